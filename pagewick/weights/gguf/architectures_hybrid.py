"""The architectures of GGUF files that have Mamba or short convolutions in most layers. Imports no torch.

Tables like those in architectures.py. Lists of numbers, one for each layer, are read by hybrid_entries.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from pagewick.weights.gguf import architecture as common
from pagewick.weights.gguf.architecture import GgufArchitecture

# Keys that can be lists are none of these: they are checked where they are read.
_REQUIRED: Final = ("context_length", "embedding_length", "attention.head_count", "block_count")
_CONVOLUTION_REQUIRED: Final = (*_REQUIRED, "attention.layer_norm_rms_epsilon", "shortconv.l_cache")
_STATE_REQUIRED: Final = (
    *_REQUIRED,
    *("ssm.conv_kernel", "ssm.state_size", "ssm.group_count", "ssm.time_step_rank", "ssm.inner_size"),
)
_RMS_STATE_REQUIRED: Final = (*_STATE_REQUIRED, "attention.layer_norm_rms_epsilon")
_ENTRIES: Final = {
    key: name for key, name in common.ENTRIES.items() if key not in ("feed_forward_length", "attention.head_count_kv")
}
_CONVOLUTION_ENTRIES: Final = {
    **{key: name for key, name in _ENTRIES.items() if name != "rms_norm_eps"},
    "feed_forward_length": "intermediate_size",
    "attention.layer_norm_rms_epsilon": "norm_eps",
    "shortconv.l_cache": "conv_L_cache",
}
_STATE_ENTRIES: Final = {
    **_ENTRIES,
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}
_STATE_HAS: Final = {
    **common.BIAS,
    "mamba_conv_bias": "ssm_conv1d.bias",
    "mamba_proj_bias": "ssm_in.bias",
}
_STATE_PARTS: Final = {
    "ssm_in": "in_proj",
    "ssm_conv1d": "conv1d",
    "ssm_dt": "dt_bias",
    "ssm_a": "A_log",
    "ssm_d": "D",
    "ssm_norm": "norm",
    "ssm_out": "out_proj",
}
_STATE: Final = {name: f"mamba.{part}" for name, part in _STATE_PARTS.items()}
# The norm of all layers has the name of one of the table of embeddings, after which it was once computed.
_LFM2_WHOLE: Final = {
    "token_embd": "model.embed_tokens",
    "token_embd_norm": "model.embedding_norm",
    "output_norm": "model.embedding_norm",
    "output": "lm_head",
}
_LFM2: Final = {
    **common.ATTENTION,
    "attn_norm": "operator_norm",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_down": "feed_forward.w2",
    "ffn_up": "feed_forward.w3",
}
_NEMOTRON_H: Final = {
    **{name: theirs.replace("self_attn", "mixer") for name, theirs in common.ATTENTION.items()},
    **{name: f"mixer.{part}" for name, part in _STATE_PARTS.items()},
    "attn_norm": "norm",
    "ffn_up": "mixer.up_proj",
    "ffn_down": "mixer.down_proj",
}
_NEMOTRON_H_ENTRIES: Final = {
    **{key: name for key, name in _ENTRIES.items() if name != "rms_norm_eps"},
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "ssm_state_size",
    "ssm.group_count": "n_groups",
    "ssm.time_step_rank": "mamba_num_heads",
}
_NEMOTRON_H_HAS: Final = {
    **common.BIAS,
    "use_conv_bias": "ssm_conv1d.bias",
    "use_bias": "ssm_in.bias",
    "mlp_bias": "ffn_up.bias",
}
_NEMOTRON_H_WHOLE: Final = {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"}

# Models with nothing but Mamba, whose keys for heads and MLPs are 0.
_ALONE_REQUIRED: Final = (
    *("context_length", "embedding_length", "block_count", "attention.layer_norm_rms_epsilon"),
    *("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank"),
)
_ALONE_ENTRIES: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "attention.layer_norm_rms_epsilon": "layer_norm_epsilon",
    "ssm.conv_kernel": "conv_kernel",
    "ssm.state_size": "state_size",
}
_ALONE_HAS: Final = {"use_bias": "ssm_in.bias", "use_conv_bias": "ssm_conv1d.bias"}
_ALONE_LAYER: Final = {"attn_norm": "norm", **{name: f"mixer.{part}" for name, part in _STATE_PARTS.items()}}
_MAMBA1: Final = GgufArchitecture(
    name="MambaForCausalLM",
    entries={**_ALONE_ENTRIES, "ssm.inner_size": "intermediate_size", "ssm.time_step_rank": "time_step_rank"},
    required=_ALONE_REQUIRED,
    has=_ALONE_HAS,
    whole=_NEMOTRON_H_WHOLE,
    layer={
        **{name: part for name, part in _ALONE_LAYER.items() if name != "ssm_norm"},
        "ssm_x": "mixer.x_proj",
        "ssm_dt": "mixer.dt_proj",
    },
    layer_prefix="backbone.layers.{}.",
    endings={"ssm_dt": None},
    vectors=frozenset(),
    fixed={"ssm.dt_b_c_rms": False},
)
FALCON_MAMBA: Final = replace(_MAMBA1, name="FalconMambaForCausalLM", fixed={"ssm.dt_b_c_rms": True})

BAMBA: Final = GgufArchitecture(
    name="BambaForCausalLM",
    entries={**_STATE_ENTRIES, "feed_forward_length": "intermediate_size"},
    required=(*_RMS_STATE_REQUIRED, "feed_forward_length"),
    has={**_STATE_HAS, "mlp_bias": "ffn_down.bias"},
    whole={**common.WHOLE, "output_norm": "model.final_layernorm"},
    layer={
        **common.ATTENTION,
        **_STATE,
        "ffn_norm": "pre_ff_layernorm",
        "ffn_gate": "feed_forward.gate_proj",
        "ffn_up": "feed_forward.up_proj",
        "ffn_down": "feed_forward.down_proj",
    },
    is_permuted=True,
)

# Files have the layers of attention and of experts as one.
_NEMOTRON_MTP: Final = {
    "": "mtp.layers.1.",
    "attn_norm": "mtp.layers.0.norm",
    **{f"attn_{part}": f"mtp.layers.0.mixer.{part}_proj" for part in "qkv"},
    "attn_output": "mtp.layers.0.mixer.o_proj",
    **{f"nextn.{part}": f"mtp.layers.0.{part}" for part in ("eh_proj", "enorm", "hnorm")},
    "post_attention_norm": "mtp.layers.1.norm",
    "nextn.shared_head_norm": "mtp.layers.1.final_layernorm",
}
# general.architecture -> its meaning. `granitehybrid` without Granite's factors is BAMBA.
ARCHITECTURES_HYBRID: Final[Mapping[str, GgufArchitecture]] = {
    "lfm2": GgufArchitecture(
        name="Lfm2ForCausalLM",
        entries=_CONVOLUTION_ENTRIES,
        required=(*_CONVOLUTION_REQUIRED, "feed_forward_length"),
        # The file has the size that the entries of the checkpoint amount to.
        constants={"block_auto_adjust_ff_dim": False},
        has={"conv_bias": "shortconv.in_proj.bias"},
        whole=_LFM2_WHOLE,
        layer=_LFM2,
    ),
    "lfm2moe": GgufArchitecture(
        name="Lfm2MoeForCausalLM",
        entries={
            **_CONVOLUTION_ENTRIES,
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "leading_dense_block_count": "num_dense_layers",
        },
        required=(*_CONVOLUTION_REQUIRED, "expert_count", "expert_used_count"),
        constants={"num_dense_layers": 0},
        has={"conv_bias": "shortconv.in_proj.bias", "use_expert_bias": "exp_probs_b.bias"},
        whole=_LFM2_WHOLE,
        layer={
            **_LFM2,
            "ffn_gate_inp": "feed_forward.gate",
            "ffn_gate_exps": "feed_forward.experts.{}.w1",
            "ffn_down_exps": "feed_forward.experts.{}.w2",
            "ffn_up_exps": "feed_forward.experts.{}.w3",
            "exp_probs_b": "feed_forward.expert_bias",
        },
        fixed={"expert_gating_func": 2},
    ),
    "granitehybrid": GgufArchitecture(
        name="GraniteMoeHybridForCausalLM",
        entries={
            **_STATE_ENTRIES,
            **common.FACTORS,
            "feed_forward_length": "intermediate_size",
            "expert_count": "num_local_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_shared_feed_forward_length": "shared_intermediate_size",
        },
        required=(*_RMS_STATE_REQUIRED, "feed_forward_length"),
        constants={"shared_mlp_fused": False, "num_local_experts": 0},
        has=_STATE_HAS,
        layer={
            **common.LAYER,
            **_STATE,
            "ffn_gate_inp": "block_sparse_moe.router.layer",
            "ffn_gate_exps": "block_sparse_moe.{}.gate_proj",
            "ffn_up_exps": "block_sparse_moe.{}.up_proj",
            "ffn_down_exps": "block_sparse_moe.{}.down_proj",
            "ffn_gate_shexp": "shared_mlp.gate_proj",
            "ffn_up_shexp": "shared_mlp.up_proj",
            "ffn_down_shexp": "shared_mlp.down_proj",
        },
        is_permuted=True,
    ),
    "mamba": _MAMBA1,
    "mamba2": GgufArchitecture(
        name="Mamba2ForCausalLM",
        entries={**_ALONE_ENTRIES, "ssm.group_count": "n_groups", "ssm.time_step_rank": "num_heads"},
        required=(*_ALONE_REQUIRED, "ssm.group_count"),
        has=_ALONE_HAS,
        whole=_NEMOTRON_H_WHOLE,
        layer=_ALONE_LAYER,
        layer_prefix="backbone.layers.{}.",
    ),
    "jamba": GgufArchitecture(
        name="JambaForCausalLM",
        entries={
            **_ENTRIES,
            "feed_forward_length": "intermediate_size",
            "ssm.conv_kernel": "mamba_d_conv",
            "ssm.state_size": "mamba_d_state",
            "ssm.time_step_rank": "mamba_dt_rank",
            "expert_count": "num_experts",
            "expert_used_count": "num_experts_per_tok",
        },
        required=(
            *(*_REQUIRED, "feed_forward_length", "attention.layer_norm_rms_epsilon"),
            *("ssm.conv_kernel", "ssm.state_size", "ssm.time_step_rank", "ssm.inner_size"),
        ),
        has={"mamba_conv_bias": "ssm_conv1d.bias", "mamba_proj_bias": "ssm_in.bias"},
        whole={**common.WHOLE, "output_norm": "model.final_layernorm"},
        layer={
            **common.ATTENTION,
            **{name: theirs for name, theirs in _STATE.items() if name not in ("ssm_dt", "ssm_norm")},
            "ssm_x": "mamba.x_proj",
            "ssm_dt": "mamba.dt_proj",
            "ssm_dt_norm": "mamba.dt_layernorm",
            "ssm_b_norm": "mamba.b_layernorm",
            "ssm_c_norm": "mamba.c_layernorm",
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
            "ffn_gate_inp": "feed_forward.router",
            "ffn_gate_exps": "feed_forward.experts.{}.gate_proj",
            "ffn_up_exps": "feed_forward.experts.{}.up_proj",
            "ffn_down_exps": "feed_forward.experts.{}.down_proj",
        },
        # dt_proj has a weight and a bias, and A_log a row for each channel.
        endings={"ssm_dt": None},
        vectors=frozenset(),
    ),
    # The converter multiplies the weights by the model's factors.
    "falcon-h1": GgufArchitecture(
        name="FalconH1ForCausalLM",
        entries={
            **_STATE_ENTRIES,
            "feed_forward_length": "intermediate_size",
            "attention.head_count_kv": "num_key_value_heads",
            "ssm.inner_size": "mamba_d_ssm",
        },
        required=(*_RMS_STATE_REQUIRED, "feed_forward_length"),
        # llama.cpp normalises behind the gate.
        constants={"mamba_norm_before_gate": False},
        has={"mamba_conv_bias": "ssm_conv1d.bias", "mamba_rms_norm": "ssm_norm.weight"},
        whole={**common.WHOLE, "output_norm": "model.final_layernorm"},
        layer={
            **common.ATTENTION,
            **_STATE,
            "ffn_norm": "pre_ff_layernorm",
            "ffn_gate": "feed_forward.gate_proj",
            "ffn_up": "feed_forward.up_proj",
            "ffn_down": "feed_forward.down_proj",
        },
    ),
    "nemotron_h": GgufArchitecture(
        name="NemotronHForCausalLM",
        entries=_NEMOTRON_H_ENTRIES,
        required=_STATE_REQUIRED,
        has=_NEMOTRON_H_HAS,
        whole=_NEMOTRON_H_WHOLE,
        layer=_NEMOTRON_H,
        layer_prefix="backbone.layers.{}.",
        is_permuted=True,
    ),
    "nemotron_h_moe": GgufArchitecture(
        name="NemotronHForCausalLM",
        entries={
            **_NEMOTRON_H_ENTRIES,
            "expert_count": "n_routed_experts",
            "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size",
            "expert_shared_count": "n_shared_experts",
            "expert_weights_norm": "norm_topk_prob",
            "expert_weights_scale": "routed_scaling_factor",
            "expert_group_count": "n_group",
            "expert_group_used_count": "topk_group",
            "moe_latent_size": "moe_latent_size",
        },
        required=(*_STATE_REQUIRED, "expert_count", "expert_used_count"),
        has=_NEMOTRON_H_HAS,
        whole=_NEMOTRON_H_WHOLE,
        layer={
            **_NEMOTRON_H,
            "ffn_gate_inp": "mixer.gate",
            "exp_probs_b": "mixer.gate.e_score_correction_bias",
            "ffn_up_exps": "mixer.experts.{}.up_proj",
            "ffn_down_exps": "mixer.experts.{}.down_proj",
            "ffn_latent_down": "mixer.fc1_latent_proj",
            "ffn_latent_up": "mixer.fc2_latent_proj",
            "ffn_up_shexp": "mixer.shared_experts.up_proj",
            "ffn_down_shexp": "mixer.shared_experts.down_proj",
        },
        predicting=_NEMOTRON_MTP,
        layer_prefix="backbone.layers.{}.",
        is_permuted=True,
    ),
}
