"""Tensors in huge pages (pagewick/huge_memory.py): weights on a CPU, and K/V caches."""

import torch
from torch import Tensor

from pagewick import huge_memory


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype, *, num_small_bytes: int = 0) -> Tensor:
    """Zeros in huge pages where there are some; a page costs nothing until it is written.

    What is smaller than a huge page is an ordinary tensor. num_small_bytes: so many of the first are in small pages.
    """
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if num_bytes < huge_memory.HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    # The tensor keeps the memory alive.
    memory, offset = huge_memory.allocate(num_bytes, num_small_bytes=num_small_bytes)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset).view(dtype).view(shape)


def empty_weight(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """Room for a weight, in huge pages on a CPU."""
    if torch.device(device).type == "cpu":
        return huge_zeros(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)
