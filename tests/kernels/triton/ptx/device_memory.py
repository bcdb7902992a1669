"""Global memory of an emulated GPU: that of the tensors of a launch, at their own addresses, and nothing else."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from tests.kernels.triton.ptx.memory import Memory
from tests.kernels.triton.ptx.values import Array, Faulty


class DeviceMemory:
    """The memory of some tensors with names. Only bytes of their elements may be accessed, not gaps between them."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], unit: int) -> None:
        storages: dict[int, list[tuple[str, Tensor]]] = {}
        for name, tensor in tensors:
            if tensor.nbytes:
                storages.setdefault(tensor.untyped_storage().data_ptr(), []).append((name, tensor))
        self.memories = [_memory_of(storages[start], unit) for start in sorted(storages)]
        self.starts = np.array(sorted(storages), np.int64)

    def load(self, addresses: Array, width: int, count: int, stamps: Array) -> Array:
        parts = self._parts(addresses)
        if len(parts) == 1:
            return parts[0][0].load(addresses, width, count, stamps)
        found = np.zeros((len(addresses), count), f"u{width}")
        for memory, which in parts:
            found[which] = memory.load(addresses[which], width, count, stamps[which])
        return found

    def store(self, addresses: Array, values: Array, stamps: Array) -> None:
        for memory, which in self._parts(addresses):
            memory.store(addresses[which], values[which], stamps[which])

    def change(self, operation: str, addresses: Array, operands: Array, stamps: Array) -> Array:
        """Carry out atomic operations one after the other, and return what was there before each."""
        before = np.zeros_like(operands)
        for memory, which in self._parts(addresses):
            before[which] = memory.change(operation, addresses[which], operands[which], stamps[which])
        return before

    def _parts(self, addresses: Array) -> list[tuple[Memory, Array]]:
        """Return the memories that some addresses are in, and which of the addresses are in each."""
        numbers = np.searchsorted(self.starts, addresses, side="right") - 1
        if not len(self.starts) or bool((numbers < 0).any()):
            raise Faulty("an access where no argument is")
        first = numbers[0]
        if bool((numbers == first).all()):
            return [(self.memories[first], np.ones(len(addresses), np.bool_))]
        return [(self.memories[number], numbers == number) for number in np.unique(numbers)]


def _memory_of(tensors: list[tuple[str, Tensor]], unit: int) -> Memory:
    """Return the memory of tensors that share their storage."""
    storage = tensors[0][1].untyped_storage()
    num_bytes, address = storage.nbytes(), storage.data_ptr()
    if address % 16:
        raise Faulty(f"the memory of {tensors[0][0]} does not begin at a multiple of 16 bytes")
    data = np.ctypeslib.as_array((ctypes.c_uint8 * num_bytes).from_address(address))
    allowed = torch.zeros(num_bytes, dtype=torch.bool)
    for _, tensor in tensors:
        size = tensor.element_size()
        strides = [stride * size for stride in tensor.stride()]
        begin = tensor.storage_offset() * size
        allowed.as_strided((*tensor.shape, size), (*strides, 1), begin).fill_(True)
    names = " and ".join(dict.fromkeys(name for name, _ in tensors))
    return Memory(data, address, unit, name=names, allowed=allowed.numpy())
