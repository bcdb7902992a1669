"""RMS and layer norm, with a residual too, against PyTorch's own in float64, and bit for bit against themselves."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from pagewick.kernels import reference
from tests.kernels.conftest import NativeKernels

Kernels = ModuleType | NativeKernels

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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 15, 65, 1000])
def test_a_residual_in_float32_stays_so(kernels: Kernels, size: int, dtype: torch.dtype) -> None:
    x, weight = random_case(3, size, dtype=dtype)
    # One row that serves all, as before the first layer, and rows that lie apart.
    for residual in (torch.zeros(1, size).expand(3, -1), random_case(3, size + 5, dtype=torch.float32)[0][:, :size]):
        out, new_residual = kernels.add_rms_norm(x, residual, weight, EPS)
        assert new_residual.dtype == torch.float32 and torch.equal(new_residual, x.float() + residual)
        assert torch.equal(out, kernels.rms_norm(new_residual.to(dtype), weight, EPS))


@pytest.mark.parametrize("shape", [(64,), (1, 64), (37, 64), (2, 3, 64), (2, 3, 4, 64)])
def test_shapes(kernels: Kernels, shape: tuple[int, ...]) -> None:
    x, weight = random_case(*shape, dtype=torch.float32)
    out = kernels.rms_norm(x, weight, EPS)
    assert out.shape == shape
    torch.testing.assert_close(out.double(), expected(x, weight), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 16, 40])
def test_a_part_of_each_row_is_normalised_in_place(kernels: Kernels, width: int, dtype: torch.dtype) -> None:
    fused, weight = random_case(6, 50, dtype=dtype)[0], random_case(width, dtype=dtype)[0]
    before, part = fused.clone(), fused[:, 7 : 7 + width]
    wanted = kernels.rms_norm(part, weight, EPS)
    assert kernels.rms_norm(part, weight, EPS, out=part) is part
    assert torch.equal(part, wanted)
    before[:, 7 : 7 + width] = wanted
    assert torch.equal(fused, before)


def test_a_result_that_does_not_fit_is_refused(native: NativeKernels) -> None:
    x, weight = random_case(3, 8, dtype=torch.float32)
    for out in (torch.empty(3, 7), torch.empty(3, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="differ in shape or dtype"):
            native.rms_norm(x, weight, EPS, out=out)
    out = torch.empty(8, 3).T
    assert torch.equal(native.rms_norm(x, weight, EPS, out=out), reference.rms_norm(x, weight, EPS))


def test_heads_inside_a_fused_projection(kernels: Kernels) -> None:
    fused, weight = random_case(6, 5 * 16, dtype=torch.float32)[0], torch.ones(16)
    for x in (fused[:, :16], fused[:, 16:64].view(6, 3, 16), fused.T[:16].T):
        assert torch.equal(kernels.rms_norm(x, weight, EPS), kernels.rms_norm(x.contiguous(), weight, EPS))
        added, new_residual = kernels.add_rms_norm(x, x, weight, EPS)
        assert torch.equal(new_residual, x + x)
        assert torch.equal(added, kernels.rms_norm(x + x, weight, EPS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounds_where_the_reference_rounds(native: NativeKernels, dtype: torch.dtype) -> None:
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
def test_same_bits_alone_batched_and_threaded(native: NativeKernels, dtype: torch.dtype) -> None:
    x, weight = random_case(301, 1000, dtype=dtype)
    out = native.rms_norm(x, weight, EPS)
    assert torch.equal(torch.cat([native.rms_norm(row, weight, EPS) for row in x.split(1)]), out)
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(native.rms_norm(x, weight, EPS), out)


def test_tensors_that_do_not_fit_are_refused(native: NativeKernels) -> None:
    x, weight = random_case(3, 20, dtype=torch.float32)
    with pytest.raises(ValueError, match="weight"):
        native.rms_norm(x, weight[:-1], EPS)
    with pytest.raises(ValueError, match="native dtype"):
        native.layer_norm(x, weight, weight.bfloat16(), EPS)
    with pytest.raises(ValueError, match="native dtype"):
        native.rms_norm(x.double(), weight.double(), EPS)
    with pytest.raises(ValueError, match="differ in shape"):
        native.add_rms_norm(x, x[:2], weight, EPS)
    with pytest.raises(ValueError, match="differ in shape or dtype"):
        native.add_rms_norm(x, x.bfloat16(), weight, EPS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 17, 65, 1000])
def test_weight_offset_rounds_once(kernels: Kernels, size: int, dtype: torch.dtype) -> None:
    x, weight = random_case(5, size, dtype=dtype)
    out = kernels.rms_norm(x, weight, EPS, 1.0)
    expected_out = F.rms_norm(x.double(), (size,), weight.double() + 1, EPS)
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5}[dtype]
    torch.testing.assert_close(out.double(), expected_out, rtol=rounding, atol=1e-6)
    added, new_residual = kernels.add_rms_norm(x, x, weight, EPS, 1.0)
    assert torch.equal(added, kernels.rms_norm(new_residual, weight, EPS, 1.0))


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_layer_norm(kernels: Kernels, size: int, dtype: torch.dtype, has_bias: bool) -> None:
    x, weight = random_case(5, size, dtype=dtype)
    x = x + 2
    bias = weight.flip(0) if has_bias else None
    out = kernels.layer_norm(x, weight, bias, EPS)
    assert out.dtype == dtype
    expected_out = F.layer_norm(x.double(), (size,), weight.double(), None if bias is None else bias.double(), EPS)
    rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8 + 1e-5, torch.float16: 2**-11 + 1e-5}[dtype]
    # Weight and bias may cancel each other. In a row of two numbers, the difference to the mean has few digits.
    torch.testing.assert_close(out.double(), expected_out, rtol=rounding, atol=1e-4 if size == 2 else 4e-6)
    added, new_residual = kernels.add_layer_norm(x, x, weight, bias, EPS)
    assert torch.equal(new_residual, x + x)
    assert torch.equal(added, kernels.layer_norm(x + x, weight, bias, EPS))


def test_layer_norm_far_from_zero(kernels: Kernels) -> None:
    x = random_case(3, 1000, dtype=torch.float32)[0] + 4096
    out = kernels.layer_norm(x, torch.ones(1000), None, EPS)
    torch.testing.assert_close(out.double(), F.layer_norm(x.double(), (1000,), eps=EPS), rtol=0, atol=3e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_norm_has_the_same_bits_alone_batched_and_threaded(native: NativeKernels, dtype: torch.dtype) -> None:
    x, weight = random_case(301, 1000, dtype=dtype)
    out = native.layer_norm(x, weight, weight, EPS)
    assert torch.equal(torch.cat([native.layer_norm(row, weight, weight, EPS) for row in x.split(1)]), out)
    for num_threads in (2, 3):
        native.set_num_threads(num_threads)
        assert torch.equal(native.layer_norm(x, weight, weight, EPS), out)
    with pytest.raises(ValueError, match="weight or bias"):
        native.layer_norm(x, weight, weight[:-1], EPS)
