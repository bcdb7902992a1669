"""The changes of test_config_fields.py for families that were published before Llama 2, and their successors."""

from __future__ import annotations

from typing import Any

CHANGES_EARLY: dict[str, list[dict[str, Any]]] = {
    "gpt2": [
        {"activation_function": "relu"},
        {"layer_norm_epsilon": 0.05},
        {"n_inner": 80},
        {"n_head": 4},
        {"scale_attn_weights": False},
        {"scale_attn_by_inverse_layer_idx": True},
        {"tie_word_embeddings": False},
    ],
    "opt": [
        {"activation_function": "gelu"},
        {"ffn_dim": 80},
        {"num_attention_heads": 4},
        {"enable_bias": False},
        {"layer_norm_elementwise_affine": False},
        {"tie_word_embeddings": False},
    ],
    "falcon-7b": [{"layer_norm_epsilon": 0.05}, {"bias": True}, {"rope_parameters.rope_theta": 900.0}],
    "falcon-40b": [
        {"new_decoder_architecture": False, "num_ln_in_parallel_attn": None},
        {"num_kv_heads": 3},
        {"num_ln_in_parallel_attn": 1},
        {"activation": "relu"},
        {"ffn_hidden_size": 72},
        {"bias": False},
        {"tie_word_embeddings": False},
    ],
    "olmo": [{"clip_qkv": 1.2}, {"attention_bias": True}, {"tie_word_embeddings": False}],
    "olmo-0424": [{"clip_qkv": 0.9}, {"rope_parameters.rope_theta": 900.0}],
    "pythia": [
        {"use_parallel_residual": False},
        {"layer_norm_eps": 0.05},
        {"hidden_act": "relu"},
        {"attention_bias": False},
        {"rope_parameters.partial_rotary_factor": 0.5},
        {"rope_parameters.rope_theta": 900.0},
        {"tie_word_embeddings": True},
    ],
}
