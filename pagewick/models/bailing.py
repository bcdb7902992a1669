"""Ling 3.0. DeepSeek-V3, except:

- All layers but the last of each layer_group_size have linear attention, as Kimi Linear: the gated delta rule with a
  decay for each number of a key. Logarithms of decays are a bound times a sigmoid. Decays and the gates of outputs come
  from hidden states by one matrix each.
- The others have latent attention, whose heads are multiplied by the sigmoid of a gate. One matrix may make queries.
- In the last layers, both factors of the gated products of experts are bounded, which transformers does not do.
- A further layer of a file, with latent attention and experts, predicts later tokens, and serves --speculative-method
  mtp.

transformers writes other names of entries than published files have, and of the output projections of linear attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from pagewick.errors import ModelLoadError
from pagewick.layers.state_config import DeltaConfig
from pagewick.models import deepseek, delta_entries, reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import MAX_LAYERS, Entries
from pagewick.models.mtp_offers import nextn, offer
from pagewick.models.name_map import NameMap
from pagewick.models.parts import LayerConfig, MlpConfig, NormConfig
from pagewick.models.rope_entries import read_rope
from pagewick.models.step3 import bounded_activations

if TYPE_CHECKING:
    from pagewick.layers.config import MoeConfig, RopeConfig

# Names that transformers writes.
_NAMES: Final = {
    "max_position_embeddings": "model_max_length", "n_group": "num_expert_group", "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token", "n_shared_experts": "num_shared_experts",
}  # fmt: skip
_DEFAULTS: Final = {
    "model_max_length": 262144, "num_expert_group": 8, "topk_group": 4, "moe_renormalize": True,
    "kda_lower_bound": -5.0, "num_nextn_predict_layers": 1,
}  # fmt: skip
# Entries of published files of which only one value is implemented.
_ONLY: Final = {
    "gated_attention_proj_granularity_type": "head_wise", "moe_router_enable_expert_bias": True, "no_kda_lora": True,
    "num_kv_heads_for_linear_attn": 0, "pregate_inference": False, "rope_interleave": True, "router_dtype": "fp32",
    "scale_router_input": False, "score_function": "sigmoid", "up_proj_norm": False, "use_bias": False,
    "use_kda_lora": False, "use_mla_nope": False, "use_nGPT": False, "use_qkv_bias": False, "value_norm": False,
}  # fmt: skip
# Bounds of both factors of the gated products of experts, and of the shared expert, with an entry for each layer.
_BOUNDS: Final = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")

_FILE_NAMES: Final = NameMap(
    parts=(
        *deepseek.SHARED_EXPERTS.parts,
        ("embed_tokens", "word_embeddings"),
        ("mlp.gate.e_score_correction_bias", "mlp.gate.expert_bias"),
        ("self_attn.o_proj", "self_attn.dense"),
        ("self_attn", "attention"),
        ("linear_attn.in_proj_b", "linear_attn.b_proj"),
        ("linear_attn.in_proj_a", "linear_attn.f_proj"),
        ("linear_attn.in_proj_z", "linear_attn.g_proj"),
        ("linear_attn.norm", "linear_attn.o_norm"),
        ("linear_attn.out_proj", "linear_attn.o_proj"),
        ("linear_attn", "attention"),
    )
)
_WRITTEN_NAMES: Final = NameMap(parts=(("linear_attn.out_proj", "linear_attn.dense"), *_FILE_NAMES.parts))


def read_bailing_hybrid(entries: Entries) -> ModelConfig:
    entries = entries.renamed(_NAMES).filled(_DEFAULTS)
    for name, value in _ONLY.items():
        entries.demand(name, value, value)
    eps = entries.positive("rms_norm_eps", 1e-6)
    linear, rope = _linear_attention(entries, eps), _rope(entries)
    latent = deepseek.latent_attention(entries, rope, has_head_gates=True)
    layers = [
        LayerConfig(attention=linear if is_linear else latent, mlp=mlp, rope=None if is_linear else rope)
        for is_linear, mlp in zip(_linear_layers(entries), _mlps(entries), strict=True)
    ]
    config = reading.model_config(
        entries,
        norm=NormConfig(eps=eps),
        layers=tuple(layers),
        names=(_FILE_NAMES, _WRITTEN_NAMES),
        ignored=deepseek.later_layers(entries),
    )
    experts = _later_experts(entries, len(layers))
    if experts is None or not entries.count("num_nextn_predict_layers", most=MAX_LAYERS):
        return config
    later = LayerConfig(attention=latent, mlp=experts, rope=rope)
    return offer(config, replace(nextn(len(layers), "final_layernorm"), own=later))


def _linear_attention(entries: Entries, eps: float) -> DeltaConfig:
    # In what transformers writes, head_dim is qk_rope_head_dim.
    size = entries.size("linear_head_dim", entries.size("head_dim", 128))
    num_heads = entries.size("linear_num_heads", entries.size("num_attention_heads"))
    conv_size = entries.size("linear_conv_kernel_dim", entries.size("short_conv_kernel_size", 4))
    bound = None
    if entries.flag("kda_safe_gate", True):
        bound = entries.number("kda_lower_bound")
        if bound >= 0:
            raise entries.wrong("kda_lower_bound", "a number below 0")
    return delta_entries.read_delta(
        entries.replaced({"linear_conv_kernel_dim": conv_size}),
        {
            "linear_num_key_heads": num_heads, "linear_num_value_heads": num_heads, "linear_key_head_dim": size,
            "linear_value_head_dim": size,
        },
        norm_eps=eps,
        has_parts=True,
        has_channel_decay=True,
        has_sigmoid_gate=True,
        decay_bound=bound,
    )  # fmt: skip


def _rope(entries: Entries) -> RopeConfig:
    rope_dim = entries.size("qk_rope_head_dim", 64)
    if rope_dim % 2:
        raise entries.wrong("qk_rope_head_dim", "an even number")
    entries.demand("rotary_dim", rope_dim, rope_dim, "qk_rope_head_dim says what is rotated")
    # Published files have the part of linear attention's heads that qk_rope_head_dim is.
    parts = {1.0, rope_dim / entries.size("linear_head_dim", entries.size("head_dim", 128))}
    for at in (entries, entries.child("rope_parameters")):
        if at is not None and at.get("partial_rotary_factor") not in (None, *parts):
            raise at.wrong("partial_rotary_factor", f"left out or one of {sorted(parts)}: qk_rope_head_dim rotates")
    return read_rope(
        entries,
        head_dim=rope_dim,
        rotary_dim=rope_dim,
        max_position_embeddings=reading.read_max_position(entries),
        interleaved=True,
        default_theta=6e6,
    )


def _linear_layers(entries: Entries) -> list[bool]:
    num_layers, group_size = reading.read_num_layers(entries), entries.size("layer_group_size", 6)
    if "layer_types" not in entries and num_layers % group_size:
        # The model's own code and transformers differ in what layers behind the last whole group are.
        raise entries.wrong(
            "layer_group_size", f"a divisor of num_hidden_layers ({num_layers}), or layer_types beside it"
        )
    return delta_entries.linear_layers(entries, [(idx + 1) % group_size != 0 for idx in range(num_layers)])


def _mlps(entries: Entries) -> list[MlpConfig | MoeConfig]:
    mlps = deepseek.layers_by_kind(entries, _experts(entries), default_dense=2)
    bounded, shared = (_activations(entries, name, mlps) for name in _BOUNDS)
    return [
        mlp if isinstance(mlp, MlpConfig) else replace(mlp, activation=activation, shared_activation=own)
        for mlp, activation, own in zip(mlps, bounded, shared, strict=True)
    ]


def _experts(entries: Entries) -> MoeConfig:
    num_experts, expert_size = entries.size("num_experts", 512), entries.size("moe_intermediate_size")
    entries.demand("moe_shared_expert_intermediate_size", expert_size, expert_size)
    routing = deepseek.sigmoid_routing(entries, num_experts, default_scaling=2.5)
    return deepseek.read_experts(entries, routing, num_experts=num_experts, default_shared=1)


def _later_experts(entries: Entries, num_layers: int) -> MoeConfig | None:
    """Return the experts of the layer that predicts later tokens, whose bounds stand behind those of the others.

    None: the bounds are not supported, which must keep nobody from using the model without this layer.
    """
    later = [(entries.get(name) or [])[num_layers : num_layers + 1] or [0] for name in _BOUNDS]
    entries = entries.replaced(dict(zip(_BOUNDS, later, strict=True)))
    try:
        (activation,), (own,) = (bounded_activations(entries, name, 1) for name in _BOUNDS)
    except ModelLoadError:
        return None
    return replace(_experts(entries), activation=activation, shared_activation=own)


def _activations(entries: Entries, name: str, mlps: list[MlpConfig | MoeConfig]) -> list[str]:
    """Return each layer's activation by the bounds in the file. Further entries are of later layers."""
    if isinstance(bounds := entries.get(name), list):
        entries = entries.replaced({name: bounds[: len(mlps)]})
    found = list(bounded_activations(entries, name, len(mlps)))
    if any(isinstance(mlp, MlpConfig) and each != "silu" for mlp, each in zip(mlps, found, strict=True)):
        raise entries.wrong(name, "a list with 0 for layers without experts")
    return found
