"""Main memory in huge pages, for data such as weights that every step reads completely.

The kernel fills a page with zeros when it is first written, and on a virtual machine the host may have to provide it
first. `prepared` does that for the weights in a thread beside other work, such as the import of torch;
docs/decisions/0015-memory-ahead.md has measurements.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from ctypes import memset
from typing import Final

HUGE_PAGE: Final = 2 * 2**20

# Bytes zeroed per call. The thread needs the GIL between two calls, and an import releases it only every 5 ms.
_NUM_ZEROED: Final = 16 * HUGE_PAGE
# Bytes populated per call, during which the process's other threads cannot map memory.
_NUM_POPULATED: Final = 2 * HUGE_PAGE
# MADV_POPULATE_WRITE, since Linux 5.14; the module mmap does not define it.
_POPULATE_WRITE: Final = 23


class _Mapping:
    """An anonymous private mapping. Its usable part starts at a huge page, `offset` bytes into `memory`.

    num_small_bytes: number of bytes at the start that get pages of the usual size.
    """

    def __init__(self, num_bytes: int, num_small_bytes: int = 0) -> None:
        self.memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.offset = -start % HUGE_PAGE
        self.address = start + self.offset
        first_huge = _up(self.offset + min(num_small_bytes, num_bytes), mmap.PAGESIZE)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.memory.madvise(mmap.MADV_HUGEPAGE, first_huge)
        if num_small_bytes and hasattr(mmap, "MADV_NOHUGEPAGE"):
            # If the system uses huge pages by default, they must be refused explicitly.
            self.memory.madvise(mmap.MADV_NOHUGEPAGE, 0, first_huge)


class _Prepared:
    """Memory whose pages a thread prepares from front to back, while `take` hands it out in the same order.

    Ahead of the memory that is taken, the thread writes zeros, which does not block other threads. Once `take` has
    caught up, the thread must not write any more; it then has the kernel populate pages, which preserves content.
    """

    def __init__(self, num_bytes: int) -> None:
        self._size = num_bytes
        self._mapping = _Mapping(num_bytes)
        self._num_taken = self._num_asked = 0
        self._is_zeroing = self._is_caught_up = self._is_over = False
        self._turn = threading.Condition()
        self.thread = threading.Thread(target=self._ask, name="memory", daemon=True)

    @property
    def num_ready_bytes(self) -> int:
        """Number of prepared bytes that are not taken."""
        return max(0, self._num_asked - self._num_taken)

    def take(self, num_bytes: int) -> tuple[mmap.mmap, int] | None:
        with self._turn:
            begin = _up(self._num_taken, mmap.PAGESIZE)
            if begin + num_bytes > self._size:
                return None
            self._num_taken = begin + num_bytes
            if self._num_taken > self._num_asked:
                self._is_caught_up = True
                self._turn.wait_for(lambda: not self._is_zeroing)
        return self._mapping.memory, self._mapping.offset + begin

    def end(self) -> None:
        """Return the memory that was not taken to the system."""
        with self._turn:
            self._is_over = True
        try:
            if self.thread.is_alive():
                self.thread.join()
        finally:
            unused = _up(self._mapping.offset + self._num_taken, mmap.PAGESIZE)
            if unused < len(self._mapping.memory):
                self._mapping.memory.madvise(mmap.MADV_DONTNEED, unused)

    def _ask(self) -> None:
        while self._ask_for_some():
            with self._turn:
                self._is_zeroing = False
                self._turn.notify_all()

    def _ask_for_some(self) -> bool:
        """Make one call without the GIL; False if there is nothing left to do."""
        with self._turn:
            begin, is_zeroing = self._num_asked, not self._is_caught_up
            if self._is_over or begin == self._size:
                return False
            end = min(begin + (_NUM_ZEROED if is_zeroing else _NUM_POPULATED), self._size)
            self._is_zeroing = is_zeroing
        if is_zeroing:
            memset(self._mapping.address + begin, 0, end - begin)
        elif not madvise(self._mapping.address + begin, end - begin, _POPULATE_WRITE):
            return False
        self._num_asked = end
        return True


# A ContextVar, because only the thread that loads the model takes this memory.
_prepared: ContextVar[_Prepared | None] = ContextVar("prepared", default=None)


def allocate(num_bytes: int, *, num_small_bytes: int = 0) -> tuple[mmap.mmap, int]:
    """Allocate zeros, in huge pages if available; returns a mapping, which the caller must keep alive, and an offset.

    A page takes no memory until it is written, unless it was prepared. num_small_bytes: number of bytes at the start
    that get small pages, for data that may never be written.
    """
    ready = _prepared.get()
    if ready is not None and not num_small_bytes and (taken := ready.take(num_bytes)):
        return taken
    mapping = _Mapping(num_bytes, num_small_bytes)
    return mapping.memory, mapping.offset


@contextlib.contextmanager
def prepared(num_bytes: int) -> Iterator[None]:
    """Inside this context, `allocate` hands out memory that a thread prepares, until none of it is left.

    At exit, memory that was not taken returns to the system. Memory that was taken returns once all of it is freed.
    Does nothing inside another `prepared`, if there is not enough memory, or on systems other than Linux.
    """
    if sys.platform != "linux" or num_bytes < HUGE_PAGE or _prepared.get() is not None:
        yield
        return
    # If there is not enough memory, the allocation of the weights reports it.
    with contextlib.suppress(OSError):
        _prepared.set(_Prepared(_up(num_bytes, mmap.PAGESIZE)))
    ready = _prepared.get()
    try:
        if ready is not None:
            with contextlib.suppress(RuntimeError):
                ready.thread.start()
        yield
    finally:
        _prepared.set(None)
        if ready is not None:
            ready.end()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside this context, `allocate` returns separate memory, for data that is freed before the rest."""
    token = _prepared.set(None)
    try:
        yield
    finally:
        _prepared.reset(token)


def num_ready_bytes() -> int:
    """Return the number of prepared bytes that are not taken: allocated by this process, yet free."""
    ready = _prepared.get()
    return 0 if ready is None else ready.num_ready_bytes


def madvise(address: int, num_bytes: int, advice: int) -> bool:
    """Advise the kernel about whole pages at an address, without the GIL; return whether it accepts that."""
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(function(address, num_bytes, advice) == 0)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
