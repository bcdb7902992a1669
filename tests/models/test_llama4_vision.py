"""The encoder of Llama 4 against transformers, and what its files leave out or have wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.models.registry import read_config
from pagewick.models.vision.merging_config import Llama4VisionConfig
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.plain_images import encoder_of
from tests.models.published import PUBLISHED
from tests.models.test_vision import Pixels, build, image_of

NAME, PIXELS, SIDE = "llama4-maverick", Pixels(temporal_patch_size=1), 24


def by_transformers(reference: Any, image: Tensor) -> Tensor:
    """The rows of a tile, whose colours the processor normalises in bfloat16."""
    mean, std = (torch.tensor(numbers, dtype=torch.bfloat16) for numbers in (PIXELS.mean, PIXELS.std))
    normed = (image.bfloat16() * PIXELS.rescale_factor - mean) / std
    whole = normed.permute(2, 0, 1).unsqueeze(0).to(reference.dtype)
    found = reference.get_image_features(whole, return_dict=True).last_hidden_state
    return reference.multi_modal_projector(found)[0]  # type: ignore[no-any-return]


def entries_of(**entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes, with other entries: `part.entry` stands within a part."""
    config = transformers.Llama4Config(**VARIANTS[NAME].all_entries()).to_dict()
    config = json.loads(json.dumps({**config, "architectures": ["Llama4ForConditionalGeneration"]}))
    for name, value in entries.items():
        part, _, inner = name.rpartition(".")
        (config[part] if part else config)[inner] = value
    return config  # type: ignore[no-any-return]


def vision_of(config: dict[str, Any]) -> Llama4VisionConfig:
    found = read_config(config).vision
    assert isinstance(found, Llama4VisionConfig)
    return found


@torch.inference_mode()
def test_rows_are_those_of_transformers(tmp_path: Path) -> None:
    reference, encoder = write_checkpoint(NAME, tmp_path), encoder_of(tmp_path, PIXELS)
    for turn in (0, 5):
        image = image_of(SIDE, SIDE).roll(turn, 1)
        expected, found = by_transformers(reference, image), encoder(image)
        assert float(expected.std()) > 1 and found.deepstack.shape == (0, *expected.shape) == (0, 9, 48)
        torch.testing.assert_close(found.rows, expected, atol=3e-5, rtol=0)
    with pytest.raises(ValueError, match="and this model reads 24 x 24"):
        encoder(image_of(SIDE, 2 * SIDE))


@pytest.mark.parametrize("name", ["Llama-4-Scout-17B-16E", "Llama-4-Maverick-17B-128E-Instruct"])
def test_published_files(name: str) -> None:
    found = vision_of(PUBLISHED[name])
    assert (found.num_blocks, found.hidden_size, found.num_heads, found.intermediate_size) == (34, 1408, 16, 5632)
    assert (found.positions_per_side, found.merge_size, found.projector_size) == (24, 2, 4096)
    assert (found.image_token_id, found.rope_theta, found.out_hidden_size) == (200092, 1e4, 5120)


def test_what_is_left_out_is_the_default_of_transformers() -> None:
    """But for widths, whose defaults do not fit each other."""
    usual = json.loads(json.dumps(transformers.Llama4Config().to_dict()))
    widths, text = {"hidden_size": 1408, "vision_output_dim": 4096}, PUBLISHED["Llama-4-Scout-17B-16E"]["text_config"]
    config = {
        **usual, "architectures": ["Llama4ForConditionalGeneration"], "text_config": text,
        "vision_config": {**usual["vision_config"], **widths},
    }  # fmt: skip
    expected = vision_of(config)
    assert (expected.image_token_id, expected.patch_size, expected.positions_per_side) == (200092, 14, 32)
    assert vision_of({key: value for key, value in config.items() if key != "image_token_index"}) == expected
    for key in config["vision_config"].keys() - widths.keys():
        given = {name: value for name, value in config["vision_config"].items() if name != key}
        assert vision_of({**config, "vision_config": given}) == expected, key
    changed = {**config, "vision_config": {**config["vision_config"], "rope_parameters": None, "rope_theta": 7.0}}
    assert vision_of(changed).rope_theta == 7.0


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vision_config.model_type": "clip"}, r"vision_config\.model_type is 'clip', and must be one of"),
        ({"vision_config.hidden_act": "silu"}, r"hidden_act is 'silu', and must be 'gelu'"),
        ({"vision_config.norm_eps": 1e-6}, r"norm_eps is 1e-06, and must be 1e-05"),
        ({"vision_config.vision_feature_layer": -2}, r"vision_feature_layer is -2, and must be -1"),
        ({"vision_config.vision_feature_select_strategy": "full"}, r"select_strategy is 'full', and must be 'default'"),
        ({"vision_config.multi_modal_projector_bias": True}, r"projector_bias is True, and must be False"),
        ({"vision_config.num_attention_heads": 7}, r"num_attention_heads is 7, and must be a number that cuts"),
        ({"vision_config.image_size": 26}, r"image_size is 26, and must be a multiple of patch_size \(4\)"),
        ({"vision_config.intermediate_size": 96}, r"intermediate_size is 96, and must be 192, the width of merged"),
        ({"vision_config.pixel_shuffle_ratio": 0.25}, r"pixel_shuffle_ratio is 0\.25, and must be 1 divided by a"),
        ({"vision_config.projector_input_dim": 40}, r"projector_input_dim is 40, and must be 52: projector_output_dim"),
        ({"vision_config.vision_output_dim": 40}, r"vision_output_dim is 40, and must be 52: projector_output_dim"),
        ({"vision_config.rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.rope_type is 'yarn'"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    read_config(entries_of())
    with pytest.raises(ModelLoadError, match=said):
        read_config(entries_of(**entries))


def test_a_vocabulary_without_the_token_reads_text() -> None:
    config = read_config(entries_of(image_token_index=193))
    assert config.vision is None and config.layers == read_config(entries_of()).layers


def test_a_file_without_the_vision_part_reads_no_images(tmp_path: Path) -> None:
    write_checkpoint(NAME, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if name.startswith("language_model.")}, file)
    assert build(tmp_path, single_context()).visual is None
    save_file({name: tensor for name, tensor in tensors.items() if "_embedding" not in name}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 3 tensors of this model: .*vision_model\.class_embedding"):
        build(tmp_path, single_context())
    save_file({**tensors, "vision_model.class_embedding": torch.ones(1, 48)}, file)
    with pytest.raises(ModelLoadError, match=r"class_embedding: its shape is \[1, 48\], and config.json says \[48\]"):
        build(tmp_path, single_context())
