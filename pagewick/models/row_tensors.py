"""The tensors of attention to a window and to compressed entries, and of hyper-connections. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pagewick.layers.compressed_config import CompressorConfig, WindowConfig
from pagewick.models.state_tensors import Named
from pagewick.models.tensor_sizes import Size, cut, whole

if TYPE_CHECKING:
    from pagewick.layers.config import HyperConfig


def window_tensors(config: WindowConfig, hidden: Size, rank: int, num_ranks: int) -> Iterator[Named]:
    """Yield the name behind self_attn, the role and the sizes of each tensor. hidden: the size of hidden states."""
    low, dim = whole(config.q_lora_rank), whole(config.head_dim)
    heads, groups = cut(config.num_heads, rank, num_ranks), cut(config.num_groups, rank, num_ranks)
    yield "q_a_proj.weight", "attention", (low, hidden)
    yield "q_a_norm.weight", "norm", (low,)
    yield "q_b_proj.weight", "attention", (heads.times(config.head_dim), low)
    yield "kv_proj.weight", "attention", (dim, hidden)
    yield "kv_norm.weight", "norm", (dim,)
    yield "sinks.weight", "attention", (heads,)
    outputs = groups.times(config.group_rank)
    yield "o_a_proj.weight", "attention", (outputs, whole(config.group_width))
    yield "o_b_proj.weight", "attention", (hidden, outputs)
    if (compressor := config.compressor) is None:
        return
    yield from _compressor("compressor", compressor, hidden, config.head_dim)
    if (indexer := compressor.indexer) is not None:
        yield from _compressor("indexer", compressor, hidden, indexer.head_dim)
        yield "indexer.q_b_proj.weight", "attention", (whole(indexer.num_heads * indexer.head_dim), low)
        yield "indexer.weights_proj.weight", "router", (whole(indexer.num_heads), hidden)


def _compressor(name: str, config: CompressorConfig, hidden: Size, dim: int) -> Iterator[Named]:
    rows = whole(config.num_kinds * dim)
    yield f"{name}.kv_proj.weight", "attention", (rows, hidden)
    yield f"{name}.gate_proj.weight", "attention", (rows, hidden)
    yield f"{name}.position_bias", "router", (whole(config.ratio), rows)
    yield f"{name}.kv_norm.weight", "norm", (whole(dim),)


def stream_tensors(config: HyperConfig, hidden: Size, num_weights: int) -> Iterator[Named]:
    """Yield the same for what reads streams, in float32 as routers; num_weights: as in layers.hyper.StreamReader."""
    num_scales = 1 if num_weights == config.num_streams else config.num_kinds
    yield "fn", "router", (whole(num_weights), hidden.times(config.num_streams))
    yield "base", "router", (whole(num_weights),)
    yield "scale", "router", (whole(num_scales),)
