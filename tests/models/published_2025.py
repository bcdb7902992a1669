"""The config.json of checkpoints that were published since 2025, as in published.py, and the facts of each."""

from __future__ import annotations

from typing import Any

# fmt: off
_GLM_45: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "attention_dropout": 0.0, "pad_token_id": 151329,
    "eos_token_id": [151329, 151336, 151338], "first_k_dense_replace": 3, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 12288, "max_position_embeddings": 131072,
    "model_type": "glm4_moe", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 160,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 96, "num_experts_per_tok": 8,
    "num_hidden_layers": 92, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False, "topk_group": 1, "torch_dtype": "bfloat16", "use_cache": True, "use_qk_norm": True,
    "vocab_size": 151552,
}
_GLM_47_FLASH: dict[str, Any] = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
    "dtype": "bfloat16", "eos_token_id": [154820, 154827, 154829], "first_k_dense_replace": 1, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 10240, "kv_lora_rank": 512, "max_position_embeddings": 202752,
    "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1, "n_routed_experts": 64,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20, "num_experts_per_tok": 4,
    "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1, "pad_token_id": 154820,
    "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8,
    "tie_word_embeddings": False, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 256, "vocab_size": 154880,
}
_OLMO2: dict[str, Any] = {
    "architectures": ["Olmo2ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "max_position_embeddings": 4096, "model_type": "olmo2", "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 32, "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": None,
    "rope_theta": 500000, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_cache": True,
    "vocab_size": 100352,
}
_ERNIE: dict[str, Any] = {
    "architectures": ["Ernie4_5ForCausalLM"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "max_position_embeddings": 131072, "pad_token_id": 0, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_bias": False, "use_cache": True, "vocab_size": 103424,
}
_EXAONE_ROPE = {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"}
_EXAONE: dict[str, Any] = {
    "architectures": ["Exaone4ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 361,
    "hidden_act": "silu", "model_type": "exaone4", "rms_norm_eps": 1e-05, "rope_scaling": _EXAONE_ROPE,
    "rope_theta": 1000000, "torch_dtype": "bfloat16", "vocab_size": 102400,
}
PUBLISHED_2025: dict[str, dict[str, Any]] = {
    "GLM-4.5": _GLM_45,
    "GLM-4.5-Air": {
        **_GLM_45, "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_hidden_layers": 46, "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
    "GLM-4.6": {**_GLM_45, "max_position_embeddings": 202752},
    "GLM-4.7-Flash": _GLM_47_FLASH,
    "MiniMax-M2": {
        "architectures": ["MiniMaxM2ForCausalLM"], "attention_dropout": 0.0, "attn_type_list": [1] * 62,
        "head_dim": 128, "hidden_act": "silu", "hidden_size": 3072, "intermediate_size": 1536,
        "max_position_embeddings": 196608, "model_type": "minimax_m2", "mtp_transformer_layers": 1,
        "num_attention_heads": 48, "num_experts_per_tok": 8, "num_hidden_layers": 62, "num_key_value_heads": 8,
        "num_local_experts": 256, "num_mtp_modules": 3, "qk_norm_type": "per_layer", "rms_norm_eps": 1e-06,
        "rope_theta": 5000000, "rotary_dim": 64, "scoring_func": "sigmoid", "shared_intermediate_size": 0,
        "tie_word_embeddings": False, "use_cache": True, "use_mtp": True, "use_qk_norm": True,
        "use_routing_bias": True, "vocab_size": 200064,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8",
                                "weight_block_size": [128, 128]},
    },
    "SmolLM3-3B": {
        "architectures": ["SmolLM3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": None, "eos_token_id": 128012, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 11008, "layer_types": ["full_attention"] * 36, "max_position_embeddings": 65536,
        "max_window_layers": 28, "mlp_bias": False, "model_type": "smollm3", "no_rope_layer_interval": 4,
        "no_rope_layers": [1, 1, 1, 0] * 9, "num_attention_heads": 16, "num_hidden_layers": 36,
        "num_key_value_heads": 4, "pad_token_id": 128004, "pretraining_tp": 2, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 5000000.0, "sliding_window": None, "torch_dtype": "bfloat16",
        "use_cache": False, "use_sliding_window": False, "vocab_size": 128256,
    },
    "Seed-OSS-36B-Instruct": {
        "architectures": ["SeedOssForCausalLM"], "attention_bias": True, "attention_dropout": 0.1,
        "attention_out_bias": False, "bos_token_id": 0, "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu",
        "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 27648, "max_position_embeddings": 524288,
        "mlp_bias": False, "model_type": "seed_oss", "num_attention_heads": 80, "num_hidden_layers": 64,
        "num_key_value_heads": 8, "pad_token_id": 1, "residual_dropout": 0.1, "rms_norm_eps": 1e-06,
        "rope_scaling": {"rope_type": "default"}, "rope_theta": 10000000.0, "tie_word_embeddings": False,
        "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 155136,
    },
    "OLMo-2-1124-7B": _OLMO2,
    "OLMo-2-0325-32B": {
        **_OLMO2, "hidden_size": 5120, "intermediate_size": 27648, "num_attention_heads": 40, "num_hidden_layers": 64,
        "num_key_value_heads": 8,
    },
    "Olmo-3-1025-7B": {
        **_OLMO2, "architectures": ["Olmo3ForCausalLM"], "model_type": "olmo3", "max_position_embeddings": 65536,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8, "sliding_window": 4096,
        "rope_scaling": {"attention_factor": 1.2079441541679836, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                         "original_max_position_embeddings": 8192, "rope_type": "yarn"}, "vocab_size": 100278,
    },
    "OLMoE-1B-7B-0924": {
        **_OLMO2, "architectures": ["OlmoeForCausalLM"], "clip_qkv": None, "eos_token_id": 50279, "hidden_size": 2048,
        "intermediate_size": 1024, "model_type": "olmoe", "norm_topk_prob": False, "num_attention_heads": 16,
        "num_experts": 64, "num_experts_per_tok": 8, "num_hidden_layers": 16, "num_key_value_heads": 16,
        "output_router_logits": False, "pad_token_id": 1, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
        "router_aux_loss_coef": 0.01, "vocab_size": 50304,
    },
    "ERNIE-4.5-0.3B-PT": {
        **_ERNIE, "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3072, "model_type": "ernie4_5",
        "num_attention_heads": 16, "num_hidden_layers": 18, "num_key_value_heads": 2,
    },
    "ERNIE-4.5-21B-A3B-PT": {
        **_ERNIE, "architectures": ["Ernie4_5_MoeForCausalLM"], "hidden_size": 2560, "intermediate_size": 12288,
        "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536,
        "moe_k": 6, "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64,
        "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28,
        "num_key_value_heads": 4,
    },
    "EXAONE-4.0-1.2B": {
        **_EXAONE, "head_dim": 64, "hidden_size": 2048, "intermediate_size": 4096, "num_attention_heads": 32,
        "layer_types": ["full_attention"] * 30, "max_position_embeddings": 65536, "num_hidden_layers": 30,
        "num_key_value_heads": 8, "sliding_window": None, "sliding_window_pattern": None, "tie_word_embeddings": True,
    },
    "EXAONE-4.0-32B": {
        **_EXAONE, "head_dim": 128, "hidden_size": 5120, "intermediate_size": 27392, "num_attention_heads": 40,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 16, "max_position_embeddings": 131072,
        "num_hidden_layers": 64, "num_key_value_heads": 8, "sliding_window": 4096, "sliding_window_pattern": "LLLG",
        "tie_word_embeddings": False,
    },
}
_GLM_45_FACTS = (
    "92 96/8x128 | default 64@1e+06 | all | sequential rms 1e-05 | 3: silu 12288, 89: 8 of 160 x 1536 + 1536"
)
FACTS_2025 = {
    "GLM-4.5": f"{_GLM_45_FACTS} | 131072 | qkv bias, rms head norm",
    "GLM-4.5-Air": "46 96/8x128 | default 64@1e+06 | all | sequential rms 1e-05 | "
    "1: silu 10944, 45: 8 of 128 x 1408 + 1408 | 131072 | qkv bias",
    "GLM-4.6": f"{_GLM_45_FACTS} | 202752 | qkv bias, rms head norm",
    "GLM-4.7-Flash": "47 20 768/512 192+64 256 | default 64@1e+06 in pairs | all | sequential rms 1e-05 | "
    "1: silu 10240, 46: 4 of 64 x 1536 + 1536 | 202752 |",
    "MiniMax-M2": "62 48/8x128 | default 64@5e+06 | all | sequential rms 1e-06 | 8 of 256 x 1536 | 196608 | "
    "rms head norm joint",
    "SmolLM3-3B": "36 16/4x128 | default 128@5e+06, none | all | sequential rms 1e-06 | silu 11008 | 65536 | tied",
    "Seed-OSS-36B-Instruct": "64 80/8x128 | default 128@1e+07 | all | sequential rms 1e-06 | silu 27648 | 524288 | "
    "qkv bias",
    "OLMo-2-1124-7B": "32 32/32x128 | default 128@500000 | all | post_norm rms 1e-06 | silu 11008 | 4096 | "
    "rms head norm joint",
    "OLMo-2-0325-32B": "64 40/8x128 | default 128@500000 | all | post_norm rms 1e-06 | silu 27648 | 4096 | "
    "rms head norm joint",
    "Olmo-3-1025-7B": "32 32/32x128 | default 128@500000, yarn 128@500000 | 24 of 4096 | post_norm rms 1e-06 | "
    "silu 11008 | 65536 | rms head norm joint",
    "OLMoE-1B-7B-0924": "16 16/16x128 | default 128@10000 | all | sequential rms 1e-05 | 8 of 64 x 1024 | 4096 | "
    "rms head norm joint",
    "ERNIE-4.5-0.3B-PT": "18 16/2x128 | default 128@500000 in pairs | all | sequential rms 1e-05 | silu 3072 | "
    "131072 | tied",
    "ERNIE-4.5-21B-A3B-PT": "28 20/4x128 | default 128@500000 in pairs | all | sequential rms 1e-05 | "
    "1: silu 12288, 27: 6 of 64 x 1536 + 3072 | 131072 | tied",
    "EXAONE-4.0-1.2B": "30 32/8x64 | llama3 64@1e+06 | all | post_norm rms 1e-05 | silu 4096 | 65536 | "
    "tied, rms head norm",
    "EXAONE-4.0-32B": "64 40/8x128 | llama3 128@1e+06, none | 48 of 4096 | post_norm rms 1e-05 | silu 27392 | "
    "131072 | rms head norm",
}
