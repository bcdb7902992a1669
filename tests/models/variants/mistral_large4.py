"""Mistral Large 4: sparse latent attention whose layers lend latents and selections, learned frequencies, images."""

from __future__ import annotations

from typing import Any

import torch

from tests.models.variants.deepseek import EXPERTS, GROUPS, INDEXER, LATENT, YARN
from tests.models.variants.mistral import PIXTRAL
from tests.models.variants.variant import COMMON, Variant, rope

_USUAL = {**COMMON, **LATENT, **EXPERTS, **INDEXER}
TEXT: dict[str, Any] = {
    **{name: value for name, value in _USUAL.items() if value is not None and name != "q_lora_rank"},
    "model_type": "mistral_large4_text", "rms_norm_eps": 1e-3,
}  # fmt: skip
WHOLE: dict[str, Any] = {**dict.fromkeys(COMMON), "vision_config": {**PIXTRAL, "hidden_act": "silu"}}


@torch.no_grad()
def _usual_scales(model: Any) -> None:
    """Let the logarithm of a position matter, and keep attention from the best token alone.

    No token of an image is the next one, which the engine would not choose.
    """
    if not model.config.tie_word_embeddings:
        model.lm_head.weight[model.config.image_token_index] = 0
    for name, weight in model.named_parameters():
        if "softmax_scaling" in name:
            low, high = (0.4, 0.7) if name.endswith("bias") else (-0.05, 0.15)
            weight.uniform_(low, high)
    for name, buffer in model.named_buffers():
        if name.endswith("rotary_emb.alpha"):
            buffer.uniform_(-0.7, 0.7)


VARIANTS = {
    "mistral-large-4": Variant(
        "MistralLarge4",
        {
            **WHOLE,
            "text_config": {
                **TEXT, "num_hidden_layers": 4, "index_topk": 32, "final_logit_softcapping": 9.0,
                "no_rope_layers": [1, 0, 1, 0],
                "kv_source_layers": [0, 1, 0, 1],
                "indexer_types": ["full", "full", "full", "shared"],
                **rope("yarn", 100.0, **YARN, attention_factor=1.0),
            },
            "image_token_index": 190, "tie_word_embeddings": False,
        },
        is_loose=True, patch=_usual_scales,
    ),
    "mistral-large-4-bias": Variant(
        "MistralLarge4",
        {
            **WHOLE,
            "text_config": {
                **TEXT, **GROUPS, "num_hidden_layers": 3, "no_rope_layers": [0, 1, 1], "attention_bias": True,
                "index_topk": 13, "mlp_layer_types": ["sparse", "dense", "sparse"],
                **rope("yarn", 100.0, **YARN, mscale=1.2, mscale_all_dim=0.6),
            },
            "image_token_index": 190, "tie_word_embeddings": True, "multimodal_projector_bias": True,
            "projector_hidden_act": "silu",
        },
        is_loose=True, patch=_usual_scales,
    ),
}  # fmt: skip
