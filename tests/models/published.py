"""The config.json of well-known checkpoints on the hub, in the spelling of their time: name -> entries.

Some entries have nothing to do with the model (dropout, token ids, versions): readers must ignore them.
"""

from __future__ import annotations

from typing import Any

from tests.models.published_2025 import PUBLISHED_2025
from tests.models.published_2026 import PUBLISHED_2026
from tests.models.published_early import PUBLISHED_EARLY
from tests.models.published_gemma3n import GEMMA3N
from tests.models.published_gemma4 import GEMMA4
from tests.models.published_llama4 import PUBLISHED_LLAMA4
from tests.models.published_openai import OPENAI
from tests.models.published_states import PUBLISHED_STATES

# fmt: off
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "initializer_range": 0.02,
    "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "pretraining_tp": 1,
    "torch_dtype": "bfloat16", "transformers_version": "4.36.0", "use_cache": True,
}
_LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"}
_LLAMA_31: dict[str, Any] = {
    **_LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0,
    "rope_scaling": _LLAMA3_ROPE, "attention_bias": False, "mlp_bias": False, "eos_token_id": [128001, 128008, 128009],
}
_MISTRAL: dict[str, Any] = {
    **_LLAMA, "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096,
    "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "max_position_embeddings": 32768, "rope_theta": 1000000.0, "sliding_window": None,
}
_QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "initializer_range": 0.02, "model_type": "qwen2", "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "use_sliding_window": False, "max_position_embeddings": 32768,
}
_QWEN3: dict[str, Any] = {
    **_QWEN2, "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False, "head_dim": 128,
    "rope_scaling": None, "sliding_window": None, "max_position_embeddings": 40960, "vocab_size": 151936,
}
_PHI: dict[str, Any] = {
    "architectures": ["PhiForCausalLM"], "attention_dropout": 0.0, "bos_token_id": None, "embd_pdrop": 0.0,
    "eos_token_id": None, "hidden_act": "gelu_new", "layer_norm_eps": 1e-05, "max_position_embeddings": 2048,
    "model_type": "phi", "num_attention_heads": 32, "num_key_value_heads": None, "qk_layernorm": False,
    "resid_pdrop": 0.0, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "vocab_size": 51200,
}
_PHI3: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"], "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
    "attention_dropout": 0.0, "embd_pdrop": 0.0, "hidden_act": "silu", "model_type": "phi3", "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 32064,
    "original_max_position_embeddings": 4096, "attention_bias": False, "rope_scaling": None, "eos_token_id": 32000,
}
_PHI3_MINI: dict[str, Any] = {
    **_PHI3, "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "max_position_embeddings": 4096, "sliding_window": 2047,
}
_STABLELM: dict[str, Any] = {
    "architectures": ["StableLmForCausalLM"], "hidden_act": "silu", "model_type": "stablelm", "layer_norm_eps": 1e-05,
    "max_position_embeddings": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "rope_theta": 10000,
    "partial_rotary_factor": 0.25, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "vocab_size": 100352,
}
_STABLELM_3B: dict[str, Any] = {
    **_STABLELM, "hidden_size": 2560, "intermediate_size": 6912, "num_hidden_layers": 32, "vocab_size": 50304,
    "use_qkv_bias": False,
}
_GEMMA: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"], "attention_bias": False, "bos_token_id": 2, "eos_token_id": 1,
    "head_dim": 256, "hidden_act": "gelu", "max_position_embeddings": 8192, "model_type": "gemma", "pad_token_id": 0,
    "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "vocab_size": 256000,
}
_GEMMA2: dict[str, Any] = {
    **_GEMMA, "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh", "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0,
    "cache_implementation": "hybrid", "sliding_window": 4096, "query_pre_attn_scalar": 256,
}
_GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attn_logit_softcapping": None,
    "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
    "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000, "rope_scaling": None,
    "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
}


def _gemma3(**text: Any) -> dict[str, Any]:
    return {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eos_token_id": [1, 106],
        "image_token_index": 262144, "mm_tokens_per_image": 256, "model_type": "gemma3", "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "patch_size": 14,
                          "model_type": "siglip_vision_model", "num_attention_heads": 16, "num_hidden_layers": 27},
        "text_config": {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
                        "sliding_window": 1024, **text},
    }


