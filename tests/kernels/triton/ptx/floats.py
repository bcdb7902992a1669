"""Instructions on floating-point numbers. Each rounds once, to the nearest, unless it is an approximation.

Approximations are off by as much as the PTX manual allows: nothing may depend on a better one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.kernels.triton.ptx.semantics import carries_out
from tests.kernels.triton.ptx.values import (
    Array,
    Faulty,
    bfloat16_of_float,
    float_of_bfloat16,
    fused_float32,
    fused_float64,
    perturbed,
    sum_to_odd,
)

if TYPE_CHECKING:
    from tests.kernels.triton.ptx.machine import Threads
    from tests.kernels.triton.ptx.parsing import Instruction

_NAN = {2: np.uint16(0x7FFF), 4: np.uint32(0x7FFFFFFF), 8: np.uint64(0x7FF8000000000000)}
_SMALLEST = np.float32(2**-126)
# Units in the last place by which a result may be off: PTX ISA, "Floating Point Instructions".
_DIVISION_UNITS, _RECIPROCAL_UNITS, _EXPONENTIAL_UNITS, _ROOT_UNITS = 2, 1, 2, 2
_COMPARISONS: dict[str, Callable[[Array, Array], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip


def is_float(kind: str) -> bool:
    return kind[0] == "f" or kind.startswith("bf")


def read(threads: Threads, operand: object, each: Instruction) -> Array:
    """Return numbers: float32 for bfloat16. Small ones are zero where the instruction asks for that.

    Of pairs, the lower and the upper numbers [2, threads].
    """
    numbers = threads.read(operand, each.type)
    if each.type.endswith("x2"):
        numbers = np.stack((numbers, numbers >> np.uint32(16))).astype(np.uint16)
    if each.type.startswith("bf16"):
        return float_of_bfloat16(numbers)
    if each.type == "f16x2":
        return numbers.view(np.float16)
    return flushed(numbers) if "ftz" in each.parts else numbers


def flushed(numbers: Array) -> Array:
    if numbers.dtype != np.float32:
        return numbers
    return np.where(np.abs(numbers) < _SMALLEST, np.copysign(np.float32(0), numbers), numbers)


def write(threads: Threads, each: Instruction, numbers: Array) -> None:
    """Set the result. A result that is no number has the bits that GPUs give it."""
    if each.type.startswith("bf16"):
        bits = bfloat16_of_float(numbers)
    else:
        numbers = flushed(numbers) if "ftz" in each.parts else numbers
        size = numbers.dtype.itemsize
        bits = np.where(np.isnan(numbers), _NAN[size], np.ascontiguousarray(numbers).view(_NAN[size].dtype))
    if each.type.endswith("x2"):
        low, high = bits.astype(np.uint32)
        bits = low | high << np.uint32(16)
    threads.write(each.operands[0], bits)


def binary(threads: Threads, each: Instruction) -> None:
    a, b = (read(threads, operand, each) for operand in each.operands[1:])
    if {"rz", "rm", "rp", "sat", "relu", "xorsign"} & set(each.parts):
        raise Faulty("a rounding that is not known")
    write(threads, each, _two_numbers(each, a, b))


def _two_numbers(each: Instruction, a: Array, b: Array) -> Array:
    if each.name in ("min", "max"):
        return _extreme(each, a, b)
    if each.name == "div":
        quotient = a / b
        if {"full", "approx"} & set(each.parts):
            return perturbed(quotient, a + b, _DIVISION_UNITS)
        return quotient
    results: dict[str, Callable[[], Array]] = {"add": lambda: a + b, "sub": lambda: a - b, "mul": lambda: a * b}
    return results[each.name]()


def _extreme(each: Instruction, a: Array, b: Array) -> Array:
    """Return the smaller or greater number: the other one of a NaN unless .NaN is asked for, and -0 is below 0."""
    is_max = each.name == "max"
    both_zero = (a == 0) & (b == 0)
    is_negative = (np.signbit(a) & np.signbit(b)) if is_max else (np.signbit(a) | np.signbit(b))
    zero = np.where(is_negative, a.dtype.type(-0.0), a.dtype.type(0))
    if "NaN" in each.parts:
        result = np.maximum(a, b) if is_max else np.minimum(a, b)
    else:
        result = np.fmax(a, b) if is_max else np.fmin(a, b)
    return np.where(both_zero, zero, result)


def unary(threads: Threads, each: Instruction) -> None:
    numbers = read(threads, each.operands[1], each)
    write(threads, each, -numbers if each.name == "neg" else np.abs(numbers))


def compare(threads: Threads, each: Instruction) -> Array:
    if each.type.endswith("x2"):
        raise Faulty("a comparison of pairs is not known")
    a, b = (read(threads, operand, each) for operand in each.operands[1:3])
    is_unordered: Array = np.isnan(a) | np.isnan(b)
    kind = each.parts[1]
    if kind in ("nan", "num"):
        return is_unordered if kind == "nan" else ~is_unordered
    if len(kind) == 3:
        unordered: Array = _COMPARISONS[kind[:2]](a, b) | is_unordered
        return unordered
    ordered: Array = _COMPARISONS[kind](a, b) & ~is_unordered
    return ordered


@carries_out("fma")
def _fused(threads: Threads, each: Instruction) -> None:
    a, b, c = (read(threads, operand, each) for operand in each.operands[1:])
    if "relu" in each.parts or "sat" in each.parts:
        raise Faulty("a kind of fma that is not known")
    if each.type == "f64":
        write(threads, each, fused_float64(a, b, c))
    elif each.type == "f32":
        write(threads, each, fused_float32(a, b, c))
    else:
        # The product of 11 bits is exact, and a sum that is rounded to odd can be rounded again.
        exact = sum_to_odd(a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64))
        write(threads, each, exact.astype(np.float16) if each.type.startswith("f16") else _narrow_to_odd(exact))


def _narrow_to_odd(numbers: Array) -> Array:
    """Return float64 as float32; where that is not exact, the neighbour whose last bit is 1."""
    narrow = numbers.astype(np.float32)
    rest = numbers - narrow
    bits = narrow.view(np.int32)
    is_inexact = (rest != 0) & np.isfinite(narrow) & (bits & 1 == 0)
    step = np.where((rest > 0) == (narrow > 0), 1, -1).astype(np.int32)
    return np.where(is_inexact, bits + step, bits).astype(np.int32).view(np.float32)


@carries_out("ex2", "lg2", "rcp", "sqrt", "rsqrt", "sin", "cos", "tanh")
def _function(threads: Threads, each: Instruction) -> None:
    x = read(threads, each.operands[1], each)
    if each.type == "f64":
        write(threads, each, _coarse_reciprocal(each, x))
        return
    if each.type != "f32":
        raise Faulty("a function of numbers that is not known")
    write(threads, each, _approximation(each, x))


def _approximation(each: Instruction, x: Array) -> Array:
    wide = x.astype(np.float64)
    if "approx" not in each.parts:
        exact = {"sqrt": np.sqrt(wide), "rcp": 1 / wide}[each.name]
        return exact.astype(np.float32)
    if each.name == "ex2":
        result = perturbed(np.exp2(wide).astype(np.float32), x, _EXPONENTIAL_UNITS)
        return np.where(x == 0, np.float32(1), result)
    if each.name == "lg2":
        # The error is absolute near 1.
        found = np.log2(wide)
        error = perturbed(np.ones_like(x), x, 1).astype(np.float64) - 1
        near = found + error * np.where(np.abs(found) < 1, 2.0, 2 * np.abs(found))
        return np.where(np.isfinite(found), near, found).astype(np.float32)
    if each.name in ("rcp", "sqrt", "rsqrt"):
        exact = {"rcp": 1 / wide, "sqrt": np.sqrt(wide), "rsqrt": 1 / np.sqrt(wide)}[each.name]
        units = _RECIPROCAL_UNITS if each.name == "rcp" else _ROOT_UNITS
        return perturbed(exact.astype(np.float32), x, units)
    raise Faulty(f"the error of {each.name}.approx is not known")


def _coarse_reciprocal(each: Instruction, x: Array) -> Array:
    """Return what rcp.approx.ftz.f64 gives: the upper half of the bits of a reciprocal, the lower half zero."""
    if each.name == "sqrt":
        return np.sqrt(x)
    if each.name != "rcp":
        raise Faulty(f"{each.name} of float64 is not known")
    if "approx" not in each.parts:
        return 1 / x
    bits = np.ascontiguousarray(1 / x).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)
    return bits.view(np.float64)
