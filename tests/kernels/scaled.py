"""Paged caches of 8-bit numbers for tests, with bytes that mean NaN wherever nothing was stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagewick.attention.cache_spec import KeptHeads, KeptLatents, native_spec
from pagewick.kernels import reference
from pagewick.kernels.kv_cache import KVCache, heads_cache, latent_cache, torch_dtype
from pagewick.kernels.options import ScoreOptions
from tests.kernels.paged import Paged, make_paged, packed_copy, plain_copy

NAMES = ("int8", "fp8_e4m3", "fp8_e5m2")


@dataclass(frozen=True)
class Scaled:
    """A Paged whose keys and values are those that the 8-bit numbers of `plain` stand for."""

    paged: Paged
    plain: KVCache

    def attend(self, attention: Callable[..., Tensor], **options: Any) -> Tensor:
        """Attention by the reference over the plain cache, by anything else over a packed copy."""
        cache = self.plain if attention is reference.paged_attention else packed_cache(self.plain)
        scores = ScoreOptions(**{"softmax_scale": self.paged.q.shape[-1] ** -0.5, **options})
        return attention(self.paged.q, cache, self.paged.metadata, scores)

    def only(self, seq: int, begin: int = 0, end: int | None = None) -> Scaled:
        return replace(self, paged=self.paged.only(seq, begin, end))


def make_scaled(name: str, q_lens: list[int], context_lens: list[int], **shape: Any) -> Scaled:
    """As make_paged. Queries are exact in bfloat16, with which some processors multiply 8-bit numbers."""
    paged = make_paged(q_lens, context_lens, **{"kv_dtype": torch.bfloat16, **shape})
    num_blocks, _, num_kv_heads, block_size, head_dim = paged.kv_cache.shape
    plain = empty_heads(name, num_blocks, num_kv_heads, block_size, head_dim, is_packed=False)
    assert plain.scales is not None
    keys, values = [], []
    for seq, context_len in enumerate(context_lens):
        positions = torch.arange(context_len)
        block_ids = paged.block_tables[seq][positions // block_size].long()
        slots = block_ids * block_size + positions % block_size
        reference.store_kv(paged.keys[seq], paged.values[seq], plain, slots)
        index = (block_ids, slice(None), slice(None), positions % block_size)
        numbers = plain.data.view(torch.uint8)[index].view(plain.dtype).double()
        both = numbers * plain.scales[index].double().unsqueeze(-1)
        keys.append(both[:, 0])
        values.append(both[:, 1])
    return Scaled(replace(paged, keys=keys, values=values), plain)


def empty_heads(
    name: str, num_blocks: int, num_kv_heads: int, block_size: int, head_dim: int, *, is_packed: bool
) -> KVCache:
    """Return a cache in which nothing is stored."""
    spec = native_spec(KeptHeads(num_kv_heads, head_dim), block_size, name)
    blocks = torch.full((num_blocks, spec.block_bytes), 255, dtype=torch.uint8)
    return heads_cache(blocks, torch_dtype(name), num_kv_heads, block_size, head_dim, is_packed=is_packed)


def empty_latents(
    name: str, num_blocks: int, block_size: int, latent_dim: int, rope_dim: int
) -> tuple[Tensor, Tensor | None]:
    """Return a cache of latents in which nothing is stored, and its scales."""
    spec = native_spec(KeptLatents(latent_dim, rope_dim), block_size, name)
    blocks = torch.full((num_blocks, spec.block_bytes), 255, dtype=torch.uint8)
    return latent_cache(blocks, torch_dtype(name), block_size, latent_dim + rope_dim)


def name_of(dtype: torch.dtype) -> str:
    return next(name for name in NAMES if torch_dtype(name) == dtype)


def packed_cache(plain: KVCache) -> KVCache:
    """Return a packed cache with the contents of a plain one, bit for bit."""
    num_blocks, _, num_kv_heads, block_size, head_dim = plain.data.shape
    cache = empty_heads(name_of(plain.dtype), num_blocks, num_kv_heads, block_size, head_dim, is_packed=True)
    assert cache.scales is not None and plain.scales is not None
    cache.data.view(torch.int8).copy_(packed_copy(plain.data.view(torch.int8)).data)
    cache.scales.copy_(plain.scales)
    return cache


def plain_numbers(cache: KVCache) -> Tensor:
    """Return the bytes of a packed cache as [num_blocks, 2, KVH, block_size, D] int8."""
    return plain_copy(replace(cache, data=cache.data.view(torch.int8)))
