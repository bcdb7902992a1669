"""The architectures of GGUF files of models of 2026, as tables like those in architectures.py. Imports no torch.

entries_2026.py reads what no table can say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pagewick.weights.gguf import architecture as common
from pagewick.weights.gguf.architecture import GgufArchitecture

# Linear attention with a decay for each number of a key, beside layers with latent attention.
_DELTA: Final = {
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "ssm_conv1d_q": "self_attn.q_conv1d",
    "ssm_conv1d_k": "self_attn.k_conv1d",
    "ssm_conv1d_v": "self_attn.v_conv1d",
    "ssm_beta": "self_attn.b_proj",
    "ssm_a": "self_attn.A_log",
    "ssm_dt": "self_attn.dt_bias",
    "ssm_norm": "self_attn.o_norm",
}
_DELTA_ENTRIES: Final = {
    **common.LATENT_ENTRIES,
    "expert_count": "num_experts",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "kda.head_dim": "linear_head_dim",
}
_DELTA_REQUIRED: Final = (
    *common.EXPERTS,
    *("attention.kv_lora_rank", "rope.dimension_count", "expert_feed_forward_length", "leading_dense_block_count"),
    *("ssm.conv_kernel", "kda.head_dim"),
)
_LING: Final = {
    name: theirs.replace("self_attn", "attention").replace("attention.o_proj", "attention.dense")
    for name, theirs in {**common.LATENT, **_DELTA}.items()
}
# Heads whose number differs from layer to layer are read by entries_2026.py.
_HEADS: Final = ("attention.head_count", "attention.head_count_kv")
_UNLIKE_ENTRIES: Final = {
    **{key: name for key, name in common.EXPERT_ENTRIES.items() if key not in _HEADS},
    "attention.sliding_window": "sliding_window",
    "rope.freq_base_swa": "rope_local_base_freq",
}
_UNLIKE_REQUIRED: Final = (
    *(key for key in common.EXPERTS if key not in _HEADS),
    *("expert_feed_forward_length", "attention.key_length"),
)
_GATED_HEADS: Final = {**common.ATTENTION, **common.HEAD_NORMS, "attn_gate": "self_attn.g_proj"}

# general.architecture -> its meaning.
ARCHITECTURES_2026: Final[Mapping[str, GgufArchitecture]] = {
    # Names are those that transformers writes, as they have the same output projection in all layers.
    "bailingmoe3": GgufArchitecture(
        name="BailingMoeV3ForCausalLM",
        entries={
            **_DELTA_ENTRIES,
            "kda.safe_gate": "kda_safe_gate",
            "kda.gate_lower_bound": "kda_lower_bound",
            "expert_weights_norm": "norm_topk_prob",
        },
        required=(*_DELTA_REQUIRED, "kda.gate_lower_bound"),
        constants={"n_group": 1, "topk_group": 1},
        whole={**common.WHOLE, "token_embd": "model.word_embeddings"},
        layer={
            **common.GATED_MLP,
            **_LING,
            **common.ROUTED,
            "attn_gate": "attention.g_proj",
            "ssm_f_a": "attention.f_proj",
            "exp_probs_b": "mlp.gate.expert_bias",
        },
        linear={"ssm_g_a": "attention.g_proj"},
        predicting={
            **{key: theirs for key, theirs in common.NEXTN.items() if key != "nextn.shared_head_norm"},
            "layer_output_norm": "model.layers.{}.final_layernorm",
        },
        decay_sign=1.0,
    ),
    "kimi-linear": GgufArchitecture(
        name="KimiLinearForCausalLM",
        entries={**_DELTA_ENTRIES, "expert_group_count": "num_expert_group"},
        required=_DELTA_REQUIRED,
        layer={
            **common.GATED_MLP,
            **{name: theirs.replace("mlp.", "block_sparse_moe.") for name, theirs in common.LATENT.items()},
            **_DELTA,
            **common.NUMBERED,
            "ssm_f_a": "self_attn.f_a_proj",
            "ssm_f_b": "self_attn.f_b_proj",
            "ssm_g_a": "self_attn.g_a_proj",
            "ssm_g_b": "self_attn.g_b_proj",
        },
        vectors=frozenset(),
        decay_shape=(1, 1, -1, 1),
    ),
    # Step 3.5 and 3.7.
    "step35": GgufArchitecture(
        name="Step3p7ForConditionalGeneration",
        entries={
            **_UNLIKE_ENTRIES,
            "expert_count": "n_routed_experts",
            "expert_shared_feed_forward_length": "share_expert_dim",
            "expert_weights_scale": "moe_router_scaling_factor",
        },
        required=(*_UNLIKE_REQUIRED, "attention.sliding_window", "expert_shared_feed_forward_length"),
        has=common.BIAS,
        layer={
            **common.GATED_MLP,
            **_GATED_HEADS,
            "ffn_gate_inp": "moe.gate",
            "exp_probs_b": "moe.router_bias",
            **{f"ffn_{part}_exps": f"moe.{{}}.{part}_proj" for part in ("gate", "up", "down")},
            **{f"ffn_{part}_shexp": f"share_expert.{part}_proj" for part in ("gate", "up", "down")},
        },
        norm_offset=1.0,
        fixed={"moe_every_n_layers": 1},
        has_pattern=True,
    ),
    # MiMo-V2-Flash.
    "mimo2": GgufArchitecture(
        name="MiMoV2FlashForCausalLM",
        entries={
            **{key: name for key, name in _UNLIKE_ENTRIES.items() if name != "sliding_window"},
            "expert_count": "n_routed_experts",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "attention.value_length": "v_head_dim",
            "attention.value_scale": "attention_value_scale",
        },
        required=(
            *_UNLIKE_REQUIRED,
            *("attention.sliding_window", "attention.value_length", "attention.value_scale", "attention.head_count"),
        ),
        has=common.BIAS,
        layer={
            **common.ATTENTION,
            **common.GATED_MLP,
            **common.ROUTED,
            "attn_sinks": "self_attn.attention_sink_bias",
            "exp_probs_b": "mlp.gate.e_score_correction_bias",
        },
    ),
    "laguna": GgufArchitecture(
        name="LagunaForCausalLM",
        entries={
            **_UNLIKE_ENTRIES,
            "leading_dense_block_count": "first_k_dense_replace",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
            "expert_weights_scale": "moe_routed_scaling_factor",
        },
        required=(*_UNLIKE_REQUIRED, "leading_dense_block_count", "expert_shared_feed_forward_length"),
        has=common.BIAS,
        layer={
            **common.GATED_MLP,
            **_GATED_HEADS,
            **common.ROUTED,
            "exp_probs_b": "mlp.experts.e_score_correction_bias",
            **{f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        },
    ),
}
