"""The memory that compressed entries take in a step on a GPU, where their definitions compute them."""

from __future__ import annotations

from typing import Final

from pagewick.models.parts import LayerConfig

# Tokens of the smallest usual block, for block tables of single tokens.
_BLOCK_TOKENS: Final = 16


def entry_bytes(layer: LayerConfig, num_tokens: int, context: int) -> int:
    """Return the bytes for what entries are made from, and for the choice of some; 0 for a layer without entries.

    These are 4 bytes for each number of a token's row; with an indexer, also two block tables for each token, and the
    places of its entries. context: the longest sequence.
    """
    if layer.rows is None or (compressor := layer.rows.compressor) is None:
        return 0
    numbers = compressor.row_size(layer.rows.head_dim)
    if (indexer := compressor.indexer) is not None:
        numbers += 2 * -(-context // _BLOCK_TOKENS) + min(indexer.top_k, context // compressor.ratio)
    return 4 * num_tokens * numbers
