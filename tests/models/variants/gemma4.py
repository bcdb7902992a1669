"""Gemma 4: heads of two sizes, keys that are values, borrowed keys, inputs of layers, experts beside MLPs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.variants.variant import COMMON, Variant

ROPES: dict[str, Any] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e5},
}
GEMMA4: dict[str, Any] = {
    "rope_parameters": ROPES, "sliding_window": 18, "global_head_dim": 32, "vocab_size_per_layer_input": 193,
    "hidden_size_per_layer_input": 0, "rms_norm_eps": 1e-3,
}  # fmt: skip


UNIFIED: dict[str, Any] = {
    name: value
    for name, value in GEMMA4.items()
    if name not in ("vocab_size_per_layer_input", "hidden_size_per_layer_input")
}
# Squares of 3 x 3 patches become a token.
VISION: dict[str, Any] = {
    "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 6, "head_dim": 8, "patch_size": 4, "position_embedding_size": 840,
    "rms_norm_eps": 1e-3, "model_type": "gemma4_vision",
}  # fmt: skip
# Behind the tokens of texts, because transformers reads each of them as padding, also where there is no image.
TOKENS = {
    "image_token_id": 196, "boi_token_id": 193, "eoi_token_id": 194, "video_token_id": 197, "audio_token_id": 198,
}  # fmt: skip
WITH_TOKENS = {"vocab_size": 199, "vocab_size_per_layer_input": 199}


def layers(text: str) -> dict[str, Any]:
    """The entries of layers, a letter for each: s for one with a window, f for one that sees everything."""
    kinds = {"s": "sliding_attention", "f": "full_attention"}
    return {"num_hidden_layers": len(text), "layer_types": [kinds[letter] for letter in text]}


@torch.no_grad()
def _revealed(model: nn.Module) -> None:
    """Make attention peaked although scores are not scaled, and factors of layers and experts differ."""
    for name, weight in (*model.named_parameters(), *model.named_buffers()):
        if name.endswith("embed_tokens.weight"):
            # The head is tied to it, so that no answer has these tokens.
            weight[TOKENS["boi_token_id"] :] = 0.0
        elif name.endswith("layer_scalar"):
            weight.uniform_(0.5, 1.0)
        elif name.endswith(("router.scale", "per_expert_scale")):
            weight.uniform_(0.5, 1.5)
        elif name.endswith(("q_norm.weight", "k_norm.weight")):
            low, high = (0.4, 1.2) if "vision_tower" in name else (0.2, 0.9)
            weight.uniform_(low, high)
        elif "down_proj." in name and name.endswith(("_min", "_max")):
            # Its inputs are products of limited numbers.
            weight.fill_(0.2 if name.endswith("max") else -0.08)
        elif name.endswith(("input_min", "output_min")):
            weight.uniform_(-0.8, -0.4)
        elif name.endswith(("input_max", "output_max")):
            weight.uniform_(0.4, 0.8)
        elif name.endswith("std_bias"):
            weight.normal_(0.0, 5.0)
        elif name.endswith("std_scale"):
            weight.uniform_(0.02, 0.05)
        elif "vision_tower" in name and name.endswith("layernorm.weight"):
            weight.uniform_(0.5, 1.5)
        elif name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            # The head is tied to large embeddings: without more from its layers the model repeats the token.
            weight.add_(1.5)


EXPERTS: dict[str, Any] = {
    "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24,
}  # fmt: skip

VARIANTS = {
    # Layers with inputs of their own, of which the last three borrow keys and values, as in E2B and E4B.
    "gemma-4-e2b": Variant(
        "Gemma4Text",
        {
            **GEMMA4, **layers("sfssf"), "hidden_size_per_layer_input": 12, "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True, "num_key_value_heads": 1, "final_logit_softcapping": 9.0,
        },
        patch=_revealed,
    ),
    # As in 31B: keys are values in layers that see everything, which have fewer of them.
    "gemma-4-31b": Variant(
        "Gemma4Text",
        {
            **GEMMA4, **layers("ssf"), "attention_k_eq_v": True, "num_global_key_value_heads": 1,
            "num_key_value_heads": 3, "tie_word_embeddings": False,
        },
        patch=_revealed,
    ),
    # As 12B, which is of another architecture in name.
    "gemma-4-12b": Variant(
        "Gemma4UnifiedText",
        {
            **UNIFIED, **layers("ssf"), "attention_k_eq_v": True, "num_global_key_value_heads": 2,
            "attention_bias": True, "num_key_value_heads": 6, "num_kv_shared_layers": 0,
        },
        patch=_revealed,
    ),
    "gemma-4-multimodal": Variant(
        "Gemma4",
        {
            **dict.fromkeys(COMMON),
            "text_config": {**COMMON, **GEMMA4, **layers("sfsf"), "num_kv_shared_layers": 1,
                            "hidden_size_per_layer_input": 8, "num_key_value_heads": 2, **WITH_TOKENS,
                            "pad_token_id": 3},
            "vision_config": {**VISION, "use_clipped_linears": True}, "audio_config": None, **TOKENS,
        },
        nulls=("audio_config",),
        patch=_revealed,
    ),
    # As in 26B and 31B: layers with a window see images whole, and the encoder standardises its output.
    "gemma-4-31b-multimodal": Variant(
        "Gemma4",
        {
            **dict.fromkeys(COMMON),
            "text_config": {**COMMON, **GEMMA4, **layers("sfsf"), "num_key_value_heads": 2, **WITH_TOKENS,
                            "use_bidirectional_attention": "vision"},
            "vision_config": {
                **VISION, "hidden_size": 72, "head_dim": 12, "standardize": True,
                "pooling_kernel_size": 2, "rope_parameters": {"rope_type": "axial", "rope_theta": 30.0},
            },
            "audio_config": None, **TOKENS,
        },
        nulls=("audio_config",),
        # The largest image has more tokens than the steps of some tests.
        engine={"language_model_only": True},
        patch=_revealed,
    ),
    "gemma-4-12b-multimodal": Variant(
        "Gemma4Unified",
        {
            **dict.fromkeys(COMMON),
            "text_config": {**COMMON, **UNIFIED, **layers("sf"), "num_key_value_heads": 2},
            "image_token_id": 1190, "boi_token_id": 1191, "eoi_token_id": 1192, "video_token_id": 1189,
            "audio_token_id": 1188,
        },
        nulls=("audio_config", "vision_config"),
        patch=_revealed,
    ),
    "gemma-4-26b-a4b": Variant(
        "Gemma4Text",
        {**GEMMA4, **EXPERTS, **layers("sf"), "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        patch=_revealed,
        is_loose=True,
    ),
}  # fmt: skip
