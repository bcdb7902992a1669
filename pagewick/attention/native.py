"""Attention by Pagewick's own kernels (kernels.paged_attention, kernels.latent_attention), on every device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Unpack

import torch
from torch import Tensor

from pagewick import kernels
from pagewick.attention.backend import AttentionBackend, AttentionBatch, LatentOptions, Scoring
from pagewick.attention.cache_spec import (
    CacheSpec,
    Kept,
    KeptHeads,
    KeptIndexKeys,
    KeptLatents,
    KeptRows,
    native_spec,
)
from pagewick.attention.metadata import metadata_of
from pagewick.attention.rows import NativeRows
from pagewick.kernels.block_choice import BlockChoice
from pagewick.kernels.kv_cache import KVCache, heads_cache, latent_cache, torch_dtype
from pagewick.kernels.options import (
    AttentionMetadata,
    HeadLayout,
    HeadOptions,
    Rotation,
    ScoreOptions,
    SelectedKeys,
)

# Raise the number whenever the layout of latents in a block changes, or that of index keys.
_LATENT_LAYOUT = "latents 1"
_INDEX_LAYOUT = "index keys 1"
_ROWS_LAYOUT = "rows 1"
_PLAIN_LAYOUT = "plain heads 1"
_CPU = torch.device("cpu")


class NativeBackend:
    """Stores keys and values as kernels/kv_cache.py says, and latents token after token, the latent first.

    Keys and values are packed if native operations read them, else plain, as are those of which tokens see a selection.
    cache_dtype: a name in CACHE_DTYPES. device: that of the blocks.
    """

    def __init__(self, block_size: int, cache_dtype: str, device: torch.device = _CPU) -> None:
        self._block_size = block_size
        self._cache_dtype = cache_dtype
        self._torch_dtype = torch_dtype(cache_dtype)
        self._device = device

    def cache_spec(self, kept: Kept) -> CacheSpec:
        if isinstance(kept, KeptHeads):
            layout = _PLAIN_LAYOUT if kept.is_selective else kernels.kv_layout_version(self._device)
        else:
            layouts = {KeptIndexKeys: _INDEX_LAYOUT, KeptLatents: _LATENT_LAYOUT, KeptRows: _ROWS_LAYOUT}
            layout = layouts[type(kept)]
        return native_spec(kept, self._block_size, self._cache_dtype, layout=layout)

    def bind_heads(
        self,
        kept: KeptHeads,
        scoring: Scoring,
        blocks: Tensor,
        group: int,
        kv_scales: tuple[float, float] = (0.0, 0.0),
    ) -> NativeHeads:
        is_packed = not kept.is_selective and kernels.packs_kv(
            kept.head_dim, self._block_size, self._torch_dtype, blocks.device
        )
        cache = heads_cache(
            blocks, self._torch_dtype, kept.num_kv_heads, self._block_size, kept.head_dim, is_packed=is_packed
        )
        # A checkpoint's scales are for numbers up to 448, the largest of this dtype.
        if self._torch_dtype == torch.float8_e4m3fn:
            cache = replace(cache, constant_scales=kv_scales)
        return NativeHeads(cache, kept, scoring, group)

    def bind_latents(self, kept: KeptLatents, scoring: Scoring, blocks: Tensor, group: int) -> NativeLatents:
        cache, scales = latent_cache(blocks, self._torch_dtype, self._block_size, kept.latent_dim + kept.rope_dim)
        return NativeLatents(cache, scales, scoring, group)

    def bind_index(self, kept: KeptIndexKeys, blocks: Tensor, group: int) -> NativeIndex:
        cache, _ = latent_cache(blocks, self._torch_dtype, self._block_size, kept.dim)
        return NativeIndex(cache, group)

    def bind_rows(self, kept: KeptRows, blocks: Tensor, group: int) -> NativeRows:
        num_rows = self.cache_spec(kept).block_size // kept.ratio
        cache, _ = latent_cache(blocks, self._torch_dtype, num_rows, kept.dim)
        return NativeRows(cache, group, kept.ratio)


class NativeHeads:
    """BoundHeads over a KVCache of what is kept."""

    def __init__(self, cache: KVCache, kept: KeptHeads, scoring: Scoring, group: int) -> None:
        self.cache = cache
        self._layout = HeadLayout(scoring.num_heads, cache.num_kv_heads, cache.head_dim)
        assert scoring.chunk_size is None or kept.window is None, "a layer has one or the other"
        self._scores = ScoreOptions(
            scoring.softmax_scale,
            kept.window or scoring.chunk_size,
            scoring.logit_soft_cap,
            scoring.sinks,
            is_chunked=kept.is_chunked or scoring.chunk_size is not None,
        )
        self._group = group
        self._sees_later = scoring.sees_images_whole or scoring.sees_all
        self._sees_window = scoring.sees_all and kept.window is not None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        kernels.store_kv(k, v, self.cache, batch.groups[self._group].slot_mapping)
        return self._attend(q, batch)

    def forward_fused(self, qkv: Tensor, batch: AttentionBatch, heads: HeadOptions) -> Tensor:
        q = kernels.rope_and_store(qkv, self.cache, batch.groups[self._group].slot_mapping, self._layout, heads)
        return self._attend(q, batch)

    def store(self, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        kernels.store_kv(k, v, self.cache, slot_mapping)

    def forward_queries(self, q: Tensor, batch: AttentionBatch, heads: HeadOptions) -> Tensor:
        layout = self._layout._replace(num_kv_heads=0)
        turned = kernels.rope_and_store(q, self.cache, batch.groups[self._group].slot_mapping, layout, heads)
        return self._attend(turned, batch)

    def forward_selected(
        self, qkv: Tensor, batch: AttentionBatch, heads: HeadOptions, selected: SelectedKeys, ratio: int
    ) -> Tensor:
        group = batch.groups[self._group]
        q = kernels.rope_and_store(qkv, self.cache, group.slot_mapping, self._layout, heads)
        metadata = metadata_of(group, batch, len(q))
        return kernels.block_attention(q, self.cache, metadata, self._scores, selected, ratio)

    def _attend(self, q: Tensor, batch: AttentionBatch) -> Tensor:
        metadata = metadata_of(batch.groups[self._group], batch, len(q))
        if self._sees_later:
            metadata = metadata._replace(key_ends=batch.window_key_ends if self._sees_window else batch.key_ends)
        return kernels.paged_attention(q, self.cache, metadata, self._scores)


class NativeLatents:
    """BoundLatents over cache [num_blocks, block_size, L + R], with scales if its dtype needs some."""

    def __init__(self, cache: Tensor, scales: Tensor | None, scoring: Scoring, group: int) -> None:
        self._cache = cache
        self._scales = scales
        self._scoring = scoring
        self._group = group

    def forward(
        self,
        q: Tensor,
        latents: Tensor | None,
        batch: AttentionBatch,
        absorb: Callable[[Tensor], Tensor],
        selected: SelectedKeys | None = None,
        **options: Unpack[LatentOptions],
    ) -> Tensor:
        group = batch.groups[self._group]
        q_rope = kernels.rope_and_store_latent(
            q, latents, self._cache, group.slot_mapping, scales=self._scales, **options
        )
        q_latent = absorb(q)
        cache, metadata = self._cache, metadata_of(group, batch, len(q))
        if selected is not None:
            # Rows follow each other without gaps, so that each token is a block: decision 58.
            cache = cache.view(-1, 1, cache.shape[-1])
            metadata = AttentionMetadata(selected.slots, selected.counts, selected.starts, 1)
        return kernels.latent_attention(
            q_latent,
            q_rope,
            cache,
            metadata,
            softmax_scale=self._scoring.softmax_scale,
            scales=self._scales,
            sinks=self._scoring.sinks,
        )


class NativeIndex:
    """BoundIndex over cache [num_blocks, block_size, I]."""

    def __init__(self, cache: Tensor, group: int) -> None:
        self._cache = cache
        self._group = group

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
        group = batch.groups[self._group]
        kernels.store_index_keys(keys, self._cache, group.slot_mapping, rotation=rotation)
        return kernels.select_keys(
            q,
            weights,
            self._cache,
            metadata_of(group, batch, len(q)),
            batch.groups[latent_group].block_tables,
            rotation=rotation,
            top_k=top_k,
        )

    def select_blocks(
        self, q: Tensor, keys: Tensor, batch: AttentionBatch, *, rotation: Rotation, choice: BlockChoice
    ) -> SelectedKeys:
        own = batch.groups[self._group]
        kernels.store_index_keys(keys, self._cache, own.slot_mapping, rotation=rotation)
        return kernels.select_blocks(q, self._cache, metadata_of(own, batch, len(q)), rotation=rotation, choice=choice)


def default_block_size(device: torch.device) -> int:
    """Return the number of tokens per block for a device, unless the user chooses another."""
    return 32


def choose_backend(device: torch.device, cache_dtype: str, block_size: int) -> AttentionBackend:
    """Choose for a device and a --kv-cache-dtype: Pagewick's own kernels, which run on every device."""
    return NativeBackend(block_size, cache_dtype, device)
