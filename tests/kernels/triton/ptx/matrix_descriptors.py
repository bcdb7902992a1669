"""Matrices in shared memory that products of a warpgroup read: where their parts of 16 bytes lie.

PTX ISA, "Shared Memory Matrix Layout" and "Matrix Descriptor Format". A descriptor is a number of 64 bits: where the
matrix begins, two distances in bytes, and a swizzle. A swizzle permutes the parts of a row of 128 bytes by the row's
number, as an exclusive or, so that a column of parts lies in different banks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.kernels.triton.ptx.values import Array, Faulty

PART = 16
# By the mode of the swizzle: how many parts a row of its pattern has (none, 128, 64 and 32 bytes).
_ROW_PARTS = np.array([1, 8, 4, 2], np.int64)
_MODE_NONE = 0


@dataclass(frozen=True, slots=True)
class Descriptor:
    """The fields of descriptors, one for each warpgroup: bytes, the pattern's first row, and the swizzle's mode."""

    start: Array
    leading: Array
    stride: Array
    base: Array
    mode: Array

    @property
    def row_parts(self) -> Array:
        found: Array = _ROW_PARTS[self.mode]
        return found

    def swizzled(self, offsets: Array) -> Array:
        """Return the addresses [groups, ...] of places in the matrices, given in bytes from their begin."""
        shape = (-1, *[1] * (offsets.ndim - 1))
        plain = self.start.reshape(shape) + offsets
        row = (plain >> 7) - self.base.reshape(shape)
        return plain ^ (row & (self.row_parts - 1).reshape(shape)) << 4


def decoded(numbers: Array) -> Descriptor:
    """Read descriptors. Bits that have no meaning must be zero."""
    if bool((numbers & np.uint64(~0xC00E3FFF3FFF3FFF & (1 << 64) - 1)).any()):
        raise Faulty(f"a matrix descriptor that is not known: {int(numbers[0]):#x}")
    wide = numbers.astype(np.int64)
    start, leading, stride = ((wide >> place & 0x3FFF) << 4 for place in (0, 16, 32))
    found = Descriptor(start, leading, stride, wide >> 49 & 7, wide >> 62 & 3)
    if bool(((start >> 7 ^ found.base) & (found.row_parts - 1)).any()):
        raise Faulty("a matrix that does not begin with the first row of its swizzle's pattern")
    return found


def parts_along_k(descriptor: Descriptor, num_rows: int) -> Array:
    """Return the addresses [groups, rows, 2] of a matrix whose rows are 32 bytes that follow each other along K."""
    rows, parts = np.arange(num_rows)[None, :, None], np.arange(2)[None, None, :]
    leading, stride, row_parts, mode = _columns(descriptor)
    between_parts = np.where(mode == _MODE_NONE, leading, PART)
    return descriptor.swizzled(rows % 8 * row_parts * PART + rows // 8 * stride + parts * between_parts)


def parts_along_rows(descriptor: Descriptor, num_rows: int) -> Array:
    """Return the addresses [groups, rows / 8, 16] of a transposed matrix: parts of 8 rows of one of 16 columns."""
    parts, columns = np.arange(num_rows // 8)[None, :, None], np.arange(16)[None, None, :]
    leading, stride, row_parts, mode = _columns(descriptor)
    is_plain = mode == _MODE_NONE
    # Without a swizzle, the two distances change their roles.
    outer = np.where(is_plain, stride, leading)
    block = np.where(is_plain, leading, stride)
    in_row = parts % row_parts * PART + parts // row_parts * outer
    return descriptor.swizzled(in_row + columns % 8 * row_parts * PART + columns // 8 * block)


def _columns(descriptor: Descriptor) -> tuple[Array, Array, Array, Array]:
    fields = descriptor.leading, descriptor.stride, descriptor.row_parts, descriptor.mode
    leading, stride, row_parts, mode = (field[:, None, None] for field in fields)
    return leading, stride, row_parts, mode
