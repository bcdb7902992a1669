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
_GLM_52: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"], "attention_bias": False, "first_k_dense_replace": 3,
    "hidden_act": "silu", "hidden_size": 6144, "index_head_dim": 128, "index_n_heads": 32, "index_skip_topk_offset": 3,
    "index_topk": 2048, "index_topk_freq": 4, "index_topk_pattern": None, "indexer_rope_interleave": True,
    "indexer_types": ["shared" if layer > 2 and layer % 4 != 2 else "full" for layer in range(78)],
    "intermediate_size": 12288, "kv_lora_rank": 512, "max_position_embeddings": 1048576,
    "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75, "model_type": "glm_moe_dsa", "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
    "num_attention_heads": 64, "num_experts_per_tok": 8, "num_hidden_layers": 78, "num_key_value_heads": 64,
    "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-05,
    "rope_interleave": True, "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
    "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_group": 1, "topk_method": "noaux_tc",
    "v_head_dim": 256, "vocab_size": 154880,
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
_COHERE: dict[str, Any] = {
    "architectures": ["CohereForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 5,
    "eos_token_id": 255001, "hidden_act": "silu", "hidden_size": 8192, "initializer_range": 0.02,
    "intermediate_size": 22528, "layer_norm_eps": 1e-05, "logit_scale": 0.0625, "max_position_embeddings": 8192,
    "model_max_length": 131072, "model_type": "cohere", "num_attention_heads": 64, "num_hidden_layers": 40,
    "num_key_value_heads": 64, "pad_token_id": 0, "rope_theta": 8000000.0, "torch_dtype": "float16",
    "use_cache": True, "use_qk_norm": False, "vocab_size": 256000,
}
_QWEN_VL: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645, "hidden_act": "silu",
    "hidden_size": 3584, "image_token_id": 151655, "initializer_range": 0.02, "intermediate_size": 18944,
    "max_position_embeddings": 32768, "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": {"mrope_section": [16, 24, 24], "type": "mrope"},
    "rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "use_cache": True, "use_sliding_window": False, "video_token_id": 151656, "vision_end_token_id": 151653,
    "vision_start_token_id": 151652, "vision_token_id": 151654, "vocab_size": 152064,
}
_QWEN3_VISION: dict[str, Any] = {
    "deepstack_visual_indexes": [8, 16, 24], "depth": 27, "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152,
    "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 4304, "num_heads": 16,
    "num_position_embeddings": 2304, "patch_size": 16, "spatial_merge_size": 2, "temporal_patch_size": 2,
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
    "GLM-4.5V": {
        "architectures": ["Glm4vMoeForConditionalGeneration"], "image_end_token_id": 151340,
        "image_start_token_id": 151339, "image_token_id": 151363, "model_type": "glm4v_moe",
        "text_config": {
            **{name: value for name, value in _GLM_45.items() if name not in ("architectures", "rope_scaling")},
            "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944,
            "max_position_embeddings": 65536, "model_type": "glm4v_moe_text", "moe_intermediate_size": 1408,
            "n_routed_experts": 128, "num_hidden_layers": 46, "rope_theta": 10000.0, "routed_scaling_factor": 1.0,
            "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"}, "use_qk_norm": False,
        },
        "tie_word_embeddings": False, "video_end_token_id": 151342, "video_start_token_id": 151341,
        "video_token_id": 151364,
        "vision_config": {
            "attention_bias": False, "attention_dropout": 0.0, "depth": 24, "hidden_act": "silu", "hidden_size": 1536,
            "image_size": 336, "in_channels": 3, "initializer_range": 0.02, "intermediate_size": 10944,
            "model_type": "glm4v_moe", "num_heads": 12, "out_hidden_size": 4096, "patch_size": 14,
            "rms_norm_eps": 1e-05, "spatial_merge_size": 2, "temporal_patch_size": 2,
        },
    },
    "GLM-4.6": {**_GLM_45, "max_position_embeddings": 202752},
    "GLM-4.7-Flash": _GLM_47_FLASH,
    "GLM-5.2": _GLM_52,
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
    "Ministral-3-8B-Instruct-2512": {
        "architectures": ["Mistral3ForConditionalGeneration"], "dtype": "bfloat16", "image_token_index": 10,
        "model_type": "mistral3", "multimodal_projector_bias": False, "projector_hidden_act": "gelu",
        "spatial_merge_size": 2, "vision_feature_layer": -1,
        "vision_config": {
            "attention_dropout": 0.0, "head_dim": 64, "hidden_act": "silu", "hidden_size": 1024, "image_size": 1540,
            "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "pixtral", "num_attention_heads": 16,
            "num_channels": 3, "num_hidden_layers": 24, "patch_size": 14,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "text_config": {
            "attention_dropout": 0.0, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 14336, "max_position_embeddings": 262144, "model_type": "ministral3",
            "num_attention_heads": 32, "num_hidden_layers": 34, "num_key_value_heads": 8, "rms_norm_eps": 1e-05,
            "rope_parameters": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384, "rope_theta": 1000000.0,
                "rope_type": "yarn", "type": "yarn",
            },
            "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 131072,
        },
    },
    "Devstral-2-123B-Instruct-2512": {
        "architectures": ["Ministral3ForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "dtype": "bfloat16",
        "eos_token_id": 2, "head_dim": 128, "hidden_act": "silu", "hidden_size": 12288, "intermediate_size": 28672,
        "max_position_embeddings": 262144, "model_type": "ministral3", "num_attention_heads": 96,
        "num_hidden_layers": 88, "num_key_value_heads": 8, "pad_token_id": 11, "rms_norm_eps": 1e-05,
        "quantization_config": {
            "activation_scheme": "static", "dequantize": False, "quant_method": "fp8", "weight_block_size": None,
            "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"],
        },
        "rope_parameters": {
            "beta_fast": 4.0, "beta_slow": 1.0, "factor": 64.0, "llama_4_scaling_beta": 0.0, "mscale": 1.0,
            "mscale_all_dim": 0.0, "original_max_position_embeddings": 4096, "rope_theta": 1000000.0,
            "rope_type": "yarn", "type": "yarn",
        },
        "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "vocab_size": 131072,
    },
    "Qwen2-VL-7B-Instruct": {
        **_QWEN_VL, "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl",
        "vision_config": {
            "depth": 32, "embed_dim": 1280, "hidden_size": 3584, "in_chans": 3, "mlp_ratio": 4,
            "model_type": "qwen2_vl", "num_heads": 16, "patch_size": 14, "spatial_merge_size": 2,
            "spatial_patch_size": 14, "temporal_patch_size": 2,
        },
    },
    "Qwen2.5-VL-7B-Instruct": {
        **_QWEN_VL, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "max_position_embeddings": 128000,
        "vision_config": {
            "depth": 32, "fullatt_block_indexes": [7, 15, 23, 31], "hidden_act": "silu", "hidden_size": 1280,
            "in_chans": 3, "intermediate_size": 3420, "model_type": "qwen2_5_vl", "num_heads": 16,
            "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
            "temporal_patch_size": 2, "tokens_per_second": 2, "window_size": 112,
        },
    },
    "Qwen3-VL-8B-Instruct": {
        "architectures": ["Qwen3VLForConditionalGeneration"], "image_token_id": 151655, "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "dtype": "bfloat16",
            "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 4096,
            "intermediate_size": 12288, "max_position_embeddings": 262144, "model_type": "qwen3_vl_text",
            "num_attention_heads": 32, "num_hidden_layers": 36, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000, "use_cache": True, "vocab_size": 151936,
        },
        "tie_word_embeddings": False,
        "vision_config": {**_QWEN3_VISION, "model_type": "qwen3_vl", "out_hidden_size": 4096},
    },
    "Qwen3-VL-30B-A3B-Instruct": {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"], "image_token_id": 151655,
        "model_type": "qwen3_vl_moe", "tie_word_embeddings": False,
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 151643, "decoder_sparse_step": 1,
            "dtype": "bfloat16", "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
            "intermediate_size": 6144, "max_position_embeddings": 262144, "mlp_only_layers": [],
            "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768, "norm_topk_prob": True,
            "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
            "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 5000000, "use_cache": True,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "vocab_size": 151936,
        },
        "vision_config": {**_QWEN3_VISION, "model_type": "qwen3_vl_moe", "out_hidden_size": 2048},
    },
    "granite-3.0-1b-a400m-base": {
        "architectures": ["GraniteMoeForCausalLM"], "attention_bias": False, "attention_dropout": 0.1,
        "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "hidden_act": "silu", "hidden_size": 1024,
        "intermediate_size": 512, "logits_scaling": 6.0, "max_position_embeddings": 4096, "model_type": "granitemoe",
        "num_attention_heads": 16, "num_experts_per_tok": 8, "num_hidden_layers": 24, "num_key_value_heads": 8,
        "num_local_experts": 32, "output_router_logits": False, "residual_multiplier": 0.22, "rms_norm_eps": 1e-06,
        "rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.0, "tie_word_embeddings": True,
        "torch_dtype": "float32", "use_cache": True, "vocab_size": 49155,
    },
    "granite-4.0-1b": {
        "architectures": ["GraniteMoeHybridForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attention_multiplier": 0.0078125, "bos_token_id": 100257, "embedding_multiplier": 12, "eos_token_id": 100257,
        "hidden_act": "silu", "hidden_size": 2048, "init_method": "mup", "intermediate_size": 4096,
        "layer_types": ["attention"] * 40, "logits_scaling": 8, "mamba_n_heads": 128, "max_position_embeddings": 131072,
        "model_type": "granitemoehybrid", "normalization_function": "rmsnorm", "num_attention_heads": 16,
        "num_experts_per_tok": 0, "num_hidden_layers": 40, "num_key_value_heads": 4, "num_local_experts": 0,
        "output_router_logits": False, "position_embedding_type": "rope", "residual_multiplier": 0.22,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 10000000, "shared_intermediate_size": 4096,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 100352,
    },
    "c4ai-command-r-v01": _COHERE,
    "c4ai-command-r-plus": {
        **_COHERE, "hidden_size": 12288, "intermediate_size": 33792, "logit_scale": 0.8333333333333334,
        "num_attention_heads": 96, "num_hidden_layers": 64, "num_key_value_heads": 8, "rope_theta": 75000000.0,
        "use_qk_norm": True,
    },
    "c4ai-command-r7b-12-2024": {
        **{name: value for name, value in _COHERE.items() if name not in ("model_max_length", "use_qk_norm")},
        "architectures": ["Cohere2ForCausalLM"], "cache_implementation": "hybrid", "head_dim": 128,
        "hidden_size": 4096, "intermediate_size": 14336, "layer_switch": 4, "logit_scale": 0.25,
        "max_position_embeddings": 132096, "model_type": "cohere2", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 8, "order_of_interleaved_layers": "local_attn_first",
        "position_embedding_type": "rope_gptj", "rope_scaling": None, "rope_theta": 50000, "rotary_pct": 1.0,
        "sliding_window": 4096, "sliding_window_pattern": 4, "torch_dtype": "bfloat16",
        "use_embedding_sharing": True, "use_gated_activation": True, "use_parallel_block": True,
        "use_parallel_embedding": True,
    },
    "SmolVLM2-500M-Video-Instruct": {
        "architectures": ["SmolVLMForConditionalGeneration"], "image_token_id": 49190, "model_type": "smolvlm",
        "pad_token_id": 128002, "scale_factor": 4,
        "text_config": {
            "architectures": ["VLlama3ForCausalLM"], "head_dim": 64, "hidden_size": 960, "intermediate_size": 2560,
            "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama", "neftune_noise_alpha": 0.0,
            "num_attention_heads": 15, "num_hidden_layers": 32, "num_key_value_heads": 5, "pad_token_id": 2,
            "pixel_shuffle_factor": 4, "qk_layer_norms": False, "rms_norm_eps": 1e-05, "rope_interleaved": False,
            "rope_theta": 100000, "torch_dtype": "bfloat16", "use_resampler": False, "vocab_size": 49280,
        },
        "tie_word_embeddings": False, "torch_dtype": "float32", "transformers_version": "4.47.1", "use_cache": False,
        "use_reentrant_checkpointing": False,
        "vision_config": {
            "hidden_size": 768, "image_size": 512, "max_image_size": {"longest_edge": 512},
            "model_type": "smolvlm_vision", "num_attention_heads": 12, "patch_size": 16,
            "size": {"longest_edge": 2048}, "tie_word_embeddings": False, "use_base_siglip": False,
        },
        "vocab_size": 49280,
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
    "ERNIE-4.5-0.3B-PT as first published": {
        **_ERNIE, "architectures": ["Ernie4_5_ForCausalLM"], "head_dim": 128, "hidden_size": 1024,
        "intermediate_size": 3072, "model_type": "ernie4_5", "num_attention_heads": 16, "num_hidden_layers": 18,
        "num_key_value_heads": 2,
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
    "GLM-4.5V": "46 96/8x128 | default 64@10000 | all | sequential rms 1e-05 | "
    "1: silu 10944, 45: 8 of 128 x 1408 + 1408 | 65536 | qkv bias",
    "GLM-4.6": f"{_GLM_45_FACTS} | 202752 | qkv bias, rms head norm",
    "GLM-5.2": "78 64 2048/512 192+64 256 | default 64@8e+06 in pairs | all | sequential rms 1e-05 | "
    "3: silu 12288, 75: 8 of 256 x 2048 + 2048 | 1048576 | 21 indexers 32x128 for 2048 in pairs",
    "GLM-4.7-Flash": "47 20 768/512 192+64 256 | default 64@1e+06 in pairs | all | sequential rms 1e-05 | "
    "1: silu 10240, 46: 4 of 64 x 1536 + 1536 | 202752 |",
    "MiniMax-M2": "62 48/8x128 | default 64@5e+06 | all | sequential rms 1e-06 | 8 of 256 x 1536 | 196608 | "
    "rms head norm joint",
    "Ministral-3-8B-Instruct-2512": "34 32/8x128 | yarn 128@1e+06 | all | sequential rms 1e-05 | silu 14336 | "
    "262144 | queries 0.1 from 16384",
    "Devstral-2-123B-Instruct-2512": "88 96/8x128 | yarn 128@1e+06 | all | sequential rms 1e-05 | silu 28672 | "
    "262144 |",
    "Qwen2-VL-7B-Instruct": "28 28/4x128 | default 128@1e+06 | all | sequential rms 1e-06 | silu 18944 | 32768 | "
    "qkv bias",
    "Qwen2.5-VL-7B-Instruct": "28 28/4x128 | default 128@1e+06 | all | sequential rms 1e-06 | silu 18944 | 128000 | "
    "qkv bias",
    "Qwen3-VL-8B-Instruct": "36 32/8x128 | default 128@5e+06 | all | sequential rms 1e-06 | silu 12288 | 262144 | "
    "rms head norm",
    "Qwen3-VL-30B-A3B-Instruct": "48 32/4x128 | default 128@5e+06 | all | sequential rms 1e-06 | 8 of 128 x 768 | "
    "262144 | rms head norm",
    "granite-3.0-1b-a400m-base": "24 16/8x64 | default 64@10000 | all | sequential rms 1e-06 | 8 of 32 x 512 | 4096 | "
    "tied, factors 12 0.22 0.166667",
    "granite-4.0-1b": "40 16/4x128 | default 128@1e+07 | all | sequential rms 1e-05 | silu 4096 | 131072 | "
    "tied, factors 12 0.22 0.125",
    "c4ai-command-r-v01": "40 64/64x128 | default 128@8e+06 in pairs | all | parallel layer 1e-05 | silu 22528 | "
    "131072 | tied, factors 1 1 0.0625",
    "c4ai-command-r-plus": "64 96/8x128 | default 128@7.5e+07 in pairs | all | parallel layer 1e-05 | silu 33792 | "
    "131072 | tied, layer head norm each, factors 1 1 0.833333",
    "c4ai-command-r7b-12-2024": "32 32/8x128 | default 128@50000 in pairs, none | 24 of 4096 | parallel layer 1e-05 | "
    "silu 14336 | 132096 | tied, factors 1 1 0.25",
    "SmolVLM2-500M-Video-Instruct": "32 15/5x64 | default 64@100000 | all | sequential rms 1e-05 | silu 2560 | 8192 |",
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
    "ERNIE-4.5-0.3B-PT as first published": "18 16/2x128 | default 128@500000 in pairs | all | "
    "sequential rms 1e-05 | silu 3072 | 131072 | tied",
    "ERNIE-4.5-21B-A3B-PT": "28 20/4x128 | default 128@500000 in pairs | all | sequential rms 1e-05 | "
    "1: silu 12288, 27: 6 of 64 x 1536 + 3072 | 131072 | tied",
    "EXAONE-4.0-1.2B": "30 32/8x64 | llama3 64@1e+06 | all | post_norm rms 1e-05 | silu 4096 | 65536 | "
    "tied, rms head norm",
    "EXAONE-4.0-32B": "64 40/8x128 | llama3 128@1e+06, none | 48 of 4096 | post_norm rms 1e-05 | silu 27392 | "
    "131072 | rms head norm",
}
