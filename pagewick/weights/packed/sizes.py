"""Groups of columns, and the block formats that hold whole numbers of one scale per group. Imports no torch."""

from __future__ import annotations

from typing import Final

from pagewick.weights.packed.layout import NUMBERS

SCALE_DTYPES: Final = ("F16", "BF16", "F32")
_INT4_SIZES: Final = (128, 64, 32)
_INT8_SIZE: Final = 32


def num_groups(columns: int, group_size: int) -> int:
    """Return the number of groups of a row; group_size -1 is one group."""
    return 1 if group_size == -1 else -(-columns // group_size)


def group_label(group_size: int) -> str:
    """Return the size of groups in words."""
    return "per row" if group_size == -1 else f"g{group_size}"


def stored_type_of(bits: int, columns: int, group_size: int, scale_dtype: str) -> str:
    """Return the block format for levels of at most 8 bits with a scale for each group; NUMBERS if none fits.

    With more than 4 bits, levels minus zeros must fit a signed byte.
    """
    group_size = columns if group_size == -1 else group_size
    if bits <= 4:
        sizes = (size for size in _INT4_SIZES if group_size % size == 0 == columns % size)
        return next((f"int4_g{size}" for size in sizes), NUMBERS)
    if group_size % _INT8_SIZE or columns % _INT8_SIZE:
        return NUMBERS
    return "Q8_0" if scale_dtype == "F16" else "int8_g32"
