"""Whether products take AMX's tile registers, whose results are those of other instructions.

Memory stands in for the registers: test_native_library.py runs this file with a library that has the stand-ins.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

import pytest
import torch

from pagewick.kernels.cpu.quantized import BLOCKS
from pagewick.kernels.quantized import QuantizedMatrix
from tests.kernels.block_rows import random_rows
from tests.kernels.conftest import STAND_IN_LIBRARY, required_library

pytestmark = pytest.mark.skipif(
    STAND_IN_LIBRARY not in os.environ, reason=f"needs the library that {STAND_IN_LIBRARY} names"
)


@pytest.fixture(autouse=True)
def amx() -> Iterator[None]:
    library = required_library()
    before = library.isa
    library.select_isa("amx")
    yield
    library.select_isa(before)


def num_tile_products(name: str, num_rows: int, *, zero: int = 8) -> int:
    """Multiply by a weight of 64 rows and 512 columns; return the number of products of tiles.

    zero: the zero point of the first group of an int4 format. All others are 8.
    """
    rows = random_rows(name, 64, 512)
    if name.startswith("int4"):
        rows[:, 4 :: BLOCKS[name][1]] = 8
        rows[0, 4] = zero
    matrix = QuantizedMatrix.empty(64, 512, name, rows.shape[1], torch.float32, "cpu")
    matrix.load(rows, 0)
    counter = ctypes.c_int64.in_dll(ctypes.CDLL(os.environ[STAND_IN_LIBRARY]), "pw_num_tile_products")
    before = counter.value
    matrix.linear(torch.ones(num_rows, 512))
    return counter.value - before


# A panel has four tiles beside each other.
@pytest.mark.parametrize(
    ("name", "per_tile"),
    [("Q8_0", 16), ("Q5_1", 16), ("MXFP4", 16), ("int4_g64", 16), ("iq3_g32", 16), ("fp4_g16", 32)],
)
def test_parts_of_units_have_a_product_each(name: str, per_tile: int) -> None:
    assert [num_tile_products(name, num_rows) for num_rows in (1, 15)] == [0, 0]
    # One to three rows that would need a tile of their own do without.
    tiles = {16: 1, 19: 1, 20: 2, 33: 2, 300: 19}
    assert {rows: num_tile_products(name, rows) for rows in tiles} == {
        rows: 4 * per_tile * count for rows, count in tiles.items()
    }


# Eight steps of 64 columns. A level times its scale has one byte, or two.
@pytest.mark.parametrize(("name", "num_bytes"), [("Q2_K", 1), ("Q3_K", 1), ("Q4_K", 2), ("Q5_K", 2), ("Q6_K", 2)])
def test_bytes_of_scaled_levels_have_a_product_each(name: str, num_bytes: int) -> None:
    assert [num_tile_products(name, num_rows) for num_rows in (1, 15)] == [0, 0]
    tiles = {16: 1, 19: 1, 20: 2, 300: 19}
    assert {rows: num_tile_products(name, rows) for rows in tiles} == {
        rows: 4 * 8 * num_bytes * count for rows, count in tiles.items()
    }


# Tiles add numbers in an order of their own, so any number of rows takes them.
@pytest.mark.parametrize("name", ["fp8_g32", "fp8_g128"])
def test_all_rows_of_fp8_take_tiles(name: str) -> None:
    tiles = {1: 1, 16: 1, 17: 2, 300: 19}
    assert {rows: num_tile_products(name, rows) for rows in tiles} == {
        rows: 4 * 16 * count for rows, count in tiles.items()
    }


def test_a_chunk_with_large_zero_points_takes_dot_products() -> None:
    assert num_tile_products("int4_g64", 16, zero=16) == 4 * 16
    assert num_tile_products("int4_g64", 16, zero=17) == 4 * 8
