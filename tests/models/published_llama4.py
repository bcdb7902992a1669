"""The config.json of Llama 4 on the hub; a part of published.PUBLISHED."""

from __future__ import annotations

from typing import Any

# fmt: off
_TEXT: dict[str, Any] = {
    "attention_bias": False, "attention_chunk_size": 8192, "attention_dropout": 0.0, "bos_token_id": 200000,
    "eos_token_id": [200001, 200007, 200008], "for_llm_compressor": False, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 5120, "initializer_range": 0.02, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    "model_type": "llama4_text", "no_rope_layers": [1, 1, 1, 0] * 12, "num_attention_heads": 40,
    "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_key_value_heads": 8, "output_router_logits": False,
    "pad_token_id": 200018, "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0, "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 202048,
}
_WHOLE: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
    "image_token_index": 200092, "model_type": "llama4", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "vision_config": {
        "attention_dropout": 0.0, "hidden_act": "gelu", "hidden_size": 1408, "image_size": 336,
        "intermediate_size": 5632, "model_type": "llama4_vision_model", "multi_modal_projector_bias": False,
        "norm_eps": 1e-05, "num_attention_heads": 16, "num_channels": 3, "num_hidden_layers": 34, "patch_size": 14,
        "pixel_shuffle_ratio": 0.5, "projector_input_dim": 4096, "projector_output_dim": 4096, "rope_theta": 10000,
        "vision_feature_layer": -1, "vision_feature_select_strategy": "default", "vision_output_dim": 4096,
    },
}
PUBLISHED_LLAMA4: dict[str, dict[str, Any]] = {
    "Llama-4-Scout-17B-16E": {
        **_WHOLE,
        "text_config": {
            **_TEXT, "attn_scale": 0.1, "attn_temperature_tuning": 4, "floor_scale": 8192,
            "interleave_moe_layer_step": 1, "max_position_embeddings": 262144, "moe_layers": list(range(48)),
            "num_local_experts": 16, "use_qk_norm": True,
            "rope_scaling": {
                "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
    },
    "Llama-4-Maverick-17B-128E-Instruct": {
        **_WHOLE,
        "text_config": {
            **_TEXT, "interleave_moe_layer_step": 2, "max_position_embeddings": 1048576, "no_rope_layers": [],
            "num_local_experts": 128, "rope_scaling": None, "use_qk_norm": False,
        },
    },
}
_MAVERICK_MLPS = ", ".join(["1: silu 16384", "1: 1 of 128 x 8192 + 8192"] * 24)
FACTS_LLAMA4 = {
    "Llama-4-Scout-17B-16E": "48 40/8x128 | llama3 128@500000 in pairs, none | 36 of 8192 in chunks | "
    "sequential rms 1e-05 | 1 of 16 x 8192 + 8192 | 262144 | rms head norm plain, queries 0.1 from 8192",
    "Llama-4-Maverick-17B-128E-Instruct": "48 40/8x128 | default 128@500000 in pairs, none | 36 of 8192 in chunks | "
    f"sequential rms 1e-05 | {_MAVERICK_MLPS} | 1048576 | queries 0.1 from 8192",
}
# fmt: on
