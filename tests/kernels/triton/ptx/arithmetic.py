"""Instructions on whole numbers, bits and predicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.kernels.triton.ptx import floats
from tests.kernels.triton.ptx.semantics import carries_out
from tests.kernels.triton.ptx.values import BITS, Array, Faulty, as_type, numpy_type, width_of

if TYPE_CHECKING:
    from tests.kernels.triton.ptx.machine import Threads
    from tests.kernels.triton.ptx.parsing import Instruction


def _divided(a: Array, b: Array) -> Array:
    """Return a quotient that is cut off; of a division by zero, all ones."""
    if a.dtype.kind == "u":
        return np.where(b == 0, ~np.zeros_like(a), a // np.maximum(b, 1))
    safe = np.where(b == 0, 1, b)
    quotient = a // safe
    quotient = quotient + ((a % safe != 0) & ((a < 0) != (safe < 0)))
    return np.where(b == 0, -1, quotient).astype(a.dtype)


_BINARY: dict[str, Callable[[Array, Array], Any]] = {
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "min": np.minimum, "max": np.maximum, "div": _divided,
    "rem": lambda a, b: a - _divided(a, b) * b, "and": lambda a, b: a & b, "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}  # fmt: skip
_UNARY: dict[str, Callable[[Array], Any]] = {"neg": lambda a: -a, "abs": np.abs, "not": lambda a: ~a}
_COMPARISONS: dict[str, Callable[[Array, Array], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip


@carries_out(*_BINARY)
def _binary(threads: Threads, each: Instruction) -> None:
    if floats.is_float(each.type):
        floats.binary(threads, each)
        return
    target, *operands = each.operands
    a, b = (threads.read(operand, each.type) for operand in operands)
    threads.write(target, _BINARY[each.name](a, b))


@carries_out(*_UNARY)
def _unary(threads: Threads, each: Instruction) -> None:
    if floats.is_float(each.type):
        floats.unary(threads, each)
        return
    threads.write(each.operands[0], _UNARY[each.name](threads.read(each.operands[1], each.type)))


@carries_out("mul", "mad")
def _multiply(threads: Threads, each: Instruction) -> None:
    if floats.is_float(each.type):
        floats.binary(threads, each)
        return
    target, *operands = each.operands
    a, b = (threads.read(operand, each.type) for operand in operands[:2])
    is_wide, kind = each.parts[1] == "wide", each.type
    if is_wide:
        kind = f"{kind[0]}{2 * width_of(kind)}"
        result = a.astype(numpy_type(kind)) * b.astype(numpy_type(kind))
    else:
        result = _high_product(a, b) if each.parts[1] == "hi" else a * b
    threads.write(target, result + threads.read(operands[2], kind) if each.name == "mad" else result)


def _high_product(a: Array, b: Array) -> Array:
    wide = np.array([int(x) * int(y) >> 8 * a.dtype.itemsize for x, y in np.broadcast(a, b)], object)
    return (wide & ((1 << 8 * a.dtype.itemsize) - 1)).astype(BITS[8 * a.dtype.itemsize]).view(a.dtype)


@carries_out("shl", "shr")
def _shift(threads: Threads, each: Instruction) -> None:
    target, source, amount = each.operands
    a, width = threads.read(source, each.type), width_of(each.type)
    by = threads.read(amount, "u32")
    last = np.minimum(by, width - 1).astype(a.dtype)
    if each.name == "shl":
        result = np.where(by >= width, np.zeros_like(a), a << last)
    else:
        shifted = a >> last
        result = shifted if a.dtype.kind == "i" else np.where(by >= width, np.zeros_like(a), shifted)
    threads.write(target, result.astype(a.dtype))


@carries_out("bfe")
def _extract_bits(threads: Threads, each: Instruction) -> None:
    """Take `length` bits from `start` on; what lies beyond the number's bits is zero, or its sign."""
    target, source, first, count = each.operands
    width, kind = width_of(each.type), each.type
    start, length = (threads.read(operand, "u32").astype(np.int64) & 255 for operand in (first, count))
    bits = threads.read(source, f"u{width}").astype(np.uint64)
    if kind[0] == "s":
        bits = threads.read(source, kind).astype(np.int64).view(np.uint64)
    kept = np.where(start > 63, 0, bits >> np.minimum(start, 63).astype(np.uint64))
    ones = (np.uint64(1) << np.minimum(length, 63).astype(np.uint64)) - np.uint64(1)
    found = np.where(length > 63, kept, kept & ones)
    if kind[0] == "s":
        sign_place = np.minimum(start + length - 1, width - 1)
        is_negative = (length > 0) & (bits >> np.maximum(sign_place, 0).astype(np.uint64) & np.uint64(1)).astype(bool)
        found = np.where(is_negative, found | ~ones, found)
    threads.write(target, found.astype(np.uint64).astype(BITS[width]))


