"""cvt: conversions between types of numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.kernels.triton.ptx import floats
from tests.kernels.triton.ptx.semantics import carries_out
from tests.kernels.triton.ptx.values import (
    Array,
    Faulty,
    bfloat16_of_float,
    float_of_bfloat16,
    numpy_type,
    width_of,
)

if TYPE_CHECKING:
    from tests.kernels.triton.ptx.machine import Threads
    from tests.kernels.triton.ptx.parsing import Instruction

_TO_WHOLE = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}


@carries_out("cvt")
def _convert(threads: Threads, each: Instruction) -> None:
    *modes, to, source = each.parts[1:]
    if set(modes) - {"rn", "rni", "rzi", "rmi", "rpi", "rna", "ftz", "sat"}:
        raise Faulty("a conversion that is not known")
    if to.endswith("x2"):
        _convert_pair(threads, each, to)
        return
    numbers = threads.read(each.operands[1], source)
    if source == "bf16":
        numbers = float_of_bfloat16(numbers)
    if "ftz" in modes:
        numbers = floats.flushed(numbers)
    threads.write(each.operands[0], _converted(numbers, source, to, modes))


def _convert_pair(threads: Threads, each: Instruction, to: str) -> None:
    """Round two float32 to halves; the first is the upper one."""
    if each.type != "f32" or each.parts[1] != "rn" or len(each.parts) != 4:
        raise Faulty("a conversion that is not known")
    upper, lower = (threads.read(operand, "f32") for operand in each.operands[1:])
    high, low = (_rounded(numbers, to.removesuffix("x2")).astype(np.uint32) for numbers in (upper, lower))
    threads.write(each.operands[0], high << np.uint32(16) | low)


def _rounded(numbers: Array, to: str) -> Array:
    """Round to float16 or bfloat16, as bits."""
    if to == "bf16":
        return bfloat16_of_float(numbers)
    return np.where(np.isnan(numbers), np.uint16(0x7FFF), numbers.astype(np.float16).view(np.uint16))


def _converted(numbers: Array, source: str, to: str, modes: list[str]) -> Array:
    if floats.is_float(to) or to == "tf32":
        return _to_float(numbers, source, to, modes)
    if floats.is_float(source):
        return _to_integer(numbers, source, to, modes)
    if "sat" in modes:
        limits = np.iinfo(numpy_type(to))
        numbers = np.clip(numbers.astype(np.int64), limits.min, limits.max)
    return numbers.astype(numpy_type(to))


def _to_float(numbers: Array, source: str, to: str, modes: list[str]) -> Array:
    whole = [mode for mode in modes if mode in _TO_WHOLE]
    if whole:
        numbers = _TO_WHOLE[whole[0]](numbers)
    if "sat" in modes:
        numbers = np.where(np.isnan(numbers), 0, np.clip(numbers, 0, 1)).astype(numbers.dtype)
    if to == "tf32":
        # To the nearest, ties away from zero.
        bits = np.ascontiguousarray(numbers).view(np.uint32) + np.uint32(0x1000)
        return bits & np.uint32(0xFFFFE000)
    if to == "bf16":
        if source == "f64" or not floats.is_float(source):
            raise Faulty("a conversion to bfloat16 that is not known")
        return bfloat16_of_float(numbers.astype(np.float32))
    return numbers.astype(numpy_type(to))


def _to_integer(numbers: Array, source: str, to: str, modes: list[str]) -> Array:
    """Numbers beyond the range become its ends. NaN becomes 0, or of 64 bits the highest bit alone."""
    dtype = numpy_type(to)
    whole = _TO_WHOLE[next(mode for mode in modes if mode in _TO_WHOLE)](numbers).astype(np.float64)
    limits = np.iinfo(dtype)
    is_low, is_high = whole <= float(limits.min), whole >= float(limits.max)
    inside = np.where(is_low | is_high | np.isnan(whole), 0, whole).astype(dtype)
    result = np.where(is_low, limits.min, np.where(is_high, limits.max, inside)).astype(dtype)
    no_number = limits.min if dtype.kind == "i" else 1 << 63
    is_wide = source == "f64" or width_of(to) == 64
    return np.where(np.isnan(whole), dtype.type(no_number if is_wide and width_of(to) == 64 else 0), result)
