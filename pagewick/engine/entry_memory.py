"""The memory that residual streams take in a step, and that windows, entries and selections do on a GPU."""

from __future__ import annotations

from typing import Final

from pagewick.models.config import ModelConfig
from pagewick.models.parts import AttentionConfig, LayerConfig

# Entries of a split (kernels/triton/window_attention.py).
ENTRY_SPLIT: Final = 128
# Kernels of a captured step beyond those of any layer: of an indexer; of a layer with windows and of its streams; and
# of one with entries.
_OF_INDEXER: Final = 13
_OF_WINDOW: Final = 32
_OF_ENTRIES: Final = 12
# The most memory for scores of blocks (kernels/triton/head_blocks.py), and the kernels that choose some.
BLOCK_SCORES_BYTES: Final = 256 * 2**20
_OF_BLOCKS: Final = 6


def entry_bytes(layer: LayerConfig, num_tokens: int, context: int) -> int:
    """Return the bytes for what entries are made from, and for the choice of some; 0 for a layer without entries.

    These are 4 bytes for each number of a token's row; with an indexer, also the places of its entries. context: the
    longest sequence. So for a layer that selects blocks of tokens.
    """
    if isinstance(layer.attention, AttentionConfig) and layer.attention.head_blocks is not None:
        return _head_block_bytes(layer.attention, num_tokens, context)
    if layer.block_index is not None:
        return _block_bytes(layer, num_tokens, context)
    if layer.rows is None or (compressor := layer.rows.compressor) is None:
        return 0
    numbers = compressor.row_size(layer.rows.head_dim)
    if (indexer := compressor.indexer) is not None:
        numbers += min(indexer.top_k, context // compressor.ratio)
    return 4 * num_tokens * numbers


def _head_block_bytes(attention: AttentionConfig, num_tokens: int, context: int) -> int:
    """Return the bytes for queries of index heads before and behind their rotation, and for the scores of blocks."""
    blocks = attention.head_blocks
    assert blocks is not None, "other layers have none"
    row = 4 * attention.num_kv_heads * -(-context // blocks.block_size)
    queries = 8 * num_tokens * attention.num_kv_heads * blocks.head_dim
    return queries + row * max(1, min(num_tokens, BLOCK_SCORES_BYTES // row))


def _block_bytes(layer: LayerConfig, num_tokens: int, context: int) -> int:
    index = layer.block_index
    assert index is not None, "other layers have no blocks"
    num_blocks = -(-context // index.ratio)
    numbers = 2 * index.num_rows + 2 * index.head_dim + min(index.top_k, num_blocks)
    # The keys and the scores of one token, which is computed after the other.
    return 4 * (num_tokens * numbers + num_blocks * (2 * index.head_dim + 3 * index.num_heads))


def streams_width(model: ModelConfig) -> int:
    """Return the numbers of a token in the residual streams of hyper-connections and gated connections."""
    if model.hyper is not None:
        # The streams before and behind a part, and all of them in float32.
        return 4 * model.hyper.num_streams * model.hidden_size
    if model.gated_streams is not None:
        # The streams, normalised, with their gates, times these, and what is added, before and behind its factors.
        return 8 * model.gated_streams.num_streams * model.hidden_size
    return 0


def entry_splits(layer: LayerConfig, context: int) -> int:
    """Return the splits of what a token sees: the window, and its entries; 0 where nothing is split.

    context: the longest sequence.
    """
    if layer.rows is None or (compressor := layer.rows.compressor) is None:
        return 0
    num_entries = -(-context // compressor.ratio)
    if compressor.indexer is not None:
        num_entries = min(compressor.indexer.top_k, num_entries)
    return 1 + -(-num_entries // ENTRY_SPLIT)


def further_kernels(layer: LayerConfig) -> int:
    """Return the kernels of a layer's captured step beyond those of any layer."""
    if isinstance(layer.attention, AttentionConfig) and layer.attention.head_blocks is not None:
        return _OF_BLOCKS
    if layer.rows is None:
        return 0 if layer.indexer is None else _OF_INDEXER
    number = _OF_WINDOW
    if layer.rows.compressor is not None:
        number += _OF_ENTRIES
    return number if layer.rows.indexer is None else number + _OF_INDEXER


def num_selected(layer: LayerConfig, context: int) -> int:
    """Numbers by which a token's selection is described: those of tokens, or those of blocks for each KV head."""
    attention = layer.attention
    if isinstance(attention, AttentionConfig) and attention.head_blocks is not None:
        blocks = attention.head_blocks
        return attention.num_kv_heads * min(blocks.top_k, -(-context // blocks.block_size))
    return min(layer.indexer.top_k, context) if layer.indexer else 0
