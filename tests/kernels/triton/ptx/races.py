"""Finds races: accesses of which one is a write, and which no barrier orders.

That is an access by another program of the same launch; or by another warp of the same program since the program's last
barrier; or by another thread of the same warp since the warp's last barrier, too. Writes of a value that is there
already are left to the caller, since Triton lets several threads hold and write the same element. Atomic operations do
not race with each other.

A stamp is one integer that says who accesses memory: the program, the number of its barriers so far, the warp, the
number of the warp's own barriers since the program's last one, and the thread in the warp.
"""

from __future__ import annotations

import numpy as np

from tests.kernels.triton.ptx.values import Array

WARP = 32
_WARP_EPOCH, _WARP, _EPOCH, _PROGRAM = 6, 21, 27, 45
_LANES, _WARP_EPOCHS, _WARPS, _EPOCHS, _PROGRAMS = (
    (1 << 6) - 1,
    (1 << 15) - 1,
    (1 << 6) - 1,
    (1 << 18) - 1,
    (1 << 18) - 1,
)
# In place of one lane, warp or program: more than one.
_SEVERAL_LANES = _LANES
_SEVERAL_WARPS = _SEVERAL_LANES | _WARPS << _WARP
_SEVERAL_PROGRAMS = _SEVERAL_WARPS | _PROGRAMS << _PROGRAM
NOBODY = -1


def stamp(programs: Array, threads: Array, epochs: Array, warp_epochs: Array) -> Array:
    warps, lanes = threads // WARP, threads % WARP
    in_program = (epochs & _EPOCHS) << _EPOCH | warps << _WARP | (warp_epochs & _WARP_EPOCHS) << _WARP_EPOCH | lanes
    return programs << _PROGRAM | in_program


def several_threads(stamps: Array) -> Array:
    """Return stamps of accesses that any threads of the program may make."""
    return stamps | _SEVERAL_WARPS


def thread_of(stamps: Array) -> Array:
    """Return the thread in its program of each stamp of one thread."""
    return (stamps >> _WARP & _WARPS) * WARP + (stamps & _LANES)


def described(number: int) -> str:
    program, warp, lane = number >> _PROGRAM, number >> _WARP & _WARPS, number & _LANES
    if program == _PROGRAMS:
        return "several programs"
    who = f"thread {WARP * warp + lane}" if lane < WARP else "several threads"
    return f"{who} of program {program} after {number >> _EPOCH & _EPOCHS} barriers"


class History:
    """The last write and the last reads of each unit of a memory."""

    def __init__(self, num_units: int) -> None:
        self._writers = np.full(num_units, NOBODY, np.int64)
        self._readers = np.full(num_units, NOBODY, np.int64)
        self._is_atomic = np.zeros(num_units, np.bool_)

    def read(self, units: Array, stamps: Array) -> Array | None:
        """Note reads, and return which of them race with a write; None if none does."""
        merged = _merged(self._readers[units], stamps)
        self._readers[units] = merged
        last = self._readers[units]
        is_shared = last != merged
        if bool(is_shared.any()):
            self._readers[units[is_shared]] = _merged(last[is_shared], merged[is_shared])
        return _unordered(self._writers[units], stamps)

    def write(self, units: Array, stamps: Array, *, is_atomic: bool = False) -> Array | None:
        """Note writes, and return which of them race with a read or another write; None if none does."""
        races = _unordered(self._writers[units], stamps)
        if races is not None and is_atomic:
            races &= ~self._is_atomic[units]
        with_reads = _unordered(self._readers[units], stamps)
        if with_reads is not None:
            races = with_reads if races is None else races | with_reads
        self._writers[units] = stamps
        self._is_atomic[units] = is_atomic
        return races

    def writers(self, units: Array) -> Array:
        """Return the stamps of the last writes of units; NOBODY where there was none."""
        found: Array = self._writers[units]
        return found

    def before(self, unit: int) -> str:
        """Say who has accessed a unit last."""
        pairs = (("written", self._writers[unit]), ("read", self._readers[unit]))
        return ", ".join(f"{what} by {described(int(who))}" for what, who in pairs if who != NOBODY)


def _unordered(earlier: Array, stamps: Array) -> Array | None:
    """Return which accesses no barrier orders after an earlier one by somebody else; None if all are ordered."""
    differences = earlier ^ stamps
    is_other = (earlier != NOBODY) & (differences != 0)
    if not bool(is_other.any()):
        return None
    in_warp = (differences >> _WARP_EPOCH & _WARP_EPOCHS == 0) & (differences & _LANES != 0)
    in_program = (differences >> _EPOCH & _EPOCHS == 0) & ((differences >> _WARP & _WARPS != 0) | in_warp)
    return is_other & ((differences >> _PROGRAM != 0) | in_program)


def _merged(earlier: Array, stamps: Array) -> Array:
    """Return what to remember of earlier reads and of those of now: the later ones, or several at once."""
    differences = earlier ^ stamps
    is_other = (earlier != NOBODY) & (differences != 0)
    if not bool(is_other.any()):
        return stamps
    is_later = differences >> _EPOCH & _EPOCHS != 0
    is_later_in_warp = differences >> _WARP_EPOCH & _WARP_EPOCHS != 0
    marks = np.where(
        differences >> _PROGRAM != 0,
        _SEVERAL_PROGRAMS,
        np.where(
            is_later,
            0,
            np.where(differences >> _WARP & _WARPS != 0, _SEVERAL_WARPS, ~is_later_in_warp * _SEVERAL_LANES),
        ),
    )
    return stamps | np.where(is_other, marks, 0)
