"""kept_by: the parts of the KV cache that a layer needs, by its config. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator

from pagewick.attention.cache_spec import Kept, KeptHeads, KeptIndexKeys, KeptLatents, KeptState
from pagewick.models.parts import AttentionConfig, LayerConfig
from pagewick.parallel.sharding import kv_heads_of_rank


def kept_by(layer: LayerConfig, num_ranks: int) -> Iterator[Kept | KeptState]:
    """Yield what a layer keeps, on each of num_ranks ranks."""
    attention = layer.attention
    for state in layer.states:
        yield KeptState(state.state_bytes(num_ranks))
    if layer.ngrams is not None:
        yield from map(KeptState, layer.ngrams.state_sizes)
    if layer.latent is not None:
        indexer = layer.latent.indexer
        if layer.lender is None:
            yield KeptLatents(layer.latent.kv_lora_rank, layer.latent.qk_rope_head_dim, indexer is not None)
        if indexer is not None and not indexer.is_shared:
            yield KeptIndexKeys(indexer.head_dim)
    if layer.rows is not None:
        yield from layer.rows.kept()
    if isinstance(attention, AttentionConfig) and layer.lender is None:
        # Every rank stores as many KV heads as the first.
        kv_heads = kv_heads_of_rank(attention.num_heads, attention.num_kv_heads, 0, num_ranks)
        blocks, is_selective = attention.head_blocks, attention.head_blocks or attention.block_index
        yield KeptHeads(len(kv_heads), attention.head_dim, layer.window, layer.is_chunked, is_selective is not None)
        yield from () if blocks is None else (KeptIndexKeys(blocks.head_dim),)
    if layer.block_index is not None:
        yield from layer.block_index.kept()
