"""A list of native calls that is recorded once and then run with a single one."""

import ctypes
import math
import weakref

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64

_Block = np.ndarray[tuple[int], np.dtype[np.uint8]]


class _Call(ctypes.Structure):
    """Call in csrc/ops.cpp."""

    _fields_ = (("operation", ctypes.c_int64), ("args", ctypes.c_void_p))


class Tape:
    """Calls in the order in which they were made, and the memory that they write to.

    Memory of a result whose tensors are gone is given to later results, as an allocator would: when the calls are
    replayed in the same order, nobody reads it any more by then.
    """

    def __init__(self) -> None:
        self._recorded: list[tuple[int, ctypes.Structure]] = []
        self._calls: ctypes.Array[_Call] | None = None
        self._free: dict[int, list[_Block]] = {}
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """Of the memory for results."""
        return self._num_bytes

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
        count = math.prod(shape)
        size = -(-max(1, count * dtype.itemsize) // ALIGNMENT) * ALIGNMENT
        free = self._free.setdefault(size, [])
        block = free.pop() if free else self._new_block(size)
        # The tensor holds this array, and views of the tensor do; when the last of them goes, the block is free.
        lease = block[:]
        weakref.finalize(lease, free.append, block).atexit = False
        return torch.frombuffer(lease, dtype=dtype)[:count].view(shape)

    def _new_block(self, size: int) -> _Block:
        self._num_bytes += size
        memory = np.empty(size + ALIGNMENT, np.uint8)
        offset = -memory.ctypes.data % ALIGNMENT
        return memory[offset : offset + size]
