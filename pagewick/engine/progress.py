"""Progress: how far the engine process is, in memory that it shares with the process that watches it. Imports no torch.

The engine's main thread counts up one word of it wherever something has been done: at every turn of its loop, before
every layer or, where layers are replayed, after every operation, with every block on its way to or from a disk. Nobody
is woken by that, and it costs 0.1 microseconds.

The memory is a file without a name, open in both processes only: the parent makes it, the child inherits it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass

# Tells the engine process the number of the open file.
PROGRESS_VARIABLE = "PAGEWICK_PROGRESS_FD"

_NUM_BYTES = 64
# Whoever inherits the variable but not the file must not write into another one.
_MAGIC = int.from_bytes(b"pagewick", "big")
# The 8-byte words of the record.
_MAGIC_WORD, _COUNT, _NUM_TAKEN, _IS_BUSY, _ALLOWED_S, _ALLOWED_CPU_S = range(6)


@dataclass(frozen=True, slots=True)
class Reading:
    """What a Progress said at one moment. count: changes whenever something has been done.

    num_taken: messages taken in. is_busy: not waiting for one. allowed_s, allowed_cpu_s: see Progress.expect.
    """

    count: int = 0
    num_taken: int = 0
    is_busy: bool = False
    allowed_s: float = 0.0
    allowed_cpu_s: float = 0.0


class Progress:
    """Written by one thread at a time. Made by `shared` where it is watched, by `private` where it is not."""

    def __init__(self, memory: mmap.mmap | bytearray, file: int | None = None) -> None:
        """file: the open file that the memory is, which `close` closes."""
        self._memory = memory
        with memoryview(memory) as view:
            self._words, self._seconds = view.cast("Q"), view.cast("d")
        self._words[_MAGIC_WORD] = _MAGIC
        self.file = file

    @classmethod
    def shared(cls) -> Progress:
        """A new one, which a child process finds if it inherits `file`, named by PROGRESS_VARIABLE. Raises OSError."""
        if sys.platform == "linux":
            file = os.memfd_create("pagewick-progress", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile() as temporary:
                file = os.dup(temporary.fileno())
        # Written, not only made longer: to write into a hole of a full disk would be a bus error later.
        os.write(file, bytes(_NUM_BYTES))
        return cls(mmap.mmap(file, _NUM_BYTES), file)

    @classmethod
    def private(cls) -> Progress:
        """One that nobody reads."""
        return cls(bytearray(_NUM_BYTES))

    @classmethod
    def inherited(cls, environ: Mapping[str, str]) -> Progress | None:
        """The parent's, or None if it gave none."""
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
        """Something has been done."""
        self._words[_COUNT] += 1

    def count_address(self) -> int:
        """Where `mark` counts: for native code that has something to do between two turns of the interpreter."""
        word = ctypes.c_uint64.from_buffer(self._memory, _COUNT * 8)
        return ctypes.addressof(word)

    def expect(self, seconds: float = 0.0, cpu_seconds: float = 0.0) -> None:
        """From now on, until it is called again, the work between two marks may take so long.

        seconds: beside what anything may take. cpu_seconds: the same in time of the processors of this machine, for
        work that they do: it passes only as fast as they come to do it.
        """
        self._seconds[_ALLOWED_S], self._seconds[_ALLOWED_CPU_S] = seconds, cpu_seconds
        self._words[_COUNT] += 1

    def take(self) -> None:
        """A message has been taken in: there is something to do."""
        self._words[_IS_BUSY] = 1
        self._words[_NUM_TAKEN] += 1
        self._words[_COUNT] += 1

    def rest(self) -> None:
        """There is nothing to do before the next message."""
        self._words[_IS_BUSY] = 0
        self._words[_COUNT] += 1

    def read(self) -> Reading:
        words, seconds = self._words, self._seconds
        return Reading(
            words[_COUNT], words[_NUM_TAKEN], bool(words[_IS_BUSY]), seconds[_ALLOWED_S], seconds[_ALLOWED_CPU_S]
        )

    def close_file(self) -> None:
        """Let go of the open file, once the child has it; the memory stays."""
        if self.file is not None:
            os.close(self.file)
            self.file = None

    def close(self) -> None:
        """Let go of the memory, too; may be called twice. Nothing else may be called then."""
        self.close_file()
        self._words.release()
        self._seconds.release()
        if isinstance(self._memory, mmap.mmap):
            self._memory.close()
