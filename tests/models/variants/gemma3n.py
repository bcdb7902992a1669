"""Gemma 3n: several residual streams, sparse MLPs of different sizes, borrowed keys, inputs of layers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.variants.gemma4 import layers
from tests.models.variants.variant import Variant

ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    "full_attention": {"rope_type": "default", "rope_theta": 1e5},
}
HIDDEN_SIZE = 48


@torch.no_grad()
def _revealed(model: nn.Module) -> None:
    """Make attention peaked although scores are not scaled, and coefficients of streams far from 0."""
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weight.uniform_(0.2, 0.9)
        elif name.endswith("modality_router.weight"):
            # Its inputs are divided by hidden_size.
            weight.normal_(0.0, 0.5 * HIDDEN_SIZE**0.5)
        elif name.endswith("prediction_coefs.weight"):
            weight.normal_(0.0, 0.2)
        elif name.endswith("correct_output_scale"):
            weight.uniform_(0.5, 1.5)


VARIANTS = {
    # Tokens from 150 on have the first row of the table of inputs.
    "gemma-3n": Variant(
        "Gemma3nText",
        {
            **layers("sfssf"), "rope_parameters": ROPES, "hidden_size": HIDDEN_SIZE, "rms_norm_eps": 1e-3,
            "intermediate_size": [72, 60, 72, 66, 81], "activation_sparsity_pattern": [0.8, 0.6, 0.0, 0.7, 0.0],
            "vocab_size_per_layer_input": 150, "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 2,
            "altup_num_inputs": 3, "laurel_rank": 7, "sliding_window": 18, "final_logit_softcapping": 9.0,
        },
        patch=_revealed,
    ),
}  # fmt: skip
