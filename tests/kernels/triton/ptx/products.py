"""Products of matrices that run beside the program (wgmma.mma_async): their registers and their reads.

Their results arrive when the program waits for their group. Until then, nobody may read or write the registers of their
accumulators and fragments, or write the shared memory that they read: PTX ISA, "Asynchronous wgmma Proxy Operations".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tests.kernels.triton.ptx.parsing import Instruction, Program
from tests.kernels.triton.ptx.values import Array, Faulty

if TYPE_CHECKING:
    from tests.kernels.triton.ptx.machine import Threads

_NONE = -1


@dataclass(slots=True)
class Read:
    """Addresses [warpgroups, parts] in shared memory that products of warpgroups read, since a time.

    lanes: [warpgroups, 128]. groups: those of each warpgroup's product.
    """

    lanes: Array
    addresses: Array
    since: int
    groups: Array


def is_product(each: Instruction) -> bool:
    return each.parts[:2] == ("wgmma", "mma_async")


class Products:
    """The products in flight. registers: all that any product of the kernel has as accumulators or fragments."""

    def __init__(self, program: Program, num_lanes: int) -> None:
        lists = [operand for each in program.instructions if is_product(each) for operand in each.operands[:2]]
        names = {name for names in lists if isinstance(names, tuple) for name in names}
        self.registers = frozenset(names)
        self._num_groups = np.zeros(num_lanes, np.int64)
        # The group of the product in flight that has a register, by thread.
        self._accumulators = {name: np.full(num_lanes, _NONE, np.int64) for name in names}
        self._fragments = {name: np.full(num_lanes, _NONE, np.int64) for name in names}
        # Whether a thread has accessed a register since its last wgmma.fence. Before the first, it counts as accessed.
        self._is_accessed = {name: np.ones(num_lanes, np.bool_) for name in names}
        self._results = {name: np.zeros(num_lanes, np.uint32) for name in names}
        self._shapes: dict[str, tuple[str, ...]] = {}
        self._reads: list[Read] = []

    def note_access(self, register: str, mask: Array | None) -> None:
        """Note that threads read or write a register, or raise if a product in flight has it."""
        active = slice(None) if mask is None else mask
        for in_flight in (self._accumulators, self._fragments):
            if bool((in_flight[register][active] != _NONE).any()):
                raise Faulty(f"{register} is accessed while a product in flight has it")
        self._is_accessed[register][active] = True

    def fence(self, lanes: Array) -> None:
        for accessed in self._is_accessed.values():
            accessed[lanes] = False

    def check_accumulators(self, names: Sequence[str], lanes: Array, shape: tuple[str, ...]) -> None:
        """Raise if a product may not have accumulators: without a fence, or beside a product of another shape."""
        self._check_fence(names, lanes)
        for name in names:
            is_other = self._shapes.setdefault(name, shape) != shape
            if is_other and bool((self._accumulators[name][lanes] != _NONE).any()):
                raise Faulty(f"{name} belongs to a product of another shape in flight")
            if bool((self._fragments[name][lanes] != _NONE).any()):
                raise Faulty(f"{name} is a fragment of a product in flight")
            self._shapes[name] = shape

    def check_fragments(self, names: Sequence[str], lanes: Array) -> None:
        self._check_fence(names, lanes)
        for name in names:
            if bool((self._accumulators[name][lanes] != _NONE).any()):
                raise Faulty(f"{name} is an accumulator of a product in flight")

    def _check_fence(self, names: Sequence[str], lanes: Array) -> None:
        for name in names:
            if bool(self._is_accessed[name][lanes].any()):
                raise Faulty(f"no wgmma.fence after {name} was accessed")

    def accumulated(self, name: str, lanes: Array, register: Array) -> Array:
        """Return what a product adds to: the result of an earlier one in flight, or the register's bits."""
        is_pending = self._accumulators[name][lanes] != _NONE
        found: Array = np.where(is_pending, self._results[name][lanes], register[lanes])
        return found

    def begin(self, lanes: Array, results: dict[str, Array], fragments: Sequence[str]) -> None:
        """Keep results [warpgroups, 128] by register until they are waited for."""
        for name, values in results.items():
            self._results[name][lanes] = values
            self._accumulators[name][lanes] = self._num_groups[lanes]
        for name in fragments:
            self._fragments[name][lanes] = self._num_groups[lanes]

    def note_read(self, lanes: Array, addresses: Array, since: int) -> None:
        self._reads.append(Read(lanes, addresses, since, self._num_groups[lanes[:, 0]]))

    def commit(self, lanes: Array) -> None:
        self._num_groups[lanes] += 1

    def wait(self, threads: Threads, lanes: Array, num_left: int) -> list[Read]:
        """Let all groups of some threads arrive but the last num_left, and return the reads that end by that."""
        end = np.full(threads.num_lanes, np.iinfo(np.int64).min)
        end[lanes] = self._num_groups[lanes] - num_left
        for name, groups in self._accumulators.items():
            arrives = (groups != _NONE) & (groups < end)
            if bool(arrives.any()):
                threads.registers[name] = np.where(arrives, self._results[name], threads.register(name))
                groups[arrives] = _NONE
        for groups in self._fragments.values():
            groups[(groups != _NONE) & (groups < end)] = _NONE
        ended, left = [], []
        for read in self._reads:
            arrives = read.groups < end[read.lanes[:, 0]]
            for which, into in ((arrives, ended), (~arrives, left)):
                if bool(which.any()):
                    into.append(Read(read.lanes[which], read.addresses[which], read.since, read.groups[which]))
        self._reads = left
        return ended
