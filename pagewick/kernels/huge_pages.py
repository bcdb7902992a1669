"""Tensors in huge pages (pagewick/huge_memory.py)."""

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
