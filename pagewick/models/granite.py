"""Granite 3, dense or with experts (1B-A400M, 3B-A800M), Granite 4, Granite Swash and HyperCLOVA X.

Llama, except for four factors.

embedding_multiplier scales the embeddings, residual_multiplier the outputs of attention and MLP, attention_multiplier
the products of queries and keys (in place of 1 / sqrt(head_dim)); logits are divided by logits_scaling.
The experts of a layer are the best of a softmax over all, with normalised weights. GraniteMoeShared has a shared
one beside them. Granite 4 calls an MLP without experts beside it shared_mlp, may rotate nothing, and has Mamba-2 in
most layers of its models whose names have an H.
HyperCLOVA X has norms after attention and MLP as well, and multiplies logits by logits_scaling.
Granite Swash (GraniteSWA, GraniteMoeSWA) has windows in most layers and a sink in each head's softmax. A layer may have
a base of the rotation of its own, or rotate nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from pagewick.layers.config import MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.mamba_entries import read_kinds, read_mamba
from pagewick.models.name_map import NameMap
from pagewick.models.parts import AttentionConfig, LayerConfig, MlpConfig, NormConfig

_NAMES: Final = NameMap()
# Experts are stacked in the file: weights/stacked.py.
_MOE_NAMES: Final = NameMap(parts=(("mlp.gate", "block_sparse_moe.router.layer"), ("mlp.experts", "block_sparse_moe")))

_NEW_MOE_NAMES: Final = NameMap(
    parts=(("mlp.gate", "block_sparse_moe.router"), ("mlp.experts", "block_sparse_moe.experts"))
)
_SHARED_NAMES: Final = NameMap(
    parts=(("mlp.gate_up_proj", "shared_mlp.input_linear"), ("mlp.down_proj", "shared_mlp.output_linear"))
)
_SHARED_MOE_NAMES: Final = tuple(
    NameMap(
        parts=(
            ("mlp.shared_expert.gate_up_proj", "shared_mlp.input_linear"),
            ("mlp.shared_expert.down_proj", "shared_mlp.output_linear"),
            *names.parts,
        )
    )
    for names in (_MOE_NAMES, _NEW_MOE_NAMES)
)
_NAMES_OF_POST_NORMS: Final = NameMap(
    parts=(
        ("post_attention_layernorm", "post_norm1"),
        ("pre_feedforward_layernorm", "post_attention_layernorm"),
        ("post_feedforward_layernorm", "post_norm2"),
    )
)
# Files whose shared MLPs are not fused give them the usual names.
_SEPARATE_MOE_NAMES: Final = NameMap(parts=(("mlp.shared_expert", "shared_mlp"), *_MOE_NAMES.parts))
_SINKS: Final = ("sinks.weight", "sinks")
_SWA_DEFAULTS: Final = {
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
}


def read_granite(entries: Entries) -> ModelConfig:
    return _read(entries, reading.read_mlp(entries, bias=entries.flag("mlp_bias", False)))


def read_hyperclova_x(entries: Entries) -> ModelConfig:
    mlp = reading.read_mlp(entries, bias=entries.flag("mlp_bias", False))
    config = _read(entries, mlp, default_attention_multiplier=None)
    config = replace(config, logit_scale=entries.positive("logits_scaling", 1.0))
    if not entries.flag("use_post_norm", True):
        return config
    return replace(config, block="sandwich", names=(_NAMES_OF_POST_NORMS,))


def read_granite_moe(entries: Entries) -> ModelConfig:
    return _read(entries, _read_experts(entries), _MOE_NAMES, _NEW_MOE_NAMES)


def read_granite_moe_shared(entries: Entries) -> ModelConfig:
    shared, is_fused = entries.count("shared_intermediate_size", 0), entries.flag("shared_mlp_fused", True)
    if not shared:
        return read_granite_moe(entries)
    moe = _read_experts(entries, shared_intermediate_size=shared, is_shared_fused=is_fused)
    return _read(entries, moe, *(_SHARED_MOE_NAMES if is_fused else (_SEPARATE_MOE_NAMES,)))


def _read_experts(entries: Entries, **fields: Any) -> MoeConfig:
    num_experts = entries.size("num_local_experts", 8)
    return reading.make_moe(
        {"top_k": entries.size("num_experts_per_tok", 2, most=num_experts), "renormalize": True},
        num_experts=num_experts,
        intermediate_size=entries.size("intermediate_size"),
        activation=reading.read_activation(entries),
        **fields,
    )


def read_granite_hybrid(entries: Entries) -> ModelConfig:
    entries = entries.renamed({"layer_types": "layers_block_type"})
    num_layers = reading.read_num_layers(entries)
    kinds = read_kinds(entries, entries.texts("layer_types"), (reading.LINEAR, reading.FULL))
    if len(kinds) != num_layers:
        raise entries.wrong("layer_types", f"a list of num_hidden_layers ({num_layers}) kinds")
    is_rotated = entries.choice("position_embedding_type", ("rope", "nope"), "nope") == "rope"
    shared, is_fused = entries.size("shared_intermediate_size", 1024), entries.flag("shared_mlp_fused", True)
    mlp: MlpConfig | MoeConfig
    if entries.count("num_local_experts", 8):
        mlp = _read_experts(entries, shared_intermediate_size=shared, is_shared_fused=is_fused)
        names = _SHARED_MOE_NAMES if is_fused else (_SEPARATE_MOE_NAMES,)
    else:
        activation = reading.read_activation(entries)
        mlp = MlpConfig(intermediate_size=shared, activation=activation, is_fused=is_fused)
        names = (_SHARED_NAMES if is_fused else _NAMES,)
    mamba = None
    if reading.LINEAR in kinds:
        mamba = read_mamba(entries, norm_eps=entries.positive("rms_norm_eps", 1e-6))
    entries = entries.replaced(dict.fromkeys(("layer_types", "layers_block_type")))
    config = _read(entries, mlp, *names, is_rotated=is_rotated)
    layers = [
        replace(layer, attention=mamba, rope=None) if kind == reading.LINEAR else layer
        for layer, kind in zip(config.layers, kinds, strict=True)
    ]
    return replace(config, layers=tuple(layers))


def read_granite_swa(entries: Entries) -> ModelConfig:
    entries = entries.filled(_SWA_DEFAULTS)
    return _read_swa(entries, reading.read_mlp(entries, bias=entries.flag("mlp_bias", False)), (_NAMES,))


def read_granite_moe_swa(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048})
    shared = entries.count("shared_intermediate_size", 0)
    moe = _read_experts(entries, shared_intermediate_size=shared or None, is_shared_fused=True)
    return _read_swa(entries, moe, _SHARED_MOE_NAMES if shared else (_MOE_NAMES, _NEW_MOE_NAMES))


def _read_swa(entries: Entries, mlp: MlpConfig | MoeConfig, names: Sequence[NameMap]) -> ModelConfig:
    entries = entries.filled({"sliding_window": 128})
    num_layers = reading.read_num_layers(entries)
    windows = reading.read_windows(entries, [layer_idx % 4 != 0 for layer_idx in range(num_layers)])
    attention = _attention(entries, has_sinks=True)
    rope = reading.read_rope_of(entries, attention)
    thetas = entries.numbers("layer_rope_theta") or (rope.theta,) * num_layers
    if len(thetas) != num_layers or any(theta != 0 and theta <= 1 for theta in thetas):
        raise entries.wrong(
            "layer_rope_theta", f"a list of num_hidden_layers ({num_layers}) times 0 or a number above 1"
        )
    # Files may say twice which layers rotate.
    if entries.sizes("no_rope_layers", least=0) not in (None, tuple(int(theta != 0) for theta in thetas)):
        raise entries.wrong(
            "no_rope_layers", "left out or a list with a 1 for each layer that layer_rope_theta rotates"
        )
    layers = [
        LayerConfig(attention=attention, mlp=mlp, rope=replace(rope, theta=theta) if theta else None, window=window)
        for theta, window in zip(thetas, windows, strict=True)
    ]
    return _model(entries, layers, [NameMap(parts=(_SINKS, *each.parts)) for each in names])


def _read(
    entries: Entries,
    mlp: MlpConfig | MoeConfig,
    *names: NameMap,
    is_rotated: bool = True,
    default_attention_multiplier: float | None = 1.0,
) -> ModelConfig:
    """Read all but the MLP. default_attention_multiplier: None: 1 / sqrt(head_dim)."""
    entries = entries.filled({"max_position_embeddings": 2048})
    attention = _attention(entries, default_multiplier=default_attention_multiplier)
    rope = reading.read_rope_of(entries, attention) if is_rotated else None
    return _model(
        entries, reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope), names or (_NAMES,)
    )


def _attention(entries: Entries, *, default_multiplier: float | None = 1.0, **fields: Any) -> AttentionConfig:
    """default_multiplier: of products of queries and keys; None: 1 / sqrt(head_dim)."""
    has_bias, scale = entries.flag("attention_bias", False), default_multiplier
    if scale is not None or "attention_multiplier" in entries:
        scale = entries.positive("attention_multiplier", scale)
    return reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, softmax_scale=scale, **fields)


def _model(entries: Entries, layers: Sequence[LayerConfig], names: Sequence[NameMap]) -> ModelConfig:
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-6)),
        layers=tuple(layers),
        embedding_scale=entries.positive("embedding_multiplier", 1.0),
        residual_scale=entries.positive("residual_multiplier", 1.0),
        logit_scale=1.0 / entries.positive("logits_scaling", 1.0),
        names=tuple(names),
    )
