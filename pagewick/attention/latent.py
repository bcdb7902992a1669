"""Attention over cached latents by Pagewick's own kernels (kernels.latent_attention), on every device."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagewick import kernels

if TYPE_CHECKING:
    from pagewick.attention.backend import AttentionBatch, GroupBatch


def view_latent_cache(blocks: Tensor, block_size: int, latent_size: int, dtype: torch.dtype) -> Tensor:
    """Blocks [num_blocks, block_bytes] uint8 of one layer as [num_blocks, block_size, latent_size] of `dtype`."""
    rows = blocks.view(dtype)
    return rows.view(len(rows), block_size, latent_size)


def attend_latents(
    q: Tensor,
    latents: Tensor,
    cache: Tensor,
    batch: AttentionBatch,
    group: GroupBatch,
    *,
    absorb: Callable[[Tensor], Tensor],
    norm_weight: Tensor,
    norm_eps: float,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    softmax_scale: float,
) -> Tensor:
    """Store latents [T, L + R], then attend with q [T, H, N + R]: sums of latents [T, H, L].

    absorb: brings the part of the queries that does not rotate, [T, H, N], into the space of the latents, [T, H, L].
    The other options are those of kernels.rope_and_store_latent.
    """
    q_rope = kernels.rope_and_store_latent(
        q,
        latents,
        cache,
        group.slot_mapping,
        norm_weight=norm_weight,
        norm_eps=norm_eps,
        cos=cos,
        sin=sin,
        interleaved=interleaved,
    )
    q_latent = absorb(q[..., : q.shape[-1] - q_rope.shape[-1]])
    return kernels.latent_attention(
        q_latent,
        q_rope,
        cache,
        group.block_tables,
        batch.context_lens,
        batch.cu_seqlens_q,
        softmax_scale=softmax_scale,
    )
