"""StableLM: LayerNorm, partial rope; with and without qkv biases, a norm for each head, and the parallel residual."""

from __future__ import annotations

from tests.models.variants.variant import NO_HEAD_DIM, Variant, rope

STABLELM = {**NO_HEAD_DIM, **rope(partial_rotary_factor=0.25), "num_key_value_heads": 6, "layer_norm_eps": 1e-3}

VARIANTS = {
    "stablelm-3b": Variant("StableLm", STABLELM),
    "stablelm-2-1.6b": Variant("StableLm", {**STABLELM, "use_qkv_bias": True}),
    "stablelm-2-12b": Variant(
        "StableLm", {**STABLELM, "qk_layernorm": True, "use_parallel_residual": True, "num_key_value_heads": 2}
    ),
    "stablelm-qk-layernorm": Variant("StableLm", {**STABLELM, "qk_layernorm": True, "num_key_value_heads": 3}),
    "stablelm-parallel-tied": Variant(
        "StableLm",
        {
            **STABLELM, **rope(theta=3e4, partial_rotary_factor=0.5), "use_parallel_residual": True,
            "use_qkv_bias": True, "tie_word_embeddings": True,
        },
    ),
}  # fmt: skip
