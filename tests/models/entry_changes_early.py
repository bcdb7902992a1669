"""The changes of test_config_fields.py for families that were published before Llama 2, and their successors."""

from __future__ import annotations

from typing import Any

CHANGES_EARLY: dict[str, list[dict[str, Any]]] = {
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
