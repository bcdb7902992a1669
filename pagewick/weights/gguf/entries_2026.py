"""Entries of config.json that follow from several keys of GGUF files of models of 2026. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pagewick.weights.gguf.metadata import Metadata

_SIGMOID: Final = 2  # expert_gating_func
# Keys of the bounds of gated products, of experts and of shared ones, with a number for each layer; 0: none.
BOUNDS: Final = ("swiglu_clamp_exp", "swiglu_clamp_shexp")
_LING_BOUNDS: Final = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
_LINEAR, _FULL = "linear_attention", "full_attention"

Entries = Mapping[str, Any]


def _bailing(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """The kinds of layers, the bounds of products, and the size of the shared expert, which files have as a number."""
    _check_sigmoids(metadata)
    size = found["moe_intermediate_size"]
    key = "expert_shared_feed_forward_length"
    shared = metadata.get(key, size * found.get("n_shared_experts", 1))
    if not size or shared % size:
        raise metadata.wrong(f"{metadata.kind}.{key}", "not a multiple of expert_feed_forward_length")
    return {
        "n_shared_experts": shared // size,
        "layer_types": _kinds(metadata, found),
        **_bounds(metadata, found, _LING_BOUNDS),
    }


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


def _bounds(metadata: Metadata, found: Entries, entries: tuple[str, str]) -> dict[str, Any]:
    bounds = {
        entry: metadata.of_layers(key, found["num_hidden_layers"]) for key, entry in zip(BOUNDS, entries, strict=True)
    }
    return {entry: values for entry, values in bounds.items() if values is not None}


def _kimi_linear(metadata: Metadata, found: Entries) -> dict[str, Any]:
    """The kinds of layers, which have as many heads in files. Weights of experts are normalised, as in llama.cpp."""
    _check_sigmoids(metadata)
    return {"layer_types": _kinds(metadata, found), "linear_num_heads": found["num_attention_heads"]}


ENTRIES_2026: Final[Mapping[str, Callable[[Metadata, Entries], dict[str, Any]]]] = {
    "bailingmoe3": _bailing,
    "kimi-linear": _kimi_linear,
}
