"""The config.json of Gemma 4 on the hub; a part of published.PUBLISHED."""

from __future__ import annotations

from typing import Any

_VISION = {
    "attention_bias": False, "attention_dropout": 0.0, "head_dim": 64, "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 768, "intermediate_size": 3072, "max_position_embeddings": 131072, "model_type": "gemma4_vision",
    "num_attention_heads": 12, "num_hidden_layers": 16, "num_key_value_heads": 12, "patch_size": 16,
    "pooling_kernel_size": 3, "position_embedding_size": 10240, "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}, "standardize": False, "use_clipped_linears": True,
}  # fmt: skip


def _gemma4(num_blocks: int, num_windows: int, **text: Any) -> dict[str, Any]:
    """num_blocks: times that num_windows layers with a window come before one without."""
    kinds = ["sliding_attention"] * num_windows + ["full_attention"]
    return {
        "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "tie_word_embeddings": True,
        "dtype": "bfloat16", "audio_token_id": 258881, "image_token_id": 258880, "boi_token_id": 255999,
        "vision_config": _VISION,
        "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "attention_k_eq_v": False, "bos_token_id": 2,
            "dtype": "bfloat16", "enable_moe_block": False, "eos_token_id": 1, "final_logit_softcapping": 30.0,
            "global_head_dim": 512, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
            "hidden_size_per_layer_input": 256, "initializer_range": 0.02, "layer_types": kinds * num_blocks,
            "max_position_embeddings": 131072, "model_type": "gemma4_text", "moe_intermediate_size": None,
            "num_attention_heads": 8, "num_experts": None, "num_global_key_value_heads": None,
            "num_hidden_layers": len(kinds) * num_blocks, "pad_token_id": 0, "rms_norm_eps": 1e-06,
            "rope_parameters": {
                "full_attention": {
                    "partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional",
                },
                "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
            },
            "sliding_window": 512, "tie_word_embeddings": True, "top_k_experts": None, "use_cache": True,
            "use_bidirectional_attention": None, "vocab_size": 262144, "vocab_size_per_layer_input": 262144, **text,
        },
    }  # fmt: skip


GEMMA4: dict[str, dict[str, Any]] = {
    "gemma-4-E2B": _gemma4(
        7, 4, hidden_size=1536, intermediate_size=6144, num_key_value_heads=1, num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    ),
    "gemma-4-E4B": _gemma4(
        7, 5, hidden_size=2560, intermediate_size=10240, num_key_value_heads=2, num_kv_shared_layers=18,
        use_double_wide_mlp=False,
    ),
}  # fmt: skip
