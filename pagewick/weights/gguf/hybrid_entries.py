"""Entries of config.json for GGUF files with Mamba or short convolutions in most layers. Imports no torch.

Such files have lists, one number for each layer, that say which kind of layer it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from pagewick.weights.gguf.metadata import Metadata

_KV_HEADS, _WIDTHS = "attention.head_count_kv", "feed_forward_length"
_INNER, _HEADS, _HIDDEN = "ssm.inner_size", "ssm.time_step_rank", "embedding_length"
# llama.cpp's name is about another thing: whether Granite rotates heads at all.
_IS_ROTATED: Final = "rope.scaling.finetuned"
_SIGMOID: Final = 2  # expert_gating_func
_CONVOLUTION, _LINEAR, _FULL, _MLP, _MOE = "conv", "linear_attention", "full_attention", "mlp", "moe"
# Keys without which a file of `granitehybrid` holds Bamba, and not Granite.
_FACTORS: Final = ("attention.scale", "embedding_scale", "residual_scale", "logit_scale")

Entries = Mapping[str, Any]


def is_bamba(metadata: Metadata) -> bool:
    """Whether a file of the architecture granitehybrid holds Bamba."""
    return not metadata.get("expert_count") and all(metadata.get(key) is None for key in _FACTORS)


def _lfm2(metadata: Metadata, found: Entries) -> dict[str, Any]:
    if window := metadata.get("attention.sliding_window"):
        raise metadata.wrong(f"{metadata.kind}.attention.sliding_window", f"{window!r:.80}, which is not supported")
    if metadata.kind == "lfm2moe" and (gating := metadata.get("expert_gating_func", _SIGMOID)) != _SIGMOID:
        raise metadata.wrong(f"{metadata.kind}.expert_gating_func", f"{gating!r:.80}, which is not supported")
    heads = _kv_heads(metadata, found)
    return {
        "num_key_value_heads": max(heads),
        "layer_types": [_FULL if count else _CONVOLUTION for count in heads],
    }


def _granite_hybrid(metadata: Metadata, found: Entries) -> dict[str, Any]:
    heads, shapes = _kv_heads(metadata, found), metadata.shapes
    inner, hidden_size = metadata.get(_INNER), metadata.get(_HIDDEN)
    if inner % max(1, hidden_size):
        raise metadata.wrong(f"{metadata.kind}.{_INNER}", f"no multiple of {_HIDDEN}, which is not supported")
    cases: dict[str, Any] = {
        "num_key_value_heads": max(heads),
        "mamba_d_head": _head_dim(metadata),
        "mamba_expand": inner // max(1, hidden_size),
    }
    if is_bamba(metadata):
        return {**cases, "attn_layer_indices": [layer for layer, count in enumerate(heads) if count]}
    if not metadata.get("expert_count"):
        # The converter writes two sizes, and one of them is not that of the MLP.
        shape = shapes.get("blk.0.ffn_up.weight")
        cases["shared_intermediate_size"] = found["intermediate_size"] if shape is None else shape[0]
    return {
        **cases,
        "layer_types": [_FULL if count else _LINEAR for count in heads],
        "position_embedding_type": "rope" if metadata.get(_IS_ROTATED, True) else "nope",
        "attention_multiplier": found.get("attention_multiplier", max(1, found["head_dim"]) ** -0.5),
    }


def _granite(metadata: Metadata, found: Entries) -> dict[str, Any]:
    if not metadata.get(_IS_ROTATED, True):
        raise metadata.wrong(
            f"{metadata.kind}.{_IS_ROTATED}", "false, so that heads do not rotate: it is not supported"
        )
    return {}


def _nemotron_h(metadata: Metadata, found: Entries) -> dict[str, Any]:
    num_layers, shapes, kind = found["num_hidden_layers"], metadata.shapes, metadata.kind
    heads, widths = _kv_heads(metadata, found), metadata.of_layers(_WIDTHS, num_layers)
    if widths is None:
        raise metadata.wrong(f"{kind}.{_WIDTHS}", "missing")
    kinds = []
    for layer, (count, width) in enumerate(zip(heads, widths, strict=True)):
        if width:
            kinds.append(_MOE if f"blk.{layer}.ffn_gate_inp.weight" in shapes else _MLP)
        else:
            kinds.append(_FULL if count else _LINEAR)
    of_mlps = [width for width, one in zip(widths, kinds, strict=True) if one == _MLP]
    if len(set(of_mlps)) > 1:
        raise metadata.wrong(f"{kind}.{_WIDTHS}", "different in some layers, which is not supported")
    eps = metadata.get("attention.layer_norm_rms_epsilon", found.get("layer_norm_epsilon"))
    if eps is None:
        raise metadata.wrong(f"{kind}.attention.layer_norm_rms_epsilon", "missing")
    return {
        "layers_block_type": kinds,
        "num_key_value_heads": max(heads),
        "intermediate_size": of_mlps[0] if of_mlps else None,
        "mamba_head_dim": _head_dim(metadata),
        "layer_norm_epsilon": eps,
    }


def _jamba(metadata: Metadata, found: Entries) -> dict[str, Any]:
    inner, hidden_size = metadata.get(_INNER), metadata.get(_HIDDEN)
    if inner % max(1, hidden_size):
        raise metadata.wrong(f"{metadata.kind}.{_INNER}", f"no multiple of {_HIDDEN}, which is not supported")
    heads = _kv_heads(metadata, found)
    has_experts = [f"blk.{layer}.ffn_gate_inp.weight" in metadata.shapes for layer in range(len(heads))]
    cases: dict[str, Any] = {
        "num_key_value_heads": max(heads),
        "mamba_expand": inner // max(1, hidden_size),
        # Files of models without experts may have no key for their number.
        "num_experts": found.get("num_experts", 1) if any(has_experts) else 1,
    }
    for name, flags in (("attn_layer", [count > 0 for count in heads]), ("expert_layer", has_experts)):
        # From the first to the second, or, if there is one, to the end, so that no other follows.
        places = [layer for layer, flag in enumerate(flags) if flag]
        first = places[0] if places else 0
        period = places[1] - first if len(places) > 1 else max(first + 1, len(flags) - first)
        if places and flags != [layer % period == first for layer in range(len(flags))]:
            raise metadata.wrong(
                f"{metadata.kind}.{_KV_HEADS}", "not periodic, or experts are not: it is not supported"
            )
        cases |= {f"{name}_period": period, f"{name}_offset": first}
    return cases


def _mamba2(metadata: Metadata, found: Entries) -> dict[str, Any]:
    inner, hidden_size = metadata.get(_INNER), metadata.get(_HIDDEN)
    if inner % max(1, hidden_size):
        raise metadata.wrong(f"{metadata.kind}.{_INNER}", f"no multiple of {_HIDDEN}, which is not supported")
    return {"expand": inner // max(1, hidden_size), "head_dim": _head_dim(metadata)}


def _kv_heads(metadata: Metadata, found: Entries) -> list[Any]:
    """Return the number of key and value heads of each layer, which is the same where it is not 0."""
    key, heads = f"{metadata.kind}.{_KV_HEADS}", metadata.of_layers(_KV_HEADS, found["num_hidden_layers"])
    if heads is None:
        raise metadata.wrong(key, "missing")
    sizes = {count for count in heads if count}
    if not sizes:
        raise metadata.wrong(key, "0 for every layer, and some layer must have attention")
    if len(sizes) > 1:
        raise metadata.wrong(key, "different in layers with attention, which is not supported")
    return heads


def _head_dim(metadata: Metadata) -> Any:
    inner, num_heads = metadata.get(_INNER), metadata.get(_HEADS)
    if inner % max(1, num_heads):
        raise metadata.wrong(f"{metadata.kind}.{_INNER}", f"no multiple of {_HEADS}")
    return inner // max(1, num_heads)


HYBRID_ENTRIES: Final[Mapping[str, Callable[[Metadata, Entries], dict[str, Any]]]] = {
    **dict.fromkeys(("lfm2", "lfm2moe"), _lfm2),
    **dict.fromkeys(("granite", "granitemoe"), _granite),
    "granitehybrid": _granite_hybrid,
    "jamba": _jamba,
    "mamba2": _mamba2,
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron_h),
}
