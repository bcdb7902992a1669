"""Main memory in huge pages: what is read from end to end, again and again, should not wait for page tables.

The system fills a page with zeros when it is first written, and on a virtual machine the host may have to find one
first: between 0.3 and 20 GB/s were seen. `prepared` has that done for the weights while there is other work, such as
the import of torch; docs/decisions/0015-memory-ahead.md has what was measured.
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

# Asked for at a time. The thread needs the interpreter in between, and an import lets go of it every 5 ms.
_NUM_ZEROED: Final = 16 * HUGE_PAGE
# The process's other threads cannot map memory while a piece is populated.
_NUM_POPULATED: Final = 2 * HUGE_PAGE
# MADV_POPULATE_WRITE of Linux 5.14, which the module mmap does not name.
_POPULATE_WRITE: Final = 23


class _Mapping:
    """Zeros of the process's own; they begin `offset` bytes into `memory`, at a huge page.

    num_small_bytes: so many of the first are in pages of the usual size.
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
            # Where huge pages are the rule, not to ask for them is not enough.
            self.memory.madvise(mmap.MADV_NOHUGEPAGE, 0, first_huge)


class _Prepared:
    """Memory whose pages a thread asks for from front to back, while `take` gives it away in the same order.

    Ahead of what is taken the thread writes zeros, one thread's work in user mode that hinders nobody. Once `take` has
    caught up with it nothing may be written any more, and it has the kernel populate pages, which leaves what is there.
    """

    def __init__(self, num_bytes: int) -> None:
        self._size = num_bytes
        self._mapping = _Mapping(num_bytes)
        self._num_taken = self._num_asked = 0
        self._is_zeroing = self._is_caught_up = self._is_over = False
        self._turn = threading.Condition()
        self._thread = threading.Thread(target=self._ask, name="memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def num_ready_bytes(self) -> int:
        """What is there, and taken by nobody."""
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
        """Give back what was not taken."""
        with self._turn:
            self._is_over = True
        try:
            if self._thread.is_alive():
                self._thread.join()
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
        """One call of the library, which leaves the interpreter to others; False when there is nothing left to do."""
        with self._turn:
            begin, is_zeroing = self._num_asked, not self._is_caught_up
            if self._is_over or begin == self._size:
                return False
            end = min(begin + (_NUM_ZEROED if is_zeroing else _NUM_POPULATED), self._size)
            self._is_zeroing = is_zeroing
        if is_zeroing:
            memset(self._mapping.address + begin, 0, end - begin)
        elif not _populate(self._mapping.address + begin, end - begin):
            return False
        self._num_asked = end
        return True


# A variable of the thread: it is the one that loads the model which takes.
_prepared: ContextVar[_Prepared | None] = ContextVar("prepared", default=None)


def allocate(num_bytes: int, *, num_small_bytes: int = 0) -> tuple[mmap.mmap, int]:
    """Zeros, in huge pages where there are some: a memory and where in it they begin. The memory is to be kept alive.

    A page costs nothing until it is written, unless it was prepared. num_small_bytes: so many at the beginning are in
    small pages, for what may never be filled.
    """
    ready = _prepared.get()
    if ready is not None and not num_small_bytes and (taken := ready.take(num_bytes)):
        return taken
    mapping = _Mapping(num_bytes, num_small_bytes)
    return mapping.memory, mapping.offset


@contextlib.contextmanager
def prepared(num_bytes: int) -> Iterator[None]:
    """Within it, `allocate` gives away memory that a thread asks the system for, as long as there is some left.

    What nobody took in the end goes back to the system; a piece that was taken goes back with the last of them. On
    Linux, where the system knows how to take a part back. Within another `prepared`, or where there is no room for so
    much, it does nothing.
    """
    if sys.platform != "linux" or num_bytes < HUGE_PAGE or _prepared.get() is not None:
        yield
        return
    # Whoever wants the memory will say what is wrong if there is none.
    with contextlib.suppress(OSError):
        _prepared.set(_Prepared(_up(num_bytes, mmap.PAGESIZE)))
    ready = _prepared.get()
    try:
        if ready is not None:
            with contextlib.suppress(RuntimeError):
                ready.start()
        yield
    finally:
        _prepared.set(None)
        if ready is not None:
            ready.end()


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Within it, `allocate` gives memory that goes back by itself: for what does not stay as long as the rest."""
    token = _prepared.set(None)
    try:
        yield
    finally:
        _prepared.reset(token)


def num_ready_bytes() -> int:
    """Memory that was prepared and is still to be given away: taken from the system, and yet free."""
    ready = _prepared.get()
    return 0 if ready is None else ready.num_ready_bytes


def _populate(address: int, num_bytes: int) -> bool:
    """Have the kernel put pages where there are none. False where it cannot."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return bool(madvise(address, num_bytes, _POPULATE_WRITE) == 0)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit
