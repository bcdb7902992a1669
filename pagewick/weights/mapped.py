"""Memory of mapped files."""

from __future__ import annotations

import math
import mmap
import sys

import torch

from pagewick.huge_memory import madvise


def release_pages(tensor: torch.Tensor) -> None:
    """Drop a tensor's pages from this process; its file stays in the system's page cache.

    This is madvise(MADV_DONTNEED) on the whole pages inside the tensor. Should a tensor ever not be mapped, only its
    own bytes can be lost, which the caller has given up.
    """
    if sys.platform != "linux":  # elsewhere the advice means something else, or nothing
        return
    begin = math.ceil(tensor.data_ptr() / mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end > begin:
        madvise(begin, end - begin, mmap.MADV_DONTNEED)
