"""Copies between host and device: everything in a call travels together, in one copy that the host does not await.

A copy from or to ordinary memory makes the host wait for a GPU's queue. The GPU itself reads and writes pinned memory,
later. PyTorch's allocator gives pinned memory to its next user only once the copies that use it are done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Array = npt.NDArray[Any]

# Arrays begin at multiples of this number of bytes; kernels read 16 at once.
_ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Place:
    """The place of an array in a piece of memory. begin: its first byte."""

    begin: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.shape) * self.dtype.itemsize

    def of_tensor(self, memory: Tensor) -> Tensor:
        """Return the array as a view of memory [bytes] uint8."""
        return memory[self.begin : self.end].view(_torch_dtype(self.dtype)).view(self.shape)

    def of_array(self, memory: Array) -> Array:
        """Return the array as a view of memory [bytes] uint8."""
        return memory[self.begin : self.end].view(self.dtype).reshape(self.shape)


def lay_out(kinds: Sequence[tuple[tuple[int, ...], np.dtype[Any]]]) -> tuple[list[Place], int]:
    """Return the places of arrays of these shapes and dtypes in one piece of memory, and its size in bytes."""
    places: list[Place] = []
    end = 0
    for shape, dtype in kinds:
        places.append(Place(-(-end // _ALIGNMENT) * _ALIGNMENT, shape, dtype))
        end = places[-1].end
    return places, end


def upload(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Return the arrays as tensors on a device; on a CPU they share memory with the arrays.

    On a GPU the copy is asynchronous. The arrays may change at once.
    """
    if device.type != "cuda":
        return [torch.from_numpy(np.ascontiguousarray(array)).to(device) for array in arrays]
    places, num_bytes = lay_out([(array.shape, array.dtype) for array in arrays])
    pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    memory = pinned.numpy()
    for place, array in zip(places, arrays, strict=True):
        place.of_array(memory)[...] = array
    on_device = pinned.to(device, non_blocking=True)
    return [place.of_tensor(on_device) for place in places]


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies in host memory; on a CPU the tensors themselves.

    A GPU fills the copies once it has computed the tensors: they are complete when an event after this call is.
    """
    if not tensors or not tensors[0].is_cuda:
        return [tensor.cpu() for tensor in tensors]
    # Larger elements first, so that all are aligned.
    order = sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)
    on_device = torch.cat([tensors[index].reshape(-1).view(torch.uint8) for index in order])
    pinned = torch.empty(on_device.shape, dtype=torch.uint8, pin_memory=True)
    pinned.copy_(on_device, non_blocking=True)
    copies, end = list(tensors), 0
    for index in order:
        begin, end = end, end + tensors[index].nbytes
        copies[index] = pinned[begin:end].view(tensors[index].dtype).view(tensors[index].shape)
    return copies


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
