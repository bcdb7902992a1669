"""Instructions of a whole warp: exchanges, sums, matrices from shared memory, and products by tensor cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.kernels.triton.ptx.eight_bits import E4M3
from tests.kernels.triton.ptx.memory_access import addresses_of
from tests.kernels.triton.ptx.races import WARP
from tests.kernels.triton.ptx.semantics import carries_out
from tests.kernels.triton.ptx.values import Array, Faulty, float_of_bfloat16, tf32_of_float, towards_zero

if TYPE_CHECKING:
    from tests.kernels.triton.ptx.machine import Threads
    from tests.kernels.triton.ptx.parsing import Instruction

_LANES = np.arange(WARP)
# The row and the column of a matrix for each thread of a warp: PTX ISA, "Matrix Fragments for mma".
_GROUP, _IN_GROUP = _LANES // 4, _LANES % 4


def needs_warp(each: Instruction) -> bool:
    return "sync" in each.parts and each.parts[:2] != ("bar", "sync")


def _warps(threads: Threads) -> Array:
    """Return the numbers of the active threads, a row for each warp."""
    lanes = threads.active()
    if len(lanes) % WARP or bool((lanes.reshape(-1, WARP)[:, 0] % WARP).any()):
        raise Faulty("a warp is not whole")
    return lanes.reshape(-1, WARP)


def _set(threads: Threads, register: str, lanes: Array, values: Array) -> None:
    """Set a register of the threads `lanes`, which are all active ones."""
    every = np.zeros(threads.num_lanes, values.dtype)
    every[lanes] = values
    threads.write(register, every)


def _check_members(threads: Threads, operand: object, lanes: Array) -> None:
    if bool((threads.of(operand, "u32", lanes) != 0xFFFFFFFF).any()):
        raise Faulty("not all threads of a warp take part")


@carries_out("bar")
def _order_warp(threads: Threads, each: Instruction) -> None:
    """bar.warp.sync: all threads of the warp are here, and see what the others have written."""
    lanes = _warps(threads)
    _check_members(threads, each.operands[0], lanes)
    threads.warp_epochs[lanes] += 1


@carries_out("shfl")
def _exchange(threads: Threads, each: Instruction) -> None:
    target, source, by, limits, members = each.operands
    lanes = _warps(threads)
    _check_members(threads, members, lanes)
    step = threads.of(by, "u32", lanes).astype(np.int64) & 31
    limit = threads.of(limits, "u32", lanes).astype(np.int64)
    segment, clamp = limit >> 8 & 31, limit & 31
    last = (_LANES & segment) | (clamp & ~segment)
    mode = each.parts[2]
    first = _LANES & segment
    chosen = {"up": _LANES - step, "down": _LANES + step, "bfly": _LANES ^ step, "idx": first | (step & ~segment)}[mode]
    is_inside = chosen >= last if mode == "up" else chosen <= last
    values = threads.of(source, "b32", lanes)
    found = np.take_along_axis(values, np.where(is_inside, chosen, _LANES) & 31, axis=1)
    registers = target.split("|")
    _set(threads, registers[0], lanes, found)
    if len(registers) > 1:
        _set(threads, registers[1], lanes, is_inside)


@carries_out("redux")
def _reduce(threads: Threads, each: Instruction) -> None:
    target, source, members = each.operands
    lanes = _warps(threads)
    _check_members(threads, members, lanes)
    values = threads.of(source, each.type, lanes)
    operations = {"add": np.add, "min": np.minimum, "max": np.maximum}
    operations |= {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}
    total = operations[each.parts[2]].reduce(values, axis=1, keepdims=True, dtype=values.dtype)
    _set(threads, target, lanes, np.broadcast_to(total, lanes.shape))


@carries_out("vote")
def _vote(threads: Threads, each: Instruction) -> None:
    target, source, members = each.operands
    lanes = _warps(threads)
    _check_members(threads, members, lanes)
    holds = threads.of(source, "pred", lanes)
    if each.parts[2] == "ballot":
        bits = (holds.astype(np.uint64) << _LANES.astype(np.uint64)).sum(axis=1, keepdims=True).astype(np.uint32)
        _set(threads, target, lanes, np.broadcast_to(bits, lanes.shape))
        return
    answer = {"any": holds.any, "all": holds.all}[each.parts[2]](axis=1, keepdims=True)
    _set(threads, target, lanes, np.broadcast_to(answer, lanes.shape))


@carries_out("ldmatrix")
def _load_matrices(threads: Threads, each: Instruction) -> None:
    """Load matrices of 8 x 8 halves. Threads 8 i to 8 i + 7 have the addresses of the rows of matrix i."""
    targets, place = each.operands
    lanes = _warps(threads)
    sources = lanes[:, : 8 * len(targets)].ravel()
    addresses = addresses_of(threads, place, sources)
    threads.check_shared(addresses, 16)
    rows = threads.shared.load(threads.shared_address(addresses, sources), 2, 8, threads.stamps(sources))
    matrices = rows.reshape(len(lanes), len(targets), 8, 8).astype(np.uint32)
    if "trans" in each.parts:
        matrices = matrices.swapaxes(2, 3)
    for number, register in enumerate(targets):
        low = matrices[:, number, _GROUP, 2 * _IN_GROUP]
        high = matrices[:, number, _GROUP, 2 * _IN_GROUP + 1]
        _set(threads, register, lanes, low | high << np.uint32(16))


@carries_out("stmatrix")
def _store_matrices(threads: Threads, each: Instruction) -> None:
    """Store matrices of 8 x 8 halves, the other way round than ldmatrix loads them."""
    place, sources = each.operands
    if each.parts[3] != "m8n8" or each.type != "b16":
        raise Faulty("matrices that are not known")
    lanes = _warps(threads)
    matrices = np.zeros((len(lanes), len(sources), 8, 8), np.uint16)
    for number, register in enumerate(sources):
        bits = threads.of(register, "b32", lanes)
        matrices[:, number, _GROUP, 2 * _IN_GROUP] = bits
        matrices[:, number, _GROUP, 2 * _IN_GROUP + 1] = bits >> np.uint32(16)
    if "trans" in each.parts:
        matrices = matrices.swapaxes(2, 3)
    targets = lanes[:, : 8 * len(sources)].ravel()
    addresses = addresses_of(threads, place, targets)
    threads.check_shared(addresses, 16)
    threads.shared.store(threads.shared_address(addresses, targets), matrices.reshape(-1, 8), threads.stamps(targets))


@carries_out("mma")
def _multiply(threads: Threads, each: Instruction) -> None:
    """Add a product of matrices of a warp to float32, exactly but for one rounding towards zero."""
    shape, kinds = each.parts[3], each.parts[6:]
    if kinds[0] != "f32" or kinds[3] != "f32" or kinds[1] != kinds[2]:
        raise Faulty("a product that is not known")
    lanes = _warps(threads)
    target, *sources = each.operands
    a, b, c = ([threads.of(register, "b32", lanes) for register in source] for source in sources)
    if (shape, kinds[1]) == ("m16n8k8", "tf32"):
        left, right = _tf32_operands(a, b)
    elif shape == "m16n8k16" and kinds[1] in ("f16", "bf16"):
        left, right = _half_operands(a, b, kinds[1])
    elif (shape, kinds[1]) == ("m16n8k32", "e4m3"):
        left, right = _byte_operands(a, b)
    else:
        raise Faulty("a product that is not known")
    total = np.zeros((len(lanes), 16, 8))
    places = [(_GROUP + 8 * (number // 2), 2 * _IN_GROUP + number % 2) for number in range(4)]
    for (row, column), numbers in zip(places, c, strict=True):
        total[:, row, column] = numbers.view(np.float32)
    total += left @ right
    rounded = towards_zero(total)
    for (row, column), register in zip(places, target, strict=True):
        _set(threads, register, lanes, rounded[:, row, column].copy().view(np.uint32))


def _half_operands(a: list[Array], b: list[Array], kind: str) -> tuple[Array, Array]:
    """Return the matrices [warps, 16, 16] and [warps, 16, 8] of the registers of a warp."""
    left, right = np.zeros((len(a[0]), 16, 16)), np.zeros((len(a[0]), 16, 8))
    for half in range(2):
        for number, bits in enumerate(a):
            columns = 2 * _IN_GROUP + half + 8 * (number // 2)
            left[:, _GROUP + 8 * (number % 2), columns] = _half(bits, half, kind)
        for number, bits in enumerate(b):
            right[:, 2 * _IN_GROUP + half + 8 * number, _GROUP] = _half(bits, half, kind)
    return left, right


def _byte_operands(a: list[Array], b: list[Array]) -> tuple[Array, Array]:
    """Return the matrices [warps, 16, 32] and [warps, 32, 8] of the registers of a warp, which have E4M3 numbers."""
    left, right = np.zeros((len(a[0]), 16, 32)), np.zeros((len(a[0]), 32, 8))
    for byte in range(4):
        for number, bits in enumerate(a):
            columns = 4 * _IN_GROUP + byte + 16 * (number // 2)
            left[:, _GROUP + 8 * (number % 2), columns] = E4M3[bits >> np.uint32(8 * byte) & 0xFF]
        for number, bits in enumerate(b):
            right[:, 4 * _IN_GROUP + byte + 16 * number, _GROUP] = E4M3[bits >> np.uint32(8 * byte) & 0xFF]
    return left, right


def _half(bits: Array, half: int, kind: str) -> Array:
    part = (bits >> np.uint32(16 * half)).astype(np.uint16)
    return float_of_bfloat16(part) if kind == "bf16" else part.view(np.float16)


def _tf32_operands(a: list[Array], b: list[Array]) -> tuple[Array, Array]:
    left, right = np.zeros((len(a[0]), 16, 8)), np.zeros((len(a[0]), 8, 8))
    for number, bits in enumerate(a):
        left[:, _GROUP + 8 * (number % 2), _IN_GROUP + 4 * (number // 2)] = tf32_of_float(bits.view(np.float32))
    for number, bits in enumerate(b):
        right[:, _IN_GROUP + 4 * number, _GROUP] = tf32_of_float(bits.view(np.float32))
    return left, right
