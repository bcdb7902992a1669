"""Entries that config.json leaves out have the defaults of the model's own class."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from pagewick.errors import ModelLoadError
from pagewick.layers.config import MlaConfig
from pagewick.models.parts import AttentionConfig
from pagewick.models.registry import ARCHITECTURES, read_config
from tests.models.checkpoints import VARIANTS
from tests.models.encoders import ENCODERS, VARIANT_OF_ENCODER
from tests.models.test_tensors import VARIANT_OF

# Sizes: every published file has them, and a wrong one is a tensor that does not fit.
SIZES = {
    "indexer_n_heads", "indexer_kv_heads", "indexer_head_dim", "indexer_budget", "indexer_compress_ratio",
    "ple_layer_ids", "eos_token_id",
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "moe_intermediate_size", "num_experts_per_tok", "n_embd", "n_layer", "n_head", "dim", "n_layers", "n_heads",
    "hidden_dim", "ffn_dim",
}  # fmt: skip
# Entries in place of a class's own defaults: DeepSeek-V2's does not say how many experts there are for a token, and
# dots.llm1's has none; the heads of GLM-4.5's do not share out hidden_size. Those of Granite 4 and Bamba have no layer
# with attention. Ling 3.0's writes another head_dim than it reads. Qwen4-Exp's has no index, without which
# its attention cannot be made. Gemma3TextModel is an encoder, and its class halves
# the window whenever it reads it.
CHANGED: dict[str, dict[str, Any]] = {
    "DeepseekV2ForCausalLM": {"num_experts_per_tok": 6},
    "Glm4MoeForCausalLM": {"num_attention_heads": 64},
    "Gemma3TextModel": {"use_bidirectional_attention": True, "sliding_window": 4096},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 16},
    "BailingHybridForCausalLM": {"linear_head_dim": 128},
    "BailingMoeV3ForCausalLM": {"linear_head_dim": 128},
    "Qwen4ExpForCausalLM": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 256,
        "indexer_budget": 64,
        "indexer_compress_ratio": 8,
        "ple_layer_ids": [2],
        "eos_token_id": 7,
    },
    "BambaForCausalLM": {"attn_layer_indices": [9, 18, 27]},
    "Dots1ForCausalLM": {"n_routed_experts": 128, "n_shared_experts": 2, "num_experts_per_tok": 6},
}
# The text part of a multimodal file is read as that of Gemma3ForCausalLM or MistralForCausalLM is.
# transformers has no class of Moondream.
TEXT_ONLY = sorted(
    name for name in ARCHITECTURES if not name.endswith("ForConditionalGeneration") and name != "HfMoondream"
)


def usual(architecture: str) -> dict[str, Any]:
    """The architecture's config.json with all defaults."""
    if architecture in VARIANT_OF_ENCODER:
        name = ENCODERS[VARIANT_OF_ENCODER[architecture]].kind
    else:
        name = VARIANTS[VARIANT_OF[architecture]].config
    config_class = getattr(transformers, f"{name}Config")
    return {**config_class(**CHANGED.get(architecture, {})).to_dict(), "architectures": [architecture]}


@pytest.mark.parametrize("architecture", TEXT_ONLY)
def test_what_is_left_out_is_the_default(architecture: str) -> None:
    config = usual(architecture)
    expected = read_config(config)
    for name in config.keys() - SIZES - CHANGED.get(architecture, {}).keys() - {"architectures", "model_type"}:
        assert read_config({key: value for key, value in config.items() if key != name}) == expected, name


@pytest.mark.parametrize("architecture", TEXT_ONLY)
def test_heads_share_out_the_hidden_size_unless_their_size_has_a_default(architecture: str) -> None:
    config = usual(architecture)
    attention = read_config({key: value for key, value in config.items() if key != "head_dim"}).layers[0].attention
    if isinstance(attention, AttentionConfig):
        model = transformers.AutoConfig.for_model(config["model_type"], **CHANGED.get(architecture, {}))
        model.allow_global_per_layer_attribute_access = True  # Gemma 4 has heads of two sizes
        shared_out = model.hidden_size // model.num_attention_heads
        assert attention.head_dim == (getattr(model, "head_dim", None) or shared_out)


def test_what_the_text_part_of_mistral_large_4_leaves_out_is_the_default() -> None:
    config = {
        **transformers.MistralLarge4Config().to_dict(),
        "architectures": ["MistralLarge4ForConditionalGeneration"],
    }
    text, expected = config["text_config"], read_config(config)
    for name in text.keys() - SIZES:
        left_out = {key: value for key, value in text.items() if key != name}
        assert read_config({**config, "text_config": left_out}) == expected, name


def test_what_is_null_is_not_left_out() -> None:
    mistral = read_config({**usual("MistralForCausalLM"), "num_key_value_heads": None}).layers[0].attention
    assert isinstance(mistral, AttentionConfig)
    assert mistral.num_kv_heads == mistral.num_heads == 32
    deepseek = usual("DeepseekV3ForCausalLM")
    assert read_config(deepseek).ignored == (r"model\.layers\.(61)\..*",)
    config = read_config({**deepseek, "q_lora_rank": None, "num_nextn_predict_layers": None})
    attention = config.layers[0].attention
    assert isinstance(attention, MlaConfig)
    assert (attention.q_lora_rank, config.ignored) == (None, ())
    for name in ("max_position_embeddings", "n_group", "topk_group"):
        with pytest.raises(ModelLoadError, match=f"{name} is missing, and must be a whole number"):
            read_config({**deepseek, name: None})


def test_a_flag_of_deepseek_v3_that_is_null_is_false() -> None:
    usual_config = usual("DeepseekV3ForCausalLM")
    flags = {"norm_topk_prob": None, "rope_interleave": None}
    found = [read_config({**usual_config, **entries}) for entries in ({}, flags, dict.fromkeys(flags, False))]
    assert found[1] == found[2]
    for config, expected in zip(found, (True, False, False), strict=True):
        attention, rope = config.layers[0].attention, config.layers[0].rope
        assert isinstance(attention, MlaConfig) and rope is not None
        assert attention.rope_interleaved == rope.interleaved == expected
        assert config.mixtures[0].routing.renormalize == expected
