"""Loads, stores, atomic operations, and copies from global to shared memory that run beside the program."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tests.kernels.triton.ptx.semantics import carries_out
from tests.kernels.triton.ptx.values import Array, Faulty, as_type, numpy_type, width_of

if TYPE_CHECKING:
    from tests.kernels.triton.ptx.machine import Threads
    from tests.kernels.triton.ptx.parsing import Instruction, Place


def addresses_of(threads: Threads, place: Place, lanes: Array) -> Array:
    return threads.of(place.base, "u64", lanes).astype(np.int64) + place.offset


def _load_parameter(threads: Threads, each: Instruction) -> None:
    target, place = each.operands
    bits = threads.parameters[place.base]
    threads.write(target, as_type(bits, each.type))


@carries_out("ld")
def _load(threads: Threads, each: Instruction) -> None:
    if each.parts[1] == "param":
        _load_parameter(threads, each)
        return
    targets, place = each.operands
    registers = targets if isinstance(targets, tuple) else (targets,)
    lanes, width = threads.active(), width_of(each.type) // 8
    addresses, stamps = addresses_of(threads, place, lanes), threads.stamps(lanes)
    if each.parts[1] == "shared":
        threads.check_shared(addresses, width * len(registers))
        found = threads.shared.load(threads.shared_address(addresses, lanes), width, len(registers), stamps)
    elif each.parts[1] == "global":
        found = threads.memory.load(addresses, width, len(registers), stamps)
    else:
        raise Faulty("a kind of memory that is not known")
    every = np.zeros((len(registers), threads.num_lanes), numpy_type(each.type))
    every[:, lanes] = found.view(every.dtype).T
    for register, values in zip(registers, every, strict=True):
        threads.write(register, values)


@carries_out("st")
def _store(threads: Threads, each: Instruction) -> None:
    place, sources = each.operands
    registers = sources if isinstance(sources, tuple) else (sources,)
    lanes, kind = threads.active(), f"b{width_of(each.type)}"
    values = np.stack([threads.of(register, kind, lanes) for register in registers], axis=1)
    addresses, stamps = addresses_of(threads, place, lanes), threads.stamps(lanes)
    if each.parts[1] == "shared":
        threads.check_shared(addresses, values.dtype.itemsize * len(registers))
        threads.shared.store(threads.shared_address(addresses, lanes), values, stamps)
    elif each.parts[1] == "global":
        threads.memory.store(addresses, values, stamps)
    else:
        raise Faulty("a kind of memory that is not known")


@carries_out("atom", "red")
def _change(threads: Threads, each: Instruction) -> None:
    """Change numbers of memory one thread after the other; atom also returns what they were."""
    operands = each.operands if each.name == "atom" else ("_", *each.operands)
    target, place, source = operands
    operation, kind = each.parts[-2], each.type
    if operation not in ("add", "min", "max", "and", "or", "exch"):
        raise Faulty("an atomic operation that is not known")
    lanes = threads.active()
    operand, stamps = threads.of(source, kind, lanes), threads.stamps(lanes)
    addresses = addresses_of(threads, place, lanes)
    if "shared" in each.parts:
        threads.check_shared(addresses, operand.dtype.itemsize)
        before = threads.shared.change(operation, threads.shared_address(addresses, lanes), operand, stamps)
    elif "global" in each.parts:
        before = threads.memory.change(operation, addresses, operand, stamps)
    else:
        raise Faulty("a kind of memory that is not known")
    every = np.zeros(threads.num_lanes, before.dtype)
    every[lanes] = before
    threads.write(target, every)


@carries_out("cp")
def _copy(threads: Threads, each: Instruction) -> None:
    """Copy 4, 8 or 16 bytes from global to shared memory, or zeros instead of those beyond a size."""
    lanes, step = threads.active(), each.parts[2]
    if step == "commit_group":
        threads.copies.commit(lanes)
    elif step in ("wait_group", "wait_all"):
        threads.copies.wait(threads, lanes, int(each.operands[0][0]) if step == "wait_group" else 0)
    elif step in ("ca", "cg"):
        _begin_copy(threads, each, lanes)
    else:
        raise Faulty("a copy that is not known")


def _begin_copy(threads: Threads, each: Instruction, lanes: Array) -> None:
    target, source, count, *sizes = each.operands
    num_bytes = int(count[0])
    size = threads.of(sizes[0], "u32", lanes) if sizes else np.full(len(lanes), num_bytes, np.uint32)
    if bool(((size != 0) & (size != num_bytes)).any()):
        raise Faulty("a copy of a part is not known")
    addresses, is_read = addresses_of(threads, source, lanes), size != 0
    values = np.zeros((len(lanes), num_bytes // 4), np.uint32)
    if bool(is_read.any()):
        read_lanes = lanes[is_read]
        values[is_read] = threads.memory.load(addresses[is_read], 4, num_bytes // 4, threads.stamps(read_lanes))
    places = addresses_of(threads, target, lanes)
    threads.check_shared(places, num_bytes)
    places = threads.shared_address(places, lanes)
    threads.shared.note_write(places, num_bytes, threads.stamps(lanes))
    threads.copies.begin(lanes, places, values)
