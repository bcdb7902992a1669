"""Blocks of ggml's formats give the gguf package's numbers, and products with them those of their definition.

The definition of products is compared with sums of Python's whole numbers, block by block.
"""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from torch import Tensor

from pagewick.kernels import reference_quantized
from pagewick.kernels.block_formats import Blocks, unpack
from pagewick.kernels.options import StoredQuantized
from tests.kernels.block_rows import LAYOUTS, random_rows


def by_gguf(name: str, rows: Tensor) -> Tensor:
    return torch.from_numpy(quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name]))


def int8_rows(num_rows: int, num_columns: int, group: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    levels = torch.randint(-128, 128, (num_rows, num_columns // 32, 32), generator=generator).to(torch.int8)
    scales = torch.randn(num_rows, num_columns // 32, 32 // group, generator=generator)
    return torch.cat([scales.view(torch.uint8), levels.view(torch.uint8)], dim=-1).flatten(1)


def rows_of(name: str, num_rows: int, num_columns: int) -> Tensor:
    if name in LAYOUTS:
        return random_rows(name, num_rows, num_columns)
    return int8_rows(num_rows, num_columns, int(name.removeprefix("int8_g")))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_extreme", [False, True])
def test_blocks_stand_for_the_same_numbers_as_in_gguf(name: str, is_extreme: bool) -> None:
    rows = random_rows(name, 30, 1024, is_extreme=is_extreme)
    found, expected = unpack(name, rows).numbers(), by_gguf(name, rows)
    assert expected.isfinite().all()
    # Bits, not numbers: 0 and -0 differ.
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def whole_sums(x: Blocks, weight: Blocks, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Exact sums [T, N] of a block's products, and of its levels of x times minima of groups."""
    levels = weight.levels[:, block].numpy().astype(object)
    x_levels = x.levels.numpy().reshape(len(x.levels), weight.levels.shape[1], -1)[:, block].astype(object)
    size = levels.shape[1]
    ones = torch.ones(len(levels), 1, dtype=torch.int8)
    scales = ones if weight.group_scales is None else weight.group_scales[:, block]
    minima = ones if weight.group_minima is None else weight.group_minima[:, block]
    spread = [np.repeat(part.numpy().astype(object), size // part.shape[1], axis=1) for part in (scales, minima)]
    return x_levels @ (levels * spread[0]).T, x_levels @ spread[1].T


@pytest.mark.parametrize("name", [*LAYOUTS, "int8_g32", "int8_g16"])
def test_products_are_exact_sums_scaled_in_the_order_of_the_columns(name: str) -> None:
    num_columns = 512
    rows = rows_of(name, 7, num_columns)
    # Levels of 127 throughout make the largest sums.
    x = torch.cat([torch.randn(3, num_columns), torch.ones(1, num_columns)])
    weight = unpack(name, rows)
    size = weight.levels.shape[2]
    quantized = reference_quantized.quantize_rows(x, 256 if size == 256 else 32)
    total = np.zeros((len(x), len(rows)), np.float32)
    for block in range(num_columns // size):
        products, of_minima = whole_sums(quantized, weight, block)
        x_scales = quantized.scales[:, block * size // quantized.levels.shape[2], None].numpy()
        total += products.astype(np.int32).astype(np.float32) * (x_scales * weight.scales[:, block].numpy())
        if weight.minima is not None:
            total -= of_minima.astype(np.int32).astype(np.float32) * (x_scales * weight.minima[:, block].numpy())
    found = reference_quantized.quantized_linear(x, StoredQuantized(rows, len(rows), num_columns, name, False))
    assert torch.equal(found, torch.from_numpy(total))


@pytest.mark.parametrize("name", [*LAYOUTS, "int8_g32", "int8_g16"])
def test_quantized_activations_change_a_product_by_one_percent_at_most(name: str) -> None:
    rows, x = rows_of(name, 96, 1024), torch.randn(40, 1024, generator=torch.Generator().manual_seed(1))
    numbers = by_gguf(name, rows) if name in LAYOUTS else unpack(name, rows).numbers()
    exact = x.double() @ numbers.double().t()
    found = reference_quantized.quantized_linear(x, StoredQuantized(rows, 96, 1024, name, False)).double()
    assert (found - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.parametrize("name", LAYOUTS)
def test_rows_are_looked_up_as_numbers(name: str) -> None:
    rows, ids = random_rows(name, 9, 512), torch.tensor([8, 0, 3, 3])
    stored = StoredQuantized(rows, 9, 512, name, False)
    found = reference_quantized.gather_quantized_rows(ids, stored, torch.float32)
    assert torch.equal(found, by_gguf(name, rows)[ids])


@pytest.mark.parametrize(("num_rows", "num_columns"), [(0, 512), (3, 0)])
def test_there_may_be_no_rows_or_columns(num_rows: int, num_columns: int) -> None:
    stored = StoredQuantized(random_rows("Q4_K", 5, num_columns), 5, num_columns, "Q4_K", False)
    found = reference_quantized.quantized_linear(torch.ones(num_rows, num_columns), stored)
    assert torch.equal(found, torch.zeros(num_rows, 5))
