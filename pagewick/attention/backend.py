"""AttentionBackend: stores keys and values and computes attention. AttentionBatch: the part of a batch that it reads.

Dimensions: T tokens and B sequences of a batch; H query heads and KVH key/value heads of one rank; D head size. In
latent attention a latent has L elements, and a query or key has R elements that rotate and N that do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypedDict, Unpack

from torch import Tensor

from pagewick.attention.cache_spec import CacheSpec, Kept, KeptHeads, KeptIndexKeys, KeptLatents, KeptRows
from pagewick.kernels.block_choice import BlockChoice
from pagewick.kernels.options import CompressOptions, HeadOptions, Rotation, ScoreOptions, SelectedKeys


@dataclass(frozen=True, slots=True)
class GroupBatch:
    """One cache group's share of a batch of T tokens and B sequences.

    slot_mapping: [T] int64, block_id * block_size + offset of each new token.
    block_tables: [B, max_blocks] int32; entries after the context or before the lookback are 0 and never read.

    In a group of snapshots a block holds one state. block_tables: [B, 3]; the first block holds the state before the
    sequence's new tokens (0 and never read if it has no earlier ones), the second receives a state after them. Both
    may be the same block. The third number says after how many of the new tokens that state is; 0: after all of them.
    slot_mapping: for each new token the second block.
    """

    slot_mapping: Tensor
    block_tables: Tensor


class AttentionBatch(Protocol):
    """The part of a batch that attention reads.

    cu_seqlens_q: [B + 1] int32, index of each sequence's first new token, then T. context_lens: [B] int32, number of
    tokens that each sequence attends to, the new ones included. groups: one entry for each cache group.
    key_ends: [T] int32, as in AttentionMetadata, for layers whose Scoring sees_images_whole or sees_all; None: the step
    computes no tokens of images, or there are no such layers. window_key_ends: the same, for layers that see all within
    a window; None: there are none.
    """

    @property
    def cu_seqlens_q(self) -> Tensor: ...

    @property
    def context_lens(self) -> Tensor: ...

    @property
    def groups(self) -> Sequence[GroupBatch]: ...

    @property
    def key_ends(self) -> Tensor | None: ...

    @property
    def window_key_ends(self) -> Tensor | None: ...


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer's queries score keys. num_heads: query heads of this rank.

    logit_soft_cap: a score s becomes cap * tanh(s / cap); None: scores stay as they are. sinks: [num_heads] float32, a
    further logit of each head's softmax, which has no value. sees_images_whole: tokens of an image see those behind
    them in the same image, too. sees_all: all tokens see those behind them, within the layer's window if it has one.
    chunk_size: sequences are cut into chunks of this many tokens, of which a token sees its own, although the blocks of
    all are kept; in a layer without a window. None: they are not.
    """

    num_heads: int
    softmax_scale: float
    logit_soft_cap: float | None = None
    sinks: Tensor | None = None
    sees_images_whole: bool = False
    sees_all: bool = False
    chunk_size: int | None = None


class LatentOptions(TypedDict):
    """How latents are prepared before they are stored: the arguments of kernels.rope_and_store_latent.

    norm_weight, norm_eps: RMS norm of the latent. rotation: of the part of queries and keys that rotates.
    """

    norm_weight: Tensor
    norm_eps: float
    rotation: Rotation


class BoundHeads(Protocol):
    """One layer's keys and values of each head, bound to the layer's blocks."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        """Store k and v [T, KVH, D], then attend with q [T, H, D]. Returns [T, H, D]."""
        ...

    def forward_fused(self, qkv: Tensor, batch: AttentionBatch, heads: HeadOptions) -> Tensor:
        """Normalise and rotate the heads of qkv [T, (H + 2 KVH) * D] as `heads` says, then do what forward does."""
        ...

    def store(self, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store k and v [T, KVH, D] in the slots [T] int64, as in GroupBatch."""
        ...

    def forward_queries(self, q: Tensor, batch: AttentionBatch, heads: HeadOptions) -> Tensor:
        """Normalise and rotate q [T, H * D] as `heads` says, and attend to what the blocks hold. Returns [T, H, D]."""
        ...

    def forward_selected(
        self, qkv: Tensor, batch: AttentionBatch, heads: HeadOptions, selected: SelectedKeys, ratio: int
    ) -> Tensor:
        """Do what forward_fused does, but attend to selected blocks of `ratio` tokens, as kernels.block_attention does.

        Only where KeptHeads.is_selective.
        """
        ...


