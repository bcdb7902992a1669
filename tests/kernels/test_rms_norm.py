"""rms_norm and add_rms_norm against PyTorch's own in float64, and bit for bit against themselves."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu import NativeLibrary

Kernels = ModuleType | NativeLibrary

EPS = 1e-5
# bfloat16 and float16 round twice: before the weight is applied and after.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}
DTYPES = list(TOLERANCE)
SIZES = [1, 2, 7, 8, 15, 16, 17, 63, 64, 65, 128, 1000, 1031, 4096]


def random_case(*shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(shape[-1])
    x = 3 * torch.randn(*shape, generator=generator)
    return x.to(dtype), (1 + torch.randn(shape[-1], generator=generator)).to(dtype)


def expected(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x.double(), x.shape[-1:], weight.double(), EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_sizes(kernels: Kernels, size: int, dtype: torch.dtype) -> None:
    x, weight = random_case(5, size, dtype=dtype)
    out = kernels.rms_norm(x, weight, EPS)
    assert out.dtype == dtype
    subnormal = 2.0**-24 if dtype == torch.float16 else 0.0
    torch.testing.assert_close(out.double(), expected(x, weight), rtol=TOLERANCE[dtype], atol=subnormal)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 15, 65, 1000])
def test_residual(kernels: Kernels, size: int, dtype: torch.dtype) -> None:
    x, weight = random_case(3, size, dtype=dtype)
    residual = random_case(4, size, dtype=dtype)[0][1:]
    out, new_residual = kernels.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(new_residual, x + residual)
    assert torch.equal(out, kernels.rms_norm(new_residual, weight, EPS))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (37, 64), (2, 3, 64), (2, 3, 4, 64)])
def test_shapes(kernels: Kernels, shape: tuple[int, ...]) -> None:
    x, weight = random_case(*shape, dtype=torch.float32)
    out = kernels.rms_norm(x, weight, EPS)
    assert out.shape == shape
    torch.testing.assert_close(out.double(), expected(x, weight), rtol=1e-6, atol=0)


def test_heads_inside_a_fused_projection(kernels: Kernels) -> None:
    fused, weight = random_case(6, 5 * 16, dtype=torch.float32)[0], torch.ones(16)
    for x in (fused[:, :16], fused[:, 16:64].view(6, 3, 16), fused.T[:16].T):
        assert torch.equal(kernels.rms_norm(x, weight, EPS), kernels.rms_norm(x.contiguous(), weight, EPS))
        added, new_residual = kernels.add_rms_norm(x, x, weight, EPS)
        assert torch.equal(new_residual, x + x)
        assert torch.equal(added, kernels.rms_norm(x + x, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_where_the_reference_rounds(native: NativeLibrary, dtype: torch.dtype) -> None:
    x, weight = random_case(50, 200, dtype=dtype)
    differing = native.rms_norm(x, weight, EPS) != reference.rms_norm(x, weight, EPS)
    # Sums in another order may move a value across a rounding boundary; one rounding less moves far more.
    assert differing.double().mean() < 0.005


def test_zero_and_huge_rows(kernels: Kernels) -> None:
    x = torch.tensor([[0.0] * 20, [1e18] * 20, [1e-18] * 20])
    out = kernels.rms_norm(x, torch.full((20,), 2.0), EPS)
    torch.testing.assert_close(out, torch.tensor([[0.0], [2.0], [2e-18 / EPS**0.5]]).expand(3, 20))


def test_nan_stays_in_its_row(kernels: Kernels) -> None:
    x, weight = random_case(3, 33, dtype=torch.float32)
    x[1, 32] = float("nan")
    out = kernels.rms_norm(x, weight, EPS)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_alone_batched_and_threaded(native: NativeLibrary, dtype: torch.dtype) -> None:
    x, weight = random_case(301, 1000, dtype=dtype)
    out = native.rms_norm(x, weight, EPS)
    assert torch.equal(torch.cat([native.rms_norm(row, weight, EPS) for row in x.split(1)]), out)
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(native.rms_norm(x, weight, EPS), out)


def test_outputs_are_written_in_place(native: NativeLibrary) -> None:
    x, weight = random_case(3, 20, dtype=torch.bfloat16)
    out, new_residual = torch.full_like(x, float("nan")), torch.full_like(x, float("nan"))
    assert native.rms_norm(x, weight, EPS, out=out) is out
    assert torch.equal(out, native.rms_norm(x, weight, EPS))
    native.add_rms_norm(x, x, weight, EPS, out=(out, new_residual))
    assert torch.equal(new_residual, x + x)
    in_place = x.clone()
    native.rms_norm(in_place, weight, EPS, out=in_place)
    assert torch.equal(in_place, native.rms_norm(x, weight, EPS))


def test_tensors_that_do_not_fit_are_refused(native: NativeLibrary) -> None:
    x, weight = random_case(3, 20, dtype=torch.float32)
    with pytest.raises(ValueError, match="weight"):
        native.rms_norm(x, weight[:-1], EPS)
    with pytest.raises(ValueError, match="native dtype"):
        native.rms_norm(x, weight.bfloat16(), EPS)
    with pytest.raises(ValueError, match="native dtype"):
        native.rms_norm(x.double(), weight.double(), EPS)
    with pytest.raises(ValueError, match="out must be contiguous"):
        native.rms_norm(x, weight, EPS, out=torch.empty(20, 3).T)
    with pytest.raises(ValueError, match="differ in shape"):
        native.add_rms_norm(x, x[:2], weight, EPS)
