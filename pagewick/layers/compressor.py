"""Compressed entries: what a layer makes from the tokens of a window, and an indexer that selects some of them.

T: tokens of a batch; H: hidden_size; D: numbers of an entry. Module names are checkpoint names.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick.attention.backend import AttentionBatch, BoundRows
from pagewick.attention.cache_spec import CacheSpec, KeptRows
from pagewick.kernels.options import CompressOptions, Rotation, SelectedKeys
from pagewick.layers.compressed_config import CompressorConfig
from pagewick.layers.config import IndexerConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import MergedReplicatedLinear, ReplicatedLinear
from pagewick.layers.moe import Router
from pagewick.layers.norm import RMSNorm
from pagewick.layers.rotary import Angles
from pagewick.quantization.share import check_floats


class RowCache(nn.Module):
    """A cache of rows. The engine reads `cache_spec` and calls `bind_cache` once."""

    def __init__(self, context: LayerContext, kept: KeptRows) -> None:
        super().__init__()
        self._kept, self._backend = kept, context.backend
        self._bound: BoundRows | None = None

    @property
    def cache_spec(self) -> CacheSpec:
        return self._backend.cache_spec(self._kept)

    def bind_cache(self, blocks: Tensor, group: int) -> None:
        """Use `blocks` [num_blocks, block_bytes] uint8, addressed by the block tables of cache group `group`."""
        self._bound = self._backend.bind_rows(self._kept, blocks, group)

    @property
    def rows(self) -> BoundRows:
        assert self._bound is not None, "bind_cache comes first"
        return self._bound


def turning(angles: Angles, dim: int) -> Rotation:
    """Return the rotation of vectors of `dim` numbers, whose last ones turn. The angles are at least as many."""
    half = dim // 2
    return Rotation(angles.cos[:, -half:], angles.sin[:, -half:], interleaved=True)


class Compressor(nn.Module):
    """Makes an entry of `dim` numbers from the tokens of each window. Every rank has all of it."""

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, dim: int, config: CompressorConfig, norm_eps: float
    ) -> None:
        super().__init__()
        self.ratio, self._dim = config.ratio, dim
        kinds = config.num_kinds
        parts = {"kv_proj": kinds * dim, "gate_proj": kinds * dim}
        self.rows_proj = MergedReplicatedLinear(context, prefix, hidden_size, parts)
        self.kv_norm = RMSNorm(context, dim, norm_eps)
        self.position_bias = nn.Parameter(
            torch.empty(config.ratio, kinds * dim, dtype=torch.float32, device=context.device), requires_grad=False
        )
        self._options = CompressOptions(
            config.ratio, config.overlaps, self.position_bias, self.kv_norm.weight, norm_eps
        )
        of_tokens, of_entries = config.kept(dim)
        self.tokens, self.entries = RowCache(context, of_tokens), RowCache(context, of_entries)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, "position_bias"),)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_floats(tensor, tuple(self.position_bias.shape))
        self.position_bias.copy_(tensor)

    def compress(self, hidden_states: Tensor, first_angles: Angles, batch: AttentionBatch) -> None:
        """Store the entries of windows that end among these tokens [T, H].

        first_angles: for each token those of the first token of the window that it ends, if it ends one.
        """
        rows = self.rows_proj(hidden_states, batch)
        rotation = turning(first_angles, self._dim)
        self.tokens.rows.compress(rows, batch, self.entries.rows, rotation, self._options)


class EntryIndexer(Compressor):
    """Selects the entries that each token sees. Every rank has all of it, so that all ranks select the same."""

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        hidden_size: int,
        q_lora_rank: int,
        config: CompressorConfig,
        indexer: IndexerConfig,
        norm_eps: float,
    ) -> None:
        super().__init__(context, prefix, hidden_size, indexer.head_dim, config, norm_eps)
        self._config = indexer
        # No token has more before it.
        self._top_k = min(indexer.top_k, max(1, context.max_model_len // config.ratio))
        self.q_b_proj = ReplicatedLinear(
            context, f"{prefix}.q_b_proj", q_lora_rank, indexer.num_heads * indexer.head_dim
        )
        self.weights_proj = Router(context, f"{prefix}.weights_proj", hidden_size, indexer.num_heads)

    def select(
        self, hidden_states: Tensor, query_latents: Tensor, angles: Angles, batch: AttentionBatch, entries: RowCache
    ) -> SelectedKeys:
        """Return the places in `entries` that each token [T, H] sees. query_latents: [T, q_lora_rank]."""
        config = self._config
        queries = self.q_b_proj(query_latents, batch)
        return self.entries.rows.select(
            queries.view(len(hidden_states), config.num_heads, config.head_dim),
            self.weights_proj(hidden_states, batch),
            batch,
            entries.rows,
            rotation=turning(angles, config.head_dim),
            top_k=self._top_k,
        )
