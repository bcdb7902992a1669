"""Key-values of GGUF files of models of 2026 that differ from those of other models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pagewick.layers.config import MlaConfig, MoeConfig
from pagewick.models.config import ModelConfig
from pagewick.models.parts import AttentionConfig, MlpConfig
from pagewick.models.step3 import bound_of
from pagewick.weights.gguf.entries_2026 import BOUNDS, FULL_INTERVAL

Factors = dict[str, tuple[float, ...]]
"""Name of a tensor in the file that holds divisors of rotary frequencies -> the numbers."""


_SIGMOID: Final = 2  # expert_gating_func


def values_2026(kind: str, model: ModelConfig) -> dict[str, Any]:
    """Return the key-values of one of these models; none for any other.

    kind: general.architecture. model: with has_mtp if the file has the layer that predicts further tokens.
    """
    values = _VALUES.get(kind)
    return {} if values is None else values(model)


def padded_factors(kind: str, model: ModelConfig, factors: Factors) -> Factors:
    """Return the divisors of rotary frequencies as files of a kind have them: those of Step 3.5 for each pair."""
    if kind != "step35":
        return factors
    num_pairs = _attentions(model)[0].head_dim // 2
    return {name: (*numbers, *[1.0] * (num_pairs - len(numbers))) for name, numbers in factors.items()}


def _bailing(model: ModelConfig) -> dict[str, Any]:
    # As the converter has it, which llama.cpp does not use.
    value_size = {"attention.value_length": model.deltas[0].value_dim} if model.deltas else {}
    return {
        **_kinds(model),
        **_num_dense(model),
        **_groups(model),
        **_bounds(model),
        **_shared_size(model),
        **value_size,
    }


def _kimi_linear(model: ModelConfig) -> dict[str, Any]:
    # Nothing turns, and files have the size all the same.
    turned = [layer.attention.qk_rope_head_dim for layer in model.layers if isinstance(layer.attention, MlaConfig)]
    return {**_kinds(model), **_num_dense(model), **_groups(model), "rope.dimension_count": turned[0]}


def _step35(model: ModelConfig) -> dict[str, Any]:
    # llama.cpp halves the numbers that turn in layers that see everything.
    (head_dim,) = {attention.head_dim for attention in _attentions(model)}
    size = {"rope.dimension_count": head_dim}
    return {**_heads(model), **_num_dense(model), **_shared_size(model), **_bounds(model), **size}


def _mimo2(model: ModelConfig) -> dict[str, Any]:
    windows = [layer.window for layer in model.layers]
    attention = _attentions(model)[0]
    found = {
        "attention.head_count": attention.num_heads,
        "attention.head_count_kv": [attention.num_kv_heads for attention in _attentions(model)],
        "attention.value_length": attention.value_dim,
        "attention.value_scale": attention.value_scale,
        "attention.sliding_window_pattern": [int(window is not None) for window in windows],
        "expert_gating_func": _SIGMOID,
    }
    if sizes := {window for window in windows if window is not None}:
        # The new token itself does not count.
        found["attention.sliding_window"] = sizes.pop() - 1
    return {**found, **_groups(model)}


def _laguna(model: ModelConfig) -> dict[str, Any]:
    attentions = _attentions(model)
    found: dict[str, Any] = {
        "attention.head_count": [attention.num_heads for attention in attentions],
        "attention.head_count_kv": attentions[0].num_kv_heads,
        **_num_dense(model),
    }
    slides = [layer.window is not None for layer in model.layers]
    if not any(slides):
        return {**found, "attention.sliding_window": 0}
    if slides != [layer % FULL_INTERVAL != 0 for layer in range(model.num_layers)]:
        found["attention.sliding_window_pattern"] = slides
    turned = [layer.rope.rotary_dim for layer in model.layers if layer.window is not None and layer.rope is not None]
    return {**found, "rope.dimension_count_swa": turned[0]}


def _attentions(model: ModelConfig) -> list[AttentionConfig]:
    return [layer.attention for layer in model.layers if isinstance(layer.attention, AttentionConfig)]


def _heads(model: ModelConfig) -> dict[str, Any]:
    """Numbers of heads, which differ from layer to layer."""
    attentions = _attentions(model)
    return {
        "attention.head_count": [attention.num_heads for attention in attentions],
        "attention.head_count_kv": [attention.num_kv_heads for attention in attentions],
    }


def _shared_size(model: ModelConfig) -> dict[str, Any]:
    shared = model.mixtures[0].shared_intermediate_size if model.mixtures else None
    return {} if shared is None else {"expert_shared_feed_forward_length": shared}


def _kinds(model: ModelConfig) -> dict[str, Any]:
    """Layers of latent attention keep one head; the others have linear attention."""
    heads = [int(isinstance(layer.attention, MlaConfig)) for layer in model.all_layers]
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
    pairs = [_bounds_of(layer.mlp) for layer in model.all_layers]
    bounds = (list(map(float, each)) for each in zip(*pairs, strict=True))
    return {key: each for key, each in zip(BOUNDS, bounds, strict=True) if any(each)}


def _bounds_of(mlp: MlpConfig | MoeConfig | None) -> tuple[float, float]:
    if isinstance(mlp, MoeConfig):
        return bound_of(mlp.activation), bound_of(mlp.shared_activation or mlp.activation)
    return 0.0, 0.0 if mlp is None else bound_of(mlp.activation)


_VALUES: Final[Mapping[str, Callable[[ModelConfig], dict[str, Any]]]] = {
    "bailingmoe3": _bailing,
    "kimi-linear": _kimi_linear,
    "step35": _step35,
    "mimo2": _mimo2,
    "laguna": _laguna,
}
