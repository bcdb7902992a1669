"""The attention layer: one rank's heads, their place in the KV cache, and a backend that does the work."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor, nn

from pagewick.attention.backend import AttentionBatch, HeadOptions, ScoreOptions
from pagewick.attention.cache_spec import CacheSpec, full_attention_spec
from pagewick.kernels import KVCache
from pagewick.layers.context import LayerContext

__all__ = ["Attention", "AttentionBatch"]


class Attention(nn.Module):
    """q [T, num_heads, head_dim], k and v [T, num_kv_heads, head_dim] -> [T, num_heads, head_dim].

    The numbers of heads are this rank's. window: how many tokens each token sees, itself included; None is all.
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
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self._options = ScoreOptions(softmax_scale=softmax_scale, sliding_window=window, logit_soft_cap=logit_soft_cap)
        self._backend = context.backend
        self._cache_dtype = context.cache_dtype
        self._cache: KVCache | None = None
        self._group = 0

    @property
    def cache_spec(self) -> CacheSpec:
        element_bytes = self._cache_dtype.itemsize
        spec = full_attention_spec(self.num_kv_heads, self.head_dim, self._backend.block_size, element_bytes)
        return spec.windowed(self._options.get("sliding_window"))

    def bind_cache(self, blocks: Tensor, group: int) -> None:
        """Use `blocks` [num_blocks, block_bytes] uint8, addressed by the block tables of cache group `group`."""
        self._cache = self._backend.view_cache(blocks, self.num_kv_heads, self.head_dim, self._cache_dtype)
        self._group = group

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: AttentionBatch) -> Tensor:
        group = batch.groups[self._group]
        return self._backend.forward(q, k, v, self._bound_cache(), batch, group, self._options)

    def forward_fused(self, qkv: Tensor, batch: AttentionBatch, **options: Unpack[HeadOptions]) -> Tensor:
        """forward for the heads side by side, qkv [T, (num_heads + 2 * num_kv_heads) * head_dim].

        Queries and keys are normalised and rotated first, as the options of kernels.rope_and_store say.
        """
        group = batch.groups[self._group]
        return self._backend.forward_fused(
            qkv, self.num_heads, self._bound_cache(), batch, group, self._options, **options
        )

    def _bound_cache(self) -> KVCache:
        assert self._cache is not None, "bind_cache comes first"
        return self._cache