@carries_out("bfi")
def _insert_bits(threads: Threads, each: Instruction) -> None:
    target, source, into, first, count = each.operands
    dtype = BITS[width_of(each.type)]
    a, b = (threads.read(operand, each.type).astype(np.uint64) for operand in (source, into))
    start, length = (np.minimum(threads.read(operand, "u32") & 255, 63) for operand in (first, count))
    ones = ((np.uint64(1) << length.astype(np.uint64)) - np.uint64(1)) << start.astype(np.uint64)
    threads.write(target, ((b & ~ones) | ((a << start.astype(np.uint64)) & ones)).astype(dtype))


@carries_out("setp")
def _compare(threads: Threads, each: Instruction) -> None:
    target, first, second, *others = each.operands
    if floats.is_float(each.type):
        holds = floats.compare(threads, each)
    else:
        a, b = threads.read(first, each.type), threads.read(second, each.type)
        holds = _COMPARISONS[each.parts[1]](a, b)
    if others:
        holds = _BINARY[each.parts[2]](holds, threads.read(others[0], "pred"))
    threads.write(target, holds)


@carries_out("selp")
def _select(threads: Threads, each: Instruction) -> None:
    target, first, second, condition = each.operands
    kind = f"b{width_of(each.type)}"
    a, b = threads.read(first, kind), threads.read(second, kind)
    threads.write(target, np.where(threads.bits(condition), a, b))


@carries_out("mov")
def _move(threads: Threads, each: Instruction) -> None:
    """Copy bits; a list takes the parts of a number apart or puts them together, the low ones first."""
    target, source = each.operands
    if isinstance(target, tuple):
        part = width_of(each.type) // len(target)
        bits = threads.read(source, each.type)
        for place, register in enumerate(target):
            threads.write(register, (bits >> bits.dtype.type(place * part)).astype(BITS[part]))
    elif isinstance(source, tuple):
        dtype, part = BITS[width_of(each.type)], width_of(each.type) // len(source)
        bits = np.zeros(1, dtype)
        for place, register in enumerate(source):
            bits = bits | threads.read(register, f"b{part}").astype(dtype) << dtype(place * part)
        threads.write(target, bits)
    else:
        threads.write(target, as_type(threads.bits(source), each.type))


@carries_out("prmt")
def _permute_bytes(threads: Threads, each: Instruction) -> None:
    """Choose each byte of the result among the eight of two numbers, or spread the sign of one."""
    if len(each.parts) > 2:
        raise Faulty("a mode of prmt that is not known")
    target, *operands = each.operands
    low, high, selection = (threads.read(operand, "u32").astype(np.uint64) for operand in operands)
    both, result = low | high << np.uint64(32), np.zeros(1, np.uint64)
    for place in range(4):
        chosen = selection >> np.uint64(4 * place) & np.uint64(15)
        byte = both >> (chosen & np.uint64(7)) * np.uint64(8) & np.uint64(255)
        spread = np.where(byte >= 128, np.uint64(255), np.uint64(0))
        result = result | np.where(chosen >= 8, spread, byte) << np.uint64(8 * place)
    threads.write(target, result.astype(np.uint32))


@carries_out("lop3")
def _any_logic(threads: Threads, each: Instruction) -> None:
    target, *operands, table = each.operands
    a, b, c = (threads.read(operand, "u32") for operand in operands)
    result = np.zeros(1, np.uint32)
    for case in range(8):
        if int(table[0]) >> case & 1:
            result = result | (a if case & 4 else ~a) & (b if case & 2 else ~b) & (c if case & 1 else ~c)
    threads.write(target, result)


@carries_out("clz", "popc")
def _count_bits(threads: Threads, each: Instruction) -> None:
    a = threads.read(each.operands[1], each.type)
    ones = [int(x).bit_length() if each.name == "clz" else int(x).bit_count() for x in a]
    counts = np.array(ones, np.uint32)
    threads.write(each.operands[0], width_of(each.type) - counts if each.name == "clz" else counts)