class BoundLatents(Protocol):
    """One layer's latents, bound to the layer's blocks."""

    def forward(
        self,
        q: Tensor,
        latents: Tensor | None,
        batch: AttentionBatch,
        absorb: Callable[[Tensor], Tensor],
        selected: SelectedKeys | None = None,
        **options: Unpack[LatentOptions],
    ) -> Tensor:
        """Store latents [T, L + R], then attend with q [T, H, N + R]. Returns sums of latents [T, H, L].

        latents: may also be [T, L], whose keys are 0; None: nothing is stored, and the queries attend to what the
        blocks hold. absorb: maps queries [T, H, N + R], or the part of them that does not rotate, to the space of the
        latents, [T, H, L].
        selected: the tokens that each token sees; None: all up to itself.
        """
        ...


class BoundIndex(Protocol):
    """One layer's index keys, bound to the layer's blocks."""

    def forward(
        self,
        q: Tensor,
        keys: Tensor,
        weights: Tensor,
        batch: AttentionBatch,
        *,
        rotation: Rotation,
        top_k: int,
        latent_group: int,
    ) -> SelectedKeys:
        """Store keys [T, I], then choose for each token the top_k tokens that it sees, as kernels.select_keys does.

        q: [T, H, I]; weights: [T, H] float32; neither q nor keys are rotated. latent_group: the cache group in whose
        blocks the chosen tokens are looked up.
        """
        ...

    def select_blocks(
        self, q: Tensor, keys: Tensor, batch: AttentionBatch, *, rotation: Rotation, choice: BlockChoice
    ) -> SelectedKeys:
        """Store keys [T, I], then choose for each token, and each head of q [T, H, I], the blocks that it sees.

        This is what kernels.select_blocks does; neither q nor keys are rotated.
        """
        ...


class BoundRows(Protocol):
    """One layer's rows, bound to the layer's blocks. Others that a method takes are bound by the same backend."""

    def store(self, rows: Tensor, batch: AttentionBatch, rotation: Rotation) -> None:
        """Store rows [T, D] of new tokens, rotated."""
        ...

    def compress(
        self, rows: Tensor, batch: AttentionBatch, entries: BoundRows, rotation: Rotation, options: CompressOptions
    ) -> None:
        """Store rows [T, C], and the entries of the windows that end among them, as kernels.compress_rows does."""
        ...

    def select(
        self,
        q: Tensor,
        weights: Tensor,
        batch: AttentionBatch,
        entries: BoundRows | None,
        *,
        rotation: Rotation,
        top_k: int,
    ) -> SelectedKeys:
        """Choose for each token the top_k of the entries that it sees, by these rows as their keys.

        q: [T, H, I], not rotated; weights: [T, H] float32. The chosen ones are looked up in `entries`; None: the slots
        are their numbers in their sequence.
        """
        ...

    def attend(
        self,
        q: Tensor,
        batch: AttentionBatch,
        scores: ScoreOptions,
        entries: BoundRows | None = None,
        selected: SelectedKeys | None = None,
    ) -> Tensor:
        """Attend with q [T, H, D] to these rows and to entries, as kernels.window_attention does."""
        ...


class AttentionBackend(Protocol):
    """Decides the size of a block, its layout and the dtypes in it. The engine decides everything else about blocks.

    A layer describes what it keeps and how it scores. The engine allocates blocks as cache_spec says and makes each
    layer bind its own: blocks [num_blocks, block_bytes] uint8, addressed by the block tables of cache group `group`.
    """

    def cache_spec(self, kept: Kept) -> CacheSpec:
        """Describe the blocks of a layer that keeps this. Raises ConfigError if the backend cannot keep it."""
        ...

    def bind_heads(
        self,
        kept: KeptHeads,
        scoring: Scoring,
        blocks: Tensor,
        group: int,
        kv_scales: tuple[float, float] = (0.0, 0.0),
    ) -> BoundHeads:
        """kv_scales: the scales of all keys and of all values in fp8, if the checkpoint has them; 0: it has none."""
        ...

    def bind_latents(self, kept: KeptLatents, scoring: Scoring, blocks: Tensor, group: int) -> BoundLatents: ...

    def bind_index(self, kept: KeptIndexKeys, blocks: Tensor, group: int) -> BoundIndex: ...

    def bind_rows(self, kept: KeptRows, blocks: Tensor, group: int) -> BoundRows: ...
