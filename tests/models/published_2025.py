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
PUBLISHED_2025: dict[str, dict[str, Any]] = {
    "GLM-4.5": _GLM_45,
    "GLM-4.5-Air": {
        **_GLM_45, "first_k_dense_replace": 1, "hidden_size": 4096, "intermediate_size": 10944,
        "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_hidden_layers": 46, "routed_scaling_factor": 1.0,
        "use_qk_norm": False,
    },
    "GLM-4.6": {**_GLM_45, "max_position_embeddings": 202752},
    "GLM-4.7-Flash": _GLM_47_FLASH,
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
}
