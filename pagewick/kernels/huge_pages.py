"""Tensors in huge pages (pagewick/huge_memory.py): weights on a CPU, and K/V caches."""

import math

import torch
from torch import Tensor

from pagewick import huge_memory


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype, *, num_small_bytes: int = 0) -> Tensor:
    """Return zeros, in huge pages where the system has them; a page takes no memory until it is written.

    Smaller tensors than a huge page are ordinary ones. num_small_bytes: number of bytes at the beginning that are in
    small pages.
    """
    num_bytes = dtype.itemsize * math.prod(shape)
    if num_bytes < huge_memory.HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    # The tensor keeps the memory alive.
    memory, offset = huge_memory.allocate(num_bytes, num_small_bytes=num_small_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset).view(dtype).view(shape)


def empty_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Return room for a weight, on a CPU in huge pages."""
    if torch.device(device).type == "cpu":
        return huge_zeros(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)
