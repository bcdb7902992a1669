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
import torch.nn.functional as F
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


def packed_copy(plain: Tensor) -> KVCache:
    """Return a packed cache with the contents of `plain` [num_blocks, 2, KVH, block_size, D], bit for bit."""
    head_dim, step = plain.shape[-1], packing_step(plain.dtype)
    k, v = F.pad(plain, (0, padded_head_dim(head_dim) - head_dim)).unbind(1)
    num_blocks, num_kv_heads, block_size, dim = k.shape
    keys = k.view(num_blocks, num_kv_heads, block_size, dim // step, step).transpose(2, 3).flatten(2)
    values = v.view(num_blocks, num_kv_heads, block_size // step, step, dim).transpose(3, 4).flatten(2)
    return KVCache(torch.stack((keys, values), dim=1), head_dim, is_packed=True)


def plain_copy(cache: KVCache) -> Tensor:
    """Return the contents of a packed cache as [num_blocks, 2, KVH, block_size, D], bit for bit."""
    block_size, dim, step = cache.block_size, padded_head_dim(cache.head_dim), packing_step(cache.dtype)
    keys, values = cache.data.unbind(1)
    heads = (cache.num_blocks, cache.num_kv_heads)
    k = keys.view(*heads, dim // step, block_size, step).transpose(2, 3).flatten(3)
    v = values.view(*heads, block_size // step, dim, step).transpose(3, 4).flatten(2, 3)
    return torch.stack((k, v), dim=1)[..., : cache.head_dim]
