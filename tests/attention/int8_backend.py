"""An AttentionBackend that stores int8 with a scale of every token and head inside the block, in plain PyTorch.

It is slow, and exact in the engine's sense: a token's result depends only on what its own sequence stored.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Unpack

import torch
from torch import Tensor

from pagewick import kernels
from pagewick.attention.backend import AttentionBatch, BoundIndex, BoundRows, LatentOptions, Scoring
from pagewick.attention.cache_spec import (
    CacheDtype,
    CacheSpec,
    Kept,
    KeptHeads,
    KeptIndexKeys,
    KeptLatents,
    KeptRows,
    attention_spec,
)
from pagewick.kernels.options import HeadLayout, HeadOptions, SelectedKeys
from tests.kernels.paged import plain_cache

INT8 = CacheDtype("int8", 8, num_scale_bytes=4)


@dataclass
class Vectors:
    """Blocks with num_vectors vectors of dim elements for each token: float32 scales, then int8 elements."""

    blocks: Tensor
    block_size: int
    num_vectors: int
    dim: int

    def __post_init__(self) -> None:
        num_rows = self.block_size * self.num_vectors
        end = num_rows * (4 + self.dim)
        self._scales = self.blocks[:, : 4 * num_rows].view(torch.float32)
        self._elements = self.blocks[:, 4 * num_rows : end].view(torch.int8)
        assert end <= self.blocks.shape[1] < end + 16

    def store(self, vectors: Tensor, slots: Tensor) -> None:
        """Store vectors [T, num_vectors, dim] in the slots [T]."""
        scales = vectors.float().abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
        elements = (vectors.float() / scales).round().to(torch.int8)
        shape = (len(self.blocks), self.block_size, self.num_vectors, -1)
        blocks, offsets = slots // self.block_size, slots % self.block_size
        self._scales.view(shape)[blocks, offsets] = scales
        self._elements.view(shape)[blocks, offsets] = elements

    def load(self, table: Tensor, num_tokens: int) -> Tensor:
        """Return the first tokens of a sequence as float32, [num_tokens, num_vectors, dim]."""
        number = -(-num_tokens // self.block_size)
        shape = (number * self.block_size, self.num_vectors, -1)
        rows = table[:number].long()
        loaded = self._elements[rows].reshape(shape).float() * self._scales[rows].reshape(shape)
        return loaded[:num_tokens]


def attend(q: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> Tensor:
    """Attend with one token's queries [H, D] over keys [n, KVH, D] and values [n, KVH, E]. Returns [H, E]."""
    repeats = len(q) // keys.shape[1]
    keys, values = keys.repeat_interleave(repeats, 1), values.repeat_interleave(repeats, 1)
    scores = (q.float() * keys).sum(-1) * scoring.softmax_scale
    if scoring.logit_soft_cap is not None:
        scores = scoring.logit_soft_cap * torch.tanh(scores / scoring.logit_soft_cap)
    return (scores.softmax(0).unsqueeze(-1) * values).sum(0)


def attend_all(
    q: Tensor, batch: AttentionBatch, tables: Tensor, load: Callable[[Tensor, int], tuple[Tensor, Tensor]],
    scoring: Scoring, window: int | None, is_chunked: bool = False,
) -> Tensor:  # fmt: skip
    """Attend with every token of a batch separately."""
    attended = []
    bounds, lengths = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist()
    for row, length in enumerate(lengths):
        first, last = bounds[row], bounds[row + 1]
        for token in range(first, last):
            end = length - (last - 1 - token)
            keys, values = load(tables[row], end)
            begin = 0 if window is None else (end - 1) // window * window if is_chunked else max(0, end - window)
            attended.append(attend(q[token], keys[begin:], values[begin:], scoring))
    return torch.stack(attended).to(q.dtype)


class Int8Heads:
    """A BoundHeads over Vectors."""

    def __init__(self, kept: KeptHeads, scoring: Scoring, vectors: Vectors, group: int) -> None:
        self._kept, self._scoring, self._vectors, self._group = kept, scoring, vectors, group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        group, num_kv_heads = batch.groups[self._group], self._kept.num_kv_heads
        self._vectors.store(torch.cat((k, v), dim=1), group.slot_mapping)

        def load(table: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
            both = self._vectors.load(table, num_tokens)
            return both[:, :num_kv_heads], both[:, num_kv_heads:]

        window, is_chunked = self._kept.window, self._kept.is_chunked
        return attend_all(q, batch, group.block_tables, load, self._scoring, window, is_chunked)

    def forward_fused(self, qkv: Tensor, batch: AttentionBatch, heads: HeadOptions) -> Tensor:
        num_kv_heads, head_dim = self._kept.num_kv_heads, self._kept.head_dim
        # A cache with one token per block returns keys and values in the order in which they are stored here.
        passing = torch.empty(len(qkv), 2, num_kv_heads, 1, head_dim, dtype=qkv.dtype)
        layout = HeadLayout(self._scoring.num_heads, num_kv_heads, head_dim)
        q = kernels.rope_and_store(qkv, plain_cache(passing), torch.arange(len(qkv)), layout, heads)
        return self.forward(q, passing[:, 0, :, 0], passing[:, 1, :, 0], batch)


class Int8Latents:
    """A BoundLatents over Vectors."""

    def __init__(self, kept: KeptLatents, scoring: Scoring, vectors: Vectors, group: int) -> None:
        self._kept, self._scoring, self._vectors, self._group = kept, scoring, vectors, group

    def forward(
        self, q: Tensor, latents: Tensor, batch: AttentionBatch, absorb: Callable[[Tensor], Tensor],
        selected: SelectedKeys | None = None, **options: Unpack[LatentOptions],
    ) -> Tensor:  # fmt: skip
        assert selected is None, "bind_index serves no indexer"
        group = batch.groups[self._group]
        passing = torch.empty(len(q), 1, latents.shape[-1], dtype=q.dtype)
        q_rope = kernels.rope_and_store_latent(q, latents, passing, torch.arange(len(q)), **options)
        self._vectors.store(passing, group.slot_mapping)

        def load(table: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
            rows = self._vectors.load(table, num_tokens)
            return rows, rows[..., : self._kept.latent_dim]

        whole = torch.cat((absorb(q), q_rope), dim=-1)
        return attend_all(whole, batch, group.block_tables, load, self._scoring, None)


class Int8Backend:
    """The backend, with a block size of its own."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size

    def cache_spec(self, kept: Kept) -> CacheSpec:
        return attention_spec(kept, self.block_size, INT8, INT8, layout="int8 1")

    def bind_heads(
        self, kept: KeptHeads, scoring: Scoring, blocks: Tensor, group: int, kv_scales: object = None
    ) -> Int8Heads:
        vectors = Vectors(blocks, self.block_size, 2 * kept.num_kv_heads, kept.head_dim)
        return Int8Heads(kept, scoring, vectors, group)

    def bind_latents(self, kept: KeptLatents, scoring: Scoring, blocks: Tensor, group: int) -> Int8Latents:
        # One scale for both parts, where the spec counts two.
        used = self.block_size * (kept.latent_dim + kept.rope_dim + 4)
        vectors = Vectors(blocks[:, :used], self.block_size, 1, kept.latent_dim + kept.rope_dim)
        return Int8Latents(kept, scoring, vectors, group)

    def bind_index(self, kept: KeptIndexKeys, blocks: Tensor, group: int) -> BoundIndex:
        raise NotImplementedError("no model of these tests has an indexer")

    def bind_rows(self, kept: KeptRows, blocks: Tensor, group: int) -> BoundRows:
        raise NotImplementedError("no model of these tests keeps rows")
