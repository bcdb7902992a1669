"""Key-values of GGUF files of models of 2026 that differ from those of other models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pagewick.layers.config import MlaConfig, MoeConfig
from pagewick.models.config import ModelConfig
from pagewick.models.parts import MlpConfig
from pagewick.models.step3 import bound_of
from pagewick.weights.gguf.entries_2026 import BOUNDS


def values_2026(kind: str, model: ModelConfig) -> dict[str, Any]:
    """Return the key-values of one of these models; none for any other. kind: general.architecture."""
    values = _VALUES.get(kind)
    return {} if values is None else values(model)


def _bailing(model: ModelConfig) -> dict[str, Any]:
    shared = model.mixtures[0].shared_intermediate_size if model.mixtures else None
    sizes = {} if shared is None else {"expert_shared_feed_forward_length": shared}
    # As the converter has it, which llama.cpp does not use.
    value_size = {"attention.value_length": model.deltas[0].value_dim} if model.deltas else {}
    return {**_kinds(model), **_num_dense(model), **_groups(model), **_bounds(model), **sizes, **value_size}


def _kimi_linear(model: ModelConfig) -> dict[str, Any]:
    # Nothing turns, and files have the size all the same.
    turned = [layer.attention.qk_rope_head_dim for layer in model.layers if isinstance(layer.attention, MlaConfig)]
    return {**_kinds(model), **_num_dense(model), **_groups(model), "rope.dimension_count": turned[0]}


def _kinds(model: ModelConfig) -> dict[str, Any]:
    """Layers of latent attention keep one head; the others have linear attention."""
    heads = [int(isinstance(layer.attention, MlaConfig)) for layer in model.layers]
    return {"attention.head_count_kv": heads}


def _num_dense(model: ModelConfig) -> dict[str, Any]:
    """The number of layers before the first one with experts."""
    sparse = (idx for idx, layer in enumerate(model.layers) if isinstance(layer.mlp, MoeConfig))
    return {"leading_dense_block_count": next(sparse, model.num_layers)}


def _groups(model: ModelConfig) -> dict[str, Any]:
    if not model.mixtures:
        return {}
    routing = model.mixtures[0].routing
    return {"expert_group_count": routing.num_groups, "expert_group_used_count": routing.top_k_groups}


def _bounds(model: ModelConfig) -> dict[str, Any]:
    """Bounds of the gated products of each layer's experts, and of its shared expert or MLP, if any has some."""
    pairs = [_bounds_of(layer.mlp) for layer in model.layers]
    bounds = (list(map(float, each)) for each in zip(*pairs, strict=True))
    return {key: each for key, each in zip(BOUNDS, bounds, strict=True) if any(each)}


def _bounds_of(mlp: MlpConfig | MoeConfig | None) -> tuple[float, float]:
    if isinstance(mlp, MoeConfig):
        return bound_of(mlp.activation), bound_of(mlp.shared_activation or mlp.activation)
    return 0.0, 0.0 if mlp is None else bound_of(mlp.activation)


_VALUES: Final[Mapping[str, Callable[[ModelConfig], dict[str, Any]]]] = {
    "bailingmoe3": _bailing,
    "kimi-linear": _kimi_linear,
}
