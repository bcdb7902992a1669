"""Values of registers: arrays of bits, one element for each thread, and how they are read as numbers."""

from __future__ import annotations

import functools
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
# A register's or label's name, a number, a list of operands, or a place in memory (parsing.Place).
Operand: TypeAlias = Any

# Types of PTX: the type of the bits, and the type as which numbers are computed. bf16 has no type in numpy.
BITS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
_KINDS = {"u": "uint", "s": "int", "b": "uint", "f": "float"}


class Faulty(Exception):
    """A fault of the program that runs: a wrong access, a race, a deadlock or an instruction that is not known."""


@functools.cache
def width_of(kind: str) -> int:
    """Return the bits of a type such as s32, f16x2 or pred."""
    if kind == "pred":
        return 1
    number, _, times = kind.lstrip("usbft").partition("x")
    return int(number) * int(times or 1)


@functools.cache
def numpy_type(kind: str) -> np.dtype[Any]:
    """Return the type of numpy for a PTX type; bf16 and pairs of halves are bits."""
    if kind == "pred":
        return np.dtype(np.bool_)
    if kind.startswith("bf") or "x" in kind or kind == "tf32":
        return np.dtype(BITS[width_of(kind)])
    return np.dtype(f"{_KINDS[kind[0]]}{width_of(kind)}")


def as_type(bits: Array, kind: str) -> Array:
    """Read the low bits of registers as numbers of a PTX type."""
    dtype = numpy_type(kind)
    if bits.dtype == dtype:
        return bits
    if bits.dtype == np.bool_ or dtype == np.bool_:
        return bits.astype(dtype)
    width = np.dtype(BITS[8 * dtype.itemsize])
    return (bits if bits.dtype.itemsize == width.itemsize else bits.astype(width)).view(dtype)


def as_bits(numbers: Array, dtype: np.dtype[Any]) -> Array:
    """Return numbers as bits of a register of a type, extended by their sign where they have one."""
    if numbers.dtype == dtype:
        return numbers
    if dtype == np.bool_ or numbers.dtype == np.bool_:
        return numbers.astype(dtype)
    if numbers.dtype.kind == "f":
        numbers = numbers.view(BITS[8 * numbers.dtype.itemsize])
    if numbers.dtype.kind == "i" and numbers.dtype.itemsize < dtype.itemsize:
        numbers = numbers.astype(np.dtype(f"int{8 * dtype.itemsize}"))
    return numbers.astype(dtype) if numbers.dtype.itemsize != dtype.itemsize else numbers.view(dtype)


def immediate(text: str) -> Array:
    """Return a number in an instruction as its bits: 64 for a whole number, so that any type can be read from it."""
    if text.startswith("0f"):
        return np.array([int(text[2:], 16)], np.uint32)
    if text.startswith("0d"):
        return np.array([int(text[2:], 16)], np.uint64)
    return np.array([int(text.rstrip("U"), 0) & 0xFFFFFFFFFFFFFFFF], np.uint64)


def float_of_bfloat16(bits: Array) -> Array:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def bfloat16_of_float(numbers: Array) -> Array:
    """Round float32 to the nearest bfloat16, ties to even; a NaN becomes 0x7fff."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(numbers), np.uint32(0x7FFF), rounded).astype(np.uint16)


def tf32_of_float(numbers: Array) -> Array:
    """Cut float32 off to the 10 bits after the point that products of tf32 read."""
    return (np.ascontiguousarray(numbers, np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def towards_zero(numbers: Array) -> Array:
    """Round float64 to float32 towards zero, as tensor cores do with their sums."""
    nearest = numbers.astype(np.float32)
    is_beyond = np.isfinite(nearest) & (np.abs(nearest.astype(np.float64)) > np.abs(numbers))
    return np.where(is_beyond, np.nextafter(nearest, np.float32(0)), nearest)


def fused_float32(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of float32, rounded once.

    The product is exact in float64. Its sum with c is rounded to odd there, so that rounding it again is harmless.
    """
    product, addend = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    return sum_to_odd(product, addend).astype(np.float32)


def fused_float64(a: Array, b: Array, c: Array) -> Array:
    """Return a * b + c of float64, rounded once: Boldo and Melquiond, Emulation of FMA, 2008."""
    product, product_rest = _exact_product(a, b)
    low, low_rest = _exact_sum(c, product_rest)
    high, high_rest = _exact_sum(product, low)
    exact = high + sum_to_odd(low_rest, high_rest)
    return np.where(np.isfinite(exact), exact, a * b + c)


def _exact_sum(a: Array, b: Array) -> tuple[Array, Array]:
    total = a + b
    part = total - a
    return total, (a - (total - part)) + (b - part)


def _exact_product(a: Array, b: Array) -> tuple[Array, Array]:
    product = a * b
    (a_high, a_low), (b_high, b_low) = _halves(a), _halves(b)
    return product, a_low * b_low - (((product - a_high * b_high) - a_low * b_high) - a_high * b_low)


def _halves(a: Array) -> tuple[Array, Array]:
    scaled = a * 134217729.0
    high = scaled - (scaled - a)
    return high, a - high


def sum_to_odd(a: Array, b: Array) -> Array:
    """Return a + b; where that is not exact, the one of the two neighbours whose last bit is 1."""
    total, rest = _exact_sum(a, b)
    bits = np.ascontiguousarray(total).view(np.int64)
    is_inexact = (rest != 0) & np.isfinite(total) & np.isfinite(rest) & (bits & 1 == 0)
    # Away from zero if the rest has the sign of the sum.
    step = np.where((rest > 0) == (total > 0), 1, -1)
    return np.where(is_inexact, bits + step, bits).view(np.float64)


def perturbed(numbers: Array, inputs: Array, num_units: int) -> Array:
    """Return float32 that are off by up to num_units units in the last place, as approximate instructions may be.

    The error depends on the bits of the inputs alone, so that the same call has the same result every time. Zeros,
    infinities and NaN stay.
    """
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32)
    mixed = (np.ascontiguousarray(inputs, np.float32).view(np.uint32) * np.uint32(2654435761)) >> np.uint32(16)
    error = (mixed % np.uint32(2 * num_units + 1)).astype(np.int64) - num_units
    is_usual = np.isfinite(numbers) & (np.abs(numbers) > np.float32(2**-120)) & (np.abs(numbers) < np.float32(2**120))
    return np.where(is_usual, bits + error, bits).astype(np.uint32).view(np.float32)
