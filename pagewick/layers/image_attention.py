"""Attention of a text to itself and to the image before it, whose keys and values lie in the same blocks.

The first tokens of a sequence are those of an image, always as many, and the text follows. An image's keys and values
are made of the rows of its encoder, and are stored in its tokens' slots; those of the text are in theirs. N: tokens of
an image, of which the first R are seen; T: tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from pagewick.attention.backend import AttentionBatch, BoundHeads, GroupBatch
from pagewick.kernels.options import PLAIN_HEADS
from pagewick.layers.attention import Attention
from pagewick.layers.context import BlockBatch, LayerContext

# A step with more tokens of text makes an array of its own.
_USUAL_TOKENS: Final = 4096


@dataclass(frozen=True, slots=True)
class _ImageBatch:
    """An AttentionBatch whose sequences end with their image: every query sees all of it."""

    cu_seqlens_q: Tensor
    context_lens: Tensor
    groups: Sequence[GroupBatch]
    key_ends: Tensor
    window_key_ends: None = None


class TextAttention(Attention):
    """Attention of a text to itself, and to its image by `forward_image`.

    A text has at most R tokens. So the image and the text are the first two chunks of N tokens, and a token of the text
    sees the keys of its own chunk, up to itself.
    """

    def __init__(
        self,
        context: LayerContext,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        softmax_scale: float,
        *,
        num_image_tokens: int,
        num_image_rows: int,
        **options: Any,
    ) -> None:
        """num_image_tokens: N. num_image_rows: R. options: as in Attention, without a window."""
        super().__init__(
            context, num_heads, num_kv_heads, head_dim, softmax_scale, chunk_size=num_image_tokens, **options
        )
        self._ends = torch.full((_USUAL_TOKENS,), num_image_rows, dtype=torch.int32, device=context.device)
        self._of_image: BoundHeads | None = None

    def bind_cache(self, blocks: Tensor, group: int) -> None:
        super().bind_cache(blocks, group)
        scoring = replace(self._scoring, chunk_size=None, sees_all=True)
        self._of_image = self._bind(blocks, group, scoring)

    def store_image(self, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        """Store keys and values of images [I, num_kv_heads, head_dim] in the slots [I] of their tokens."""
        assert self._of_image is not None, "bind_cache comes first"
        self._of_image.store(k, v, slot_mapping)

    def forward_image(self, q: Tensor, batch: AttentionBatch) -> Tensor:
        """Attend to the image of each token's sequence: q [T, num_heads * head_dim] -> [T, num_heads, head_dim]."""
        assert self._of_image is not None, "bind_cache comes first"
        # Queries stand at the last positions of R, and key_ends lets each of them see all of it.
        lengths, ends = self._full(len(batch.context_lens)), self._full(len(q))
        of_image = _ImageBatch(batch.cu_seqlens_q, lengths, batch.groups, ends)
        return self._of_image.forward_queries(q, of_image, PLAIN_HEADS)

    def _full(self, length: int) -> Tensor:
        """Return [length] int32 of R. Those of steps that are repeated stay where they are."""
        return self._ends[:length] if length <= len(self._ends) else self._ends[:1].repeat(length)


@dataclass(frozen=True, slots=True)
class TextBatch:
    """The tokens of text of a batch, and the sequences that have some."""

    input_ids: Tensor
    positions: Tensor
    cu_seqlens_q: Tensor
    context_lens: Tensor
    groups: Sequence[GroupBatch]
    adapter_ids: Tensor | None
    inputs_embeds: None = None
    embeds_mask: None = None
    deep_embeds: None = None
    key_ends: None = None
    window_key_ends: None = None
    token_types: None = None


def text_of(
    input_ids: Tensor, positions: Tensor, batch: BlockBatch, is_image: Tensor
) -> tuple[TextBatch, Tensor] | None:
    """Return the text of a batch, and the indices of its tokens; None if there is none.

    input_ids: [T], positions: [P, T], of the batch. is_image: [T] bool. A sequence's image is ahead of its text.
    """
    text = (~is_image).nonzero().flatten()
    if not len(text):
        return None
    # The number of tokens of text ahead of each sequence.
    before = torch.cat([text.new_zeros(1), (~is_image).cumsum(0)])[batch.cu_seqlens_q.long()]
    has_text = before.diff() > 0
    groups = [GroupBatch(group.slot_mapping[text], group.block_tables[has_text]) for group in batch.groups]
    return TextBatch(
        input_ids=input_ids[text],
        positions=positions[:, text],
        cu_seqlens_q=torch.cat([before[:1], before[1:][has_text]]).to(torch.int32),
        context_lens=batch.context_lens[has_text],
        groups=groups,
        adapter_ids=None if batch.adapter_ids is None else batch.adapter_ids[text],
    ), text
