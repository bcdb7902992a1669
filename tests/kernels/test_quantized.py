"""Products with quantized weights against their definition, for every format and instruction set."""

from __future__ import annotations

import gguf
import pytest
import torch
from torch import Tensor

from pagewick import kernels
from pagewick.kernels import cpu, reference_quantized
from pagewick.kernels.block_formats import unpack
from pagewick.kernels.cpu.quantized import BLOCKS
from pagewick.kernels.options import StoredQuantized
from pagewick.kernels.quantized import QuantizedMatrix
from tests.kernels.block_rows import LAYOUTS, random_rows
from tests.kernels.conftest import NativeKernels, required_library

NUM_ROWS = (1, 2, 5, 7, 16, 33, 70)
# Between the native sums and the definition's, as a part of the largest: the former have fused multiply-adds, except
# in plain C++, whose bits are the definition's.
BOUND = 1e-6
FP8 = tuple(name for name in BLOCKS if name.startswith("fp8"))


def random_x(num_columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return rows for all tests: one is zeros, and one becomes 127 throughout."""
    x = torch.randn(max(NUM_ROWS), num_columns, generator=torch.Generator().manual_seed(2))
    x[3], x[4] = 0.0, 1.0
    return x.to(dtype)


def matrix_of(name: str, rows: Tensor, num_columns: int, dtype: torch.dtype = torch.float32) -> QuantizedMatrix:
    """A weight that is loaded in two parts."""
    matrix = QuantizedMatrix.empty(len(rows), num_columns, name, rows.shape[1], dtype, "cpu")
    half = len(rows) // 2
    matrix.load(rows[:half], 0)
    matrix.load(rows[half:], half)
    return matrix


def sizes_of(name: str) -> list[tuple[int, int]]:
    """Outputs and inputs: one panel and less, whole panels, a bit more; one block, and odd numbers of blocks."""
    columns = BLOCKS[name][0]
    return [(1, columns), (63, 3 * columns), (64, 256), (65, 256 + columns), (130, 1280)]


def by_definition(name: str, rows: Tensor, x: Tensor, bias: Tensor | None = None) -> Tensor:
    stored = StoredQuantized(rows, len(rows), x.shape[1], name, False)
    return reference_quantized.quantized_linear(x, stored, bias, torch.float32)


def assert_close(found: Tensor, expected: Tensor, bound: float = BOUND) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=bound * float(expected.abs().max()))


def test_a_packed_weight_takes_the_bytes_of_the_file() -> None:
    for name, (columns, num_bytes) in BLOCKS.items():
        if name in LAYOUTS:
            assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]] == (columns, num_bytes)
        assert random_rows(name, 3, 512).shape[1] == 512 // columns * num_bytes
        layout = cpu.BACKEND.quantized_weights[name]
        assert torch.Size(layout.packed_shape(128, 512)).numel() == 128 * 512 // columns * num_bytes


@pytest.mark.parametrize("name", BLOCKS)
def test_products_are_the_definition(name: str, native_bytes: NativeKernels) -> None:
    for num_rows, num_columns in sizes_of(name):
        rows, x = random_rows(name, num_rows, num_columns), random_x(num_columns)
        found, expected = matrix_of(name, rows, num_columns).linear(x), by_definition(name, rows, x)
        assert_close(found, expected)
        assert native_bytes.isa != "generic" or name in FP8 or torch.equal(found, expected)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_row_has_the_same_bits_whatever_is_beside_it(name: str, native_bytes: NativeKernels) -> None:
    rows, x = random_rows(name, 65, 768), random_x(768)
    matrix = matrix_of(name, rows, 768)
    together = matrix.linear(x)
    for count in NUM_ROWS:
        assert torch.equal(matrix.linear(x[:count]), together[:count])
        assert torch.equal(matrix.linear(x[-count:]), together[-count:])


@pytest.mark.parametrize("name", ["Q4_0", "Q6_K", "int4_g64", "fp8_g128"])
def test_a_row_has_the_same_bits_beyond_the_rows_that_share_a_chunk(name: str, native_bytes: NativeKernels) -> None:
    x = torch.randn(290, 512, generator=torch.Generator().manual_seed(4))
    matrix = matrix_of(name, random_rows(name, 65, 512), 512)
    together = matrix.linear(x)
    for count in (255, 257, 272):
        assert torch.equal(matrix.linear(x[:count]), together[:count])


@pytest.mark.parametrize("name", BLOCKS)
def test_a_nan_makes_its_row_nan_and_no_other(name: str, native_bytes: NativeKernels) -> None:
    columns = 2 * max(BLOCKS[name][0], 128)
    matrix = matrix_of(name, random_rows(name, 70, columns), columns)
    for column in (0, 1, columns // 4 - 1, columns // 2, columns - 1):
        x = random_x(columns)[:7].clone()
        x[2, column] = float("nan")
        found = native_bytes.quantized_linear(x, matrix)
        assert found[2].isnan().all(), column
        assert found[[0, 1, 3, 4, 5, 6]].isfinite().all(), column


@pytest.mark.parametrize("name", BLOCKS)
def test_threads_change_no_bit(name: str) -> None:
    required_library()
    # So many panels that they are divided even among a few rows.
    rows, x = random_rows(name, 1000, 512), random_x(512)
    matrix, found = matrix_of(name, rows, 512), []
    for num_threads in (1, 2, 3):
        kernels.set_num_threads(num_threads)
        found.append(torch.cat([matrix.linear(x[:1]), matrix.linear(x[:5]), matrix.linear(x)]))
    kernels.set_num_threads(torch.get_num_threads())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("name", BLOCKS)
def test_instruction_sets_with_fused_multiply_adds_agree(name: str) -> None:
    """With fp8, those with dot products of bf16 add differently."""
    library = required_library()
    matrix, x, found = matrix_of(name, random_rows(name, 65, 768), 768), random_x(768), []
    before = library.isa
    for isa in library.supported_isas():
        if isa != "generic" and not (name in FP8 and isa in ("avx512_bf16", "amx")):
            library.select_isa(isa)
            found.append(matrix.linear(x))
    library.select_isa(before)
    assert all(torch.equal(each, found[0]) for each in found[1:])


@pytest.mark.parametrize("byte", [0, 127, 128, 255])
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_largest_sums_are_exact(name: str, byte: int, native_bytes: NativeKernels) -> None:
    columns, num_bytes, halves = LAYOUTS[name]
    rows = torch.full((64, num_bytes), byte, dtype=torch.uint8)
    for start in halves:
        rows[:, start : start + 2] = torch.ones(64, 1, dtype=torch.float16).view(torch.uint8)
    signs = torch.ones(45, columns)
    signs[1::3] = -1
    signs[2::3, ::2] = -1
    found = matrix_of(name, rows, columns).linear(signs)
    # Whole numbers times 1 / 127, the scale of x.
    torch.testing.assert_close(found, by_definition(name, rows, signs), rtol=1e-6, atol=0)


@pytest.mark.parametrize("zero", [0, 16, 255])
@pytest.mark.parametrize("byte", [0, 255])
def test_the_largest_sums_with_zero_points_are_exact(byte: int, zero: int, native_bytes: NativeKernels) -> None:
    rows = torch.full((64, 69), byte, dtype=torch.uint8)
    rows[:, :4] = torch.ones(64, 1).view(torch.uint8)
    rows[:, 4] = zero
    signs = torch.ones(45, 128)
    signs[1::3] = -1
    signs[2::3, ::2] = -1
    found = matrix_of("int4_g128", rows, 128).linear(signs)
    torch.testing.assert_close(found, by_definition("int4_g128", rows, signs), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in BLOCKS if name.startswith(("int4", "fp8"))])
def test_scales_of_groups_may_be_huge_negative_and_subnormal(name: str, native_bytes: NativeKernels) -> None:
    rows = random_rows(name, 65, 256, is_extreme=True)
    x = random_x(256) * 1e-6
    found, expected = matrix_of(name, rows, 256).linear(x), by_definition(name, rows, x)
    assert expected.isfinite().all() and expected.abs().max() > 1e30
    for of_found, of_expected in zip(found.t(), expected.t(), strict=True):
        assert_close(of_found, of_expected, 1e-5)


@pytest.mark.parametrize("num_rows", [1, 7])
@pytest.mark.parametrize("name", FP8)
def test_every_number_of_fp8_is_multiplied(name: str, num_rows: int, native_bytes: NativeKernels) -> None:
    """Each output is one of the finite numbers, the subnormal ones included, times a power of two."""
    codes = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8)
    columns, num_bytes = BLOCKS[name]
    rows = torch.zeros(len(codes), num_bytes, dtype=torch.uint8)
    rows[:, :4] = torch.full((len(codes), 1), 0.5).view(torch.uint8)
    for column in (0, 1, columns - 1):
        rows[:, 4:], rows[:, 4 + column] = 0, codes
        x = torch.ones(num_rows, columns)
        found = matrix_of(name, rows, columns).linear(x)
        assert torch.equal(found, (codes.view(torch.float8_e4m3fn).float() * 0.5).expand(num_rows, -1))


@pytest.mark.parametrize("is_extreme", [False, True])
@pytest.mark.parametrize("name", BLOCKS)
def test_rows_are_looked_up_to_the_bit(name: str, is_extreme: bool) -> None:
    rows, ids = random_rows(name, 70, 768, is_extreme=is_extreme), torch.tensor([69, 0, 7, 7, 64])
    expected = unpack(name, rows[ids]).numbers()
    for dtype, bits in ((torch.float32, torch.int32), (torch.bfloat16, torch.int16), (torch.float16, torch.int16)):
        found = matrix_of(name, rows, 768, dtype).take(ids)
        assert torch.equal(found.view(bits), expected.to(dtype).view(bits))


def test_a_row_that_does_not_exist_is_not_looked_up() -> None:
    required_library()
    matrix = matrix_of("Q4_K", random_rows("Q4_K", 70, 256), 256)
    for ids in ([70], [-1], [0, 70]):
        with pytest.raises(IndexError):
            matrix.take(torch.tensor(ids))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_K", "int4_g128", "fp8_g128"])
def test_activations_bias_and_result_have_a_dtype(name: str, dtype: torch.dtype) -> None:
    rows, x = random_rows(name, 65, 512), random_x(512, dtype)
    matrix, bias = matrix_of(name, rows, 512, dtype), torch.randn(65).to(dtype)
    found = matrix.linear(x, bias, out_dtype=torch.float32)
    assert_close(found, by_definition(name, rows, x, bias))
    assert torch.equal(matrix.linear(x, bias), found.to(dtype))


def test_result_is_written_beside_others() -> None:
    matrix = matrix_of("Q6_K", random_rows("Q6_K", 64, 256), 256)
    out, x = torch.full((3, 100), 9.0), torch.randn(3, 256)
    matrix.linear(x, out=out[:, 10:74])
    assert torch.equal(out[:, 10:74], matrix.linear(x)) and (out[:, 74:] == 9).all() and (out[:, :10] == 9).all()


def test_definition_is_a_product_of_what_the_blocks_stand_for() -> None:
    rows, x = random_rows("Q8_0", 40, 96), torch.randn(5, 96)
    exact = reference_quantized.quantize_rows(x).numbers().double() @ unpack("Q8_0", rows).numbers().double().t()
    torch.testing.assert_close(by_definition("Q8_0", rows, x).double(), exact, rtol=1e-5, atol=1e-5)


def test_activations_lose_at_most_half_a_step() -> None:
    x = torch.cat([torch.randn(3, 64), torch.zeros(1, 64)])
    found = reference_quantized.quantize_rows(x)
    steps = found.scales.repeat_interleave(32, dim=1)
    assert ((found.numbers() - x).abs() <= steps * 0.5001).all()
