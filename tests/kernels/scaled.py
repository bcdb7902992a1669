"""Paged caches of numbers of 8 and of 4 bits for tests, with bytes that mean NaN wherever nothing was stored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagewick.attention.cache_spec import KeptHeads, KeptLatents, native_spec
from pagewick.kernels import reference
from pagewick.kernels.kv_cache import INT4, KVCache, heads_cache, latent_cache, torch_dtype
from pagewick.kernels.options import ScoreOptions
from pagewick.kernels.reference_kv import rotate_vectors, unpack_pairs
from tests.kernels.paged import Paged, assert_is_expected, make_paged, packed_copy, plain_copy

NAMES = ("int8", "fp8_e4m3", "fp8_e5m2")
ALL_NAMES = (*NAMES, "int4")


@dataclass(frozen=True)
class Scaled:
    """A Paged whose keys and values are those that the numbers of `plain` stand for."""

    paged: Paged
    plain: KVCache

    def attend(self, attention: Callable[..., Tensor], **options: Any) -> Tensor:
        """Attention by the reference over the plain cache, by anything else over a packed copy."""
        cache = self.plain if attention is reference.paged_attention else packed_cache(self.plain)
        scores = ScoreOptions(**{"softmax_scale": self.paged.q.shape[-1] ** -0.5, **options})
        return attention(self.paged.q, cache, self.paged.metadata, scores)

    def assert_is_expected(self, out: Tensor, **options: Any) -> None:
        """As assert_is_expected, about rotated values if the cache has those: it is their products that are rounded."""
        paged = self.paged
        if self.plain.dtype == INT4:
            matrix = rotation(self.plain.head_dim)
            out, paged = (out.double() @ matrix).float(), replace(paged, values=[one @ matrix for one in paged.values])
        assert_is_expected(out, paged, **options)

    def only(self, seq: int, begin: int = 0, end: int | None = None) -> Scaled:
        return replace(self, paged=self.paged.only(seq, begin, end))


def make_scaled(name: str, q_lens: list[int], context_lens: list[int], **shape: Any) -> Scaled:
    """As make_paged.

    Queries are exact in bfloat16, with which some processors multiply numbers of 8 bits; where keys are rotated, it is
    the rotated queries that are.
    """
    paged = make_paged(q_lens, context_lens, **{"kv_dtype": torch.bfloat16, **shape})
    if name == "int4":
        paged = replace(paged, q=rotate_vectors(paged.q))
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
        if name == "int4":
            numbers = unpack_pairs(plain.data[index]).double()
        else:
            numbers = plain.data.view(torch.uint8)[index].view(plain.dtype).double()
        both = numbers * plain.scales[index].double().unsqueeze(-1)
        if name == "int4":
            both = both @ rotation(head_dim)
        keys.append(both[:, 0])
        values.append(both[:, 1])
    return Scaled(replace(paged, keys=keys, values=values), plain)


def rotation(head_dim: int) -> Tensor:
    """Return the matrix [D, D] float64 by which keys and values of 4-bit numbers are rotated: Sylvester's construction.

    Its blocks along the diagonal are as large as the largest power of two that divides D.
    """
    matrix, count = torch.ones(1, 1, dtype=torch.float64), head_dim
    while count % 2 == 0:
        count //= 2
        matrix = torch.kron(torch.tensor([[1, 1], [1, -1]], dtype=torch.float64), matrix) / 2**0.5
    return torch.block_diag(*[matrix] * count)


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
    return next(name for name in ALL_NAMES if torch_dtype(name) == dtype)


def packed_cache(plain: KVCache) -> KVCache:
    """Return a packed cache with the contents of a plain one, bit for bit."""
    num_blocks, _, num_kv_heads, block_size, _ = plain.data.shape
    cache = empty_heads(name_of(plain.dtype), num_blocks, num_kv_heads, block_size, plain.head_dim, is_packed=True)
    assert cache.scales is not None and plain.scales is not None
    numbers = packed_copy(numbers_of(plain)).data
    if plain.dtype == INT4:
        low, high = (numbers.view(torch.uint8) & 15).unflatten(-1, (-1, 2)).unbind(-1)
        numbers = (low | high << 4).view(torch.int8)
    cache.data.view(torch.int8).copy_(numbers)
    cache.scales.copy_(plain.scales)
    return cache


def numbers_of(plain: KVCache) -> Tensor:
    """Return the bytes of a plain cache, or its numbers of 4 bits, as [num_blocks, 2, KVH, block_size, D] int8."""
    return unpack_pairs(plain.data).to(torch.int8) if plain.dtype == INT4 else plain.data.view(torch.int8)


def plain_numbers(cache: KVCache) -> Tensor:
    """Return what numbers_of does for a packed cache."""
    data = cache.data.view(torch.int8)
    if cache.dtype == INT4:
        data = torch.stack((data << 4 >> 4, data >> 4), dim=-1).flatten(-2)
    return plain_copy(replace(cache, data=data))
