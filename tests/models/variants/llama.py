"""Llama 1 to 3.2, Yi, R1-Distill-Llama; every rope scaling, bias, activation, number of KV heads; and its relatives."""

from __future__ import annotations

from tests.models.variants.variant import COMMON, NO_HEAD_DIM, Variant, rope

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 32}
OTHER_YARN = {
    "factor": 4.0, "original_max_position_embeddings": 100, "attention_factor": 1.2, "beta_fast": 4.0,
    "beta_slow": 1.0, "truncate": False,
}  # fmt: skip
SHORT = [1.0, 1.1, 1.3, 1.4, 1.6, 2.0, 2.1, 2.4]
LONG = [1.5, 2.0, 2.4, 3.1, 4.0, 5.2, 6.0, 7.5]
LONGROPE = {"short_factor": SHORT, "long_factor": LONG, "factor": 5.0}
TEXT = {**COMMON, **rope(theta=1e5), "model_type": "llama"}
# Tiles of 27 x 27 pixels, of which 24 x 24 are seen: 2 x 2 tokens.
VISION = {
    "hidden_size": 60, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 6, "image_size": 27,
    "patch_size": 4, "layer_norm_eps": 1e-3,
}  # fmt: skip

# CLIP's encoder, whose last block no image needs; images of 3 x 3 patches, and 2 pixels that are not seen.
CLIP = {
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 6, "image_size": 14,
    "patch_size": 4, "layer_norm_eps": 1e-3, "model_type": "clip_vision_model",
}  # fmt: skip

VARIANTS = {
    "llama": Variant("Llama", rope()),
    "llama-bias-tied": Variant(
        "Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 6}
    ),
    "llama3-rope": Variant("Llama", {**rope("llama3", 5e5, **LLAMA3), "rms_norm_eps": 1e-5}),
    "llama-linear-rope": Variant("Llama", {**rope("linear", factor=4.0), "num_key_value_heads": 1}),
    "llama-1": Variant("Llama", {**NO_HEAD_DIM, "num_key_value_heads": None, "rms_norm_eps": 3e-3}),
    "llama-2-70b": Variant("Llama", {**NO_HEAD_DIM, "num_key_value_heads": 1, "rms_norm_eps": 1e-5}),
    "llama-3.2-tied": Variant(
        "Llama",
        {
            **rope("llama3", 5e5, **{**LLAMA3, "factor": 32.0, "original_max_position_embeddings": 48}),
            "tie_word_embeddings": True,
        },
    ),
    "r1-distill-llama": Variant("Llama", {**NO_HEAD_DIM, **rope("llama3", 5e4, **LLAMA3), "rms_norm_eps": 2e-4}),
    "yi": Variant("Llama", {**NO_HEAD_DIM, **rope(theta=5e6), "rms_norm_eps": 1e-5, "num_key_value_heads": 3}),
    "cwm": Variant(
        "Cwm", {**rope("llama3", 1e4, **LLAMA3), "num_hidden_layers": 5, "sliding_window": 20, "rms_norm_eps": 1e-3}
    ),
    "llava-1.5": Variant(
        "Llava",
        {
            **dict.fromkeys(COMMON),
            "text_config": {**TEXT, "rms_norm_eps": 1e-4},
            "vision_config": CLIP,
            "image_token_index": 190,
        },
    ),
    "llava-next": Variant(
        "LlavaNext",
        {
            **dict.fromkeys(COMMON),
            "text_config": {**TEXT, "model_type": "mistral", "sliding_window": None},
            "vision_config": {**CLIP, "hidden_act": "gelu"},
            "image_token_index": 190,
            "image_grid_pinpoints": [[14, 28], [28, 14], [28, 28], [42, 14], [14, 42]],
        },
    ),
    "smolvlm": Variant(
        "SmolVLM",
        {
            **dict.fromkeys(COMMON),
            "text_config": {**TEXT, "rms_norm_eps": 1e-4},
            "vision_config": VISION,
            "image_token_id": 190,
            "scale_factor": 3,
        },
    ),
    # 25 patches in a row: transformers rounds the positions of some to those of their neighbours.
    "idefics3": Variant(
        "Idefics3",
        {
            **dict.fromkeys(COMMON),
            "text_config": TEXT,
            "vision_config": {**VISION, "image_size": 75, "patch_size": 3, "hidden_act": "gelu"},
            "image_token_id": 190,
            "scale_factor": 5,
            "tie_word_embeddings": True,
        },
    ),
    "llama-attention-bias": Variant("Llama", {"attention_bias": True, "num_key_value_heads": 3}),
    "llama-mlp-bias": Variant("Llama", {"mlp_bias": True}),
    "llama-gelu": Variant("Llama", {"hidden_act": "gelu"}),
    "llama-gelu-tanh": Variant("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-relu": Variant("Llama", {"hidden_act": "relu"}),
    "llama-dynamic-rope": Variant(
        "Llama", {**rope("dynamic", factor=3.0), "max_position_embeddings": 44}, {"max_model_len": 128}, one_by_one=True
    ),
    "llama-yarn-rope": Variant("Llama", rope("yarn", **YARN)),
    "llama-yarn-attention-factor": Variant("Llama", rope("yarn", 50.0, **OTHER_YARN)),
    "llama-yarn-mscale": Variant("Llama", rope("yarn", **YARN, mscale=1.5, mscale_all_dim=0.5)),
    "llama-longrope": Variant("Llama", rope("longrope", **LONGROPE, original_max_position_embeddings=24)),
}
