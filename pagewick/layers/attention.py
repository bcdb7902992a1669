"""The attention layer: one rank's heads, and a backend that stores their keys and values and computes attention."""

from __future__ import annotations

from torch import Tensor, nn

from pagewick.attention.backend import AttentionBatch, BoundHeads, Scoring
from pagewick.attention.cache_spec import CacheSpec, KeptHeads
from pagewick.kernels.options import PLAIN_HEADS, HeadOptions, Rotation
from pagewick.layers.context import LayerContext

__all__ = ["Attention", "AttentionBatch", "HeadOptions", "Rotation"]


class Attention(nn.Module):
    """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] -> [T, num_heads, head_dim].

    The numbers of heads are this rank's. window: number of tokens that each token sees, itself included; None: all.
    kv_scales: the checkpoint's scales of all keys and of all values; 0: it has none.
    The engine reads `cache_spec` and calls `bind_cache` once.
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
        logit_soft_cap: float | None = None,
    ) -> None:
        super().__init__()
        self._kept = KeptHeads(num_kv_heads, head_dim, window)
        self._scoring = Scoring(num_heads, softmax_scale, logit_soft_cap)
        self.kv_scales = [0.0, 0.0]
        self._backend = context.backend
        self._bound: BoundHeads | None = None

    @property
    def cache_spec(self) -> CacheSpec:
        return self._backend.cache_spec(self._kept)

    def bind_cache(self, blocks: Tensor, group: int) -> None:
        """Use `blocks` [num_blocks, block_bytes] uint8, addressed by the block tables of cache group `group`."""
        k_scale, v_scale = self.kv_scales
        self._bound = self._backend.bind_heads(self._kept, self._scoring, blocks, group, (k_scale, v_scale))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        assert self._bound is not None, "bind_cache comes first"
        return self._bound.forward(q, k, v, batch)

    def forward_fused(self, qkv: Tensor, batch: AttentionBatch, heads: HeadOptions = PLAIN_HEADS) -> Tensor:
        """Normalise and rotate queries and keys as `heads` says, then do what forward does.

        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], the heads side by side.
        """
        assert self._bound is not None, "bind_cache comes first"
        return self._bound.forward_fused(qkv, batch, heads)
