"""SharedSelections: what indexers select, for layers that have none of their own (GLM-5.2)."""

from __future__ import annotations

from pagewick.kernels.options import SelectedKeys
from pagewick.layers.indexer import LentSelection
from pagewick.layers.latent_attention import LatentAttention
from pagewick.models.blocks import Block


class SharedSelections:
    """Lets a layer without an indexer, where others have one, see what the nearest before it has selected.

    Layers run one after the other, each over all batches of a text, so the selections are kept for each batch. They
    fit all layers, because a batch has the same block tables in each.
    """

    def __init__(self, num_batches: int) -> None:
        self._selections: list[SelectedKeys | None] = [None] * num_batches
        self._lent = LentSelection()

    def enter(self, block: Block) -> None:
        """Let a layer without an indexer see what an earlier one has selected. Called before its first batch."""
        attention = _selective_attention(block)
        if attention is None:
            return
        if attention.indexer is not None:
            attention.indexer.lent.add_borrower()
        else:
            self._lent = LentSelection()
            attention.select_as(self._lent)

    def before(self, block: Block, batch_idx: int) -> None:
        """Prepare the layer for a batch."""
        attention = _selective_attention(block)
        if attention is not None and attention.indexer is None:
            selected = self._selections[batch_idx]
            assert selected is not None, "layers run in their order, and the first one has an indexer"
            self._lent.put(selected)

    def after(self, block: Block, batch_idx: int) -> None:
        """Keep what the layer has selected, if it selects. Called once it has computed the whole batch."""
        attention = _selective_attention(block)
        if attention is not None and attention.indexer is not None:
            self._selections[batch_idx] = attention.indexer.lent.take()


def _selective_attention(block: Block) -> LatentAttention | None:
    mixer = block.mixer if block.has_mixer else None
    return mixer if isinstance(mixer, LatentAttention) and mixer.is_selective else None
