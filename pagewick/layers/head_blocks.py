"""The indexer of block-sparse attention: selects the blocks of keys that each KV head's queries see (MiniMax-M3).

T: tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.attention.backend import AttentionBatch, BoundIndex
from pagewick.attention.cache_spec import CacheSpec, KeptIndexKeys
from pagewick.kernels.block_choice import BlockChoice
from pagewick.kernels.options import Rotation, SelectedKeys
from pagewick.layers.config import HeadBlockConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.norm import RMSNorm


class HeadBlockIndexer(nn.Module):
    """Each rank has all of it, and selects for its own KV heads. Module names are checkpoint names.

    The engine reads `cache_spec` and calls `bind_cache` once.
    """

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        hidden_size: int,
        config: HeadBlockConfig,
        kv_heads: Sequence[int],
        total_num_kv_heads: int,
    ) -> None:
        """kv_heads: ids of this rank's."""
        super().__init__()
        num_heads, head_dim = config.num_heads, config.head_dim
        self._head_dim = head_dim
        # No token has more before it, and no sequence is longer than one block of this size.
        self.ratio = min(config.block_size, context.max_model_len)
        top_k = min(config.top_k, -(-context.max_model_len // self.ratio))
        self._choice = BlockChoice(self.ratio, top_k, min(config.num_local, top_k))
        # Successive KV heads may have the same index head.
        per_head = total_num_kv_heads // num_heads
        columns = torch.tensor(kv_heads)[:, None] // per_head * head_dim + torch.arange(head_dim)
        self._columns = columns.flatten().to(context.device)
        self._kept = KeptIndexKeys(head_dim)
        self._backend = context.backend
        self._bound: BoundIndex | None = None
        self.q_proj = ReplicatedLinear(context, f"{prefix}.q_proj", hidden_size, num_heads * head_dim)
        self.k_proj = ReplicatedLinear(context, f"{prefix}.k_proj", hidden_size, head_dim)
        self.q_norm, self.k_norm = (RMSNorm(context, head_dim, config.norm_eps, offset=1.0) for _ in range(2))

    @property
    def cache_spec(self) -> CacheSpec:
        return self._backend.cache_spec(self._kept)

    def bind_cache(self, blocks: Tensor, group: int) -> None:
        """Use `blocks` [num_blocks, block_bytes] uint8, addressed by the block tables of cache group `group`."""
        self._bound = self._backend.bind_index(self._kept, blocks, group)

    def forward(self, hidden_states: Tensor, rotation: Rotation, batch: AttentionBatch) -> SelectedKeys:
        """Select for [T, hidden_size] what each of this rank's KV heads sees."""
        assert self._bound is not None, "bind_cache comes first"
        queries = kernels.gather_columns(self.q_proj(hidden_states, batch), self._columns).view(-1, self._head_dim)
        return self._bound.select_blocks(
            self.q_norm(queries).view(len(hidden_states), -1, self._head_dim),
            self.k_norm(self.k_proj(hidden_states, batch)),
            batch,
            rotation=rotation,
            choice=self._choice,
        )
