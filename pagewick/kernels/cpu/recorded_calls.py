"""Native calls that are recorded while they run, and the memory that recorded calls write their results to."""

import contextlib
import ctypes
import math
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

ALIGNMENT = 64

_Array = np.ndarray[Any, np.dtype[Any]]
_Block = np.ndarray[tuple[int], np.dtype[np.uint8]]


class _Call(ctypes.Structure):
    """The struct Call of csrc/replay.h."""

    _fields_ = (("operation", ctypes.c_int64), ("args", ctypes.c_void_p))


class _Copy(ctypes.Structure):
    """The struct Copy of csrc/replay.h."""

    _fields_ = (("source", ctypes.c_void_p), ("target", ctypes.c_void_p), ("num_bytes", ctypes.c_int64))


class _Increment(ctypes.Structure):
    """The struct Increment of csrc/replay.h."""

    _fields_ = (("integers", ctypes.c_void_p), ("count", ctypes.c_int64), ("num_bytes", ctypes.c_int64))


class _NextInputs(ctypes.Structure):
    """The struct NextInputs of csrc/replay.h."""

    _fields_ = (
        ("copies", ctypes.c_void_p),
        ("num_copies", ctypes.c_int64),
        ("increments", ctypes.c_void_p),
        ("num_increments", ctypes.c_int64),
    )


class NextInputs:
    """How the inputs of a recorded step's next repetition come from its results.

    copies: sources and targets, of the same size. increments: int32 or int64, which grow by one. All arrays must be
    contiguous.
    """

    def __init__(self, copies: Sequence[tuple[_Array, _Array]], increments: Sequence[_Array]) -> None:
        arrays = [*increments, *(array for pair in copies for array in pair)]
        assert all(array.flags.c_contiguous for array in arrays)
        assert all(source.nbytes == target.nbytes for source, target in copies)
        assert all(array.dtype in (np.int32, np.int64) for array in increments)
        # The structs hold the addresses of these, and of each other.
        self._arrays = arrays
        self._copies = (_Copy * len(copies))(
            *(_Copy(source.ctypes.data, target.ctypes.data, source.nbytes) for source, target in copies)
        )
        self._increments = (_Increment * len(increments))(
            *(_Increment(array.ctypes.data, array.size, array.itemsize) for array in increments)
        )
        self._struct = _NextInputs(
            ctypes.addressof(self._copies), len(copies), ctypes.addressof(self._increments), len(increments)
        )
        self.address = ctypes.addressof(self._struct)


class StepMemory:
    """Memory for the results of recorded steps that are never replayed at the same time.

    The memory of a result whose tensors are gone is given to later results, as an allocator would do, also to those of
    other steps: when calls are replayed in the order in which they were made, nothing reads it any more by then.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[_Block]] = {}
        self._blocks: dict[int, _Block] = {}  # by address
        self.num_bytes = 0

    def empty(self, shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
        """Return memory for a result, aligned to 64 bytes."""
        count = math.prod(shape)
        # Sizes are powers of two, so that results of other steps find blocks that fit.
        size = max(ALIGNMENT, 1 << (count * dtype.itemsize - 1).bit_length()) if count else ALIGNMENT
        free = self._free.setdefault(size, [])
        if free:
            block = free.pop()
        else:
            self.num_bytes += size
            memory = np.empty(size + ALIGNMENT, np.uint8)
            offset = -memory.ctypes.data % ALIGNMENT
            block = memory[offset : offset + size]
            self._blocks[block.ctypes.data] = block
        # The tensor holds this array, and so do views of the tensor; when the last of them goes, the block is free.
        lease = block[:]
        weakref.finalize(lease, free.append, block).atexit = False
        return torch.frombuffer(lease, dtype=dtype)[:count].view(shape)

    def give_back(self, result: Tensor) -> Tensor:
        """Return an equal tensor in the same memory, which later results may overwrite."""
        block = self._blocks.get(result.untyped_storage().data_ptr())
        if block is None:
            return result
        whole = torch.frombuffer(block, dtype=result.dtype)
        return whole.as_strided(result.shape, result.stride(), result.storage_offset())


class RecordedCalls:
    """Calls in the order in which they were made; their results lie in `memory`."""

    def __init__(self, memory: StepMemory) -> None:
        self.memory = memory
        self._calls: list[_Call] = []
        self._args: list[ctypes.Structure] = []

    def append(self, operation: int, args: ctypes.Structure) -> None:
        self._calls.append(_Call(operation, ctypes.addressof(args)))
        self._args.append(args)

    def array(self) -> ctypes.Array[_Call]:
        """Return the calls as the library takes them. They are valid as long as this object lives."""
        return (_Call * len(self._calls))(*self._calls)


class _Current(threading.local):
    """The list that calls of this thread are added to, if any."""

    calls: RecordedCalls | None = None


current = _Current()


@contextlib.contextmanager
def recording(memory: StepMemory) -> Iterator[RecordedCalls]:
    """Record the native calls that this thread makes meanwhile; they run as well."""
    assert current.calls is None, "one recording at a time"
    current.calls = calls = RecordedCalls(memory)
    try:
        yield calls
    finally:
        current.calls = None
