"""Attention by Pagewick's own kernels (kernels.paged_attention), on every device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from pagewick import kernels

if TYPE_CHECKING:
    from pagewick.attention.backend import AttentionBatch, GroupBatch, HeadOptions, ScoreOptions


class NativeBackend:
    """Blocks lie as kernels/kv_cache.py says: packed where native operations serve them, else plain."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def view_cache(self, blocks: Tensor, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> kernels.KVCache:
        rows = blocks.view(dtype)
        if kernels.packs_kv(head_dim, self.block_size, dtype, blocks.device):
            return kernels.KVCache(rows.view(len(rows), 2, num_kv_heads, -1), head_dim, is_packed=True)
        shape = (len(rows), 2, num_kv_heads, self.block_size, head_dim)
        # The plain layout pads nothing: what a block has left over is at its end.
        return kernels.plain_cache(rows[:, : math.prod(shape[1:])].view(shape))

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: kernels.KVCache,
        batch: AttentionBatch,
        group: GroupBatch,
        scores: ScoreOptions,
    ) -> Tensor:
        kernels.store_kv(k, v, cache, group.slot_mapping)
        return self._attend(q, cache, batch, group, scores)

    def forward_fused(
        self,
        qkv: Tensor,
        num_heads: int,
        cache: kernels.KVCache,
        batch: AttentionBatch,
        group: GroupBatch,
        scores: ScoreOptions,
        **heads: Unpack[HeadOptions],
    ) -> Tensor:
        q = kernels.rope_and_store(
            qkv,
            cache,
            group.slot_mapping,
            num_heads=num_heads,
            num_kv_heads=cache.num_kv_heads,
            head_dim=cache.head_dim,
            **heads,
        )
        return self._attend(q, cache, batch, group, scores)

    def _attend(
        self, q: Tensor, cache: kernels.KVCache, batch: AttentionBatch, group: GroupBatch, scores: ScoreOptions
    ) -> Tensor:
        return kernels.paged_attention(q, cache, group.block_tables, batch.context_lens, batch.cu_seqlens_q, **scores)