_GLM: dict[str, Any] = {
    "architectures": ["GlmForCausalLM"], "attention_bias": True, "eos_token_id": [151329, 151336, 151338],
    "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 13696, "model_type": "glm",
    "max_position_embeddings": 131072, "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 2,
    "partial_rotary_factor": 0.5, "rms_norm_eps": 1.5625e-07, "rope_theta": 10000.0, "tie_word_embeddings": False,
    "torch_dtype": "bfloat16", "vocab_size": 151552,
}
_GLM4: dict[str, Any] = {
    **_GLM, "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "rms_norm_eps": 1e-05,
    "max_position_embeddings": 32768,
}
_GLM4_32B: dict[str, Any] = {
    **_GLM4, "hidden_size": 6144, "intermediate_size": 23040, "num_attention_heads": 48, "num_hidden_layers": 61,
    "attention_bias": False,
}
_DEEPSEEK_YARN: dict[str, Any] = {
    "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096, "type": "yarn",
}
_DEEPSEEK_V2: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "attention_bias": False, "aux_loss_alpha": 0.001, "ep_size": 1,
    "first_k_dense_replace": 1, "hidden_act": "silu", "hidden_size": 5120, "intermediate_size": 12288,
    "kv_lora_rank": 512, "max_position_embeddings": 163840, "model_type": "deepseek_v2", "moe_intermediate_size": 1536,
    "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 160, "n_shared_experts": 2, "norm_topk_prob": False,
    "num_attention_heads": 128, "num_experts_per_tok": 6, "num_hidden_layers": 60, "num_key_value_heads": 128,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06,
    "rope_scaling": _DEEPSEEK_YARN, "rope_theta": 10000, "routed_scaling_factor": 16.0, "scoring_func": "softmax",
    "seq_aux": True, "tie_word_embeddings": False, "topk_group": 3, "topk_method": "group_limited_greedy",
    "torch_dtype": "bfloat16", "v_head_dim": 128, "vocab_size": 102400,
}
_DEEPSEEK_V3: dict[str, Any] = {
    **_DEEPSEEK_V2, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "n_routed_experts": 256,
    "first_k_dense_replace": 3, "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 8, "num_hidden_layers": 61, "topk_group": 4,
    "num_nextn_predict_layers": 1, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
    "rope_scaling": {**_DEEPSEEK_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}, "vocab_size": 129280,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                            "weight_block_size": [128, 128]},
}
_BIGCODE: dict[str, Any] = {
    "architectures": ["GPTBigCodeForCausalLM"], "activation_function": "gelu", "attention_softmax_in_fp32": True,
    "attn_pdrop": 0.1, "bos_token_id": 0, "embd_pdrop": 0.1, "eos_token_id": 0, "inference_runner": 0,
    "layer_norm_epsilon": 1e-05, "model_type": "gpt_bigcode", "multi_query": True, "n_embd": 6144, "n_head": 48,
    "n_inner": 24576, "n_layer": 40, "n_positions": 8192, "scale_attention_softmax_in_fp32": True,
    "scale_attn_weights": True, "summary_type": "cls_index", "torch_dtype": "float32", "vocab_size": 49152,
}
_STARCODER2: dict[str, Any] = {
    "architectures": ["Starcoder2ForCausalLM"], "attention_dropout": 0.1, "embedding_dropout": 0.1,
    "hidden_act": "gelu_pytorch_tanh", "max_position_embeddings": 16384, "mlp_type": "default", "norm_epsilon": 1e-05,
    "model_type": "starcoder2", "norm_type": "layer_norm", "residual_dropout": 0.1, "sliding_window": 4096,
    "use_bias": True, "vocab_size": 49152,
}
_GRANITE: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"], "attention_bias": False, "attention_multiplier": 0.015625,
    "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 2048, "intermediate_size": 8192,
    "logits_scaling": 8.0, "max_position_embeddings": 4096, "mlp_bias": False, "model_type": "granite",
    "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "vocab_size": 49155,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    **PUBLISHED_2025,
    **PUBLISHED_2026,
    **PUBLISHED_LLAMA4,
    **PUBLISHED_STATES,
    "llama-7b-hf": {
        "architectures": ["LLaMAForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "hidden_act": "silu",
        "hidden_size": 4096, "intermediate_size": 11008, "max_sequence_length": 2048, "model_type": "llama",
        "num_attention_heads": 32, "num_hidden_layers": 32, "pad_token_id": -1, "rms_norm_eps": 1e-06,
        "torch_dtype": "float16", "transformers_version": "4.27.0.dev0", "vocab_size": 32000,
    },
    "Llama-2-7b-hf": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "rope_scaling": None,
        "torch_dtype": "float16",
    },
    "vicuna-7b-v1.5-16k": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "vocab_size": 32000, "max_position_embeddings": 4096, "max_sequence_length": 16384,
        "rope_scaling": {"factor": 4.0, "type": "linear"}, "torch_dtype": "float16",
    },
    "Meta-Llama-3.1-8B": _LLAMA_31,
    "DeepSeek-R1-Distill-Llama-8B": {**_LLAMA_31, "eos_token_id": 128001, "rope_scaling": dict(_LLAMA3_ROPE)},
    "Llama-3.2-1B": {
        **_LLAMA_31, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
        "rope_scaling": {**_LLAMA3_ROPE, "factor": 32.0}, "tie_word_embeddings": True,
    },
    "Yi-6B": {
        **_LLAMA, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 4, "vocab_size": 64000, "max_position_embeddings": 4096, "rope_theta": 5000000.0,
    },
    "Yi-1.5-34B": {
        **_LLAMA, "hidden_size": 7168, "intermediate_size": 20480, "num_hidden_layers": 60, "num_attention_heads": 56,
        "num_key_value_heads": 8, "vocab_size": 64000, "max_position_embeddings": 4096, "rope_theta": 5000000.0,
        "rms_norm_eps": 1e-06, "pad_token_id": 0,
    },
    "granite-3b-code-base": {
        **_LLAMA, "attention_bias": True, "mlp_bias": True, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 32, "vocab_size": 49152,
        "max_position_embeddings": 2048, "rope_theta": 10000, "tie_word_embeddings": True,
    },
    "Mistral-7B-v0.1": {**_MISTRAL, "rope_theta": 10000.0, "sliding_window": 4096},
    "Mistral-7B-Instruct-v0.2": _MISTRAL,
    "Mistral-7B-v0.3": {**_MISTRAL, "vocab_size": 32768},
    "Mistral-Nemo-Base-2407": {
        **_MISTRAL, "hidden_size": 5120, "num_hidden_layers": 40, "head_dim": 128, "vocab_size": 131072,
        "max_position_embeddings": 128000,
    },
    "Mistral-Small-3.1-24B-Instruct-2503": {
        "architectures": ["Mistral3ForConditionalGeneration"], "image_token_index": 10, "model_type": "mistral3",
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "text_config": {
            "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 5120,
            "intermediate_size": 32768, "max_position_embeddings": 131072, "model_type": "mistral",
            "num_attention_heads": 32, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True, "vocab_size": 131072,
        },
        "torch_dtype": "bfloat16", "vision_feature_layer": -1,
        "vision_config": {
            "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
            "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
            "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14, "rope_theta": 10000.0,
        },
    },
    "Mixtral-8x7B-v0.1": {
        **_MISTRAL, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 8,
        "num_experts_per_tok": 2, "output_router_logits": False, "router_aux_loss_coef": 0.02,
    },
    "Qwen1.5-0.5B": {
        **_QWEN2, "hidden_size": 1024, "intermediate_size": 2816, "max_window_layers": 21, "num_attention_heads": 16,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "sliding_window": 32768, "tie_word_embeddings": True,
        "vocab_size": 151936,
    },
    "Qwen2.5-7B-Instruct with YaRN": {
        **_QWEN2, "hidden_size": 3584, "intermediate_size": 18944, "max_window_layers": 28, "num_attention_heads": 28,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "sliding_window": 131072, "vocab_size": 152064,
        "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    },
    "QwQ-32B": {
        **_QWEN2, "hidden_size": 5120, "intermediate_size": 27648, "max_position_embeddings": 40960,
        "max_window_layers": 64, "num_attention_heads": 40, "num_hidden_layers": 64, "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05, "sliding_window": 32768, "vocab_size": 152064,
    },
    "Qwen1.5-MoE-A2.7B": {
        **_QWEN2, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "decoder_sparse_step": 1,
        "hidden_size": 2048, "intermediate_size": 5632, "max_position_embeddings": 8192, "max_window_layers": 21,
        "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_attention_heads": 16, "num_experts": 60,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 16, "sliding_window": 32768,
        "shared_expert_intermediate_size": 5632, "vocab_size": 151936,
    },
    "Qwen3-0.6B": {
        **_QWEN3, "hidden_size": 1024, "intermediate_size": 3072, "max_window_layers": 28, "num_attention_heads": 16,
        "num_hidden_layers": 28, "num_key_value_heads": 8, "tie_word_embeddings": True,
    },
    "DeepSeek-R1-0528-Qwen3-8B": {
        **_QWEN3, "hidden_size": 4096, "intermediate_size": 12288, "max_window_layers": 36, "num_attention_heads": 32,
        "num_hidden_layers": 36, "num_key_value_heads": 8, "max_position_embeddings": 131072,
        "rope_scaling": {"attn_factor": 0.8782488562869419, "factor": 4.0, "rope_type": "yarn",
                         "original_max_position_embeddings": 32768},
    },
    "Qwen3-30B-A3B": {
        **_QWEN3, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "decoder_sparse_step": 1,
        "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [],
        "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 128,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
    },
    "phi-1": {**_PHI, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24,
              "partial_rotary_factor": 0.5, "torch_dtype": "float32"},
    "phi-2": {**_PHI, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
              "partial_rotary_factor": 0.4, "torch_dtype": "float16"},
    "Phi-3-mini-4k-instruct": _PHI3_MINI,
    "Phi-3-mini-128k-instruct": {
        **_PHI3_MINI, "max_position_embeddings": 131072, "sliding_window": 262144,
        "rope_scaling": {"long_factor": [1.03 + n for n in range(48)], "short_factor": [1.05] * 48, "type": "su"},
    },
    "Phi-3-medium-4k-instruct": {
        **_PHI3_MINI, "hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40,
        "num_hidden_layers": 40, "num_key_value_heads": 10,
    },
    "phi-4": {
        **_PHI3, "hidden_size": 5120, "intermediate_size": 17920, "num_attention_heads": 40, "num_hidden_layers": 40,
        "num_key_value_heads": 10, "max_position_embeddings": 16384, "original_max_position_embeddings": 16384,
        "rope_theta": 250000, "sliding_window": None, "vocab_size": 100352,
    },
    "Phi-4-mini-instruct": {
        **_PHI3, "full_attn_mod": 1, "hidden_size": 3072, "intermediate_size": 8192, "interpolate_factor": 1,
        "lm_head_bias": False, "max_position_embeddings": 131072, "mlp_bias": False, "num_attention_heads": 24,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "sliding_window": 262144,
        "rope_scaling": {"long_factor": [1 + n for n in range(48)], "short_factor": [1.0] * 48, "type": "longrope"},
        "tie_word_embeddings": True, "vocab_size": 200064,
    },
    "Phi-3.5-MoE-instruct": {
        **_PHI3, "architectures": ["PhiMoEForCausalLM"], "attention_bias": True, "hidden_dropout": 0.0,
        "hidden_size": 4096, "input_jitter_noise": 0.01, "intermediate_size": 6400, "lm_head_bias": True,
        "max_position_embeddings": 131072, "model_type": "phimoe", "num_attention_heads": 32,
        "num_experts_per_tok": 2, "num_hidden_layers": 32, "num_key_value_heads": 8, "num_local_experts": 16,
        "output_router_logits": False, "router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01,
        "rope_scaling": {"long_factor": [1 + n for n in range(64)], "long_mscale": 1.243163121016122,
                         "original_max_position_embeddings": 4096, "short_factor": [1.0] * 64,
                         "short_mscale": 1.243163121016122, "type": "longrope"},
        "sliding_window": 131072,
    },
    "stablelm-3b-4e1t": _STABLELM_3B,
    "stable-code-3b": {**_STABLELM_3B, "max_position_embeddings": 16384, "rope_theta": 1000000},
    "stablelm-2-1_6b": {**_STABLELM, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
                        "torch_dtype": "float16", "use_qkv_bias": True},
    "stablelm-2-12b": {
        **_STABLELM, "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40,
        "num_key_value_heads": 8, "qk_layernorm": True, "use_parallel_residual": True, "use_qkv_bias": False,
    },
    "gemma-2b": {**_GEMMA, "hidden_activation": None, "hidden_size": 2048, "intermediate_size": 16384,
                 "num_attention_heads": 8, "num_hidden_layers": 18, "num_key_value_heads": 1},
    "gemma-7b": {**_GEMMA, "hidden_size": 3072, "intermediate_size": 24576, "num_attention_heads": 16,
                 "num_hidden_layers": 28, "num_key_value_heads": 16},
    "gemma-2-2b": {**_GEMMA2, "hidden_size": 2304, "intermediate_size": 9216, "num_attention_heads": 8,
                   "num_hidden_layers": 26, "num_key_value_heads": 4, "torch_dtype": "float32"},
    "gemma-2-9b, as first published": {
        **{name: value for name, value in _GEMMA2.items() if name != "sliding_window"}, "sliding_window_size": 4096,
        "hidden_size": 3584, "intermediate_size": 14336, "num_attention_heads": 16, "num_hidden_layers": 42,
        "num_key_value_heads": 8, "query_pre_attn_scalar": 224,
    },
    "gemma-2-27b": {
        **_GEMMA2, "head_dim": 128, "hidden_size": 4608, "intermediate_size": 36864, "num_attention_heads": 32,
        "num_hidden_layers": 46, "num_key_value_heads": 16, "query_pre_attn_scalar": 144,
    },
    "gemma-3-1b-it": _GEMMA3_1B,
    "gemma-3-4b-it": _gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34),
    "gemma-3-12b-it": _gemma3(hidden_size=3840, intermediate_size=15360, num_attention_heads=16,
                              num_hidden_layers=48, num_key_value_heads=8),
    "gemma-3-27b-it": _gemma3(head_dim=128, hidden_size=5376, intermediate_size=21504, num_attention_heads=32,
                              num_hidden_layers=62, num_key_value_heads=16, query_pre_attn_scalar=168),
    "glm-4-9b-chat-hf": _GLM,
    "GLM-4-9B-0414": _GLM4,
    "GLM-4-32B-0414": _GLM4_32B,
    "DeepSeek-V2-Lite": {
        **_DEEPSEEK_V2, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 64, "num_attention_heads": 16, "num_hidden_layers": 27, "num_key_value_heads": 16,
        "q_lora_rank": None, "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "greedy",
    },
    "DeepSeek-V2.5": _DEEPSEEK_V2,
    "DeepSeek-R1": _DEEPSEEK_V3,
    "DeepSeek-V3.2": {
        **_DEEPSEEK_V3, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32",
        "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
    },
    "Kimi-K2-Instruct": {
        **_DEEPSEEK_V3, "bos_token_id": 163584, "eos_token_id": 163585, "first_k_dense_replace": 1,
        "max_position_embeddings": 131072, "model_type": "kimi_k2", "n_group": 1, "n_routed_experts": 384,
        "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0, "rope_theta": 50000.0,
        "rope_scaling": {
            "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
    },
    "Moonlight-16B-A3B": {
        **_DEEPSEEK_V3, "hidden_size": 2048, "intermediate_size": 11264, "moe_intermediate_size": 1408, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 2, "num_attention_heads": 16, "num_experts_per_tok": 6,
        "num_hidden_layers": 27, "num_key_value_heads": 16, "num_nextn_predict_layers": 0, "q_lora_rank": None,
        "rope_scaling": None,
        "rope_theta": 50000.0, "routed_scaling_factor": 2.446, "topk_group": 1, "first_k_dense_replace": 1,
        "max_position_embeddings": 8192, "vocab_size": 163840, "rms_norm_eps": 1e-05, "quantization_config": None,
    },
    "starcoder": _BIGCODE,
    "gpt_bigcode-santacoder": {
        **_BIGCODE, "architectures": ["GPTBigCodeLMHeadModel"], "activation_function": "gelu_fast", "n_embd": 2048,
        "n_head": 16, "n_inner": None, "n_layer": 24, "n_positions": 2048, "vocab_size": 49280,
    },
    "starcoder2-3b": {**_STARCODER2, "hidden_size": 3072, "intermediate_size": 12288, "num_attention_heads": 24,
                      "num_hidden_layers": 30, "num_key_value_heads": 2, "rope_theta": 999999.4420358813},
    "starcoder2-15b": {**_STARCODER2, "hidden_size": 6144, "intermediate_size": 24576, "num_attention_heads": 48,
                       "num_hidden_layers": 40, "num_key_value_heads": 4, "rope_theta": 100000,
                       "torch_dtype": "float32"},
    "granite-3.0-2b-base": _GRANITE,
    "granite-3.1-8b-instruct": {
        **_GRANITE, "attention_multiplier": 0.0078125, "hidden_size": 4096, "intermediate_size": 12800,
        "logits_scaling": 16.0, "max_position_embeddings": 131072, "rope_theta": 10000000.0,
    },
    **PUBLISHED_EARLY,
    **GEMMA3N,
    **GEMMA4,
    **OPENAI,
}
