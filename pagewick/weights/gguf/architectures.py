"""The architectures of GGUF files: their metadata and tensors in Hugging Face's terms, as tables. Imports no torch.

Source of the keys and names: https://github.com/ggml-org/llama.cpp, gguf-py/gguf/constants.py, and its converter, which
writes the files. `{}` in a tensor's name stands for an expert, or for a head whose norm has a weight of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

# Key of the metadata, without the architecture before it -> entry of config.json.
_ENTRIES: Final = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_WITHOUT_RMS: Final = {key: name for key, name in _ENTRIES.items() if name != "rms_norm_eps"}
_EXPERT_ENTRIES: Final = {
    **_ENTRIES,
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
_LATENT_ENTRIES: Final = {
    **{key: name for key, name in _ENTRIES.items() if name != "num_key_value_heads"},
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "rope.dimension_count": "qk_rope_head_dim",
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
_GEMMA2_ENTRIES: Final = {
    **_ENTRIES,
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
_GEMMA3_ENTRIES: Final = {
    **_ENTRIES,
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "rope.freq_base_swa": "rope_local_base_freq",
}
# Metadata without which no model can be built. The others have defaults, or not every model has them.
_REQUIRED: Final = ("context_length", "embedding_length", "feed_forward_length", "attention.head_count", "block_count")
_RMS: Final = (*_REQUIRED, "attention.layer_norm_rms_epsilon")
_LAYER_NORM: Final = (*_REQUIRED, "attention.layer_norm_epsilon")
_EXPERTS: Final = (*_RMS, "expert_count", "expert_used_count")

# Names of tensors without `.weight` and `.bias`: those of a layer, and those of the whole model.
_ATTENTION: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_GATED_MLP: Final = {
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER: Final = {**_ATTENTION, **_GATED_MLP}
_HEAD_NORMS: Final = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_ROUTED: Final = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
_SHARED: Final = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_MIXTRAL: Final = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
    "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
    "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
}
_SANDWICH: Final = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED_GATE: Final = {"ffn_up": "mlp.gate_up_proj"}
_LATENT: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_output": "self_attn.o_proj",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_GPT_OSS: Final = {
    **_ATTENTION,
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    **_ROUTED,
    "ffn_gate_inp": "mlp.router",
}
# Tensors whose names end here in Hugging Face's checkpoints -> the ending of their names in files.
WITHOUT_ENDING: Final = {"exp_probs_b": "bias", "attn_sinks": "weight"}
_WHOLE: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufArchitecture:
    """The meaning of the GGUF files of one architecture.

    name: the architecture of a config.json. entries: metadata -> entry of config.json. constants: entries that follow
    from the architecture. required: keys that every file has.
    has: entries that are true if a tensor of the first layer exists, and false otherwise. lacks: the opposite.
    whole, layer: names of the tensors; layer_prefix: that of a layer, with its number for `{}`.
    is_permuted: the rows of queries and keys are stored with the two halves of each head interleaved.
    norm_offset: is added to the weights of norms in the file.
    """

    name: str
    entries: Mapping[str, str] = field(default_factory=lambda: _ENTRIES)
    required: tuple[str, ...] = _RMS
    constants: Mapping[str, Any] = field(default_factory=dict)
    has: Mapping[str, str] = field(default_factory=dict)
    lacks: Mapping[str, str] = field(default_factory=dict)
    whole: Mapping[str, str] = field(default_factory=lambda: _WHOLE)
    layer: Mapping[str, str] = field(default_factory=lambda: _LAYER)
    layer_prefix: str = "model.layers.{}."
    is_permuted: bool = False
    norm_offset: float = 0.0


_BIAS: Final = {"attention_bias": "attn_q.bias"}
_LLAMA_HAS: Final = {**_BIAS, "mlp_bias": "ffn_down.bias"}

MIXTRAL: Final = GgufArchitecture(
    name="MixtralForCausalLM",
    entries={**_EXPERT_ENTRIES, "expert_count": "num_local_experts"},
    required=_EXPERTS,
    layer={**_LAYER, **_MIXTRAL},
    is_permuted=True,
)
DEEPSEEK_V3: Final = GgufArchitecture(
    name="DeepseekV3ForCausalLM",
    entries=_LATENT_ENTRIES,
    required=(*_EXPERTS, "attention.kv_lora_rank", "rope.dimension_count"),
    constants={"scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": None},
    layer={**_GATED_MLP, **_LATENT, **_ROUTED},
)

# general.architecture -> its meaning. `llama` with experts is MIXTRAL, `deepseek2` with sigmoids DEEPSEEK_V3.
ARCHITECTURES: Final[Mapping[str, GgufArchitecture]] = {
    "llama": GgufArchitecture(name="LlamaForCausalLM", has=_LLAMA_HAS, is_permuted=True),
    "granite": GgufArchitecture(
        name="GraniteForCausalLM",
        entries={
            **_ENTRIES,
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
        has=_LLAMA_HAS,
        is_permuted=True,
    ),
    "qwen2": GgufArchitecture(name="Qwen2ForCausalLM"),
    "qwen3": GgufArchitecture(name="Qwen3ForCausalLM", has=_BIAS, layer={**_LAYER, **_HEAD_NORMS}),
    "qwen2moe": GgufArchitecture(
        name="Qwen2MoeForCausalLM",
        entries={**_EXPERT_ENTRIES, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
        required=_EXPERTS,
        has={"qkv_bias": "attn_q.bias"},
        layer={**_LAYER, **_ROUTED, **_SHARED},
    ),
    "qwen3moe": GgufArchitecture(
        name="Qwen3MoeForCausalLM",
        entries=_EXPERT_ENTRIES,
        required=_EXPERTS,
        constants={"norm_topk_prob": True},
        has=_BIAS,
        layer={**_LAYER, **_HEAD_NORMS, **_ROUTED},
    ),
    "phi2": GgufArchitecture(
        name="PhiForCausalLM",
        entries={**_WITHOUT_RMS, "attention.layer_norm_epsilon": "layer_norm_eps"},
        required=_LAYER_NORM,
        whole={**_WHOLE, "output_norm": "model.final_layernorm"},
        layer={**_ATTENTION, "attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
    ),
    "phi3": GgufArchitecture(
        name="Phi3ForCausalLM",
        entries={
            **_ENTRIES,
            "attention.sliding_window": "sliding_window",
            "rope.scaling.original_context_length": "original_max_position_embeddings",
        },
        layer={**_LAYER, **_FUSED_GATE, "attn_qkv": "self_attn.qkv_proj"},
    ),
    "stablelm": GgufArchitecture(
        name="StableLmForCausalLM",
        entries={**_WITHOUT_RMS, "attention.layer_norm_epsilon": "layer_norm_eps"},
        required=_LAYER_NORM,
        has={"use_qkv_bias": "attn_q.bias", "qk_layernorm": "attn_q_norm.weight"},
        lacks={"use_parallel_residual": "ffn_norm.weight"},
        layer={
            **_LAYER,
            "attn_q_norm": "self_attn.q_layernorm.norms.{}",
            "attn_k_norm": "self_attn.k_layernorm.norms.{}",
        },
    ),
    "gemma": GgufArchitecture(name="GemmaForCausalLM", has=_BIAS, norm_offset=1.0),
    "gemma2": GgufArchitecture(
        name="Gemma2ForCausalLM", entries=_GEMMA2_ENTRIES, has=_BIAS, layer={**_LAYER, **_SANDWICH}, norm_offset=1.0
    ),
    "gemma3": GgufArchitecture(
        name="Gemma3ForCausalLM",
        entries=_GEMMA3_ENTRIES,
        has=_BIAS,
        layer={**_LAYER, **_SANDWICH, **_HEAD_NORMS},
        norm_offset=1.0,
    ),
    "chatglm": GgufArchitecture(name="GlmForCausalLM", has=_BIAS, layer={**_LAYER, **_FUSED_GATE}),
    "glm4": GgufArchitecture(
        name="Glm4ForCausalLM",
        has=_BIAS,
        layer={
            **_LAYER,
            **_FUSED_GATE,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
    ),
    "deepseek2": GgufArchitecture(
        name="DeepseekV2ForCausalLM",
        entries=_LATENT_ENTRIES,
        required=DEEPSEEK_V3.required,
        constants={"q_lora_rank": None},
        layer=DEEPSEEK_V3.layer,
    ),
    "gpt-oss": GgufArchitecture(
        name="GptOssForCausalLM",
        entries={
            **_EXPERT_ENTRIES,
            "expert_count": "num_local_experts",
            "expert_feed_forward_length": "intermediate_size",
            "attention.sliding_window": "sliding_window",
        },
        required=_EXPERTS,
        has=_BIAS,
        layer=_GPT_OSS,
    ),
    "starcoder": GgufArchitecture(
        name="GPTBigCodeForCausalLM",
        entries={
            "context_length": "n_positions",
            "embedding_length": "n_embd",
            "feed_forward_length": "n_inner",
            "attention.head_count": "n_head",
            "attention.layer_norm_epsilon": "layer_norm_epsilon",
        },
        required=_LAYER_NORM,
        whole={
            "token_embd": "transformer.wte",
            "position_embd": "transformer.wpe",
            "output_norm": "transformer.ln_f",
            "output": "lm_head",
        },
        layer={
            "attn_norm": "ln_1",
            "attn_qkv": "attn.c_attn",
            "attn_output": "attn.c_proj",
            "ffn_norm": "ln_2",
            "ffn_up": "mlp.c_fc",
            "ffn_down": "mlp.c_proj",
        },
        layer_prefix="transformer.h.{}.",
    ),
    "starcoder2": GgufArchitecture(
        name="Starcoder2ForCausalLM",
        entries={**_WITHOUT_RMS, "attention.layer_norm_epsilon": "norm_epsilon"},
        required=_LAYER_NORM,
        has={"use_bias": "attn_q.bias"},
        layer={**_LAYER, "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
    ),
}
