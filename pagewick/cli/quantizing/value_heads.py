"""Value heads of linear attention in llama.cpp's order: the first one of each key head, then the second one of each."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.layers.config import DeltaConfig
from pagewick.models.config import ModelConfig

# Tensors of linear attention that belong to value heads alone, and those in which queries and keys come first.
_OF_HEADS = ("in_proj_b.weight", "in_proj_a.weight", "A_log", "dt_bias")
_OF_VALUES = "in_proj_z.weight"
_OF_CHANNELS = ("in_proj_qkv.weight", "conv1d.weight")
_OUTPUT = "out_proj.weight"


def in_order_of_files(name: str, weight: Tensor, state: DeltaConfig | None) -> Tensor:
    """Return a checkpoint's tensor with its value heads as files have them. name: the checkpoint's.

    state: None for a model without linear attention. The same tensor is returned if nothing moves.
    """
    part = name.partition(".linear_attn.")[2]
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
    return next((layer.state for layer in model.layers if layer.state is not None), None)


def _moves(state: DeltaConfig) -> bool:
    """Whether files have another order; those of Qwen3-Next have the checkpoint's."""
    return not (state.is_tiled or state.has_fused_gates or state.num_value_heads == state.num_key_heads)


def _moved(state: DeltaConfig, size: int) -> Tensor:
    """Return the rows of value heads of `size` rows in the order of files."""
    rows = torch.arange(state.num_value_heads * size).view(state.num_key_heads, -1, size)
    return rows.transpose(0, 1).flatten()
