"""The encoder of MiniCPM-V 4.6 and 4.7 against transformers, on ranks, and what files leave out or have wrong."""

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
from pagewick.models.vision.merging_config import CanvasMarks, MiniCPMVisionConfig
from pagewick.models.vision.pixels import PatchReader
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.encoders_on_ranks import encoded_on_ranks
from tests.models.test_vision import Pixels, build, image_of

# Patches of a side that become a token.
FACTORS = {"minicpm-v-4.6": 4, "minicpm-v-4.6-4x": 2}
# Tokens: one; one column; not square; as many patches in a row as there are positions, nearly; far more of them.
SIZES = ((1, 1), (5, 1), (3, 7), (2, 2), (17, 12))


def pixels_for(factor: int) -> Pixels:
    return Pixels(merge_size=factor, temporal_patch_size=1)


def encoder_of(directory: Path, factor: int = 4, **context: Any) -> PatchReader:
    model = build(directory, replace(single_context(), **context))
    assert model.visual is not None
    model.visual.use_pixels(pixels_for(factor))
    return model.visual


def images_for(factor: int, sizes: tuple[tuple[int, int], ...] = SIZES) -> list[Tensor]:
    return [image_of(4 * factor * rows, 4 * factor * columns) for rows, columns in sizes]


def by_transformers(reference: Any, images: list[Tensor]) -> list[Tensor]:
    """The rows of all images, which its encoder gets at once: [1, colour, y, patches and x]."""
    pixels, patches, grids = pixels_for(4), [], []
    for image in images:
        rows, columns = (length // 4 for length in image.shape[:2])
        normed = (image.double() / 255 - torch.tensor(pixels.mean)) / torch.tensor(pixels.std)
        patches.append(normed.view(rows, 4, columns, 4, 3).permute(4, 1, 0, 2, 3).reshape(3, 4, -1))
        grids.append([rows, columns])
    given = torch.cat(patches, dim=-1).unsqueeze(0).to(reference.dtype)
    return reference.model.get_image_features(given, torch.tensor(grids)).pooler_output  # type: ignore[no-any-return]


def entries_of(name: str = "minicpm-v-4.6") -> dict[str, Any]:
    """The config.json that transformers writes."""
    config = transformers.MiniCPMV4_6Config(**VARIANTS[name].all_entries()).to_dict()
    return json.loads(json.dumps({**config, "architectures": ["MiniCPMV4_6ForConditionalGeneration"]}))  # type: ignore[no-any-return]


def vision_of(config: dict[str, Any]) -> MiniCPMVisionConfig:
    found = read_config(config).vision
    assert isinstance(found, MiniCPMVisionConfig)
    return found


@pytest.mark.parametrize("name", FACTORS)
@torch.inference_mode()
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference, factor = write_checkpoint(name, tmp_path), FACTORS[name]
    encoder, images = encoder_of(tmp_path, factor), images_for(factor)
    for image, expected, (rows, columns) in zip(images, by_transformers(reference, images), SIZES, strict=True):
        found, spread = encoder(image), float(expected.std())
        assert spread > 1 and expected.shape == (rows * columns, 48) and found.deepstack.shape[0] == 0
        torch.testing.assert_close(found.rows, expected, atol=2e-5 * spread, rtol=0)
    with pytest.raises(ValueError, match="multiples of"):
        encoder(image_of(4 * factor, 4))


@torch.inference_mode()
def test_it_is_as_near_in_bfloat16_as_transformers(tmp_path: Path) -> None:
    reference = write_checkpoint("minicpm-v-4.6", tmp_path).bfloat16()
    encoder, images = encoder_of(tmp_path, dtype=torch.bfloat16), images_for(4)
    theirs = torch.cat(by_transformers(reference, images))
    exact = torch.cat(by_transformers(reference.float(), images))
    ours = torch.cat([encoder(image).rows for image in images])
    assert ours.dtype == torch.bfloat16
    our_error, their_error = ((rows.float() - exact).abs().mean().item() for rows in (ours, theirs))
    assert 1e-3 < our_error < 1.1 * their_error


@pytest.mark.parametrize("num_ranks", [2, 4])
@torch.inference_mode()
def test_ranks_share_the_heads(num_ranks: int, tmp_path: Path) -> None:
    """Six heads on four ranks are two, two, one and one."""
    write_checkpoint("minicpm-v-4.6", tmp_path)
    (image,) = images_for(4, ((3, 7),))
    expected = encoder_of(tmp_path)(image).rows
    for found in encoded_on_ranks(tmp_path, num_ranks, image, pixels_for(4)):
        torch.testing.assert_close(found.rows, expected, atol=2e-4, rtol=0)


def test_settings_of_the_other_mode_are_refused(tmp_path: Path) -> None:
    write_checkpoint("minicpm-v-4.6", tmp_path)
    with pytest.raises(ModelLoadError, match=r"merge_size is 2, and config.json says 4 \(downsample_mode\)"):
        encoder_of(tmp_path, factor=2)


def test_a_file_without_the_vision_part_reads_no_images(tmp_path: Path) -> None:
    write_checkpoint("minicpm-v-4.6", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    text = {key: tensor for key, tensor in tensors.items() if "vision_tower" not in key and "merger" not in key}
    assert len(text) < len(tensors)
    save_file(text, file)
    assert build(tmp_path, single_context()).visual is None
    save_file({key: tensor for key, tensor in tensors.items() if "vit_merger" not in key}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 16 tensors of this model: .*vision_tower\.vit_merger\.layer_norm"):
        build(tmp_path, single_context())


def test_what_is_left_out_is_the_default_of_transformers() -> None:
    usual = json.loads(json.dumps(transformers.MiniCPMV4_6Config(image_token_id=190).to_dict()))
    config = {**usual, "architectures": ["MiniCPMV4_6ForConditionalGeneration"]}
    expected = vision_of(config)
    assert (expected.hidden_size, expected.patch_size, expected.positions_per_side) == (768, 16, 14)
    assert (expected.window_block, expected.merge_size, expected.projector_size) == (6, 4, 4 * 768)
    for key in config.keys() - {"architectures", "image_token_id", "text_config"}:
        given = {name: value for name, value in config.items() if name != key}
        assert key == "vision_config" or read_config(given) == read_config(config), key
    plain = config["vision_config"]
    for key in plain:
        given = {name: value for name, value in plain.items() if name != key}
        assert vision_of({**config, "vision_config": given}) == expected, key
    assert not read_config(config).tie_word_embeddings


def canvas_entries(**entries: Any) -> dict[str, Any]:
    """The config.json of MiniCPM-V 4.7, with other entries."""
    config = transformers.MiniCPMV4_7Config(**VARIANTS["minicpm-v-4.7"].all_entries()).to_dict()
    return json.loads(  # type: ignore[no-any-return]
        json.dumps({**config, "architectures": ["MiniCPMV4_7ForConditionalGeneration"], **entries})
    )


def test_the_marks_of_canvases() -> None:
    config = canvas_entries()
    marks = CanvasMarks(image_start=180, image_end=181, slice_start=182, slice_end=183, row_end=184)
    assert vision_of(config).canvas == marks and vision_of(entries_of()).canvas is None
    read = read_config(config)
    assert {layer.rope.mrope_section for layer in read.layers if layer.rope is not None} == {(4, 2, 2)}
    text = read.without_vision()
    assert all(layer.rope is None or not layer.rope.mrope_section for layer in text.layers)
    for name in ("image_start_id", "newline_id"):
        with pytest.raises(ModelLoadError, match=name):
            read_config({**config, name: None})
        # Nothing needs it where images cannot be read.
        assert read_config({**config, name: None, "image_token_id": 10**6}).vision is None
    del config["text_config"]["rope_parameters"]["mrope_section"]
    with pytest.raises(ModelLoadError, match=r"mrope_section is .* and must be three numbers with the sum 8"):
        read_config(config)


def test_a_published_file() -> None:
    """The entries of openbmb/MiniCPM-V-4.6 that describe its encoder."""
    text = {**entries_of()["text_config"], "vocab_size": 248094}
    vision = {
        "model_type": "minicpmv4_6_vision", "hidden_act": "gelu_pytorch_tanh", "hidden_size": 1152, "image_size": 980,
        "intermediate_size": 4304, "layer_norm_eps": 1e-06, "num_attention_heads": 16, "num_channels": 3,
        "num_hidden_layers": 27, "patch_size": 14,
    }  # fmt: skip
    found = vision_of({
        "architectures": ["MiniCPMV4_6ForConditionalGeneration"], "model_type": "minicpmv4_6", "image_size": 1120,
        "drop_vision_last_layer": False, "insert_layer_id": 6, "image_token_id": 248056, "video_token_id": 248057,
        "tie_word_embeddings": True, "vision_config": vision, "text_config": text,
    })  # fmt: skip
    assert (found.image_token_id, found.side, found.positions_per_side, found.num_blocks) == (248056, 56, 70, 27)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"image_token_id": None}, r"image_token_id"),
        ({"merger_times": 2}, r"merger_times is 2, and must be 1"),
        ({"merge_kernel_size": [4, 4]}, r"merge_kernel_size is \[4, 4\], and must be \[2, 2\]"),
        ({"vision_config.window_kernel_size": [2, 4]}, r"window_kernel_size is \[2, 4\], and must be \[2, 2\]"),
        ({"insert_layer_id": 4}, r"insert_layer_id is 4, and must be below num_hidden_layers of vision_config \(4\)"),
        ({"insert_layer_id": -1}, r"insert_layer_id is -1"),
        ({"downsample_mode": "8x"}, r"downsample_mode is '8x'"),
        ({"vision_config.image_size": 3}, r"image_size is 3, and must be at least patch_size \(4\)"),
        ({"vision_config.model_type": "siglip_vision_model"}, r"vision_config\.model_type is 'siglip_vision_model'"),
        ({"vision_config.num_attention_heads": 7}, r"num_attention_heads is 7, and must be a divisor of hidden_size"),
        ({"text_config.model_type": "qwen3"}, r"text_config\.model_type is 'qwen3'"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    config = entries_of()
    for name, value in entries.items():
        part, _, inner = name.rpartition(".")
        (config[part] if part else config)[inner] = value
    with pytest.raises(ModelLoadError, match=said):
        read_config(config)
