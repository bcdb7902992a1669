"""AttentionBackend: who stores keys and values and who computes attention; and what it may know of a batch.

Dimensions: T tokens and B sequences of a batch, H query heads and KVH key/value heads of one rank, D head size; of
latent attention, L elements of a latent, R elements of a query or key that rotate, N that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, Unpack

import torch
from torch import Tensor

from pagewick.attention.cache_spec import CacheSpec, Kept, KeptHeads, KeptLatents
from pagewick.attention.native import NativeBackend
from pagewick.kernels import HeadOptions, Rotation


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One cache group's share of a batch of T tokens and B sequences.

    slot_mapping: [T] int64, block_id * block_size + offset of each new token.
    block_tables: [B, max_blocks] int32; entries behind the context or before the lookback are 0 and never read.

    In a group of snapshots a block holds one state. block_tables: [B, 2], the block with the state before the
    sequence's new tokens (0 and never read if these are its first) and the block that takes the state after them; they
    may be the same. slot_mapping: for each new token the second of these.
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


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer's queries score keys. num_heads: query heads of this rank.

    logit_soft_cap: scores s become cap * tanh(s / cap); None leaves them.
    """

    num_heads: int
    softmax_scale: float
    logit_soft_cap: float | None = None


class LatentOptions(TypedDict):
    """What is done to latents, besides storing them: options of kernels.rope_and_store_latent."""

    norm_weight: Tensor
    norm_eps: float
    rotation: Rotation


class BoundHeads(Protocol):
    """One layer's keys and values per head, in its blocks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        """Store k, v [T, KVH, D], then attend: q [T, H, D] -> [T, H, D]."""
        ...

    def forward_fused(self, qkv: Tensor, batch: AttentionBatch, heads: HeadOptions) -> Tensor:
        """forward of the heads of qkv [T, (H + 2 KVH) * D], normalised and rotated as `heads` says; [T, H, D]."""
        ...


class BoundLatents(Protocol):
    """One layer's latents, in its blocks."""

    def forward(
        self,
        q: Tensor,
        latents: Tensor,
        batch: AttentionBatch,
        absorb: Callable[[Tensor], Tensor],
        **options: Unpack[LatentOptions],
    ) -> Tensor:
        """Store latents [T, L + R], then attend with q [T, H, N + R]: sums of latents [T, H, L].

        absorb: brings the part of the queries that does not rotate, [T, H, N], into the space of the latents,
        [T, H, L].
        """
        ...


class AttentionBackend(Protocol):
    """Owns what a block is: its size, its layout and the dtypes in it. All else about blocks is the engine's.

    A layer describes what it keeps and how it scores; the engine allocates blocks as cache_spec says and has each layer
    bind its own: blocks [num_blocks, block_bytes] uint8, addressed by the block tables of cache group `group`.
    """

    def cache_spec(self, kept: Kept) -> CacheSpec:
        """The blocks of a layer that keeps this. Raises ConfigError if the backend cannot keep it."""
        ...

    def bind_heads(self, kept: KeptHeads, scoring: Scoring, blocks: Tensor, group: int) -> BoundHeads: ...

    def bind_latents(self, kept: KeptLatents, scoring: Scoring, blocks: Tensor, group: int) -> BoundLatents: ...


def default_block_size(device: torch.device) -> int:
    """Tokens per block for a device, unless the user chooses."""
    return 32


def choose_backend(device: torch.device, cache_dtype: str, block_size: int) -> AttentionBackend:
    """The backend for a device and a --kv-cache-dtype: Pagewick's own kernels, which run on every device."""
    return NativeBackend(block_size, cache_dtype)
