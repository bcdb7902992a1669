"""MiniMax-M2, OLMo 2, 3 and Hybrid, OLMoE, FlexOlmo: queries and keys normalised over all heads together; OLMo 1.

MiniMax-M3, which normalises each head, and selects fewer blocks of tokens than sequences have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.variants.qwen_next import steady
from tests.models.variants.variant import COMMON, NO_HEAD_DIM, Variant, rope

MINIMAX: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24}
OLMO: dict[str, Any] = {**NO_HEAD_DIM, "rms_norm_eps": 1e-4}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}


def olmo3_rope(full: dict[str, Any]) -> dict[str, Any]:
    plain = rope(theta=5e5)["rope_parameters"]
    return {"rope_parameters": {"sliding_attention": plain, "full_attention": full["rope_parameters"]}}


def steady_and_quiet(model: nn.Module) -> None:
    """Let states decay, and their layers add less: the norm, whose eps is fixed, makes rounding errors grow."""
    steady(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("linear_attn.o_proj.weight"):
                parameter.mul_(0.4)


@torch.no_grad()
def _with_bounded_products(model: nn.Module) -> None:
    """Let the bounds of gated products be reached, and index heads select blocks by more than rounding."""
    for name, parameter in model.named_parameters():
        if name.endswith("gate_up_proj") or name.endswith("gate_up_proj.weight"):
            parameter.mul_(3.0)
        elif "language_model" in name and name.endswith(("down_proj", "down_proj.weight")):
            parameter.mul_(0.1)


VARIANTS = {
    "minimax-m2": Variant("MiniMaxM2", {**MINIMAX, **rope(theta=5e6, partial_rotary_factor=0.5)}, is_loose=True),
    "minimax-m3": Variant(
        "MiniMaxM3VL",
        {
            "text_config": {
                **COMMON, **MINIMAX, **rope(theta=5e4, partial_rotary_factor=0.5), "pad_token_id": None,
                "dense_intermediate_size": 72, "shared_intermediate_size": 28, "routed_scaling_factor": 1.7,
                "rms_norm_eps": 1e-4, "num_key_value_heads": 3, "index_n_heads": 3, "index_head_dim": 12,
                "index_block_size": 32, "index_topk_blocks": 2, "index_local_blocks": 1,
                "mlp_layer_types": ["dense", "sparse", "sparse"],
                "layer_types": ["minimax_m3_sparse", "full_attention", "minimax_m3_sparse"],
            },
            "vision_config": {
                "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 2,
                "image_size": 64, "patch_size": 4,
            },
            "projector_hidden_size": 40, "image_token_index": 193, "video_token_index": 194,
            "tie_word_embeddings": False,
        },
        is_loose=True, patch=_with_bounded_products,
    ),
    "olmo": Variant("Olmo", {**NO_HEAD_DIM, "num_key_value_heads": 6, "tie_word_embeddings": True}),
    "olmo-0424": Variant(
        "Olmo", {**NO_HEAD_DIM, **rope(theta=5e4), "clip_qkv": 1.1, "attention_bias": True, "num_key_value_heads": 3}
    ),
    "olmo-2": Variant("Olmo2", {**OLMO, **rope(theta=5e5), "num_key_value_heads": 6}),
    "olmo-2-32b": Variant("Olmo2", {**OLMO, "num_key_value_heads": 1, "attention_bias": True}),
    "olmo-3": Variant(
        "Olmo3",
        {**OLMO, **olmo3_rope(rope("yarn", 5e5, **YARN)), "sliding_window": 19, "num_hidden_layers": 4},
    ),
    "olmo-hybrid": Variant(
        "OlmoHybrid",
        {
            **OLMO, "rope_parameters": {"rope_type": "default", "rope_theta": None}, "num_hidden_layers": 4,
            "num_key_value_heads": 3, "linear_num_key_heads": 6, "linear_num_value_heads": 6, "linear_key_head_dim": 32,
            "linear_value_head_dim": 20,
        },
        one_by_one=True, patch=steady_and_quiet,
    ),
    "olmoe": Variant(
        "Olmoe",
        {**OLMO, "num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 24, "num_key_value_heads": 6},
        is_loose=True,
    ),
    "flex-olmo": Variant(
        "FlexOlmo",
        {
            **OLMO, **rope(theta=5e4), "num_experts": 7, "num_experts_per_tok": 4, "intermediate_size": 24,
            "num_key_value_heads": 3,
        },
        is_loose=True,
    ),
    "olmoe-normed": Variant(
        "Olmoe",
        {
            **OLMO, "num_experts": 7, "num_experts_per_tok": 2, "intermediate_size": 24, "norm_topk_prob": True,
            "attention_bias": True, "tie_word_embeddings": True,
        },
        is_loose=True,
    ),
}  # fmt: skip
