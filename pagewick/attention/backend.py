"""AttentionBackend: who stores keys and values and who computes attention; and what it may know of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Required, TypedDict, Unpack

import torch
from torch import Tensor

from pagewick.attention.native import NativeBackend
from pagewick.kernels import HeadNorm, KVCache


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One cache group's share of a batch of T tokens and B sequences.

    slot_mapping: [T] int64, block_id * block_size + offset of each new token.
    block_tables: [B, max_blocks] int32; entries behind the context or before the lookback are 0 and never read.
    """

    slot_mapping: Tensor
    block_tables: Tensor


class AttentionBatch(Protocol):
    """The part of a batch that attention reads.

    cu_seqlens_q: [B + 1] int32, where each sequence's new tokens begin. context_lens: [B] int32, tokens that each
    sequence attends to, the new ones included.
    """

    @property
    def cu_seqlens_q(self) -> Tensor: ...

    @property
    def context_lens(self) -> Tensor: ...

    @property
    def groups(self) -> Sequence[GroupBatch]: ...


class ScoreOptions(TypedDict, total=False):
    """How a layer's attention scores keys: options of kernels.paged_attention."""

    softmax_scale: Required[float]
    sliding_window: int | None
    logit_soft_cap: float | None


class HeadOptions(TypedDict, total=False):
    """What is done to the heads of a fused product, besides storing them: options of kernels.rope_and_store."""

    cos: Tensor | None
    sin: Tensor | None
    interleaved: bool
    q_norm: HeadNorm | None
    k_norm: HeadNorm | None


class AttentionBackend(Protocol):
    """Owns the layout inside a block. Everything else about blocks is the engine's."""

    block_size: int

    def view_cache(self, blocks: Tensor, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KVCache:
        """The cache of one layer, [num_blocks, block_bytes] uint8, in the layout that `forward` wants."""
        ...

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        group: GroupBatch,
        scores: ScoreOptions,
    ) -> Tensor:
        """Store k, v [T, KVH, D], then attend: q [T, H, D] -> [T, H, D]."""
        ...

    def forward_fused(
        self,
        qkv: Tensor,
        num_heads: int,
        cache: KVCache,
        batch: AttentionBatch,
        group: GroupBatch,
        scores: ScoreOptions,
        **heads: Unpack[HeadOptions],
    ) -> Tensor:
        """forward of the heads of qkv [T, (H + 2 KVH) * D], normalised and rotated as `heads` says; [T, H, D]."""
        ...


def choose_backend(device: torch.device, block_size: int) -> AttentionBackend:
    """The backend for a device: Pagewick's own kernels, which fall back to plain PyTorch where there are none."""
    return NativeBackend(block_size)
