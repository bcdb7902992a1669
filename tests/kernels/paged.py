"""Paged caches for tests, with NaN wherever nothing was stored, and what attention over them should give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.kv_cache import KVCache, can_pack, packing_step, padded_head_dim
from pagewick.kernels.options import AttentionMetadata, ScoreOptions

# Half a unit in the last place of 1, and in float32 what the sums add to it.
ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
# Rounding probabilities to the dtype of the cache changes results by this much: see assert_is_expected.
PROBABILITY_ROUNDING = {torch.bfloat16: 2**-8}


@dataclass(frozen=True)
class Paged:
    """The arguments of paged_attention, and the keys and values [context_len, KVH, D] of each sequence.

    kv_cache: [num_blocks, 2, KVH, block_size, D]. key_ends: as in AttentionMetadata.
    """

    q: Tensor
    kv_cache: Tensor
    block_tables: Tensor
    context_lens: Tensor
    cu_seqlens_q: Tensor
    keys: list[Tensor]
    values: list[Tensor]
    key_ends: Tensor | None = None

    def attend(self, attention: Callable[..., Tensor], **options: Any) -> Tensor:
        """Attention by the reference over the plain cache, by anything else over the cache as it wants it."""
        cache = plain_cache(self.kv_cache) if attention is reference.paged_attention else self.cache()
        scores = ScoreOptions(**{"softmax_scale": self.q.shape[-1] ** -0.5, **options})
        return attention(self.q, cache, self.metadata, scores)

    @property
    def metadata(self) -> AttentionMetadata:
        return AttentionMetadata(self.block_tables, self.context_lens, self.cu_seqlens_q, key_ends=self.key_ends)

    def cache(self) -> KVCache:
        """The cache, packed if it can be."""
        block_size, head_dim = self.kv_cache.shape[3:]
        packs = can_pack(head_dim, block_size, self.kv_cache.dtype)
        return packed_copy(self.kv_cache) if packs else plain_cache(self.kv_cache)

    def queries(self, seq: int) -> Tensor:
        return self.q[self.cu_seqlens_q[seq] : self.cu_seqlens_q[seq + 1]]

    def only(self, seq: int, begin: int = 0, end: int | None = None) -> Paged:
        """Queries begin .. end of one sequence, as a batch of its own."""
        queries, first = self.queries(seq), int(self.cu_seqlens_q[seq])
        end = len(queries) if end is None else end
        return replace(
            self,
            q=queries[begin:end],
            block_tables=self.block_tables[seq : seq + 1],
            context_lens=self.context_lens[seq : seq + 1] - (len(queries) - end),
            cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32),
            key_ends=None if self.key_ends is None else self.key_ends[first + begin : first + end].contiguous(),
        )

    def seeing_whole(self, spans: list[tuple[int, int, int]]) -> Paged:
        """Let the new tokens of sequence seq at positions from begin to end see all of these: (seq, begin, end)."""
        lens = self.cu_seqlens_q.diff()
        firsts = (self.context_lens - lens).repeat_interleave(lens)
        places = torch.arange(len(self.q)) - self.cu_seqlens_q[:-1].repeat_interleave(lens)
        positions, seqs = firsts + places, torch.arange(len(lens)).repeat_interleave(lens)
        ends = positions + 1
        for seq, begin, end in spans:
            ends[(seqs == seq) & (positions >= begin) & (positions < end)] = end
        return replace(self, key_ends=ends.int())


def make_paged(
    q_lens: list[int],
    context_lens: list[int],
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 64,
    block_size: int = 32,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Paged:
    """Random queries, keys and values, queries exact in kv_dtype too.

    Blocks lie in random order; unused table entries name no block.
    """
    generator = torch.Generator().manual_seed(seed)
    num_heads, num_kv_heads = heads
    kv_dtype = kv_dtype or dtype
    num_blocks = [-(-context_len // block_size) for context_len in context_lens]
    block_ids = torch.randperm(sum(num_blocks) + 3, generator=generator)
    kv_cache = torch.full((len(block_ids), 2, num_kv_heads, block_size, head_dim), float("nan"), dtype=kv_dtype)
    block_tables = torch.full((len(q_lens), max(num_blocks, default=0) + 1), -1, dtype=torch.int32)
    keys, values = [], []
    for seq, context_len in enumerate(context_lens):
        mine = block_ids[sum(num_blocks[:seq]) : sum(num_blocks[: seq + 1])]
        block_tables[seq, : len(mine)] = mine
        # Keys twice as long make the softmax peaked.
        k = 2 * torch.randn(context_len, num_kv_heads, head_dim, generator=generator)
        k, v = k.to(kv_dtype), torch.randn(k.shape, generator=generator).to(kv_dtype)
        positions = torch.arange(context_len)
        slots = mine[positions // block_size] * block_size + positions % block_size
        reference.store_kv(k, v, plain_cache(kv_cache), slots)
        keys.append(k)
        values.append(v)
    return Paged(
        q=torch.randn(sum(q_lens), num_heads, head_dim, generator=generator).to(kv_dtype).to(dtype),
        kv_cache=kv_cache,
        block_tables=block_tables,
        context_lens=torch.tensor(context_lens, dtype=torch.int32),
        cu_seqlens_q=torch.tensor([0, *q_lens]).cumsum(0).int(),
        keys=keys,
        values=values,
    )


def expected_attention(
    paged: Paged,
    *,
    sliding_window: int | None = None,
    is_chunked: bool = False,
    logit_soft_cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention in float64 over plain keys and values, with an explicit mask."""
    outputs = [torch.empty(0, *paged.q.shape[1:], dtype=torch.float64)]
    for seq, (keys, values) in enumerate(zip(paged.keys, paged.values, strict=True)):
        q = paged.queries(seq).double().transpose(0, 1)
        group = q.shape[0] // keys.shape[1]
        k, v = (x.double().transpose(0, 1).repeat_interleave(group, dim=0) for x in (keys, values))
        context_len, q_len = k.shape[1], q.shape[1]
        visible = torch.ones(q_len, context_len, dtype=torch.bool).tril(context_len - q_len)
        if paged.key_ends is not None:
            ends = paged.key_ends[paged.cu_seqlens_q[seq] : paged.cu_seqlens_q[seq + 1]]
            visible = torch.arange(context_len) < ends[:, None]
        if sliding_window and is_chunked:
            chunks = torch.arange(context_len) // sliding_window
            visible &= chunks == chunks[context_len - q_len :, None]
        elif sliding_window:
            visible &= torch.ones_like(visible).triu(context_len - q_len - sliding_window + 1)
        if logit_soft_cap or sinks is not None:
            scores = q @ k.mT * q.shape[-1] ** -0.5
            if logit_soft_cap:
                scores = torch.tanh(scores / logit_soft_cap) * logit_soft_cap
            weights = scores.masked_fill(~visible, float("-inf")).exp()
            rest = 0.0 if sinks is None else sinks.double().exp()[:, None, None]
            outputs.append(((weights / (weights.sum(-1, keepdim=True) + rest)) @ v).transpose(0, 1))
        else:
            outputs.append(F.scaled_dot_product_attention(q, k, v, attn_mask=visible).transpose(0, 1))
    return torch.cat(outputs)


def assert_is_expected(out: Tensor, paged: Paged, **options: Any) -> None:
    """That `out` is attention over `paged`, but for the rounding of itself and, over bfloat16, of probabilities.

    Everything else is exact in every dtype or in float32. Rounding each probability p to p (1 + d), |d| <= 2^-9, their
    sum too, changes a mean of values v by at most 2^-9 times the mean of |v - mean|, so by 2^-8 times that of |v|.
    """
    expected = expected_attention(paged, **options)
    tolerance = 5e-6 + ROUNDING[out.dtype] * expected.abs()
    if paged.kv_cache.dtype in PROBABILITY_ROUNDING:
        sizes = replace(paged, values=[values.abs() for values in paged.values])
        tolerance = tolerance + PROBABILITY_ROUNDING[paged.kv_cache.dtype] * expected_attention(sizes, **options)
    error = (out.double() - expected).abs()
    assert bool((error <= tolerance).all()), f"an error of {(error - tolerance).max().item()} more than tolerated"


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
