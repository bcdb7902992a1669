"""Products with quantized weights in Triton: interpreted, against the exact numbers of the weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from pagewick.kernels import triton as backend
from pagewick.kernels.block_formats import unpack
from pagewick.kernels.cpu.quantized import BLOCKS
from pagewick.kernels.options import StoredQuantized
from pagewick.kernels.quantized import QuantizedExperts, quantized_layout
from pagewick.kernels.triton import layouts
from pagewick.kernels.triton.layouts import FORMATS, pack_rows, packed_shape, planes
from tests.deep import IS_DEEP
from tests.kernels.block_rows import random_rows
from tests.kernels.triton.harness import assert_close

launches = pytest.importorskip("pagewick.kernels.triton.launches")
from pagewick.kernels.triton.quantized import gather_quantized_rows, quantized_linear  # noqa: E402

# No whole tile, and more than one.
NUM_ROWS = 19
# One for each kind of levels, scales and minima.
KINDS = ("Q4_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q5_K", "MXFP4", "IQ4_NL", "iq2_g16", "int4_g64", "fp8_g128")
SOME = tuple(FORMATS) if IS_DEEP else KINDS


def columns_of(name: str) -> int:
    """An odd number of blocks that is no whole tile."""
    return 3 * BLOCKS[name][0] if BLOCKS[name][0] > 32 else 7 * 32


def packed(name: str, num_rows: int = NUM_ROWS, num_columns: int | None = None) -> tuple[StoredQuantized, Tensor]:
    """A weight that is loaded in two parts into memory full of ones, and its exact numbers [N, K] in float64."""
    num_columns = num_columns or columns_of(name)
    rows = random_rows(name, num_rows, num_columns)
    data = torch.full(packed_shape(name, num_rows, num_columns), 255, dtype=torch.uint8)
    half = num_rows // 2
    pack_rows(name, rows[:half], data, 0)
    pack_rows(name, rows[half:], data, half)
    return StoredQuantized(data, num_rows, num_columns, name, True), unpack(name, rows).numbers().double()


def random_x(num_tokens: int, num_columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_tokens, num_columns, generator=torch.Generator().manual_seed(3)).to(dtype)


def assert_product(found: Tensor, x: Tensor, numbers: Tensor, bias: Tensor | None = None, part: float = 1e-6) -> None:
    """That a product is exact but for a part of the sum of what its terms amount to."""
    expected = x.double() @ numbers.t()
    sizes = x.double().abs() @ numbers.abs().t()
    if bias is not None:
        expected, sizes = expected + bias.double(), sizes + bias.double().abs()
    assert bool(((found.double() - expected).abs() <= part * sizes + 1e-30).all())


@pytest.mark.parametrize("name", FORMATS)
def test_rows_are_the_exact_numbers(name: str) -> None:
    weight, numbers = packed(name)
    ids = torch.tensor([NUM_ROWS - 1, 0, 5, 5])
    assert torch.equal(gather_quantized_rows(ids, weight, torch.float32).double(), numbers[ids])
    assert_close(gather_quantized_rows(ids, weight, torch.float16), numbers[ids])


def test_rows_that_do_not_exist_become_nan() -> None:
    weight, numbers = packed("Q6_K")
    found = gather_quantized_rows(torch.tensor([-1, 3, NUM_ROWS]), weight, torch.float32)
    assert found[[0, 2]].isnan().all() and torch.equal(found[1].double(), numbers[3])
    assert gather_quantized_rows(torch.tensor([], dtype=torch.int64), weight, torch.float32).shape == (0, 768)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16] if IS_DEEP else [torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
def test_the_product_of_one_row_rounds_no_weight(name: str, dtype: torch.dtype) -> None:
    weight, numbers = packed(name)
    x, bias = random_x(1, weight.num_columns, dtype), random_x(1, NUM_ROWS, dtype)[0]
    assert_product(quantized_linear(x, weight, bias, torch.float32), x, numbers, bias)


@pytest.mark.parametrize("name", SOME)
def test_products_of_a_few_rows_round_weights_to_the_dtype_of_x(name: str) -> None:
    weight, numbers = packed(name)
    x, bias = random_x(5, weight.num_columns, torch.float16), random_x(1, NUM_ROWS, torch.float16)[0]
    assert_product(quantized_linear(x, weight, bias, torch.float32), x, numbers, bias, 2**-11)


def test_float32_rounds_no_weight_in_any_batch() -> None:
    weight, numbers = packed("Q6_K")
    x = random_x(18, weight.num_columns)
    together = quantized_linear(x, weight)
    assert_product(together, x, numbers)
    assert torch.equal(quantized_linear(x[3:4], weight), together[3:4])


@pytest.mark.parametrize("name", SOME if IS_DEEP else ("Q6_K", "int4_g128"))
@pytest.mark.parametrize("kind", [launches.SOME, launches.MANY])
def test_tiles_of_many_rows(kind: str, name: str) -> None:
    """More than a tile in each direction: 64 rows and outputs, or 128."""
    num_tokens, num_rows = (131, 5) if kind == launches.MANY else (67, 65)
    weight, numbers = packed(name, num_rows, 512 if IS_DEEP else 256)
    x = random_x(num_tokens, weight.num_columns, torch.float16)
    out = torch.empty(num_tokens, num_rows)
    stored = launches.Stored(weight.data, num_rows, weight.num_columns, name)
    launches.launch_product(kind, x, stored, None, out)
    assert_product(out, x, numbers, part=2**-11)


class LargestTensor(TorchDispatchMode):
    """num_bytes: of the largest tensor that operations have made."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        sizes = [part.nbytes for part in pytree.tree_leaves(made) if isinstance(part, Tensor)]
        self.num_bytes = max(self.num_bytes, *sizes, 0)
        return made


