"""Phi-1, 1.5 and 2 (Phi), Phi-3, 3.5, Phi-4 and Phi-4-mini (Phi3), and Phi-3.5-MoE (Phimoe).

Phi, unlike Llama: attention and MLP of a layer read the same layer norm and are added together; an MLP without a gate;
biases everywhere, also in the vocabulary head; a part of each head is rotated; queries and keys may have a layer norm.

Phi3: Llama with one tensor for queries, keys and values and one for gate and up. If there is a window, it is in all
layers. longrope has its original length beside rope_scaling; Phi-4-mini rotates a part of each head.

Phimoe: Llama with layer norms and biases, also in the vocabulary head, and two experts for a token in all layers. The
weight of each is its softmax among the experts that are left and near it (arXiv:2409.12136). longrope has a factor of
cos and sin of its own for each set of factors. transformers has the short set for sequences of any length; Pagewick
takes one by the longest sequence, as for Phi3.
"""

from __future__ import annotations

from typing import Final

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.name_map import NameMap
from pagewick.models.parts import HeadNormConfig, LayerConfig, NormConfig

_PHI_NAMES = NameMap(
    parts=(
        ("o_proj", "dense"),
        ("q_norm", "q_layernorm"),
        ("k_norm", "k_layernorm"),
        ("mlp.up_proj", "mlp.fc1"),
        ("mlp.down_proj", "mlp.fc2"),
        ("model.norm", "model.final_layernorm"),
    )
)

# These names are as old as Mixtral's.
_PHIMOE_NAMES: Final = (
    NameMap(parts=(("mlp", "block_sparse_moe"), ("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3"))),
    # These are in files that transformers writes as it computes.
    NameMap(parts=(("mlp.gate", "mlp.router"),)),
)
_ROTATION: Final = ("rope_scaling", "rope_parameters")


def read_phi(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 2048})
    entries.demand("tie_word_embeddings", False, False, "a tied head has no bias")
    eps = entries.positive("layer_norm_eps", 1e-5)
    head_norm = HeadNormConfig(kind="layer", eps=eps, has_bias=True) if entries.flag("qk_layernorm", False) else None
    attention = reading.read_attention(entries, qkv_bias=True, o_bias=True, head_norm=head_norm)
    activation = reading.read_activation(entries, "gelu_new")
    mlp = reading.read_mlp(entries, activation=activation, is_gated=False, bias=True)
    rope = reading.read_rope_of(entries, attention, default_partial_rotary_factor=0.5)
    return reading.model_config(
        entries,
        norm=NormConfig(kind="layer", eps=eps, has_bias=True),
        block="parallel",
        layers=reading.same_layers(reading.read_num_layers(entries), attention, mlp, rope),
        head_bias=True,
        names=(_PHI_NAMES,),
    )


def read_phi3(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 4096})
    attention = reading.read_attention(entries, layout="fused")
    layer = LayerConfig(
        attention=attention,
        mlp=reading.read_mlp(entries, is_fused=True),
        rope=reading.read_rope_of(entries, attention),
        window=entries.optional_size("sliding_window"),
    )
    return reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-5)),
        layers=(layer,) * reading.read_num_layers(entries),
    )


def read_phimoe(entries: Entries) -> ModelConfig:
    entries = _with_attention_factor(entries.filled({"num_key_value_heads": 8, "max_position_embeddings": 131072}))
    entries.demand("num_experts_per_tok", 2, 2, "the way to choose experts knows two for a token")
    has_bias, has_head_bias = entries.flag("attention_bias", False), entries.flag("lm_head_bias", False)
    if has_head_bias:
        entries.demand("tie_word_embeddings", False, False, "a tied head has no bias")
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias)
    num_experts = entries.size("num_local_experts", 16)
    if num_experts < 2:
        raise entries.wrong("num_local_experts", "at least 2")
    moe = reading.make_moe(
        {"top_k": 2, "scoring": "near", "margin": 2.0 * entries.positive("router_jitter_noise", 0.01)},
        num_experts=num_experts,
        intermediate_size=entries.size("intermediate_size"),
        activation=reading.read_activation(entries),
    )
    rope = reading.read_rope_of(entries, attention, default_theta=1e6)
    layer = LayerConfig(attention=attention, mlp=moe, rope=rope, window=entries.optional_size("sliding_window"))
    return reading.model_config(
        entries,
        norm=NormConfig(kind="layer", eps=entries.positive("rms_norm_eps", 1e-5), has_bias=True),
        layers=(layer,) * reading.read_num_layers(entries),
        head_bias=has_head_bias,
        names=_PHIMOE_NAMES,
    )


def _with_attention_factor(entries: Entries) -> Entries:
    """Return the entries with longrope's usual factor in place of short_mscale and long_mscale, which are the same."""
    changed: dict[str, object] = {}
    for name in _ROTATION:
        scaling = entries.child(name)
        if scaling is None or not {"short_mscale", "long_mscale"} & set(scaling):
            continue
        scaling.demand("attention_factor", None, None, "short_mscale and long_mscale are in its place")
        factor = scaling.positive("short_mscale")
        scaling.demand("long_mscale", factor, None, "another factor than short_mscale is not supported")
        for kind in ("type", "rope_type"):
            scaling.demand(kind, "longrope", "longrope", "short_mscale belongs to this scaling")
        kept = {key: value for key, value in scaling.values.items() if key not in ("short_mscale", "long_mscale")}
        changed[name] = {**kept, "attention_factor": factor}
    return entries.replaced(changed)
