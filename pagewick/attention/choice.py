"""The choice of an attention backend for a device."""

from __future__ import annotations

import torch

from pagewick.attention.backend import AttentionBackend
from pagewick.attention.native import NativeBackend


def default_block_size(device: torch.device) -> int:
    """Return the number of tokens per block for a device, unless the user chooses another."""
    return 32


def choose_backend(device: torch.device, cache_dtype: str, block_size: int) -> AttentionBackend:
    """Choose for a device and a --kv-cache-dtype: Pagewick's own kernels, which run on every device."""
    return NativeBackend(block_size, cache_dtype)
