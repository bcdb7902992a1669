"""The attention layer: one rank's heads, and a backend that stores their keys and values and computes attention."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pagewick.attention.backend import AttentionBatch, BoundHeads, Scoring
from pagewick.attention.cache_spec import CacheSpec, KeptHeads
from pagewick.kernels.options import PLAIN_HEADS, HeadOptions, Rotation, SelectedKeys
from pagewick.layers.context import LayerContext
from pagewick.quantization.share import check_floats

__all__ = ["Attention", "AttentionBatch", "BorrowedAttention", "HeadOptions", "HeadSinks", "Rotation"]


class Attention(nn.Module):
    """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] -> [T, num_heads, head_dim].

    The numbers of heads are this rank's. window: number of tokens that each token sees, itself included; None: all.
    is_chunked: the window is a chunk, which begins at the last multiple of its size.
    sinks: [num_heads] float32, a further logit of each head's softmax, which has no value.
    sees_images_whole: tokens of an image see those behind them in the same image, too. sees_all: all tokens do.
    is_selective: each token sees a selection of those before it. chunk_size: see Scoring.
    kv_scales: the checkpoint's scales of all keys and of all values; 0: it has none.
    The engine reads `cache_spec` and calls `bind_cache` once. group: the cache group that it has got.
    """

    def __init__(
        self,
        context: LayerContext,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        softmax_scale: float,
        *,
        window: int | None = None,
        is_chunked: bool = False,
        logit_soft_cap: float | None = None,
        sinks: Tensor | None = None,
        sees_images_whole: bool = False,
        sees_all: bool = False,
        is_selective: bool = False,
        chunk_size: int | None = None,
    ) -> None:
        super().__init__()
        self._kept = KeptHeads(num_kv_heads, head_dim, window, is_chunked, is_selective)
        self._scoring = Scoring(
            num_heads, softmax_scale, logit_soft_cap, sinks, sees_images_whole, sees_all, chunk_size
        )
        self.kv_scales = [0.0, 0.0]
        self._backend = context.backend
        self._bound: BoundHeads | None = None
        self.group = 0

    @property
    def cache_spec(self) -> CacheSpec:
        return self._backend.cache_spec(self._kept)

    def bind_cache(self, blocks: Tensor, group: int) -> None:
        """Use `blocks` [num_blocks, block_bytes] uint8, addressed by the block tables of cache group `group`."""
        self._bound = self._bind(blocks, group, self._scoring)
        self.group = group

    def _bind(self, blocks: Tensor, group: int, scoring: Scoring) -> BoundHeads:
        k_scale, v_scale = self.kv_scales
        return self._backend.bind_heads(self._kept, scoring, blocks, group, (k_scale, v_scale))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        assert self._bound is not None, "bind_cache comes first"
        return self._bound.forward(q, k, v, batch)

    def forward_fused(self, qkv: Tensor, batch: AttentionBatch, heads: HeadOptions = PLAIN_HEADS) -> Tensor:
        """Normalise and rotate queries and keys as `heads` says, then do what forward does.

        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], the heads side by side.
        """
        assert self._bound is not None, "bind_cache comes first"
        return self._bound.forward_fused(qkv, batch, heads)

    def forward_queries(self, q: Tensor, batch: AttentionBatch, heads: HeadOptions = PLAIN_HEADS) -> Tensor:
        """Do what forward_fused does for q [T, num_heads * head_dim], with the keys and values that are stored."""
        assert self._bound is not None, "bind_cache comes first"
        return self._bound.forward_queries(q, batch, heads)

    def forward_selected(
        self, qkv: Tensor, batch: AttentionBatch, heads: HeadOptions, selected: SelectedKeys, ratio: int
    ) -> Tensor:
        """Do what forward_fused does, but attend to selected blocks of `ratio` tokens (kernels.block_attention)."""
        assert self._bound is not None, "bind_cache comes first"
        return self._bound.forward_selected(qkv, batch, heads, selected, ratio)


class BorrowedAttention(nn.Module):
    """Attention to the keys and values that another layer stores in the same step, before this one. It has no cache."""

    def __init__(self) -> None:
        super().__init__()
        # Not a submodule: the lender is another layer's.
        self._lenders: tuple[Attention, ...] = ()

    def borrow_from(self, lender: Attention) -> None:
        """Called once, before forward_fused. The lender has as many heads of the same size, and the same window."""
        self._lenders = (lender,)

    def forward_fused(self, q: Tensor, batch: AttentionBatch, heads: HeadOptions = PLAIN_HEADS) -> Tensor:
        """Return [T, num_heads, head_dim] for q [T, num_heads * head_dim]."""
        return self._lenders[0].forward_queries(q, batch, heads)


class HeadSinks(nn.Module):
    """A further logit in the softmax of each query head, which has no value: [heads] float32.

    heads: ids of this rank's heads.
    """

    def __init__(self, context: LayerContext, heads: Sequence[int], total_num_heads: int) -> None:
        super().__init__()
        empty = torch.empty(len(heads), dtype=torch.float32, device=context.device)
        self.weight = nn.Parameter(empty, requires_grad=False)
        self._heads, self._total_num_heads = list(heads), total_num_heads

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, "weight"),)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_floats(tensor, (self._total_num_heads,))
        self.weight.copy_(tensor[self._heads])
