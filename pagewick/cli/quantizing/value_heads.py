"""Linear attention in llama.cpp's order, on its way into a GGUF file.

Qwen3.5's value heads: the first one of each key head, then the second one of each. Qwen3-Next's fused projection, which
has each key head's query, key, values and gates: all queries, all keys, all values; gates are a tensor of their own.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from pagewick.layers.state_config import DeltaConfig
from pagewick.models.config import ModelConfig

# Tensors of linear attention that belong to value heads alone, and those in which queries and keys come first.
_OF_HEADS = ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")
_OF_VALUES = "in_proj_z.weight"
_OF_CHANNELS = ("in_proj_qkv.weight", "conv1d.weight")
_OUTPUT = "out_proj.weight"
_FUSED = "in_proj_qkvz.weight"
Shape = tuple[int, ...]


def separate_projections(
    shapes: Mapping[str, Shape], places: Mapping[str, str], state: DeltaConfig | None
) -> tuple[dict[str, Shape], dict[str, str]]:
    """Return the tensors that files have in place of a checkpoint's: their shapes, and the tensors that hold them.

    places: the checkpoint's names of `shapes` in its files.
    """
    found, sources = dict(shapes), dict(places)
    for name in [name for name in shapes if state is not None and name.endswith(_FUSED)]:
        assert state is not None
        place, (_, columns) = sources.pop(name), found.pop(name)
        sizes = {_OF_CHANNELS[0]: state.num_channels, _OF_VALUES: state.num_value_heads * state.value_dim}
        for part, size in sizes.items():
            found[name.replace(_FUSED, part)] = size, columns
            sources[name.replace(_FUSED, part)] = place
    return found, sources


def in_order_of_files(name: str, weight: Tensor, state: DeltaConfig | None) -> Tensor:
    """Return a checkpoint's tensor with its value heads as files have them. name: the checkpoint's.

    state: None for a model without linear attention. The same tensor is returned if nothing moves.
    """
    part = name.partition(".linear_attn.")[2]
    if state is not None and state.is_fused and part in (_OF_CHANNELS[0], _OF_VALUES):
        return _separated(part, weight, state)
    if state is None or not part or not _moves(state):
        return weight
    if part == _OUTPUT:
        return weight[:, _moved(state, state.value_dim)]
    if part in _OF_HEADS:
        return weight[_moved(state, 1)]
    if part == _OF_VALUES:
        return weight[_moved(state, state.value_dim)]
    if part in _OF_CHANNELS:
        first = 2 * state.num_key_heads * state.key_dim
        return torch.cat([weight[:first], weight[first:][_moved(state, state.value_dim)]])
    return weight


def moved_columns(model: ModelConfig) -> Tensor | None:
    """Return the columns of output projections in the order of files; None: the model has them so already."""
    state = state_of(model)
    if state is None or not _moves(state):
        return None
    return _moved(state, state.value_dim)


def state_of(model: ModelConfig) -> DeltaConfig | None:
    """Return the linear attention of a model, which is the same in all its layers; None: it has none."""
    return next(iter(model.deltas), None)


def _separated(part: str, weight: Tensor, state: DeltaConfig) -> Tensor:
    """Return the queries, keys and values of a fused projection, or its gates."""
    values = state.num_value_heads // state.num_key_heads * state.value_dim
    sizes = [state.key_dim, state.key_dim, values, values]
    heads = torch.split(weight.reshape(state.num_key_heads, -1, weight.shape[-1]), sizes, dim=1)
    kinds = heads[3:] if part == _OF_VALUES else heads[:3]
    return torch.cat([kind.flatten(0, 1) for kind in kinds])


def _moves(state: DeltaConfig) -> bool:
    """Whether files have another order; those of Qwen3-Next have the checkpoint's."""
    return not (state.is_tiled or state.has_fused_gates or state.num_value_heads == state.num_key_heads)


def _moved(state: DeltaConfig, size: int) -> Tensor:
    """Return the rows of value heads of `size` rows in the order of files."""
    rows = torch.arange(state.num_value_heads * size).view(state.num_key_heads, -1, size)
    return rows.transpose(0, 1).flatten()
