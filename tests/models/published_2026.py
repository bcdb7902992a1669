"""The config.json of checkpoints that were published since 2026, as in published.py, and the facts of each."""

from __future__ import annotations

from typing import Any

# fmt: off
PUBLISHED_2026: dict[str, dict[str, Any]] = {
    "Hy3": {
        "architectures": ["HYV3ForCausalLM"], "enable_attention_fp32_softmax": False, "enable_lm_head_fp32": True,
        "enable_moe_fp32_combine": False, "expert_hidden_dim": 1536, "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_size": 4096, "initializer_range": 0.006, "intermediate_size": 13312, "max_position_embeddings": 262144,
        "model_type": "hy_v3", "moe_intermediate_size": 1536, "moe_router_enable_expert_bias": True,
        "moe_router_use_sigmoid": True, "num_attention_heads": 64, "num_experts": 192, "num_experts_per_tok": 8,
        "num_hidden_layers": 80, "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "num_shared_experts": 1,
        "output_router_logits": True, "qk_norm": True, "rms_norm_eps": 1e-05,
        "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"}, "route_norm": True,
        "router_scaling_factor": 2.826, "tie_word_embeddings": False, "transformers_version": "5.6.0",
        "use_cache": True, "vocab_size": 120832,
    },
    "GLM-OCR": {
        "architectures": ["GlmOcrForConditionalGeneration"], "dtype": "bfloat16", "image_end_token_id": 59257,
        "image_start_token_id": 59256, "image_token_id": 59280, "model_type": "glm_ocr",
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "dtype": "bfloat16", "eos_token_id": [59246, 59253],
            "head_dim": 128, "hidden_act": "silu", "hidden_size": 1536, "initializer_range": 0.02,
            "intermediate_size": 4608, "max_position_embeddings": 131072, "model_type": "glm_ocr_text",
            "num_attention_heads": 16, "num_hidden_layers": 16, "num_key_value_heads": 8,
            "num_nextn_predict_layers": 1, "pad_token_id": 59246, "rms_norm_eps": 1e-05,
            "rope_parameters": {
                "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0, "rope_theta": 10000,
                "rope_type": "default",
            },
            "tie_word_embeddings": False, "use_cache": True, "vocab_size": 59392,
        },
        "tie_word_embeddings": False, "transformers_version": "5.3.0", "video_end_token_id": 59259,
        "video_start_token_id": 59258, "video_token_id": 59281,
        "vision_config": {
            "attention_bias": True, "attention_dropout": 0.0, "depth": 24, "dtype": "bfloat16", "hidden_act": "silu",
            "hidden_dropout_prob": 0.0, "hidden_size": 1024, "image_size": 336, "in_channels": 3,
            "initializer_range": 0.02, "intermediate_size": 4096, "model_type": "glm_ocr_vision", "num_heads": 16,
            "out_hidden_size": 1536, "patch_size": 14, "rms_norm_eps": 1e-05, "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    },
    "Mellum2.1-12B-A2.5B-Thinking": {
        "architectures": ["MellumForCausalLM"], "attention_bias": False, "eos_token_id": 28, "head_dim": 128,
        "hidden_act": "silu", "hidden_size": 2304, "intermediate_size": 7168,
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 7, "max_position_embeddings": 131072,
        "mlp_layer_types": ["sparse"] * 28, "model_type": "mellum", "moe_intermediate_size": 896,
        "norm_topk_prob": True, "num_attention_heads": 32, "num_experts": 64, "num_experts_per_tok": 8,
        "num_hidden_layers": 28, "num_key_value_heads": 4, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "attention_factor": 1.2772588722239782, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0,
                "original_max_position_embeddings": 8192, "rope_theta": 500000.0, "rope_type": "yarn",
            },
            "sliding_attention": {"rope_theta": 500000.0, "rope_type": "default"},
        },
        "sliding_window": 1024, "tie_word_embeddings": False, "use_sliding_window": True, "vocab_size": 98304,
    },
    "Laguna-XS-2.1": {
        "architectures": ["LagunaForCausalLM"], "attention_bias": False, "bos_token_id": 2, "decoder_sparse_step": 1,
        "eos_token_id": [2, 24], "gating": "per-head", "head_dim": 128, "hidden_act": "silu", "hidden_size": 2048,
        "intermediate_size": 8192, "layer_types": ["full_attention", *["sliding_attention"] * 3] * 10,
        "max_position_embeddings": 262144, "mlp_layer_types": ["dense", *["sparse"] * 39], "mlp_only_layers": [0],
        "model_type": "laguna", "moe_apply_router_weight_on_input": False, "moe_intermediate_size": 512,
        "moe_routed_scaling_factor": 2.5, "moe_router_logit_softcapping": 0.0, "norm_topk_prob": True,
        "num_attention_heads": 48, "num_attention_heads_per_layer": [48, 64, 64, 64] * 10, "num_experts": 256,
        "num_experts_per_tok": 8, "num_hidden_layers": 40, "num_key_value_heads": 8, "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "full_attention": {
                "attention_factor": 1.3465735902799727, "beta_fast": 64.0, "beta_slow": 1.0, "factor": 32.0,
                "original_max_position_embeddings": 8192, "partial_rotary_factor": 0.5, "rope_theta": 500000.0,
                "rope_type": "yarn",
            },
            "sliding_attention": {"partial_rotary_factor": 1.0, "rope_theta": 10000.0, "rope_type": "default"},
        },
        "shared_expert_intermediate_size": 512, "sliding_window": 512, "tie_word_embeddings": False,
        "vocab_size": 100352,
    },
}
# fmt: on
FACTS_2026 = {
    "GLM-OCR": "16 16/8x128 | default 128@10000 in pairs | all | sandwich rms 1e-05 | silu 4608 | 131072 |",
    "Hy3": "80 64/8x128 | default 128@1.11588e+07 | all | sequential rms 1e-05 | "
    "1: silu 13312, 79: 8 of 192 x 1536 + 1536 | 262144 | rms head norm",
    "Mellum2.1-12B-A2.5B-Thinking": "28 32/4x128 | default 128@500000, yarn 128@500000 | 21 of 1024 | "
    "sequential rms 1e-06 | 8 of 64 x 896 | 131072 | rms head norm",
    "Laguna-XS-2.1": "40 48/8x128 | yarn 64@500000, default 128@10000 | 30 of 512 | sequential rms 1e-06 | "
    "1: silu 8192, 39: 8 of 256 x 512 + 512 | 262144 | rms head norm",
}
