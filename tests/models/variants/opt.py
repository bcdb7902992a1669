"""OPT and Galactica: learned positions that begin with the third row."""

from __future__ import annotations

from typing import Any

from tests.models.variants.variant import NO_HEAD_DIM, Variant

OPT: dict[str, Any] = {
    **NO_HEAD_DIM, "num_key_value_heads": None, "intermediate_size": None, "ffn_dim": 72,
    "max_position_embeddings": 160,
}  # fmt: skip

VARIANTS = {
    "opt": Variant("OPT", OPT),
    "galactica-30b": Variant(
        "OPT",
        {**OPT, "enable_bias": False, "layer_norm_elementwise_affine": False, "activation_function": "gelu"},
    ),
}
