"""Entries of config.json that follow from several keys of GGUF files of models of 2026. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.weights.gguf.metadata import Metadata

_SIGMOID: Final = 2  # expert_gating_func
# Keys of the bounds of gated products, of experts and of shared ones, with a number for each layer; 0: none.
BOUNDS: Final = ("swiglu_clamp_exp", "swiglu_clamp_shexp")
_LING_BOUNDS: Final = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
FULL_INTERVAL: Final = 4
"""The first of every four layers of Laguna has no window, unless a file lists them."""

_WINDOW: Final = "attention.sliding_window"
_PATTERN: Final = f"{_WINDOW}_pattern"
_LINEAR, _FULL, _SLIDING = "linear_attention", "full_attention", "sliding_attention"

Entries = Mapping[str, Any]


def _bailing(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """The kinds of layers, the bounds of products, and the size of the shared expert, which files have as a number."""
    _check_sigmoids(metadata)
    return {
        "n_shared_experts": _num_shared(metadata, found),
        "layer_types": _kinds(metadata, found),
        # Also that of the layer that predicts further tokens.
        **_bounds(metadata, metadata.num_layers()[0], _LING_BOUNDS),
    }


def _hy_v3(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """The number of shared experts, which the file has as their size, and the layers that have none."""
    return {"num_shared_experts": _num_shared(metadata, found), "mlp_layer_types": _mlp_kinds(metadata, found)}


def _num_shared(metadata: Metadata, found: Entries) -> int:
    """Return the number of shared experts by their size."""
    size, key = found.get("moe_intermediate_size", 0), "expert_shared_feed_forward_length"
    shared = metadata.get(key, size * found.get("n_shared_experts", 1))
    if not size or shared % size:
        raise metadata.wrong(f"{metadata.kind}.{key}", "not a multiple of expert_feed_forward_length")
    return int(shared // size)


def _step35(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """Heads and rotations of both kinds of layers; of those that see everything, half of what a file says turns."""
    _check_apart(metadata)
    _check_weights(metadata)
    head_dim = _head_dim(metadata)
    turned = metadata.get("rope.dimension_count", head_dim)
    kinds, shares = _window_kinds(metadata, found), {_FULL: turned // 2, _SLIDING: turned}
    shares[_SLIDING] = metadata.get("rope.dimension_count_swa", turned)
    heads = _of_kinds(metadata, "attention.head_count", kinds)
    return {
        "num_attention_heads": heads[_FULL],
        "num_sliding_attention_heads": heads[_SLIDING],
        "num_key_value_heads": metadata.get("attention.head_count_kv"),
        "head_dim": head_dim,
        "layer_types": kinds,
        "mlp_layer_types": _mlp_kinds(metadata, found),
        **_ropes(found, head_dim, shares),
        **_bounds(metadata, found["num_hidden_layers"], ("swiglu_limits", "swiglu_limits_shared")),
    }


def _mimo2(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """Key heads of both kinds of layers. Windows of published files do not count the new token itself."""
    _check_apart(metadata)
    _check_sigmoids(metadata)
    if (scale := metadata.get("expert_weights_scale", 1.0)) not in (0.0, 1.0):
        raise metadata.wrong(f"{metadata.kind}.expert_weights_scale", f"{scale!r:.80}, which is not supported")
    head_dim, kinds = metadata.get("attention.key_length"), _window_kinds(metadata, found)
    turned, heads = (
        metadata.get("rope.dimension_count", head_dim),
        _of_kinds(metadata, "attention.head_count_kv", kinds),
    )
    return {
        "num_attention_heads": metadata.get("attention.head_count"),
        "num_key_value_heads": heads[_FULL],
        "swa_num_key_value_heads": heads[_SLIDING],
        "head_dim": head_dim,
        "sliding_window": metadata.get(_WINDOW) + 1,
        "layer_types": kinds,
        "mlp_layer_types": _mlp_kinds(metadata, found),
        **_ropes(found, head_dim, dict.fromkeys((_FULL, _SLIDING), turned)),
    }


def _laguna(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """Query heads of each layer, the kind of their gates, and rotations. Without a window, no layer has one."""
    _check_apart(metadata)
    _check_weights(metadata)
    num_layers, head_dim = found["num_hidden_layers"], _head_dim(metadata)
    heads = metadata.of_layers("attention.head_count", num_layers)
    if heads is None:
        raise metadata.wrong(f"{metadata.kind}.attention.head_count", "missing")
    window = found.get("sliding_window")
    turned = metadata.get("rope.dimension_count", head_dim)
    shares = {_FULL: turned, _SLIDING: metadata.get("rope.dimension_count_swa", turned)}
    gates = metadata.shapes.get("blk.0.attn_gate.weight", heads[:1])[0]
    return {
        "num_attention_heads": heads[0],
        "num_attention_heads_per_layer": heads,
        "num_key_value_heads": metadata.get("attention.head_count_kv"),
        "head_dim": head_dim,
        "gating": "per-head" if gates == heads[0] else "per-element",
        "sliding_window": window or None,
        "layer_types": _first_full(metadata, num_layers) if window else [_FULL] * num_layers,
        **_ropes(found, head_dim, shares),
    }


def _first_full(metadata: Metadata, num_layers: int) -> list[str]:
    """Return layer_types: the first of every four layers sees everything, unless the file says otherwise."""
    pattern = metadata.values.get(f"{metadata.kind}.{_PATTERN}", FULL_INTERVAL)
    if isinstance(pattern, list):
        slides = metadata.of_layers(_PATTERN, num_layers)
        return [_SLIDING if slide else _FULL for slide in slides or ()]
    return [_SLIDING if layer % max(1, pattern) else _FULL for layer in range(num_layers)]


def _head_dim(metadata: Metadata) -> Any:
    head_dim = metadata.get("attention.key_length")
    if metadata.get("attention.value_length", head_dim) != head_dim:
        raise metadata.wrong(
            f"{metadata.kind}.attention.value_length", "another than key_length, which is not supported"
        )
    return head_dim


def _check_apart(metadata: Metadata) -> None:
    """Raise ModelLoadError for queries, keys and values in one tensor, whose parts differ from layer to layer."""
    fused = next((name for name in metadata.shapes if name.endswith(".attn_qkv.weight")), None)
    if fused is not None:
        raise ModelLoadError(
            f"{metadata.where} holds {fused}: queries, keys and values in one tensor are not supported in files of "
            f"{metadata.kind}\n  use another file of this model"
        )


def _window_kinds(metadata: Metadata, found: Entries) -> list[str]:
    """Return layer_types by the list of flags that files have."""
    slides = metadata.of_layers(_PATTERN, found["num_hidden_layers"])
    if slides is None:
        raise metadata.wrong(f"{metadata.kind}.{_PATTERN}", "missing")
    return [_SLIDING if slide else _FULL for slide in slides]


def _mlp_kinds(metadata: Metadata, found: Entries) -> list[str]:
    """Return mlp_layer_types: layers that have a router have experts, as in llama.cpp."""
    return [
        "sparse" if f"blk.{layer}.ffn_gate_inp.weight" in metadata.shapes else "dense"
        for layer in range(found["num_hidden_layers"])
    ]


def _of_kinds(metadata: Metadata, key: str, kinds: Sequence[str]) -> dict[str, Any]:
    """Return a number of layers of each kind, which all of that kind have; a kind without layers has the other's."""
    values = metadata.of_layers(key, len(kinds))
    if values is None:
        raise metadata.wrong(f"{metadata.kind}.{key}", "missing")
    pairs = set(zip(kinds, values, strict=True))
    numbers = dict(pairs)
    if len(pairs) != len(numbers):
        raise metadata.wrong(f"{metadata.kind}.{key}", "different in layers that see as much, which is not supported")
    return {kind: numbers.get(kind, values[0]) for kind in (_FULL, _SLIDING)}


