"""Laguna. Llama, except:

- Queries and keys are normalised per head. Layers may have different numbers of query heads.
- Layers with a window are rotated in a way of their own.
- Attention's output is multiplied by the softplus of gates, one for each head or for each number.
- All layers but the first have experts, chosen by sigmoid and a learned bias, and a shared one. Weights are normalised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from pagewick.layers.config import MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import SHARED_EXPERTS, layers_by_kind
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import AttentionConfig, HeadNormConfig, LayerConfig, MlpConfig, NormConfig

_DEFAULTS: Final[dict[str, Any]] = {
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 512,
    "shared_expert_intermediate_size": 512,
}
# Where a file has no entry about rotation.
_ROPE: Final = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
}
# Entries of published files of which only one value is implemented.
_ONLY: Final[dict[str, Any]] = {
    "norm_topk_prob": True,
    "moe_router_use_sigmoid": True,
    "moe_router_logit_softcapping": 0,
    "moe_apply_router_weight_on_input": False,
    "swa_attention_sink_enabled": False,
    "swa_rope_parameters": None,
    "qkv_bias": False,
}
_NAMES: Final = (
    NameMap(parts=(("mlp.gate.e_score_correction_bias", "mlp.experts.e_score_correction_bias"),)),
    # These are in files that transformers writes as it computes.
    SHARED_EXPERTS,
)
_PER_HEAD, _PER_NUMBER = "per-head", "per-element"


def read_laguna(entries: Entries) -> ModelConfig:
    for name, value in _ONLY.items():
        entries.demand(name, value, value)
    entries = entries.without_null(("rope_parameters",)).filled({**_DEFAULTS, "rope_parameters": _ROPE})
    eps = entries.positive("rms_norm_eps", 1e-6)
    mlps = _read_mlps(entries)
    windows = reading.read_windows(entries, [False] * len(mlps))
    attentions = _read_attentions(entries, HeadNormConfig(eps=eps))
    everywhere = reading.read_rope_of(entries, attentions[0], layer_type=reading.FULL)
    within = everywhere
    if any(windows):
        within = reading.read_rope_of(entries, attentions[0], layer_type=reading.SLIDING)
    layers = [
        LayerConfig(attention=attention, mlp=mlp, rope=everywhere if window is None else within, window=window)
        for attention, mlp, window in zip(attentions, mlps, windows, strict=True)
    ]
    return reading.model_config(entries, norm=NormConfig(eps=eps), layers=tuple(layers), names=_NAMES)


def _read_attentions(entries: Entries, head_norm: HeadNormConfig) -> Sequence[AttentionConfig]:
    gates = (
        _PER_HEAD if entries.get("gating") is True else entries.choice("gating", (_PER_HEAD, _PER_NUMBER), _PER_HEAD)
    )
    # Files may say it once more for each layer.
    if {kind.replace("_", "-") for kind in entries.texts("gating_types") or ()} - {gates}:
        raise entries.wrong("gating_types", f"left out or a list of {gates}, as gating says")
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(
        entries,
        qkv_bias=has_bias,
        o_bias=has_bias,
        head_norm=head_norm,
        has_head_gates=gates == _PER_HEAD,
        has_number_gates=gates == _PER_NUMBER,
        has_softplus_gates=True,
    )
    num_layers, name = reading.read_num_layers(entries), "num_attention_heads_per_layer"
    counts = entries.sizes(name) or (attention.num_heads,) * num_layers
    if len(counts) != num_layers or any(count % attention.num_kv_heads for count in counts):
        multiples = f"multiples of num_key_value_heads ({attention.num_kv_heads})"
        raise entries.wrong(name, f"a list of num_hidden_layers ({num_layers}) {multiples}")
    return [replace(attention, num_heads=count) for count in counts]


def _read_mlps(entries: Entries) -> list[MlpConfig | MoeConfig]:
    num_experts = entries.size("num_experts", 256)
    moe = reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", 8, most=num_experts),
            "scoring": "sigmoid",
            "renormalize": True,
            "scaling": entries.positive("moe_routed_scaling_factor", 1.0),
        },
        num_experts=num_experts,
        intermediate_size=entries.size("moe_intermediate_size"),
        activation=reading.read_activation(entries),
        has_router_bias=True,
        shared_intermediate_size=entries.size("shared_expert_intermediate_size"),
    )
    mlps = layers_by_kind(entries, moe, default_dense=1)
    # Files may say twice which layers have MLPs.
    dense = tuple(layer_idx for layer_idx, mlp in enumerate(mlps) if isinstance(mlp, MlpConfig))
    if entries.sizes("mlp_only_layers", least=0) not in (None, dense) or entries.size("decoder_sparse_step", 1) != 1:
        raise entries.wrong("mlp_only_layers", f"left out or {list(dense)}, with a decoder_sparse_step of 1")
    return mlps
