"""Hunyuan, dense and with experts: queries and keys are normalised after their rotation; Hy3, Hy4; and dots.llm1."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.variants.deepseek import EXPERTS, INDEXER, LATENT
from tests.models.variants.variant import Variant, rope

MOE: dict[str, Any] = {"num_experts": 8, "moe_topk": 3, "intermediate_size": 24, "rms_norm_eps": 1e-4}


@torch.no_grad()
def _with_bounded_gates(model: nn.Module) -> None:
    """Let the bounds of experts' gated products be reached, and also be exceeded by the expert for every token."""
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "shared_experts.gate_proj.weight", "shared_experts.up_proj.weight")):
            parameter.mul_(3.0)
        elif name.endswith(("experts.down_proj", "shared_experts.down_proj.weight")):
            parameter.mul_(0.1)


VARIANTS = {
    "hunyuan-7b": Variant("HunYuanDenseV1", {**rope("dynamic", 1e3, alpha=50.0, factor=1.0), "rms_norm_eps": 1e-4}),
    "hunyuan-tied": Variant(
        "HunYuanDenseV1",
        {**rope(theta=5e4), "num_key_value_heads": 3, "attention_bias": True, "tie_word_embeddings": True},
    ),
    "hunyuan-a13b": Variant("HunYuanMoEV1", {**MOE, **rope(theta=5e4)}, is_loose=True),
    "hunyuan-moe-layers": Variant(
        "HunYuanMoEV1",
        {
            **MOE, **rope("dynamic", 1e3, alpha=9.0, factor=1.0), "moe_topk": [2, 4, 1], "attention_bias": True,
            "tie_word_embeddings": True,
        },
        is_loose=True,
    ),
    "hy3": Variant(
        "HYV3",
        {
            **rope(theta=5e4), "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
            "num_shared_experts": 2, "router_scaling_factor": 1.7, "rms_norm_eps": 1e-4,
        },
        is_loose=True,
    ),
    "hy4": Variant(
        "HYV4",
        {
            **LATENT, **EXPERTS, **INDEXER, **rope("yarn", 100.0, factor=8.0, original_max_position_embeddings=64),
            "first_k_dense_replace": None, "n_shared_experts": 1, "indexer_types": ["full", "shared", "full"],
            "hc_mult": 3, "hc_eps": 1e-3, "hc_magnitude": 1.7,
        },
        is_loose=True, patch=_with_bounded_gates,
    ),
    "dots.llm1": Variant(
        "Dots1", {**EXPERTS, **rope(theta=1e6), "num_key_value_heads": 6, "norm_topk_prob": True, "rms_norm_eps": 1e-4},
        is_loose=True,
    ),
    "dots-window": Variant(
        "Dots1",
        {
            **EXPERTS, "n_group": 4, "topk_group": 2, "n_shared_experts": 1, "sliding_window": 21,
            "max_window_layers": 1, "attention_bias": True,
        },
        is_loose=True,
    ),
}  # fmt: skip
