"""Granite, also with experts, and HyperCLOVA X: Llama with multipliers of embedding, residual, attention and logits."""

from __future__ import annotations

import torch
from torch import nn

from tests.models.variants.variant import NO_HEAD_DIM, Variant, rope

# Logits are divided by more than 1, as in every published model: less would magnify what float32 leaves uncertain.
MULTIPLIERS = {
    "embedding_multiplier": 3.0, "residual_multiplier": 0.44, "attention_multiplier": 0.31, "logits_scaling": 1.2,
}  # fmt: skip
OTHERS = {
    "embedding_multiplier": 2.3, "residual_multiplier": 0.57, "attention_multiplier": 0.22, "logits_scaling": 1.3,
}  # fmt: skip
# transformers checks entries of Mamba's layers although there are none.
DENSE = {
    "num_local_experts": 0, "shared_intermediate_size": 40, "layer_types": ["full_attention"] * 3, "mamba_n_heads": 4,
    "time_step_limit": (0.0, 100.0),
}  # fmt: skip


@torch.no_grad()
def _with_sinks(model: nn.Module) -> None:
    """Make the sinks as large as scores."""
    for name, weight in model.named_parameters():
        if name.endswith("sinks"):
            weight.uniform_(-1, 4)


VARIANTS = {
    "hyperclova-x": Variant(
        "HyperCLOVAX", {**MULTIPLIERS, **rope(theta=1e6), "logits_scaling": 0.8, "rms_norm_eps": 2e-3}
    ),
    "hyperclova-x-plain": Variant(
        "HyperCLOVAX",
        {**NO_HEAD_DIM, "use_post_norm": False, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "granite": Variant(
        "Granite",
        {**NO_HEAD_DIM, **MULTIPLIERS, **rope(theta=1e6), "rms_norm_eps": 2e-3, "tie_word_embeddings": True},
    ),
    "granite-untied-bias": Variant(
        "Granite",
        {
            **NO_HEAD_DIM, **OTHERS, **rope(theta=5e4), "rms_norm_eps": 0.03, "attention_bias": True, "mlp_bias": True,
            "num_key_value_heads": 1,
        },
    ),
    "granite-moe": Variant(
        "GraniteMoe",
        {
            **NO_HEAD_DIM, **MULTIPLIERS, "rms_norm_eps": 2e-3, "num_local_experts": 7, "num_experts_per_tok": 3,
            "intermediate_size": 24, "tie_word_embeddings": True,
        },
        is_loose=True,
    ),
    "granite-moe-shared": Variant(
        "GraniteMoeShared",
        {
            **NO_HEAD_DIM, **OTHERS, **rope(theta=3e3), "rms_norm_eps": 2e-3, "num_local_experts": 7,
            "num_experts_per_tok": 3, "intermediate_size": 24, "shared_intermediate_size": 40,
        },
        is_loose=True,
    ),
    "granite-4": Variant(
        "GraniteMoeHybrid",
        {
            **NO_HEAD_DIM, **MULTIPLIERS, **DENSE, **rope(theta=1e6), "rms_norm_eps": 2e-3, "tie_word_embeddings": True,
            "position_embedding_type": "rope",
        },
    ),
    "granite-4-not-rotated": Variant("GraniteMoeHybrid", {**NO_HEAD_DIM, **OTHERS, **DENSE, "attention_bias": True}),
    "granite-swash": Variant(
        "GraniteSWA",
        {
            **NO_HEAD_DIM, **MULTIPLIERS, **rope(theta=3e3), "rms_norm_eps": 2e-3, "num_hidden_layers": 5,
            "sliding_window": 18, "layer_rope_theta": [3e3, 1e3, 0, 1e3, 0], "attention_bias": True, "mlp_bias": True,
            "tie_word_embeddings": True,
        },
        patch=_with_sinks,
    ),
    "granite-swash-moe": Variant(
        "GraniteMoeSWA",
        {
            **NO_HEAD_DIM, **OTHERS, **rope(theta=3e3), "rms_norm_eps": 2e-3, "num_local_experts": 7,
            "num_experts_per_tok": 3, "intermediate_size": 24, "shared_intermediate_size": 40, "sliding_window": 21,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        patch=_with_sinks,
        is_loose=True,
    ),
}  # fmt: skip
