"""EXAONE 4.5: what its files leave out, hold beside the model, or have wrong; rows and logits are in test_vision.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagewick.errors import ModelLoadError
from pagewick.models.registry import read_config
from pagewick.models.vision.config import VisionConfig
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.test_vision import build, encoder_of, image_of

NAME = "exaone-4.5"


def entries_of(**entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes, with other entries: `part.entry` stands within a part."""
    config = transformers.Exaone4_5_Config(**VARIANTS[NAME].all_entries()).to_dict()
    config = json.loads(json.dumps({**config, "architectures": ["Exaone4_5_ForConditionalGeneration"]}))
    for name, value in entries.items():
        part, _, inner = name.rpartition(".")
        (config[part] if part else config)[inner] = value
    return config  # type: ignore[no-any-return]


def vision_of(config: dict[str, Any]) -> VisionConfig:
    found = read_config(config).vision
    assert found is not None
    return found


def test_what_is_left_out_is_the_default_of_transformers() -> None:
    usual = transformers.Exaone4_5_Config().to_dict()
    config = json.loads(json.dumps({**usual, "architectures": ["Exaone4_5_ForConditionalGeneration"]}))
    config["vision_config"]["out_hidden_size"] = config["text_config"]["hidden_size"]
    expected = vision_of(config)
    assert (expected.image_token_id, expected.num_heads, expected.num_kv_heads, expected.window) == (67, 16, 8, 4)
    for key in ("image_token_id", "tie_word_embeddings"):
        assert read_config({name: value for name, value in config.items() if name != key}) == read_config(config), key
    for part, kept in (("vision_config", {"out_hidden_size"}), ("text_config", SIZES)):
        for key in config[part].keys() - kept:
            given = {name: value for name, value in config[part].items() if name != key}
            assert read_config({**config, part: given}) == read_config(config), key


# Sizes: every published file has them.
SIZES = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}


@torch.inference_mode()
def test_files_may_have_older_names_and_a_layer_for_later_tokens(tmp_path: Path) -> None:
    write_checkpoint(NAME, tmp_path)
    image, file = image_of(24, 56), tmp_path / "model.safetensors"
    expected = encoder_of(build(tmp_path, single_context()))(image).rows
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= {"model_type": "exaone4_5_text"}
    config["text_config"]["layer_types"] += ["full_attention"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = load_file(file)
    save_file({**tensors, "mtp.layers.0.mlp.up_proj.weight": torch.ones(2, 2), "mtp.fc.weight": torch.ones(2, 2)}, file)
    model = build(tmp_path, single_context())
    assert torch.equal(encoder_of(model)(image).rows, expected)
    assert read_config(config) == read_config(entries_of(dtype="float32"))

    save_file({name: tensor for name, tensor in tensors.items() if ".visual." not in name}, file)
    assert build(tmp_path, single_context()).visual is None
    save_file({name: tensor for name, tensor in tensors.items() if "blocks.1.attn.qkv" not in name}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 2 tensors of this model: .*visual\.blocks\.1\.attn\.qkv"):
        build(tmp_path, single_context())


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        (
            {"vision_config.num_key_value_heads": 4},
            r"num_key_value_heads is 4, and must be a divisor of num_heads \(6\)",
        ),
        ({"vision_config.num_heads": 7}, r"num_heads is 7, and must be a number that cuts"),
        ({"vision_config.model_type": "qwen2_5_vl"}, r"vision_config\.model_type is 'qwen2_5_vl', and must be one of"),
        ({"vision_config.out_hidden_size": 40}, r"out_hidden_size is 40, and must be the hidden_size of the text part"),
        ({"vision_config.rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.rope_type is 'yarn'"),
        (
            {"text_config.model_type": "exaone_moe"},
            r"text_config\.model_type is 'exaone_moe', and must be one of exaone4",
        ),
        ({"text_config.layer_types": ["full_attention"] * 6}, r"layer_types is .* a list of num_hidden_layers \(4\)"),
        ({"text_config.num_nextn_predict_layers": 2, "text_config.layer_types": ["full_attention"] * 5}, "layer_types"),
        (
            {"text_config.rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}},
            r"mrope_section",
        ),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    read_config(entries_of())
    with pytest.raises(ModelLoadError, match=said):
        read_config(entries_of(**entries))


def test_a_vocabulary_without_the_token_reads_text() -> None:
    assert read_config(entries_of(image_token_id=192)).vision is not None
    config = read_config(entries_of(image_token_id=193))
    assert config.vision is None and config.layers == read_config(entries_of()).layers
