"""KVCache: the keys and values of one layer in blocks, in one of two layouts.

Dimensions: KVH key/value heads, D head size, Dp the head size rounded up to a multiple of 16; s = 2 for bfloat16 and
for numbers of 8 or 4 bits, else 1.

    plain    [num_blocks, 2, KVH, block_size, D]     read and written by the reference operations, on any device
    packed   [num_blocks, 2, KVH, block_size * Dp]   read and written by the native library:
             keys [Dp / s, block_size, s], values [block_size / s, Dp, s]; 0 beyond D (cpu/csrc/kv_layout.h)

Numbers of 8 or 4 bits have a scale for each key and each value, float32 [num_blocks, 2, KVH, block_size], which lies at
the end of its block; latents have two scales (latent_cache). reference_kv.py defines them.

A byte, uint8, has two numbers of 4 bits that are beside each other, the first of them in its low half: two of a vector
in the plain layout, which is [num_blocks, 2, KVH, block_size, D / 2], and the s = 2 numbers in the packed one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Raise this by one when the packed layout changes.
LAYOUT_VERSION = 1
DIM_UNIT = 16
# The size of a block with scales is a multiple of this number of bytes.
SCALE_ALIGNMENT = 16
MIN_HEAD_DIM, MAX_HEAD_DIM, HEAD_DIM_UNIT = 16, 256, 8
# The dtype of bytes with two numbers of 4 bits each.
INT4 = torch.uint8
# The largest number of each format that needs scales.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, INT4: 7.0}
_PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *LARGEST)
_TORCH_NAMES = {"fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2", "int4": "uint8"}


@dataclass(frozen=True, slots=True)
class KVCache:
    """One layer's cache; index 0 of dimension 1 of `data` and `scales` holds the keys, index 1 the values.

    constant_scales: the scales of all keys and of all values; 0: each has its own.
    """

    data: Tensor
    head_dim: int
    is_packed: bool
    scales: Tensor | None = None
    constant_scales: tuple[float, float] = (0.0, 0.0)

    @property
    def num_blocks(self) -> int:
        return self.data.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.data.shape[2]

    @property
    def block_size(self) -> int:
        if not self.is_packed:
            return self.data.shape[3]
        return self.data.shape[3] // stored_size(padded_head_dim(self.head_dim), self.dtype)

    @property
    def dtype(self) -> torch.dtype:
        return self.data.dtype


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype of a cache's numbers. name: as in --kv-cache-dtype."""
    dtype: torch.dtype = getattr(torch, _TORCH_NAMES.get(name, name))
    return dtype


def heads_cache(
    blocks: Tensor, dtype: torch.dtype, num_kv_heads: int, block_size: int, head_dim: int, is_packed: bool
) -> KVCache:
    """Return blocks [num_blocks, block_bytes] uint8 as a cache. Bytes that a block does not need are at its end."""
    dim = stored_size(padded_head_dim(head_dim) if is_packed else head_dim, dtype)
    sizes = (block_size * dim,) if is_packed else (block_size, dim)
    data, scales = _split(blocks, dtype, (2, num_kv_heads, *sizes), (2, num_kv_heads, block_size))
    return KVCache(data, head_dim, is_packed, scales)


def latent_cache(blocks: Tensor, dtype: torch.dtype, block_size: int, row_size: int) -> tuple[Tensor, Tensor | None]:
    """Return blocks [num_blocks, block_bytes] uint8 as rows [num_blocks, block_size, row_size] and their scales.

    scales: float32 [num_blocks, block_size, 2], that of the latent and that of the rotated key; None: rows need none.
    """
    return _split(blocks, dtype, (block_size, row_size), (block_size, 2))


def _split(
    blocks: Tensor, dtype: torch.dtype, shape: tuple[int, ...], scales_shape: tuple[int, ...]
) -> tuple[Tensor, Tensor | None]:
    """Return views of blocks: the numbers of each, and the scales after them if the dtype needs some."""
    num_blocks, end = len(blocks), math.prod(shape) * dtype.itemsize
    numbers = blocks[:, :end].view(dtype).view(num_blocks, *shape)
    if dtype not in LARGEST:
        return numbers, None
    begin = _first_scale(end)
    scales = blocks[:, begin : begin + 4 * math.prod(scales_shape)].view(torch.float32)
    return numbers, scales.view(num_blocks, *scales_shape)


def stored_size(dim: int, dtype: torch.dtype) -> int:
    """Return how many elements of a cache hold a vector of `dim` numbers, an even number for those of 4 bits."""
    return dim // 2 if dtype == INT4 else dim


def padded_head_dim(head_dim: int) -> int:
    """Return how many elements a key or a value takes in a packed cache."""
    return -(-head_dim // DIM_UNIT) * DIM_UNIT


def has_layout(data: Tensor, scales: Tensor | None) -> bool:
    """Whether numbers on the CPU lie as the native library expects them, and scales where they belong.

    Blocks follow each other. Those with scales end with them, and are a multiple of SCALE_ALIGNMENT bytes.
    """
    size = math.prod(data.shape[1:])
    if not data.is_cpu or (scales is None) == (data.dtype in LARGEST):
        return False
    if scales is None or not len(data):
        return data.is_contiguous()
    used = _first_scale(size) + 4 * math.prod(scales.shape[1:])
    block_bytes = -(-used // SCALE_ALIGNMENT) * SCALE_ALIGNMENT
    return (
        data[0].is_contiguous()
        and scales[0].is_contiguous()
        and (len(data) == 1 or data.stride(0) == 4 * scales.stride(0) == block_bytes)
        and scales.data_ptr() == data.data_ptr() + _first_scale(size)
    )


def _first_scale(num_bytes: int) -> int:
    """Return the byte of a block of num_bytes numbers at which its scales begin."""
    return -(-num_bytes // 4) * 4


def packing_step(dtype: torch.dtype) -> int:
    """Return how many numbers are interleaved in a packed cache of `dtype`."""
    return 2 if dtype == torch.bfloat16 or dtype in LARGEST else 1


def can_pack(head_dim: int, block_size: int, dtype: torch.dtype) -> bool:
    """Whether there are a packed layout and native operations for such a cache."""
    return (
        dtype in _PACKED_DTYPES
        and MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM
        and head_dim % HEAD_DIM_UNIT == 0
        and block_size % packing_step(dtype) == 0
    )
