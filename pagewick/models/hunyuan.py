"""Hunyuan 0.5B to 7B and Hunyuan-MT (HunYuanDenseV1), Hunyuan-A13B (HunYuanMoEV1), and Hy3 (HYV3). Llama, except:

- HunYuanDenseV1 and HunYuanMoEV1: queries and keys are normalised per head, after they are rotated. alpha in a scaling
  of type dynamic raises the base of the frequencies, for sequences of any length.
- HunYuanMoEV1: experts in all layers, chosen by softmax, with normalised weights, and a shared expert. Entries about
  them may be lists with a number for each layer.
- HYV3: queries and keys are normalised per head, before they are rotated. All layers but the first have experts, chosen
  by sigmoid and a learned bias, with normalised weights, and a shared one. A further layer of a file, which predicts
  later tokens, serves --speculative-method mtp.
"""

from __future__ import annotations

import math
from typing import Final

from pagewick.layers.config import MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import SHARED_EXPERTS, later_layers, layers_by_kind, offer_later_layer
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import HeadNormConfig, MlpConfig, NormConfig

_HEAD_NORMS: Final = (("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"))
_NAMES: Final = NameMap(parts=(*_HEAD_NORMS, ("mlp.gate", "mlp.gate.wg"), ("shared_expert", "shared_mlp")))
_SCALINGS: Final = ("rope_parameters", "rope_scaling")
# Entries beside alpha in published files, none of which has an effect then.
_BESIDE_ALPHA: Final = frozenset(
    {"alpha", "type", "rope_type", "rope_theta", "factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
)
# Entries of published files of which only one value is implemented.
_ONLY: Final = {"use_qk_norm": True, "use_cla": False, "use_mla": False, "mlp_bias": False}
_V3_DEFAULTS: Final = {"head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 131072}
_V3_ONLY: Final = {
    "qk_norm": True,
    "route_norm": True,
    "moe_router_use_sigmoid": True,
    "moe_router_enable_expert_bias": True,
    "mlp_bias": False,
}
_V3_NAMES: Final = (
    NameMap(
        parts=(
            ("mlp.gate.e_score_correction_bias", "mlp.expert_bias"),
            ("mlp.gate", "mlp.router.gate"),
            ("shared_expert", "shared_mlp"),
        )
    ),
    # These are in files that transformers writes as it computes.
    NameMap(parts=(("mlp.gate.e_score_correction_bias", "mlp.e_score_correction_bias"), *SHARED_EXPERTS.parts)),
)


def read_hunyuan_dense(entries: Entries) -> ModelConfig:
    return _read(entries, reading.read_mlp(entries))


def read_hunyuan_moe(entries: Entries) -> ModelConfig:
    entries = entries.renamed({"moe_topk": "num_experts_per_tok", "num_experts": "num_local_experts"})
    entries.demand("moe_layer_num_skipped", 0, 0, "layers without experts are not supported")
    num_experts, size = entries.size("num_experts", 1), entries.size("intermediate_size")
    activation = reading.read_activation(entries)
    mlps = [
        reading.make_moe(
            {"top_k": top_k, "renormalize": True},
            num_experts=num_experts,
            intermediate_size=expert_size,
            activation=activation,
            shared_intermediate_size=size * num_shared,
        )
        for top_k, expert_size, num_shared in zip(
            _of_layers(entries, "moe_topk", 1),
            _of_layers(entries, "moe_intermediate_size", size),
            _of_layers(entries, "num_shared_expert", 1),
            strict=True,
        )
    ]
    return _read(entries, mlps)


def read_hy_v3(entries: Entries) -> ModelConfig:
    entries = entries.renamed({"moe_intermediate_size": "expert_hidden_dim"}).filled(_V3_DEFAULTS)
    for name, value in _V3_ONLY.items():
        entries.demand(name, value, value)
    eps, has_bias = entries.positive("rms_norm_eps", 1e-5), entries.flag("attention_bias", False)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=HeadNormConfig(eps=eps))
    num_experts, size = entries.size("num_experts", 192), entries.size("moe_intermediate_size")
    moe = reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", 8, most=num_experts),
            "scoring": "sigmoid",
            "renormalize": True,
            "scaling": entries.positive("router_scaling_factor", 2.826),
        },
        num_experts=num_experts,
        intermediate_size=size,
        activation=reading.read_activation(entries),
        has_router_bias=True,
        shared_intermediate_size=size * entries.size("num_shared_experts", 1),
    )
    mlps = layers_by_kind(entries, moe, default_dense=1)
    rope = reading.read_rope_of(entries, attention, default_theta=11158840.0)
    config = reading.model_config(
        entries,
        norm=NormConfig(eps=eps),
        layers=reading.same_layers(len(mlps), attention, mlps, rope),
        names=_V3_NAMES,
        ignored=later_layers(entries),
    )
    return offer_later_layer(entries, config, norm="final_layernorm")


def _of_layers(entries: Entries, name: str, default: int) -> tuple[int, ...]:
    """Return the number for each layer."""
    num_layers = reading.read_num_layers(entries)
    if not isinstance(entries.get(name), list):
        return (entries.size(name, default),) * num_layers
    sizes = entries.sizes(name) or ()
    if len(sizes) != num_layers:
        raise entries.wrong(name, f"a number, or a list of num_hidden_layers ({num_layers}) numbers")
    return sizes


def _read(entries: Entries, mlps: MlpConfig | list[MoeConfig]) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048})
    for name, value in _ONLY.items():
        entries.demand(name, value, value)
    eps, has_bias = entries.positive("rms_norm_eps", 1e-5), entries.flag("attention_bias", False)
    head_norm = HeadNormConfig(eps=eps, is_after_rotation=True)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=head_norm)
    rope = reading.read_rope_of(_with_base(entries, attention.head_dim), attention)
    return reading.model_config(
        entries,
        norm=NormConfig(eps=eps),
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlps, rope),
        names=(_NAMES,),
    )


def _with_base(entries: Entries, head_dim: int) -> Entries:
    """Return the entries with the base that alpha makes of rope_theta: rope_theta * alpha^(head_dim / (head_dim - 2)).

    Source: Hunyuan's published code; "NTK-aware" scaling has no publication.
    """
    scalings = [scaling for name in _SCALINGS if (scaling := entries.child(name)) is not None and "alpha" in scaling]
    if not scalings:
        return entries
    scaling = scalings[0]
    for name in scaling:
        if name not in _BESIDE_ALPHA:
            raise scaling.wrong(name, "left out: a scaling with alpha and with it is not supported")
    for name in ("type", "rope_type"):
        scaling.demand(name, "dynamic", "dynamic", "alpha belongs to this scaling")
    if head_dim < 4:
        raise entries.wrong("head_dim", "at least 4 with alpha in the rotary scaling")
    theta = (scaling if "rope_theta" in scaling else entries).positive("rope_theta", 10000.0)
    try:
        base = theta * scaling.positive("alpha") ** (head_dim / (head_dim - 2))
    except OverflowError:
        base = math.inf
    if not math.isfinite(base):
        raise scaling.wrong("alpha", "so small that the base of frequencies is finite")
    return entries.replaced({"rope_scaling": None, "rope_parameters": {"rope_type": "default", "rope_theta": base}})
