"""Phi-1, 1.5 and 2 (parallel block, biases); Phi-3 and 3.5, Phi-4 and Phi-4-mini (fused weights); Phi-3.5-MoE."""

from __future__ import annotations

from tests.models.moondream import VISION
from tests.models.variants.variant import NO_HEAD_DIM, Variant, rope

PHI = {**NO_HEAD_DIM, "num_key_value_heads": None, "layer_norm_eps": 1e-3}
PHI3 = {**NO_HEAD_DIM, "rms_norm_eps": 1e-4}
LONGROPE = {
    "short_factor": [1.0, 1.1, 1.3, 1.4, 1.6, 2.0, 2.1, 2.4],
    "long_factor": [1.5, 2.0, 2.4, 3.1, 4.0, 5.2, 6.0, 7.5],
}


def longrope(original: int, num_factors: int = 8, **entries: object) -> dict[str, object]:
    """Phi-3's spelling: the original length is beside the rope's entries, and the factor is the ratio of lengths."""
    factors = {name: values[:num_factors] for name, values in LONGROPE.items()}
    return {
        **rope("longrope", **factors, **entries),
        "original_max_position_embeddings": original,
        "max_position_embeddings": 250,
    }


VARIANTS = {
    "phi-1": Variant("Phi", {**PHI, **rope(partial_rotary_factor=0.5)}),
    "phi-2": Variant("Phi", {**PHI, **rope(theta=2e4, partial_rotary_factor=0.375), "num_hidden_layers": 4}),
    "phi-gqa-qk-layernorm": Variant(
        "Phi", {**PHI, **rope(partial_rotary_factor=0.25), "qk_layernorm": True, "num_key_value_heads": 2}
    ),
    "phi-gelu": Variant("Phi", {**PHI, **rope(partial_rotary_factor=1.0), "hidden_act": "gelu"}),
    # Written as Moondream is published, whose text part is Phi's.
    "moondream": Variant(
        "Phi", {**PHI, **rope(partial_rotary_factor=0.5), "layer_norm_eps": 1e-5, "moondream": VISION}
    ),
    "phi-3-mini-4k": Variant("Phi3", {**PHI3, "sliding_window": 23, "num_key_value_heads": None}),
    "phi-3-medium-4k": Variant("Phi3", {**PHI3, "num_key_value_heads": 3, "sliding_window": 130}),
    "phi-3.5-mini-long": Variant("Phi3", {**PHI3, **longrope(24), "num_key_value_heads": 6, "sliding_window": 70}),
    "phi-3.5-mini-short": Variant("Phi3", {**PHI3, **longrope(160)}, {"max_model_len": 160}),
    "phi-4": Variant("Phi3", {**PHI3, **rope(theta=25e4), "num_key_value_heads": 1}),
    "phi-4-mini-long": Variant(
        "Phi3", {**PHI3, **longrope(30, 6, partial_rotary_factor=0.75), "tie_word_embeddings": True}
    ),
    "phi-4-mini-short": Variant(
        "Phi3",
        {**PHI3, **longrope(140, 6, partial_rotary_factor=0.75), "tie_word_embeddings": True},
        {"max_model_len": 140},
    ),
    "phi-3.5-moe": Variant(
        "Phimoe",
        {
            **NO_HEAD_DIM, **longrope(160, short_mscale=0.8, long_mscale=0.8), "rms_norm_eps": 1e-4,
            "intermediate_size": 24, "num_local_experts": 4, "router_jitter_noise": 0.03, "sliding_window": 70,
            "attention_bias": True, "lm_head_bias": True,
        },
        {"max_model_len": 160},
        is_loose=True,
    ),
}  # fmt: skip
