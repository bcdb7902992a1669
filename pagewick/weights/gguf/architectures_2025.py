"""The architectures of GGUF files of 2025 and later, as tables like those in architectures.py. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pagewick.weights.gguf import architecture as common
from pagewick.weights.gguf.architecture import GgufArchitecture

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
    **common.EXPERT_ENTRIES,
    **_STATE_ENTRIES,
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
}
_STATE: Final = {
    **common.ATTENTION,
    **common.HEAD_NORMS,
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
_STATE_NORM: Final = frozenset({"ssm_norm"})

_LAYER_INPUT: Final = {
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
}
_LAYER_INPUTS: Final = {
    **common.WHOLE,
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA3N: Final = {
    **common.LAYER,
    **common.SANDWICH,
    **common.HEAD_NORMS,
    **_LAYER_INPUT,
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4: Final = {
    **common.LAYER,
    **common.SANDWICH,
    **common.HEAD_NORMS,
    **_LAYER_INPUT,
    **{name: theirs.removeprefix("mlp.") for name, theirs in common.ROUTED.items()},
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "layer_output_scale": "layer_scalar",
}
_LLAMA4: Final = {
    name: theirs.replace("mlp.", "feed_forward.")
    for name, theirs in {**common.LAYER, **common.ROUTED, **common.SHARED, "ffn_gate_inp": "mlp.router"}.items()
    if name != "ffn_gate_inp_shexp"
}
# Attention and MLP whose norms come after them.
_NORMS_AFTER: Final = {
    **{name: theirs for name, theirs in common.ATTENTION.items() if name != "attn_norm"},
    **common.HEAD_NORMS,
    **common.DENSE,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LOCAL_EXPERTS: Final = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}
_COHERE_ENTRIES: Final = {
    **{key: name for key, name in common.ENTRIES.items() if name != "rms_norm_eps"},
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "logit_scale": "logit_scale",
}

OLMO3: Final = GgufArchitecture(
    name="Olmo3ForCausalLM",
    entries={
        **common.ENTRIES,
        "attention.sliding_window": "sliding_window",
        "rope.freq_base_swa": "rope_local_base_freq",
    },
    has=common.BIAS,
    layer=_NORMS_AFTER,
    has_pattern=True,
)

# general.architecture -> its meaning. `olmo2` with windows is OLMO3.
ARCHITECTURES_2025: Final[Mapping[str, GgufArchitecture]] = {
    "qwen3next": GgufArchitecture(
        name="Qwen3NextForCausalLM",
        entries=_STATE_ROUTED_ENTRIES,
        required=(*_STATE_REQUIRED, "expert_count", "expert_used_count"),
        has={"linear_in_proj_fused": "ssm_in.weight"},
        predicting=common.QWEN_MTP,
        layer={**_STATE, **_STATE_FUSED, **common.ROUTED, **common.SHARED},
        norm_offset=1.0,
        plain_norms=_STATE_NORM,
    ),
    "qwen35": GgufArchitecture(
        name="Qwen3_5ForCausalLM",
        entries={**common.ENTRIES, **_STATE_ENTRIES},
        required=(*_STATE_REQUIRED, "feed_forward_length"),
        constants={"linear_value_heads_tiled": True},
        predicting=common.QWEN_MTP,
        layer={**_STATE, **_STATE_GATES, **common.DENSE},
        norm_offset=1.0,
        plain_norms=_STATE_NORM,
        harmless=common.AXES,
    ),
    "qwen35moe": GgufArchitecture(
        name="Qwen3_5MoeForCausalLM",
        entries=_STATE_ROUTED_ENTRIES,
        required=(*_STATE_REQUIRED, "expert_count", "expert_used_count"),
        constants={"linear_value_heads_tiled": True},
        predicting=common.QWEN_MTP,
        layer={**_STATE, **_STATE_GATES, **common.ROUTED, **common.SHARED},
        norm_offset=1.0,
        plain_norms=_STATE_NORM,
        harmless=common.AXES,
    ),
    "llama4": GgufArchitecture(
        name="Llama4ForCausalLM",
        entries={
            **common.ENTRIES,
            **_LOCAL_EXPERTS,
            "feed_forward_length": "intermediate_size_mlp",
            "expert_feed_forward_length": "intermediate_size",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        has=common.BIAS,
        layer=_LLAMA4,
    ),
    "glm4moe": GgufArchitecture(
        name="Glm4MoeForCausalLM",
        harmless=common.AXES,
        entries=common.CHOSEN_ENTRIES,
        required=common.EXPERTS,
        has={**common.BIAS, "use_qk_norm": "attn_q_norm.weight"},
        predicting=common.NEXTN,
        layer={
            **common.ATTENTION,
            **common.HEAD_NORMS,
            **common.DENSE,
            **common.ROUTED,
            **common.CHOSEN,
            "post_attention_norm": "post_attention_layernorm",
        },
    ),
    "gemma3n": GgufArchitecture(
        name="Gemma3nForCausalLM",
        entries={
            **{key: name for key, name in common.ENTRIES.items() if name != "intermediate_size"},
            "attention.sliding_window": "sliding_window",
            "attention.shared_kv_layers": "num_kv_shared_layers",
            "embedding_length_per_layer_input": "hidden_size_per_layer_input",
            "altup.active_idx": "altup_active_idx",
            "altup.num_inputs": "altup_num_inputs",
            "final_logit_softcapping": "final_logit_softcapping",
            "rope.freq_base_swa": "rope_local_base_freq",
        },
        required=(
            *("context_length", "embedding_length", "attention.head_count", "block_count", "altup.num_inputs"),
            *("attention.layer_norm_rms_epsilon", "attention.sliding_window", "embedding_length_per_layer_input"),
        ),
        whole={
            **_LAYER_INPUTS,
            "altup_proj": "model.altup_projections.{}",
            "altup_unembd_proj": "model.altup_unembed_projections.{}",
        },
        layer=_GEMMA3N,
        has_pattern=True,
        has_unused_keys=True,
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
        whole=_LAYER_INPUTS,
        layer=_GEMMA4,
    ),
    "olmo2": GgufArchitecture(name="Olmo2ForCausalLM", has=common.BIAS, layer=_NORMS_AFTER),
    "olmoe": GgufArchitecture(
        name="OlmoeForCausalLM",
        entries={**common.ENTRIES, "expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"},
        required=common.EXPERTS,
        constants={"norm_topk_prob": False},
        has=common.BIAS,
        layer={**common.LAYER, **common.HEAD_NORMS, **common.ROUTED},
    ),
    "smollm3": GgufArchitecture(name="SmolLM3ForCausalLM", has=common.LLAMA_HAS, is_permuted=True),
    "seed_oss": GgufArchitecture(
        name="SeedOssForCausalLM",
        has={**common.LLAMA_HAS, "attention_out_bias": "attn_output.bias"},
        layer={**common.ATTENTION, **common.DENSE, "post_attention_norm": "post_attention_layernorm"},
    ),
    "ernie4_5": GgufArchitecture(name="Ernie4_5ForCausalLM", has={"use_bias": "attn_q.bias"}),
    "ernie4_5-moe": GgufArchitecture(
        name="Ernie4_5_MoeForCausalLM",
        entries={
            **common.ENTRIES,
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "interleave_moe_layer_step": "moe_layer_interval",
            "leading_dense_block_count": "moe_layer_start_index",
        },
        required=common.EXPERTS,
        layer={
            **common.LAYER,
            **common.ROUTED,
            **common.CHOSEN,
            "exp_probs_b": "mlp.moe_statics.e_score_correction_bias",
        },
        rows=frozenset({"exp_probs_b"}),
    ),
    "exaone4": GgufArchitecture(
        name="Exaone4ForCausalLM",
        entries={**common.ENTRIES, "attention.sliding_window": "sliding_window"},
        layer=_NORMS_AFTER,
        has_pattern=True,
    ),
    "minimax-m2": GgufArchitecture(
        name="MiniMaxM2ForCausalLM",
        entries={
            **common.ENTRIES,
            **_LOCAL_EXPERTS,
            "expert_feed_forward_length": "intermediate_size",
        },
        required=common.EXPERTS,
        layer={
            **common.ATTENTION,
            **common.HEAD_NORMS,
            **common.NUMBERED,
            "ffn_norm": "post_attention_layernorm",
            "exp_probs_b": "block_sparse_moe.e_score_correction_bias",
        },
    ),
    "command-r": GgufArchitecture(
        name="CohereForCausalLM",
        entries=_COHERE_ENTRIES,
        required=common.LAYER_NORM,
        has={**common.BIAS, "use_qk_norm": "attn_q_norm.weight"},
        layer={**common.ATTENTION, **common.DENSE, **common.HEAD_NORMS},
        fixed={"rope.scaling.type": "none"},
    ),
    "cohere2": GgufArchitecture(
        name="Cohere2ForCausalLM",
        entries={**_COHERE_ENTRIES, "attention.sliding_window": "sliding_window"},
        required=common.LAYER_NORM,
        has=common.BIAS,
        layer={**common.ATTENTION, **common.DENSE},
        fixed={"rope.scaling.type": "none"},
    ),
    "cohere2moe": GgufArchitecture(
        name="Cohere2MoeForCausalLM",
        entries={
            **common.ENTRIES,
            "attention.layer_norm_epsilon": "layer_norm_eps",
            "attention.sliding_window": "sliding_window",
            "logit_scale": "logit_scale",
            "feed_forward_length": "prefix_dense_intermediate_size",
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "intermediate_size",
            "expert_shared_count": "num_shared_experts",
        },
        required=(
            *("context_length", "embedding_length", "attention.head_count", "block_count", "logit_scale"),
            *("attention.sliding_window", "expert_count", "expert_used_count", "expert_feed_forward_length"),
        ),
        has=common.BIAS,
        layer={**common.ATTENTION, **common.DENSE, **common.ROUTED, **common.CHOSEN},
        is_written=False,
    ),
    # The text parts of models that also see images.
    "qwen2vl": GgufArchitecture(name="Qwen2ForCausalLM", harmless=common.AXES, is_written=False),
    "qwen3vl": GgufArchitecture(
        name="Qwen3ForCausalLM",
        has=common.BIAS,
        layer={**common.LAYER, **common.HEAD_NORMS},
        harmless=common.AXES,
        is_written=False,
    ),
    "qwen3vlmoe": GgufArchitecture(
        name="Qwen3MoeForCausalLM",
        entries=common.EXPERT_ENTRIES,
        required=common.EXPERTS,
        constants={"norm_topk_prob": True},
        has=common.BIAS,
        layer={**common.LAYER, **common.HEAD_NORMS, **common.ROUTED},
        harmless=common.AXES,
        is_written=False,
    ),
}
