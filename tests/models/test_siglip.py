"""Gemma 3's encoder and projection against transformers, on several ranks, and from files of all ages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pagewick.errors import ModelLoadError
from pagewick.models.parts import AttentionConfig
from pagewick.models.registry import read_config
from pagewick.models.vision.config import SiglipConfig
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.plain_images import by_transformers, encoder_of
from tests.models.published import PUBLISHED
from tests.models.test_vision import Pixels, build, image_of

NAME = "gemma-3-multimodal"
# Pixels of a side, and the patches whose mean is a token.
SIDE, MERGED = 48, 3
PIXELS = Pixels(merge_size=MERGED, temporal_patch_size=1)


def entries_of(**entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes, with other entries; None: left out."""
    config = transformers.Gemma3Config(**VARIANTS[NAME].all_entries()).to_dict()
    found = {**config, "architectures": ["Gemma3ForConditionalGeneration"], **entries}
    return {key: value for key, value in found.items() if value is not None}


def vision_of(config: dict[str, Any]) -> SiglipConfig:
    found = read_config(config).vision
    assert isinstance(found, SiglipConfig)
    return found


@torch.inference_mode()
def test_rows_are_those_of_transformers(tmp_path: Path) -> None:
    reference = write_checkpoint(NAME, tmp_path)
    encoder = encoder_of(tmp_path, PIXELS)
    image = image_of(SIDE, SIDE)
    expected, found = by_transformers(reference, image, PIXELS), encoder(image)
    spread = float(expected.std())
    assert spread > 0.5 and expected.shape == (16, 48) and found.deepstack.shape == (0, 16, 48)
    torch.testing.assert_close(found.rows, expected, atol=4e-5 * spread, rtol=0)
    for height, width in ((SIDE, 2 * SIDE), (12, 12)):
        with pytest.raises(ValueError, match="and this model reads 48 x 48"):
            encoder(image_of(height, width))


@pytest.mark.parametrize("has_head", [False, True])
@pytest.mark.parametrize("tower", ["vision_tower.vision_model.", "model.vision_tower.vision_model.", "vision_tower."])
@torch.inference_mode()
def test_names_in_files(tower: str, has_head: bool, tmp_path: Path) -> None:
    """Published files have the first ones; a part of SigLIP's that Gemma does not use may be there."""
    write_checkpoint(NAME, tmp_path)
    image = image_of(SIDE, SIDE)
    expected = encoder_of(tmp_path, PIXELS)(image).rows
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert "vision_tower.post_layernorm.weight" in tensors
    outer = "model." if tower.startswith("model.") else ""
    renamed = {
        key.replace("vision_tower.", tower).replace("multi_modal_projector.", f"{outer}multi_modal_projector."): tensor
        for key, tensor in tensors.items()
    }
    if has_head:
        renamed[f"{tower}head.attention.in_proj_bias"] = torch.zeros(3)
        renamed[f"{tower}embeddings.position_ids"] = torch.arange(144)[None]
    save_file(renamed, file)
    assert torch.equal(encoder_of(tmp_path, PIXELS)(image).rows, expected)


def test_a_file_without_the_vision_part_reads_no_images(tmp_path: Path) -> None:
    write_checkpoint(NAME, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    is_of_vision = ("vision_tower", "multi_modal_projector")
    save_file({key: tensor for key, tensor in tensors.items() if not key.startswith(is_of_vision)}, file)
    assert build(tmp_path, single_context()).visual is None
    save_file({key: tensor for key, tensor in tensors.items() if "multi_modal_projector" not in key}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 2 tensors of this model: .*multi_modal_projector\.mm_"):
        build(tmp_path, single_context())
    tensors["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(48, 60)
    save_file(tensors, file)
    with pytest.raises(ModelLoadError, match=r"mm_input_projection_weight.*\[48, 60\].*\[60, 48\]"):
        build(tmp_path, single_context())


def test_only_models_that_read_images_see_them_whole() -> None:
    def whole(config: Any) -> set[bool]:
        assert all(isinstance(layer.attention, AttentionConfig) for layer in config.layers)
        return {layer.attention.sees_images_whole for layer in config.layers}

    config = read_config(entries_of())
    assert whole(config) == {True}
    assert whole(config.without_vision()) == whole(read_config(entries_of(vision_config=None))) == {False}
    assert whole(read_config(entries_of(image_token_index=None, image_token_id=193))) == {False}


def test_what_is_left_out_is_the_default_of_transformers() -> None:
    text = {**entries_of()["text_config"], "vocab_size": 262208}
    usual = {**transformers.Gemma3Config().to_dict(), "text_config": text}
    config = {**usual, "architectures": ["Gemma3ForConditionalGeneration"], "mm_tokens_per_image": 4}
    expected = vision_of(config)
    assert (expected.image_token_id, expected.hidden_size, expected.patch_size) == (262144, 768, 16)
    for key in ("image_token_index", "image_token_id"):
        assert vision_of({name: value for name, value in config.items() if name != key}) == expected, key
    plain = transformers.SiglipVisionConfig().to_dict()
    for key in plain:
        found = vision_of({**config, "vision_config": {name: value for name, value in plain.items() if name != key}})
        assert found == expected, key
    whole = {**config, "vision_config": {**plain, "image_size": 256}, "mm_tokens_per_image": None}
    assert vision_of(whole).merge_size == 1, "256 tokens of 16 x 16 patches"


def test_published_files() -> None:
    vision = vision_of(PUBLISHED["gemma-3-4b-it"])
    found = (
        vision.image_token_id, vision.hidden_size, vision.out_hidden_size, vision.num_blocks, vision.num_heads,
        vision.intermediate_size, vision.activation, vision.patch_size, vision.side, vision.positions_per_side,
    )  # fmt: skip
    assert found == (262144, 1152, 2560, 27, 16, 4304, "gelu_tanh", 14, 56, 64)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"mm_tokens_per_image": 15}, r"mm_tokens_per_image is 15, and must be the square of a number that divides 12"),
        ({"mm_tokens_per_image": 25}, r"mm_tokens_per_image is 25"),
        ({"vision_config.model_type": "clip_vision_model"}, r"vision_config\.model_type is 'clip_vision_model'"),
        ({"vision_config.num_attention_heads": 7}, r"num_attention_heads is 7, and must be a divisor of hidden_size"),
        ({"vision_config.num_channels": 1}, r"num_channels is 1, and must be 3"),
        ({"vision_config.image_size": [4, 4]}, r"image_size is \[4, 4\]"),
        ({"vision_config.image_size": 50}, r"image_size is 50, and must be a multiple of patch_size \(4\)"),
        ({"vision_config.hidden_act": "mish"}, r"hidden_act is 'mish'"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    config = entries_of()
    for name, value in entries.items():
        _, _, inner = name.partition("vision_config.")
        (config["vision_config"] if inner else config)[inner or name] = value
    with pytest.raises(ModelLoadError, match=said):
        read_config(config)
