"""The config.json of Gemma 3n on the hub; a part of published.PUBLISHED."""

from __future__ import annotations

from typing import Any


def _gemma3n(num_blocks: int, intermediate_size: int, num_kv_shared_layers: int) -> dict[str, Any]:
    """num_blocks: times that four layers with a window come before one without."""
    kinds = (["sliding_attention"] * 4 + ["full_attention"]) * num_blocks
    return {
        "architectures": ["Gemma3nForConditionalGeneration"], "model_type": "gemma3n", "torch_dtype": "bfloat16",
        "audio_config": {"model_type": "gemma3n_audio", "hidden_size": 1536, "vocab_size": 128},
        "vision_config": {"model_type": "gemma3n_vision", "architecture": "mobilenetv5_300m_enc", "hidden_size": 2048},
        "audio_token_id": 262273, "image_token_id": 262145, "boi_token_id": 255999, "eoi_token_id": 262144,
        "eos_token_id": [1, 106],
        "text_config": {
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * (len(kinds) - 10), "altup_active_idx": 0,
            "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4,
            "attention_bias": False, "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 2048, "hidden_size_per_layer_input": 256,
            "initializer_range": 0.02, "intermediate_size": [intermediate_size] * len(kinds), "laurel_rank": 64,
            "layer_types": kinds, "max_position_embeddings": 32768, "model_type": "gemma3n_text",
            "num_attention_heads": 8, "num_hidden_layers": len(kinds), "num_key_value_heads": 2,
            "num_kv_shared_layers": num_kv_shared_layers, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512,
            "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
        },
    }  # fmt: skip


GEMMA3N: dict[str, dict[str, Any]] = {
    "gemma-3n-E2B-it": _gemma3n(6, 8192, 10),
    "gemma-3n-E4B-it": _gemma3n(7, 16384, 15),
}
