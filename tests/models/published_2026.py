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
}
# fmt: on
FACTS_2026 = {
    "Hy3": "80 64/8x128 | default 128@1.11588e+07 | all | sequential rms 1e-05 | "
    "1: silu 13312, 79: 8 of 192 x 1536 + 1536 | 262144 | rms head norm",
}
