"""Qwen4-Exp: gated streams, an index that selects fewer blocks than sequences have, embeddings of n-grams.

Blocks of tokens end inside of the cache's blocks, and chunks of prompts inside of both.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.variants.qwen import vision
from tests.models.variants.qwen_next import LINEAR, MOE, steady
from tests.models.variants.variant import Variant, rope

QWEN4: dict[str, Any] = {
    **LINEAR, **MOE, **rope(theta=900.0, partial_rotary_factor=0.5), "intermediate_size": None,
    "hc_count": 3, "hc_lowrank": 20, "indexer_n_heads": 14, "indexer_kv_heads": 1, "indexer_head_dim": 12,
    "indexer_budget": 12, "indexer_compress_ratio": 4, "output_gate_type": "sigmoid",
    "ple_layer_ids": [1, 3], "ple_embed_dim": 24, "ple_conv_kernel_size": 3, "ngram_size": 3, "heads_per_ngram": 2,
    "ngram_vocab_size_base": 90, "make_ngram_vocab_size_divisible_by": 16, "split_ngram_parts": 3, "seed": 7,
}  # fmt: skip


@torch.no_grad()
def _with_agreement(model: nn.Module) -> None:
    """Let streams differ, and each take enough of the embeddings of n-grams."""
    steady(model)
    for name, parameter in model.named_parameters():
        if name.endswith("conv1d.weight") and ".ple." in name:
            parameter.normal_(0, 0.7)
        elif "ngram_embedding" in name:
            parameter.normal_(0, 1.0)
        elif name == "lm_head.weight":
            # No norm comes before it, and gates halve what they multiply.
            parameter.mul_(2.0)


# This file also has an encoder of images, which is not read. Half of a head cannot be divided among three axes.
LONGER: dict[str, Any] = {
    **QWEN4, **rope(theta=900.0, partial_rotary_factor=1.0), "indexer_head_dim": 18,
    "layer_types": ["linear_attention", "linear_attention", "indexed_attention", "indexed_attention"],
    "ple_layer_ids": [2], "ngram_size": 4, "hc_count": 2, "indexer_compress_ratio": 8, "indexer_budget": 80,
    "attention_bias": True, "output_gate_type": None, "eos_token_id": [3, 1],
}  # fmt: skip


def _variant(config: str, entries: dict[str, Any]) -> Variant:
    return Variant(config, entries, is_loose=True, one_by_one=True, patch=_with_agreement, foreign="repeat")


VARIANTS = {
    "qwen4": _variant("Qwen4ExpText", QWEN4),
    "qwen4-multimodal": _variant("Qwen4Exp", vision(LONGER, [4, 2, 2], tie_word_embeddings=False)),
}
