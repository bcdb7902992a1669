"""DeepSeek-V2, V3 and R1, Mistral 4, A.X K1, Youtu-LLM, MiniCPM3: latent attention.

Experts in groups, dense first layers.

V3.2 and GLM-5.2: sparse attention, which selects fewer tokens than sequences have.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.models.variants.variant import COMMON, Variant, rope

LATENT: dict[str, Any] = {
    "head_dim": None, "num_key_value_heads": 6, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8, "v_head_dim": 10, "rms_norm_eps": 1e-4,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 20, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.7,
}  # fmt: skip
V2 = {**LATENT, **EXPERTS}
LITE = {**V2, "topk_method": "greedy", "routed_scaling_factor": 1.0}
GROUPS = {"n_group": 4, "topk_group": 2}
V3 = {**LATENT, **EXPERTS, **GROUPS, "n_shared_experts": 1, "norm_topk_prob": True}
INDEXER = {"index_n_heads": 14, "index_head_dim": 18, "index_topk": 20}
YARN = {"factor": 8.0, "original_max_position_embeddings": 60, "beta_fast": 32, "beta_slow": 1}
LONGCAT: dict[str, Any] = {
    **LATENT, "num_hidden_layers": None, "num_layers": 2, "intermediate_size": None, "ffn_hidden_size": 72,
    "head_dim": 8, "n_routed_experts": 7, "zero_expert_num": 5, "moe_topk": 4, "expert_ffn_hidden_size": 20,
    "routed_scaling_factor": 2.3, **rope(theta=3e3),
}  # fmt: skip
# transformers sets the embedding of padding to 0 whenever it loads a file.
YOUTU = {**LATENT, "pad_token_id": None}
FACTORS = {"short_factor": [1.0, 1.1, 1.3, 1.6], "long_factor": [1.5, 2.0, 3.1, 5.2]}
MINICPM3: dict[str, Any] = {**LATENT, "scale_emb": 3, "scale_depth": 1.9, "dim_model_base": 30}


# Behind the tokens of texts, because transformers reads each of them as token 0, also where there is no image.
OF_IMAGES = {"image_token_id": 193, "video_token_id": 194}


@torch.no_grad()
def _without_images(model: nn.Module) -> None:
    """Let no answer have these tokens."""
    model.lm_head.weight[min(OF_IMAGES.values()) :] = 0.0


@torch.no_grad()
def _with_small_biases(model: nn.Module) -> None:
    """Let the scores decide about experts, too: they add up to 1."""
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.mul_(0.2)


VARIANTS = {
    "deepseek-v2-lite": Variant(
        "DeepseekV2", {**LITE, **rope("yarn", 100.0, **YARN, mscale=0.707, mscale_all_dim=0.707)},
        nulls=("q_lora_rank",), is_loose=True,
    ),
    "deepseek-v2": Variant(
        "DeepseekV2",
        {
            **V2, **GROUPS, "topk_method": "group_limited_greedy",
            **rope("yarn", 100.0, **YARN, mscale=1.2, mscale_all_dim=0.6),
        },
        is_loose=True,
    ),
    "deepseek-v2-bias": Variant(
        "DeepseekV2", {**V2, "topk_method": "greedy", "attention_bias": True, "first_k_dense_replace": 2}, is_loose=True
    ),
    "deepseek-v3": Variant(
        "DeepseekV3", {**V3, **rope("yarn", 100.0, **YARN, mscale=1.0, mscale_all_dim=1.0)}, is_loose=True
    ),
    "deepseek-v3-plain": Variant(
        "DeepseekV3",
        # Three experts a token, as many as one group has.
        {**V3, "norm_topk_prob": False, "first_k_dense_replace": 0, "topk_group": 1,
         "num_experts_per_tok": 3},
        nulls=("q_lora_rank",), is_loose=True,
    ),
    "deepseek-v3.2": Variant(
        "DeepseekV32",
        {**V3, **INDEXER, "rms_norm_eps": 1e-6, **rope("yarn", 100.0, **YARN, mscale=1.0, mscale_all_dim=1.0)},
        is_loose=True,
    ),
    "glm-5.2": Variant(
        "GlmMoeDsa",
        {
            **V3, **INDEXER, "index_topk": 13, "n_group": 1, "topk_group": 1, "rms_norm_eps": 1e-5,
            "mlp_layer_types": ["dense", "sparse", "sparse"], "indexer_types": ["full", "shared", "full"],
        },
        is_loose=True,
    ),
    "kimi-k2.5": Variant(
        "Kimi_K25",
        {
            "text_config": {**COMMON, **V3, "model_type": "deepseek_v3", "n_group": 1, "topk_group": 1, **rope(),
                            "vocab_size": 195},
            "vision_config": {
                "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 3, "num_attention_heads": 6,
                "pos_emb_height": 5, "pos_emb_width": 5, "patch_size": 4, **rope("axial", 5e3),
            },
            "projection_hidden_size": 48, "projection_layer_norm_eps": 1e-3, "tie_word_embeddings": False,
            **OF_IMAGES,
        },
        is_loose=True,
        patch=_without_images,
    ),
    "a.x-k1": Variant(
        "AXK1",
        {
            **V3, "first_k_dense_replace": None, "mlp_layer_types": ["dense", "sparse", "sparse"],
            **rope("yarn", 100.0, **YARN, mscale=1.0, mscale_all_dim=1.0), "tie_word_embeddings": True,
        },
        is_loose=True,
    ),
    "a.x-k2": Variant(
        "AXK2",
        {
            **V3, **INDEXER, "n_group": None, "topk_group": None, "first_k_dense_replace": None, "gated_norm_rank": 10,
            "mlp_layer_types": ["dense", "sparse", "sparse"], "rms_norm_eps": 1e-4,
            **rope("yarn", 100.0, **YARN, mscale=1.0, mscale_all_dim=1.0),
        },
        is_loose=True,
    ),
    "a.x-k2-groups": Variant(
        "AXK2", {**V3, **INDEXER, "index_topk": 13, "norm_topk_prob": False, "tie_word_embeddings": True}, is_loose=True
    ),
    "longcat-flash": Variant("LongcatFlash", LONGCAT, is_loose=True, patch=_with_small_biases),
    "longcat-flash-bias": Variant(
        "LongcatFlash",
        {
            **LONGCAT, "zero_expert_num": 0, "moe_topk": 2, "attention_bias": True, "tie_word_embeddings": True,
            **rope("yarn", 100.0, **YARN, mscale=1.2, mscale_all_dim=0.6),
        },
        is_loose=True, patch=_with_small_biases,
    ),
    "youtu": Variant("Youtu", {**YOUTU, **rope(theta=1.6e6), "tie_word_embeddings": True}, is_loose=True),
    "youtu-untied": Variant(
        "Youtu",
        {
            **YOUTU, "rope_interleave": False, "attention_bias": True,
            **rope("yarn", 100.0, **YARN, mscale=1.2, mscale_all_dim=0.6), "tie_word_embeddings": False,
        },
        nulls=("q_lora_rank",), is_loose=True,
    ),
    "minicpm3": Variant(
        "MiniCPM3",
        {
            **MINICPM3, "max_position_embeddings": 160,
            **rope("longrope", 900.0, **FACTORS, original_max_position_embeddings=160),
        },
        is_loose=True,
    ),
    "minicpm3-long": Variant(
        "MiniCPM3",
        {
            **MINICPM3, "tie_word_embeddings": False, "attention_bias": True, "v_head_dim": None,
            **rope("longrope", **FACTORS, original_max_position_embeddings=30), "max_position_embeddings": 250,
        },
        nulls=("q_lora_rank",), is_loose=True,
    ),
    "mistral-4": Variant(
        "Mistral4",
        {
            **V3, **GROUPS, "first_k_dense_replace": None,
            **rope("yarn", 100.0, **YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.5),
        },
        is_loose=True,
    ),
    "mistral-4-plain": Variant(
        "Mistral4",
        {
            **V3, "norm_topk_prob": False, "rope_interleave": False, "n_group": 1, "topk_group": 1,
            **rope("yarn", 100.0, **YARN, mscale=1.2, mscale_all_dim=0.6, llama_4_scaling_beta=0.2),
        },
        nulls=("q_lora_rank",), is_loose=True,
    ),
    "deepseek-v3-bias": Variant(
        "DeepseekV3",
        {**V3, "attention_bias": True, "rope_interleave": False, "tie_word_embeddings": True, "topk_group": 3},
        is_loose=True,
    ),
}  # fmt: skip
