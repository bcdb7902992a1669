"""Progress: a counter in memory that the engine process shares with the process that watches it. Imports no torch.

The engine's main thread increases the count whenever it has done something: at every turn of its loop, before every
layer (in a recorded step after every operation), with every block that it reads from disk or writes. This wakes no
process and takes 0.1 microseconds.

The memory is an anonymous file that is open in both processes only: the parent creates it, the child inherits it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from pagewick.child_processes import shared_file

# The environment variable with the number of the open file.
PROGRESS_VARIABLE = "PAGEWICK_PROGRESS_FD"

_NUM_BYTES = 64
# A process that inherits the variable but not the file must not write into another file.
_MAGIC = int.from_bytes(b"pagewick", "big")
# The 8-byte words of the record.
_MAGIC_WORD, _COUNT, _NUM_TAKEN, _IS_BUSY, _ALLOWED_S, _ALLOWED_CPU_S = range(6)


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of a Progress at one moment.

    count: changes whenever the engine has done something. num_taken: messages that the engine has received. is_busy:
    whether it has work, rather than waiting for a message. allowed_s, allowed_cpu_s: see Progress.expect.
    """

    count: int = 0
    num_taken: int = 0
    is_busy: bool = False
    allowed_s: float = 0.0
    allowed_cpu_s: float = 0.0


class Progress:
    """Written by one thread at a time. Created by `shared` if another process watches it, else by `private`."""

    def __init__(self, memory: mmap.mmap | bytearray, file: int | None = None) -> None:
        """file: the open file of the memory, which `close` closes."""
        self._memory = memory
        with memoryview(memory) as view:
            self._words, self._seconds = view.cast("Q"), view.cast("d")
        self._words[_MAGIC_WORD] = _MAGIC
        self.file = file

    @classmethod
    def shared(cls) -> Progress:
        """Create one that a child process finds if it inherits `file`, named by PROGRESS_VARIABLE. Raises OSError."""
        file = shared_file("pagewick-progress", _NUM_BYTES)
        return cls(mmap.mmap(file, _NUM_BYTES), file)

    @classmethod
    def private(cls) -> Progress:
        """Create one that no other process reads."""
        return cls(bytearray(_NUM_BYTES))

    @classmethod
    def inherited(cls, environ: Mapping[str, str]) -> Progress | None:
        """Return the one that the parent process has created, or None if there is none."""
        number = environ.get(PROGRESS_VARIABLE, "")
        if not number.isdecimal():
            return None
        file = int(number)
        try:
            if os.fstat(file).st_size != _NUM_BYTES or os.pread(file, 8, 0) != _MAGIC.to_bytes(8, sys.byteorder):
                return None
            return cls(mmap.mmap(file, _NUM_BYTES))
        except (OSError, OverflowError, ValueError):
            return None

    def mark(self) -> None:
        """Note that the engine has done something."""
        self._words[_COUNT] += 1

    def count_address(self) -> int:
        """Return the address of the count, for native code that increases it itself."""
        word = ctypes.c_uint64.from_buffer(self._memory, _COUNT * 8)
        return ctypes.addressof(word)

    def expect(self, seconds: float = 0.0, cpu_seconds: float = 0.0) -> None:
        """Set the time that work between two marks may take, until the next call.

        seconds: in addition to the time that any work may take. cpu_seconds: in processor time, for work that the
        processors of this machine do; it only passes while they do it.
        """
        self._seconds[_ALLOWED_S], self._seconds[_ALLOWED_CPU_S] = seconds, cpu_seconds
        self._words[_COUNT] += 1

    def work(self) -> None:
        """Note that there is work."""
        self._words[_IS_BUSY] = 1
        self._words[_COUNT] += 1

    def take(self) -> None:
        """Note that a message was received, so there is work."""
        self._words[_NUM_TAKEN] += 1
        self.work()

    def rest(self) -> None:
        """Note that there is no work before the next message."""
        self._words[_IS_BUSY] = 0
        self._words[_COUNT] += 1

    def read(self) -> Reading:
        words, seconds = self._words, self._seconds
        return Reading(
            words[_COUNT], words[_NUM_TAKEN], bool(words[_IS_BUSY]), seconds[_ALLOWED_S], seconds[_ALLOWED_CPU_S]
        )

    def close_file(self) -> None:
        """Close the file, once the child has it; the memory stays."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def close(self) -> None:
        """Release the memory, too. May be called twice; no other method may be called afterwards."""
        self.close_file()
        self._words.release()
        self._seconds.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
