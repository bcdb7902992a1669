"""Attention by Pagewick's own kernels (kernels.paged_attention), on every device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagewick import kernels

if TYPE_CHECKING:
    from pagewick.attention.backend import AttentionBatch, GroupBatch


class NativeBackend:
    """Block layout: [keys | values, num_kv_heads, block_size, head_dim], so that one head's keys lie together."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def view_cache(self, blocks: Tensor, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> Tensor:
        return blocks.view(dtype).view(-1, 2, num_kv_heads, self.block_size, head_dim)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv_cache: Tensor,
        batch: AttentionBatch,
        group: GroupBatch,
        softmax_scale: float,
    ) -> Tensor:
        kernels.store_kv(k, v, kv_cache, group.slot_mapping)
        return kernels.paged_attention(
            q.to(kv_cache.dtype),
            kv_cache,
            group.block_tables,
            batch.context_lens,
            batch.cu_seqlens_q,
            softmax_scale=softmax_scale,
        ).to(q.dtype)
