"""Blocks of ggml's formats give the gguf package's numbers, others what their definition says; and products with them.

The definition of products is compared with sums of Python's whole numbers, block by block.
"""

from __future__ import annotations

import struct

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from torch import Tensor

from pagewick.kernels import reference_quantized
from pagewick.kernels.block_formats import Blocks, unpack
from pagewick.kernels.options import StoredQuantized
from tests.kernels.block_rows import LAYOUTS, OWN, random_rows


def by_gguf(name: str, rows: Tensor) -> Tensor:
    return torch.from_numpy(quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType[name]))


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_extreme", [False, True])
def test_blocks_stand_for_the_same_numbers_as_in_gguf(name: str, is_extreme: bool) -> None:
    rows = random_rows(name, 30, 1024, is_extreme=is_extreme)
    found, expected = unpack(name, rows).numbers(), by_gguf(name, rows)
    assert expected.isfinite().all()
    # Bits, not numbers: 0 and -0 differ.
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def int4_numbers(row: bytes, group: int) -> list[float]:
    """One block's numbers, one after the other."""
    (scale,), zero, found = struct.unpack("<f", row[:4]), row[4], []
    for column in range(group):
        byte = row[5 + column // 32 * 16 + column % 16]
        level = byte >> 4 if column % 32 >= 16 else byte & 15
        found.append(float(np.float32(scale) * np.float32(level - zero)))
    return found


def fp8_numbers(row: bytes, group: int) -> list[float]:
    (scale,), found = struct.unpack("<f", row[:4]), []
    for byte in row[4 : 4 + group]:
        exponent, mantissa = byte >> 3 & 15, byte & 7
        magnitude = (8 + mantissa) * 2.0 ** (exponent - 10) if exponent else mantissa * 2.0**-9
        found.append(float(np.float32(scale) * np.float32(-magnitude if byte >> 7 else magnitude)))
    return found


def codebook(name: str) -> list[int]:
    """The levels by code, from the gguf package. Codes 3 to 7 of three values and a sign are not used."""
    kind = name.split("_")[0]
    if kind in ("iq4", "fp4"):
        return list((quants.IQ4_NL if kind == "iq4" else quants.NVFP4).kvalues)
    if kind == "iq1":
        return [
            level for sign in (1, -1) for level in [*(8 * value + sign for value in quants.IQ1_S.grid_map), *[0] * 5]
        ]
    grid = {"iq3": quants.IQ3_XXS, "iq3s": quants.IQ3_S, "iq2": quants.IQ2_S}[kind].grid_map
    return [sign * value for sign in (1, -1) for value in [*grid, *[0] * (8 - len(grid))]]


def code_numbers(name: str, row: bytes) -> list[float]:
    num_scales, levels = (len(row) - 16) // 4, codebook(name)
    scales = struct.unpack(f"<{num_scales}f", row[: 4 * num_scales])
    codes = [byte & 15 for byte in row[-16:]] + [byte >> 4 for byte in row[-16:]]
    return [
        float(np.float32(scales[column * num_scales // 32]) * np.float32(levels[code]))
        for column, code in enumerate(codes)
    ]


@pytest.mark.parametrize("is_extreme", [False, True])
@pytest.mark.parametrize("name", [name for name in OWN if not name.startswith("int8")])
def test_blocks_of_own_formats_stand_for_what_their_definition_says(name: str, is_extreme: bool) -> None:
    group, num_bytes, _ = OWN[name]
    rows = random_rows(name, 20, 256, is_extreme=is_extreme)
    readers = {"int4": int4_numbers, "fp8": fp8_numbers}
    one_block = readers.get(name.split("_")[0], lambda block, _: code_numbers(name, block))
    with np.errstate(over="ignore"):
        blocks = [[one_block(bytes(b.tolist()), group) for b in row.split(num_bytes)] for row in rows]
    expected = torch.tensor(blocks).flatten(1)
    assert torch.equal(unpack(name, rows).numbers().view(torch.int32), expected.view(torch.int32))


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


@pytest.mark.parametrize("name", [*LAYOUTS, *(name for name in OWN if not name.startswith("fp8"))])
def test_products_are_exact_sums_scaled_in_the_order_of_the_columns(name: str) -> None:
    num_columns = 512
    rows = random_rows(name, 7, num_columns)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["fp8_g32", "fp8_g128"])
def test_products_with_fp8_round_activations_to_bfloat16_only(name: str, dtype: torch.dtype) -> None:
    rows, x = random_rows(name, 30, 256), torch.randn(5, 256).to(dtype)
    exact = x.bfloat16().double() @ unpack(name, rows).numbers().double().t()
    stored = StoredQuantized(rows, 30, 256, name, False)
    found = reference_quantized.quantized_linear(x, stored, out_dtype=torch.float32)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-6 * float(exact.abs().max()))


@pytest.mark.parametrize("name", [*LAYOUTS, *OWN])
def test_quantized_activations_change_a_product_by_one_percent_at_most(name: str) -> None:
    rows, x = random_rows(name, 96, 1024), torch.randn(40, 1024, generator=torch.Generator().manual_seed(1))
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
