"""LFM3-VL's encoder and projector against transformers, on ranks, and what files leave out or have wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.models.registry import read_config
from pagewick.models.vision.merging_config import Lfm3VisionConfig
from pagewick.models.vision.pixels import PatchReader
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.test_vision import PIXELS, Pixels, build, image_of, patches_of

SETTINGS = {"lfm3-vl": PIXELS, "lfm3-vl-wide": Pixels(merge_size=3, temporal_patch_size=1)}
# Tokens: one; one column; not square; more rows of patches, and wider ones, than are convolved at once.
SIZES = ((1, 1), (5, 1), (3, 7), (60, 9), (1, 520))


def encoder_of(directory: Path, pixels: Pixels = PIXELS, **context: Any) -> PatchReader:
    model = build(directory, replace(single_context(), **context))
    assert model.visual is not None
    model.visual.use_pixels(pixels)
    return model.visual


def by_transformers(reference: Any, image: Tensor, pixels: Pixels) -> Tensor:
    patches, grid = patches_of(image, pixels)
    found = reference.model.get_image_features(patches.to(reference.dtype), grid)
    return found.pooler_output[0]  # type: ignore[no-any-return]


def images_for(pixels: Pixels, sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Tensor]:
    side = pixels.patch_size * pixels.merge_size
    return [image_of(side * rows, side * columns) for rows, columns in sizes]


def entries_of(**entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes, with other entries."""
    config = transformers.Lfm3VlConfig(**VARIANTS["lfm3-vl"].all_entries()).to_dict()
    return json.loads(json.dumps({**config, "architectures": ["Lfm3VlForConditionalGeneration"], **entries}))  # type: ignore[no-any-return]


def vision_of(config: dict[str, Any]) -> Lfm3VisionConfig:
    found = read_config(config).vision
    assert isinstance(found, Lfm3VisionConfig)
    return found


@pytest.mark.parametrize("name", SETTINGS)
@torch.inference_mode()
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference, pixels = write_checkpoint(name, tmp_path), SETTINGS[name]
    encoder = encoder_of(tmp_path, pixels)
    for image, (rows, columns) in zip(images_for(pixels), SIZES, strict=True):
        expected, found = by_transformers(reference, image, pixels), encoder(image)
        spread = float(expected.std())
        assert spread > 1 and expected.shape == (rows * columns, 48) and found.deepstack.shape[0] == 0
        torch.testing.assert_close(found.rows, expected, atol=4e-5 * spread, rtol=0)
    with pytest.raises(ValueError, match="multiples of"):
        encoder(image_of(4, 8))


@torch.inference_mode()
def test_bits_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    write_checkpoint("lfm3-vl", tmp_path)
    encoder, image = encoder_of(tmp_path), image_of(136, 96)
    before, found = torch.get_num_threads(), []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(encoder(image).rows)
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@torch.inference_mode()
def test_names_in_files(tmp_path: Path) -> None:
    """Published files have other names of a few parts than the classes of transformers, which reads both."""
    write_checkpoint("lfm3-vl", tmp_path)
    image = image_of(24, 40)
    expected = encoder_of(tmp_path)(image).rows
    file, tower = tmp_path / "model.safetensors", "model.vision_tower."
    tensors = load_file(file)
    assert f"{tower}patchifier.weight" in tensors and f"{tower}layers.2.self_attn.q_layernorm.weight" in tensors
    renamed = {
        key.replace("patchifier", "patch_embed").replace("q_layernorm", "q_norm").replace("k_layernorm", "k_norm"): one
        for key, one in tensors.items()
    }
    save_file(renamed, file)
    assert torch.equal(encoder_of(tmp_path)(image).rows, expected)


def test_a_file_without_the_vision_part_reads_no_images(tmp_path: Path) -> None:
    write_checkpoint("lfm3-vl", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({key: tensor for key, tensor in tensors.items() if "language_model" in key}, file)
    assert build(tmp_path, single_context()).visual is None
    save_file({key: tensor for key, tensor in tensors.items() if "spatial_conv" not in key}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 3 tensors of this model: .*layers\.0\.conv\.spatial_conv\.weight"):
        build(tmp_path, single_context())


def test_what_is_left_out_is_the_default_of_transformers() -> None:
    usual = json.loads(json.dumps(transformers.Lfm3VlConfig().to_dict()))
    config = {**usual, "architectures": ["Lfm3VlForConditionalGeneration"]}
    expected = vision_of(config)
    assert (expected.image_token_id, expected.hidden_size, expected.patch_size) == (125030, 1024, 16)
    assert (expected.num_heads, expected.num_kv_heads, expected.num_blocks, expected.conv_size) == (16, 8, 14, 3)
    assert expected.attention_blocks == (2, 4, 6, 8, 10, 12)
    own = ("image_token_id", "projector_hidden_act", "projector_hidden_size", "projector_bias", "tie_word_embeddings")
    for key in own:
        assert read_config({name: value for name, value in config.items() if name != key}) == read_config(config), key
    plain = config["vision_config"]
    for key in plain:
        given = {name: value for name, value in plain.items() if name != key}
        assert vision_of({**config, "vision_config": given}) == expected, key
    assert read_config(config).tie_word_embeddings


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"vision_config.num_attention_heads": 7}, r"num_attention_heads is 7, and must be a number that cuts"),
        ({"vision_config.num_key_value_heads": 4}, r"num_key_value_heads is 4, and must be a divisor of .* \(6\)"),
        ({"vision_config.conv_kernel_size": 4}, r"conv_kernel_size is 4, and must be an odd number"),
        ({"vision_config.layer_types": ["conv"] * 3}, r"layer_types is .* and must be a list of num_hidden_layers \(4"),
        ({"vision_config.layer_types": ["conv", "mamba"] * 2}, r"kinds, conv or full_attention"),
        ({"vision_config.in_channels": 1}, r"in_channels is 1, and must be 3"),
        ({"vision_config.model_type": "siglip2_vision_model"}, r"model_type is 'siglip2_vision_model'"),
        ({"vision_config.rope_parameters": {"rope_type": "yarn"}}, r"rope_parameters\.rope_type is 'yarn'"),
        ({"text_config.model_type": "lfm2"}, r"text_config\.model_type is 'lfm2'"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    config = entries_of()
    for name, value in entries.items():
        part, _, inner = name.rpartition(".")
        config[part][inner] = value
    with pytest.raises(ModelLoadError, match=said):
        read_config(config)


def test_a_vocabulary_without_the_placeholder_reads_text_only() -> None:
    vocab_size = entries_of()["text_config"]["vocab_size"]
    assert read_config(entries_of(image_token_id=vocab_size - 1)).vision is not None
    assert read_config(entries_of(image_token_id=vocab_size)).vision is None
