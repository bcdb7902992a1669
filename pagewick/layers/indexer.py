"""The indexer of sparse attention: selects the tokens that a token sees (DeepSeek-V3.2, arXiv:2512.02556)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.attention.backend import AttentionBatch, BoundIndex
from pagewick.attention.cache_spec import CacheSpec, KeptIndexKeys
from pagewick.kernels.options import Rotation, SelectedKeys
from pagewick.layers.config import IndexerConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.log_scales import LogScales
from pagewick.layers.moe import Router
from pagewick.layers.norm import LayerNorm
from pagewick.layers.rotary import Angles, CosSin

_QUERY_NORM_EPS = 1e-6


class LentSelection:
    """Keeps what an indexer has selected until the last layer that sees the same tokens has taken it.

    The selections of all layers together would take gigabytes.
    """

    def __init__(self) -> None:
        self._num_borrowers = self._num_waiting = 0
        self._selected: SelectedKeys | None = None

    @property
    def is_kept(self) -> bool:
        return self._selected is not None

    def add_borrower(self) -> None:
        """Let one more layer take each selection. Called once for every such layer."""
        self._num_borrowers += 1

    def put(self, selected: SelectedKeys) -> None:
        """Replace the selection by that of the next batch."""
        self._num_waiting = self._num_borrowers
        self._selected = selected if self._num_borrowers else None

    def take(self) -> SelectedKeys:
        """Return the selection. Called once by each borrower."""
        assert self._selected is not None, "a layer with an indexer comes first"
        selected = self._selected
        self._num_waiting -= 1
        if self._num_waiting == 0:
            self._selected = None
        return selected


class Indexer(nn.Module):
    """Every rank has all of it, so that all ranks select the same tokens. Module names are checkpoint names.

    The engine reads `cache_spec` and calls `bind_cache` once. lent: what the last call of `forward` has selected.
    """

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, q_lora_rank: int | None, config: IndexerConfig
    ) -> None:
        """q_lora_rank: size of what queries are made from, unless that is hidden states."""
        super().__init__()
        num_heads, head_dim = config.num_heads, config.head_dim
        self._config = config
        # No token has more before it.
        self._top_k = min(config.top_k, context.max_model_len)
        self._kept = KeptIndexKeys(head_dim)
        self._backend = context.backend
        self._bound: BoundIndex | None = None
        self.lent = LentSelection()
        self.q_input_norm: LayerNorm | None = None
        if config.reads_hidden_states:
            q_lora_rank = hidden_size
            self.q_input_norm = LayerNorm(context, hidden_size, _QUERY_NORM_EPS, has_bias=True)
        assert q_lora_rank is not None, "other indexers read what queries are made from"
        self.wq_b = ReplicatedLinear(context, f"{prefix}.wq_b", q_lora_rank, num_heads * head_dim)
        self.softmax_scaling: LogScales | None = None
        if config.has_log_scales:
            self.softmax_scaling = LogScales(context, head_dim, num_heads, total_num_heads=num_heads)
        self.wk = ReplicatedLinear(context, f"{prefix}.wk", hidden_size, head_dim)
        self.k_norm = LayerNorm(context, head_dim, config.norm_eps, has_bias=True)
        self.weights_proj = Router(context, f"{prefix}.weights_proj", hidden_size, num_heads)
        self._columns: tuple[Tensor, Tensor] | None = None
        if config.num_last:
            # No score depends on the order of the elements, as long as queries and keys have the same.
            order = torch.arange(head_dim).roll(config.num_last)
            heads = head_dim * torch.arange(num_heads)[:, None]
            of_queries, of_keys = ((start + order).flatten().to(context.device) for start in (heads, heads[:1]))
            self._columns = of_queries, of_keys

    @property
    def cache_spec(self) -> CacheSpec:
        return self._backend.cache_spec(self._kept)

    def bind_cache(self, blocks: Tensor, group: int) -> None:
        """Use `blocks` [num_blocks, block_bytes] uint8, addressed by the block tables of cache group `group`."""
        self._bound = self._backend.bind_index(self._kept, blocks, group)

    def forward(
        self,
        hidden_states: Tensor,
        query_latents: Tensor | None,
        angles: Angles | CosSin | None,
        turn: CosSin,
        batch: AttentionBatch,
        group: int,
    ) -> SelectedKeys:
        """Select tokens for [T, hidden_size]. group: the cache group of the latents.

        query_latents: [T, q_lora_rank], from which the queries of attention are made as well; None in an indexer that
        reads hidden states. turn: the cosines and sines by which queries and keys rotate.
        """
        assert self._bound is not None, "bind_cache comes first"
        config = self._config
        if self.q_input_norm is not None:
            query_latents = self.q_input_norm(hidden_states)
        queries = self.wq_b(query_latents, batch)
        if self.softmax_scaling is not None:
            queries = self.softmax_scaling(queries, angles)
        keys = self.k_norm(self.wk(hidden_states, batch))
        if self._columns is not None:
            queries, keys = map(kernels.gather_columns, (queries, keys), self._columns)
        selected = self._bound.forward(
            queries.view(len(hidden_states), config.num_heads, config.head_dim),
            keys,
            self.weights_proj(hidden_states, batch),
            batch,
            rotation=Rotation(*turn, config.is_interleaved),
            top_k=self._top_k,
            latent_group=group,
        )
        self.lent.put(selected)
        return selected
