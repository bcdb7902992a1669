"""A list of native calls that is recorded once and then run with a single one."""

import ctypes
import math
import threading
import weakref

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64

_Block = np.ndarray[tuple[int], np.dtype[np.uint8]]


class _Call(ctypes.Structure):
    """Call in csrc/ops.cpp."""

    _fields_ = (("operation", ctypes.c_int64), ("args", ctypes.c_void_p))


class TapeMemory:
    """What the results of tapes lie in, of which never two are needed at the same time.

    Memory of a result whose tensors are gone is given to later results, as an allocator would, and to those of other
    tapes: when calls are replayed in the order in which they were made, nobody reads it any more by then.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[_Block]] = {}
        self._blocks: dict[int, _Block] = {}  # by address
        self.num_bytes = 0

    def empty(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for a result, aligned to 64 bytes."""
        count = math.prod(shape)
        size = _size_class(count * dtype.itemsize)
        free = self._free.setdefault(size, [])
        block = free.pop() if free else self._new_block(size)
        # The tensor holds this array, and views of the tensor do; when the last of them goes, the block is free.
        lease = block[:]
        weakref.finalize(lease, free.append, block).atexit = False
        return torch.frombuffer(lease, dtype=dtype)[:count].view(shape)

    def give_back(self, result: Tensor) -> Tensor:
        """The same tensor, but one that later results may overwrite."""
        block = self._blocks.get(result.untyped_storage().data_ptr())
        if block is None:
            return result
        whole = torch.frombuffer(block, dtype=result.dtype)
        return whole.as_strided(result.shape, result.stride(), result.storage_offset())

    def _new_block(self, size: int) -> _Block:
        self.num_bytes += size
        memory = np.empty(size + ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % ALIGNMENT
        block = memory[offset : offset + size]
        self._blocks[block.ctypes.data] = block
        return block


def _size_class(num_bytes: int) -> int:
    """A power of two: so that tapes of other sizes find blocks that fit."""
    return max(ALIGNMENT, 1 << (num_bytes - 1).bit_length()) if num_bytes else ALIGNMENT


class Tape:
    """Calls in the order in which they were made, and results in `memory`."""

    def __init__(self, memory: TapeMemory) -> None:
        self._recorded: list[tuple[int, ctypes.Structure]] = []
        self._calls: ctypes.Array[_Call] | None = None
        self._memory = memory

    @property
    def calls(self) -> tuple[int, int]:
        """Address and number of the recorded calls."""
        if self._calls is None or len(self._calls) != len(self._recorded):
            entries = [_Call(operation, ctypes.addressof(args)) for operation, args in self._recorded]
            self._calls = (_Call * len(entries))(*entries)
        return ctypes.addressof(self._calls), len(self._calls)

    def append(self, operation: int, args: ctypes.Structure) -> None:
        self._recorded.append((operation, args))

    def empty(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """Memory for a result, aligned to 64 bytes."""
        return self._memory.empty(shape, dtype)


class _Running(threading.local):
    """The tape that records this thread's calls; what other threads compute meanwhile is not this recording's."""

    tape: Tape | None = None


running = _Running()


def start_recording(tape: Tape) -> None:
    """From now on, calls of this thread are recorded as well as run, until stop_recording."""
    assert running.tape is None, "one tape at a time"
    running.tape = tape


def stop_recording() -> None:
    running.tape = None
