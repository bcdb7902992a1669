"""Products with quantized weights against their definition, and against the numbers that the weights stand for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagewick import kernels
from pagewick.kernels import cpu, reference_quantized
from pagewick.kernels.block_formats import unpack_q8_0
from pagewick.kernels.options import StoredQuantized
from pagewick.kernels.quantized import QuantizedMatrix

FORMATS = {"Q8_0": 34}
# Outputs and inputs: one panel and less, whole panels, one more than a panel.
SIZES = [(1, 32), (63, 96), (64, 64), (65, 1024), (200, 160)]


def random_rows(num_rows: int, num_columns: int, seed: int = 0) -> Tensor:
    """Rows of Q8_0 blocks, with all 256 values of a byte, small and large scales, and a block of zeros."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (num_rows, num_columns // 32, 34), generator=generator, dtype=torch.uint8)
    scales = torch.rand(num_rows, num_columns // 32, 1, generator=generator) * 0.02
    scales[0, 0] = 0.0
    blocks[..., :2] = scales.half().view(torch.uint8)
    return blocks.flatten(1)


def matrix_of(rows: Tensor, num_columns: int, dtype: torch.dtype) -> QuantizedMatrix:
    matrix = QuantizedMatrix.empty(len(rows), num_columns, "Q8_0", rows.shape[1], dtype, "cpu")
    half = len(rows) // 2
    matrix.load(rows[:half], 0)
    matrix.load(rows[half:], half)
    return matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("num_rows", [1, 2, 7, 70])
def test_product_is_the_definition(sizes: tuple[int, int], num_rows: int, dtype: torch.dtype) -> None:
    rows = random_rows(*sizes)
    x, bias = torch.randn(num_rows, sizes[1]).to(dtype), torch.randn(sizes[0]).to(dtype)
    stored = StoredQuantized(rows, *sizes, "Q8_0", False)
    expected = reference_quantized.quantized_linear(x, stored, bias, torch.float32)
    found = matrix_of(rows, sizes[1], dtype).linear(x, bias, out_dtype=torch.float32)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_definition_is_a_product_of_what_the_blocks_stand_for() -> None:
    rows, x = random_rows(40, 96), torch.randn(5, 96)
    stored = StoredQuantized(rows, 40, 96, "Q8_0", False)
    exact = reference_quantized.quantize_rows(x).numbers().double() @ unpack_q8_0(rows).numbers().double().t()
    torch.testing.assert_close(reference_quantized.quantized_linear(x, stored).double(), exact, rtol=1e-5, atol=1e-5)


def test_activations_lose_at_most_half_a_step() -> None:
    x = torch.cat([torch.randn(3, 64), torch.zeros(1, 64)])
    found = reference_quantized.quantize_rows(x)
    steps = found.scales.repeat_interleave(32, dim=1)
    assert ((found.numbers() - x).abs() <= steps * 0.5001).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_have_the_same_bits_whatever_is_beside_them(dtype: torch.dtype) -> None:
    matrix = matrix_of(random_rows(130, 256), 256, dtype)
    x = torch.randn(75, 256).to(dtype)
    together = matrix.linear(x)
    for first, last in ((0, 1), (3, 5), (10, 20), (0, 74)):
        assert torch.equal(matrix.linear(x[first:last]), together[first:last])


def test_rows_are_looked_up() -> None:
    rows = random_rows(70, 64)
    matrix = matrix_of(rows, 64, torch.float32)
    ids = torch.tensor([69, 0, 7, 7])
    assert torch.equal(matrix.take(ids), unpack_q8_0(rows[ids]).numbers())
    if cpu.library() is not None:
        with pytest.raises(IndexError):
            matrix.take(torch.tensor([70]))


def test_result_is_written_beside_others() -> None:
    matrix = matrix_of(random_rows(64, 32), 32, torch.float32)
    out, x = torch.full((3, 100), 9.0), torch.randn(3, 32)
    matrix.linear(x, out=out[:, 10:74])
    assert torch.equal(out[:, 10:74], matrix.linear(x)) and (out[:, 74:] == 9).all() and (out[:, :10] == 9).all()


@pytest.mark.skipif(cpu.library() is None, reason="without the native library there are no threads of its own")
def test_threads_change_no_bit() -> None:
    matrix, x = matrix_of(random_rows(300, 512), 512, torch.float32), torch.randn(40, 512)
    found = []
    for num_threads in (1, 2, 3):
        kernels.set_num_threads(num_threads)
        found.append(matrix.linear(x))
    kernels.set_num_threads(torch.get_num_threads())
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