def _ropes(found: Entries, head_dim: int, turned: Mapping[str, int]) -> dict[str, Any]:
    """Return the rotations of both kinds of layers; the scaling is that of layers that see everything.

    turned: numbers of a head that turn.
    """
    scaling = dict(found.get("rope_scaling") or {})
    for name in ("short_factor", "long_factor"):
        if name in scaling:
            # Files have a divisor for each pair of a head, whether it turns or not.
            scaling[name] = scaling[name][: turned[_FULL] // 2]
    theta = found.get("rope_theta", 1e4)
    ropes: dict[str, Any] = {
        _FULL: {"rope_type": "default", **scaling, "rope_theta": theta},
        _SLIDING: {"rope_type": "default", "rope_theta": found.get("rope_local_base_freq", theta)},
    }
    for kind, size in turned.items():
        # The reader of config.json rounds the product with head_dim down, which must not become one less.
        part = size / max(1, head_dim)
        ropes[kind]["partial_rotary_factor"] = 1.0 if size == head_dim else math.nextafter(part, 2.0)
    others = dict.fromkeys(("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor"))
    return {**others, "rope_parameters": ropes}


def _check_weights(metadata: Metadata) -> None:
    """Raise ModelLoadError unless experts are chosen by sigmoids, and their weights normalised."""
    _check_sigmoids(metadata)
    if not metadata.get("expert_weights_norm", True):
        raise metadata.wrong(f"{metadata.kind}.expert_weights_norm", "false, which is not supported")


def _check_sigmoids(metadata: Metadata) -> None:
    if (gating := metadata.get("expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise metadata.wrong(f"{metadata.kind}.expert_gating_func", f"{gating!r:.80}, which is not supported")


def _kinds(metadata: Metadata, found: Entries) -> list[str]:
    """Return layer_types: layers without key heads have linear attention."""
    key = "attention.head_count_kv"
    heads = metadata.of_layers(key, found["num_hidden_layers"])
    if heads is None:
        raise metadata.wrong(f"{metadata.kind}.{key}", "missing")
    if set(heads) - {0, 1} or 1 not in heads:
        raise metadata.wrong(
            f"{metadata.kind}.{key}", f"{heads!r:.80}, and must be 0 or 1 for each layer, and 1 for one"
        )
    return [_FULL if count else _LINEAR for count in heads]


def _bounds(metadata: Metadata, num_layers: int, entries: tuple[str, str]) -> dict[str, Any]:
    bounds = {entry: metadata.of_layers(key, num_layers) for key, entry in zip(BOUNDS, entries, strict=True)}
    return {entry: values for entry, values in bounds.items() if values is not None}


def _kimi_linear(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """The kinds of layers, which have as many heads in files. Weights of experts are normalised, as in llama.cpp."""
    _check_sigmoids(metadata)
    return {"layer_types": _kinds(metadata, found), "linear_num_heads": found["num_attention_heads"]}


ENTRIES_2026: Final[Mapping[str, Callable[[Metadata, Entries], dict[str, Any]]]] = {
    "bailingmoe3": _bailing,
    "hy_v3": _hy_v3,
    "kimi-linear": _kimi_linear,
    "step35": _step35,
    "mimo2": _mimo2,
    "laguna": _laguna,
}
