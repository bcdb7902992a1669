"""KVCache: the keys and values of one layer in blocks, in one of two layouts.

Dimensions: KVH key/value heads, D head size, Dp the head size rounded up to a multiple of 16; s = 2 for bfloat16,
else 1.

    plain    [num_blocks, 2, KVH, block_size, D]     read and written by the reference operations, on any device
    packed   [num_blocks, 2, KVH, block_size * Dp]   read and written by the native library:
             keys [Dp / s, block_size, s], values [block_size / s, Dp, s]; 0 beyond D (cpu/csrc/kv_layout.h)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Raise this by one when the packed layout changes.
LAYOUT_VERSION = 1
DIM_UNIT = 16
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_UNIT = 16, 256, 8
_PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's cache; index 0 of dimension 1 of `data` holds the keys, index 1 the values."""

    data: Tensor
    head_dim: int
    is_packed: bool

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[2]

    @property
    def block_size(self) -> int:
        return self.data.shape[3] // padded_head_dim(self.head_dim) if self.is_packed else self.data.shape[3]

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype


def padded_head_dim(head_dim: int) -> int:
    """Return how many elements a key or a value takes in a packed cache."""
    return -(-head_dim // DIM_UNIT) * DIM_UNIT


def packing_step(dtype: torch.dtype) -> int:
    """Return how many elements are interleaved in a packed cache of `dtype`."""
    return 2 if dtype == torch.bfloat16 else 1


def can_pack(head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether there are a packed layout and native operations for such a cache."""
    return (
        dtype in _PACKED_DTYPES
        and MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM
        and head_dim % HEAD_DIM_UNIT == 0
        and block_size % packing_step(dtype) == 0
    )


def plain_cache(data: Tensor) -> KVCache:
    """Return `data` [num_blocks, 2, KVH, block_size, D] as a cache in the plain layout."""
    return KVCache(data, data.shape[-1], is_packed=False)
