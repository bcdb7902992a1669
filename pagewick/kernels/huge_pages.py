"""Memory in huge pages: what is read from end to end, again and again, should not wait for page tables."""

import ctypes
import mmap

import torch
from torch import Tensor

HUGE_PAGE = 2 * 2**20


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros at a multiple of 2 MiB, in huge pages where there are some; a page costs nothing until it is written."""
    num_bytes = dtype.itemsize
    for size in shape:
        num_bytes *= size
    if num_bytes < HUGE_PAGE:
        return torch.zeros(shape, dtype=dtype)
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    # The tensor keeps `memory` alive.
    return (
        torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=-address % HUGE_PAGE)
        .view(dtype)
        .view(shape)
    )
