"""GPT-NeoX and Pythia."""

from __future__ import annotations

from tests.models.variants.variant import NO_HEAD_DIM, Variant, rope

NEOX = {**NO_HEAD_DIM, "num_key_value_heads": None, "layer_norm_eps": 1e-3}

VARIANTS = {
    "pythia": Variant("GPTNeoX", {**NEOX, **rope(theta=5e4, partial_rotary_factor=0.25)}),
    "gpt-neox-sequential": Variant(
        "GPTNeoX",
        {
            **NEOX, **rope(partial_rotary_factor=1.0), "use_parallel_residual": False, "hidden_act": "gelu_fast",
            "tie_word_embeddings": True, "attention_bias": False,
        },
    ),
}  # fmt: skip