@pytest.mark.parametrize("name", FORMATS)
def test_packing_takes_little_memory(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A loader brings rows of 64 MiB at once: for these, each of several tensors of levels would have up to 780 MiB."""
    at_once = 2**15
    monkeypatch.setattr(layouts, "_BYTES_AT_ONCE", at_once)
    numbers, num_bytes = 1024, 1024 // BLOCKS[name][0] * BLOCKS[name][1]
    rows = random_rows(name, 32 * at_once // num_bytes, numbers)
    data = torch.zeros(packed_shape(name, len(rows), numbers), dtype=torch.uint8)
    with LargestTensor() as largest:
        pack_rows(name, rows, data, 0)
    # Levels of two bits take 16 times as much memory in 32 bits.
    assert largest.num_bytes <= max(rows.nbytes, data.nbytes)
    again = torch.zeros_like(data)
    for number in range(0, len(rows), 100):
        pack_rows(name, rows[number : number + 1], again, number)
        assert torch.equal(again[number], data[number])


def test_levels_and_scales_may_be_extreme() -> None:
    """The largest and smallest float16 scales, minima and zero points."""
    for name in ("Q4_1", "Q4_K", "Q6_K"):
        rows = random_rows(name, 4, 512, is_extreme=True)
        data = torch.zeros(packed_shape(name, 4, 512), dtype=torch.uint8)
        pack_rows(name, rows, data, 0)
        numbers, x = unpack(name, rows).numbers().double(), random_x(3, 512)
        found = quantized_linear(x, StoredQuantized(data, 4, 512, name, True))
        # A level's part and the minimum may cancel out.
        error = (found.double() - x.double() @ numbers.t()).abs()
        assert bool((error <= 1e-5 * 65504 * 64 * x.abs().sum(1, keepdim=True)).all())


def test_the_result_has_the_dtype_and_the_places_that_are_asked_for() -> None:
    weight, numbers = packed("Q4_K")
    for num_tokens in (1, 4):
        x = random_x(2 * num_tokens, weight.num_columns, torch.float16)[::2].view(num_tokens, 1, -1)
        wide = torch.zeros(num_tokens, 1, NUM_ROWS + 8, dtype=torch.float16)
        out = wide[..., 3 : 3 + NUM_ROWS]
        assert quantized_linear(x, weight, out=out) is out
        assert_product(out.flatten(0, 1), x.flatten(0, 1), numbers, part=2**-9)
        assert not wide[..., :3].any() and not wide[..., 3 + NUM_ROWS :].any()
        assert quantized_linear(x, weight).dtype == torch.float16


def test_the_kind_of_tile_follows_the_number_of_rows() -> None:
    kinds = [launches.kind_for(number, torch.bfloat16) for number in (1, 2, 16, 17, 256, 257)]
    assert kinds == ["rows", "few", "few", "some", "some", "many"]
    assert launches.kind_for(257, torch.float32) == "rows"


def test_a_share_of_nothing_is_zero_or_the_bias() -> None:
    weight, bias = StoredQuantized(torch.zeros(3, 0, dtype=torch.uint8), 3, 0, "Q4_0", True), torch.arange(3.0)
    assert torch.equal(quantized_linear(torch.ones(2, 0), weight, bias), bias.expand(2, 3))
    assert torch.equal(quantized_linear(torch.ones(2, 0), weight), torch.zeros(2, 3))
    full, _ = packed("Q4_0")
    assert quantized_linear(torch.ones(0, full.num_columns), full).shape == (0, NUM_ROWS)


def test_tensors_that_do_not_fit_are_refused() -> None:
    weight, _ = packed("Q4_0")
    x = torch.ones(2, weight.num_columns)
    with pytest.raises(ValueError, match="does not fit a weight of 224 columns"):
        quantized_linear(torch.ones(2, 32), weight)
    with pytest.raises(ValueError, match="bias"):
        quantized_linear(x, weight, torch.ones(NUM_ROWS, dtype=torch.float16))
    with pytest.raises(ValueError, match="out"):
        quantized_linear(x, weight, out=torch.ones(2, 5))
    with pytest.raises(ValueError, match=r"out torch\.float16"):
        quantized_linear(x, weight, None, torch.float16)
    with pytest.raises(ValueError, match="do not fit into a packed weight"):
        pack_rows("Q4_0", random_rows("Q4_0", 2, 224), weight.data, NUM_ROWS - 1)
    with pytest.raises(ValueError, match="do not fit into a packed weight"):
        pack_rows("Q4_0", random_rows("Q4_0", 2, 32), weight.data, 0)


def test_the_layout_serves_every_format_that_can_be_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert FORMATS.keys() == BLOCKS.keys()
    monkeypatch.setattr(backend, "why_off", lambda: "")
    for name in FORMATS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            layout = quantized_layout(name, "cuda", dtype)
            assert layout is not None and layout.packed_shape(3, 1024) == packed_shape(name, 3, 1024)
        assert quantized_layout(name, "cuda", torch.float64) is None


@pytest.mark.parametrize("name", KINDS)
def test_experts_in_host_memory_lie_as_those_on_the_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors without memory stand in for those of a GPU."""
    monkeypatch.setattr(backend, "why_off", lambda: "")
    with FakeTensorMode():
        experts = QuantizedExperts.empty(2, NUM_ROWS, columns_of(name), name, 0, torch.bfloat16, torch.device("cuda"))
        shape = tuple(experts.data.shape[1:])
    expected, _ = packed(name)
    in_host_memory = torch.full(shape, 255, dtype=torch.uint8)
    experts.matrix_in(in_host_memory).load(random_rows(name, NUM_ROWS, columns_of(name)), 0)
    assert torch.equal(in_host_memory, expected.data)


def test_a_row_takes_little_more_than_in_a_file() -> None:
    """Scales and minima of groups have a byte each, planes begin at multiples of 16 bytes."""
    for name, (columns, num_bytes) in BLOCKS.items():
        assert 0 <= planes(name, 4096).row_bytes / (4096 // columns * num_bytes) - 1 < 0.04
        assert planes(name, 4096).row_bytes % 16 == 0


def test_fp8_weights_lie_as_products_of_fp8_numbers_want_them() -> None:
    """torch._scaled_mm takes the levels of a packed weight as they lie, if each row has one scale."""
    rows = random_rows("fp8_g128", 48, 256)
    blocks = rows.view(48, 2, 132)
    blocks[:, 1, :4] = blocks[:, 0, :4]
    data = torch.zeros(packed_shape("fp8_g128", 48, 256), dtype=torch.uint8)
    pack_rows("fp8_g128", rows, data, 0)
    levels = data.view(torch.float8_e4m3fn)[:, :256]
    scales = data.view(torch.float32)[:, planes("fp8_g128", 256).scales // 4]
    x = random_x(5, 256).to(torch.float8_e4m3fn)
    # On a CPU, only newer versions of PyTorch take a scale for each row.
    one = torch.ones(())
    found = scales * torch._scaled_mm(x, levels.t(), scale_a=one, scale_b=one, out_dtype=torch.float32)
    assert_product(found, x.float(), unpack("fp8_g128", rows).numbers().double())
