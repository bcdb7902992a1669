"""The architectures of GGUF files of 2025 and later, as tables like those in architectures.py. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pagewick.weights.gguf.architecture import (
    ATTENTION,
    BIAS,
    ENTRIES,
    EXPERT_ENTRIES,
    EXPERTS,
    GATED_MLP,
    HEAD_NORMS,
    LATENT,
    LATENT_ENTRIES,
    LAYER,
    ROUTED,
    SANDWICH,
    SHARED,
    WHOLE,
    GgufArchitecture,
)

# Linear attention, and attention whose second norm is that before the MLP.
_STATE_ENTRIES: Final = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
}
_STATE_REQUIRED: Final = (
    *("context_length", "embedding_length", "attention.head_count", "block_count", "attention.layer_norm_rms_epsilon"),
    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
)
_STATE_ROUTED_ENTRIES: Final = {
    **EXPERT_ENTRIES,
    **_STATE_ENTRIES,
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_STATE: Final = {
    **ATTENTION,
    **HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_STATE_GATES: Final = {"ssm_alpha": "linear_attn.in_proj_a", "ssm_beta": "linear_attn.in_proj_b"}
# ssm_in is in older files of Qwen3-Next.
_STATE_FUSED: Final = {"ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"}
_DENSE: Final = {name: theirs for name, theirs in GATED_MLP.items() if name != "ffn_norm"}
_STATE_NORM: Final = frozenset({"ssm_norm"})
# Positions of text are the same on all axes of images.
_AXES: Final = frozenset({"rope.dimension_sections"})

# Experts chosen by sigmoids and a learned bias, and shared ones.
_CHOSEN_ENTRIES: Final = {
    **{key: name for key, name in LATENT_ENTRIES.items() if "lora" not in key and key != "rope.dimension_count"},
    "attention.head_count_kv": "num_key_value_heads",
    "expert_weights_norm": "norm_topk_prob",
}
_CHOSEN: Final = {name: theirs for name, theirs in LATENT.items() if not name.startswith("attn")}
_GEMMA4: Final = {
    **LAYER,
    **SANDWICH,
    **HEAD_NORMS,
    **{name: theirs.removeprefix("mlp.") for name, theirs in ROUTED.items()},
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale": "layer_scalar",
}

ARCHITECTURES_2025: Final[Mapping[str, GgufArchitecture]] = {
    "qwen3next": GgufArchitecture(
        name="Qwen3NextForCausalLM",
        entries=_STATE_ROUTED_ENTRIES,
        required=(*_STATE_REQUIRED, "expert_count", "expert_used_count"),
        has={"linear_in_proj_fused": "ssm_in.weight"},
        layer={**_STATE, **_STATE_FUSED, **ROUTED, **SHARED},
        norm_offset=1.0,
        plain_norms=_STATE_NORM,
        is_written=False,
    ),
    "qwen35": GgufArchitecture(
        name="Qwen3_5ForCausalLM",
        entries={**ENTRIES, **_STATE_ENTRIES},
        required=(*_STATE_REQUIRED, "feed_forward_length"),
        constants={"linear_value_heads_tiled": True},
        layer={**_STATE, **_STATE_GATES, **_DENSE},
        norm_offset=1.0,
        plain_norms=_STATE_NORM,
        harmless=_AXES,
        is_written=False,
    ),
    "qwen35moe": GgufArchitecture(
        name="Qwen3_5MoeForCausalLM",
        entries=_STATE_ROUTED_ENTRIES,
        required=(*_STATE_REQUIRED, "expert_count", "expert_used_count"),
        constants={"linear_value_heads_tiled": True},
        layer={**_STATE, **_STATE_GATES, **ROUTED, **SHARED},
        norm_offset=1.0,
        plain_norms=_STATE_NORM,
        harmless=_AXES,
        is_written=False,
    ),
    "glm4moe": GgufArchitecture(
        name="Glm4MoeForCausalLM",
        entries=_CHOSEN_ENTRIES,
        required=EXPERTS,
        has={**BIAS, "use_qk_norm": "attn_q_norm.weight"},
        layer={
            **ATTENTION,
            **HEAD_NORMS,
            **_DENSE,
            **ROUTED,
            **_CHOSEN,
            "post_attention_norm": "post_attention_layernorm",
        },
    ),
    "gemma4": GgufArchitecture(
        name="Gemma4ForCausalLM",
        entries={
            "context_length": "max_position_embeddings",
            "embedding_length": "hidden_size",
            "attention.head_count": "num_attention_heads",
            "attention.layer_norm_rms_epsilon": "rms_norm_eps",
            "attention.sliding_window": "sliding_window",
            "attention.key_length": "global_head_dim",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "final_logit_softcapping": "final_logit_softcapping",
            "expert_count": "num_experts",
            "expert_used_count": "top_k_experts",
            "expert_feed_forward_length": "moe_intermediate_size",
        },
        required=(
            *("context_length", "embedding_length", "attention.head_count", "block_count", "rope.freq_base"),
            *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "attention.key_length"),
            *("attention.key_length_swa", "rope.freq_base_swa"),
        ),
        whole={
            **WHOLE,
            "per_layer_token_embd": "model.embed_tokens_per_layer",
            "per_layer_model_proj": "model.per_layer_model_projection",
            "per_layer_proj_norm": "model.per_layer_projection_norm",
        },
        layer=_GEMMA4,
        is_written=False,
    ),
}
