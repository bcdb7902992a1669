"""Encoders of images against transformers, in float32 and bfloat16, alone and on several ranks; then whole models."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.layers.context import LayerContext
from pagewick.models.decoder import Decoder
from pagewick.models.registry import build_model, read_config
from pagewick.models.vision.encoder import EncodedImage, VisionEncoder
from pagewick.models.vision.positions import image_positions
from pagewick.weights.loader import load_weights
from pagewick.weights.opening import open_source
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.test_given_embeddings import Loaded

NAMES = ("qwen2-vl", "qwen2.5-vl-window", "qwen3-vl", "qwen3-vl-moe", "qwen3.5-multimodal", "qwen3.5-moe-multimodal")
# Pixels: one row of the output; one column of patches; not square; windows that are cut at both edges; far more patches
# than the 5 x 5 learned positions.
SIZES = ((8, 8), (40, 8), (24, 56), (40, 72), (136, 96))


@dataclass(frozen=True)
class Pixels:
    patch_size: int = 4
    merge_size: int = 2
    temporal_patch_size: int = 2
    mean: tuple[float, float, float] = (0.5, 0.4, 0.3)
    std: tuple[float, float, float] = (0.2, 0.3, 0.25)
    rescale_factor: float = 1 / 255


PIXELS = Pixels()


def image_of(height: int, width: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * height + width)
    return torch.randint(0, 256, (height, width, 3), dtype=torch.uint8, generator=generator)


def patches_of(image: Tensor, pixels: Pixels = PIXELS) -> tuple[Tensor, Tensor]:
    """An image as transformers' processors give it to a model: [T, numbers of a patch], and its grid."""
    height, width, _ = image.shape
    size, merge, number = pixels.patch_size, pixels.merge_size, pixels.temporal_patch_size
    rows, columns = height // size, width // size
    normed = (image.double() / 255 - torch.tensor(pixels.mean)) / torch.tensor(pixels.std)
    patches = []
    for block_row in range(rows // merge):
        for block_column in range(columns // merge):
            for row in range(block_row * merge, (block_row + 1) * merge):
                for column in range(block_column * merge, (block_column + 1) * merge):
                    square = normed[row * size : (row + 1) * size, column * size : (column + 1) * size]
                    patches.append(square.permute(2, 0, 1).unsqueeze(1).repeat(1, number, 1, 1).flatten())
    return torch.stack(patches).float(), torch.tensor([[1, rows, columns]])


def build(directory: Path, context: LayerContext) -> Decoder:
    with open_source(directory) as source:
        model = build_model(context, read_config(source.config()), source.names())
        load_weights(model, source)
    return model


def encoder_of(model: Decoder) -> VisionEncoder:
    assert model.visual is not None
    model.visual.use_pixels(PIXELS)
    return model.visual


def by_transformers(reference: Any, image: Tensor, pixels: Pixels = PIXELS) -> EncodedImage:
    patches, grid = patches_of(image, pixels)
    found = reference.model.visual(patches, grid)
    deepstack = getattr(found, "deepstack_features", None) or [found.pooler_output[:0]]
    rows = found.pooler_output
    return EncodedImage(rows, torch.stack(deepstack) if len(deepstack[0]) else rows.new_empty(0, *rows.shape))


def compare(found: EncodedImage, expected: EncodedImage, tolerance: float) -> None:
    assert found.rows.shape == expected.rows.shape and found.deepstack.shape == expected.deepstack.shape
    torch.testing.assert_close(found.rows, expected.rows, atol=tolerance, rtol=0)
    torch.testing.assert_close(found.deepstack, expected.deepstack, atol=tolerance, rtol=0)


@pytest.mark.parametrize("name", [*NAMES, "exaone-4.5", "glm-4.1v", "glm-4.5v", "glm-ocr"])
@torch.inference_mode()
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = write_checkpoint(name, tmp_path)
    encoder = encoder_of(build(tmp_path, single_context()))
    assert len(encoder.blocks) == 3
    for size in SIZES:
        image = image_of(*size)
        expected = by_transformers(reference, image)
        assert float(expected.rows.std()) > 1
        assert len(expected.rows) == encoder.num_tokens(*size)
        assert len(expected.deepstack) == (2 if "qwen3-vl" in name else 0)
        compare(encoder(image), expected, 3e-5)


@torch.inference_mode()
def test_bits_do_not_depend_on_the_number_of_threads(tmp_path: Path) -> None:
    write_checkpoint("qwen2.5-vl-window", tmp_path)
    encoder, image = encoder_of(build(tmp_path, single_context())), image_of(136, 96)
    before, found = torch.get_num_threads(), []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        found.append(encoder(image).rows)
    torch.set_num_threads(before)
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


# Placeholders in each of the two sequences: where they start, and the pixels of the image. The second ends in its own.
IMAGES = ((3, (24, 56)), (6, (16, 32)))


@pytest.mark.parametrize(
    "name", ["qwen2-vl", "qwen2.5-vl-window", "qwen3.5-multimodal", "exaone-4.5", "glm-4.1v", "glm-4.5v", "glm-ocr"]
)
@torch.inference_mode()
def test_a_model_that_sees_images_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    reference: Any = write_checkpoint(name, tmp_path)
    loaded = Loaded(tmp_path, single_context())
    encoder, vision = encoder_of(loaded.model), loaded.config.vision
    assert vision is not None
    # Tokens of EXAONE 4.5 have one position each, also those of images.
    has_axes = name != "exaone-4.5"
    generator = torch.Generator().manual_seed(3)
    ids, rows, positions, expected = [], [], [], []
    for num_tokens, (start, size) in zip((27, 14), IMAGES, strict=True):
        image, own = image_of(*size), torch.randint(2, 188, (num_tokens,), generator=generator)
        number = encoder.num_tokens(*size)
        own[start : start + number] = vision.image_token_id
        given = torch.full((num_tokens, loaded.config.hidden_size), torch.nan)
        given[start : start + number] = encoder(image).rows
        axes, _ = image_positions(num_tokens, [(start, size[0] // 8, size[1] // 8)])
        patches, grid = patches_of(image)
        kinds = {"mm_token_type_ids": (own[None] == vision.image_token_id).int()} if has_axes else {}
        output = reference(input_ids=own[None], pixel_values=patches, image_grid_thw=grid, use_cache=False, **kinds)
        ids.append(own)
        rows.append(given)
        positions.append(axes)
        expected.append(output.logits[0])
    token_ids = torch.cat(ids)
    batch = loaded.batch(
        token_ids,
        num_tokens=(27, 14),
        inputs_embeds=torch.cat(rows),
        embeds_mask=token_ids == vision.image_token_id,
        **({"positions": torch.from_numpy(np.concatenate(positions, axis=1))} if has_axes else {}),
    )
    found = loaded.logits(batch)
    torch.testing.assert_close(found, torch.cat(expected), atol=VARIANTS[name].tolerance, rtol=0)
    in_text = loaded.logits(replace(batch, inputs_embeds=None, embeds_mask=None))
    assert float((found - in_text)[batch.embeds_mask].abs().amax(-1).min()) > 0.1


def test_settings_of_another_model_are_refused(tmp_path: Path) -> None:
    write_checkpoint("qwen3-vl", tmp_path)
    encoder = encoder_of(build(tmp_path, single_context()))
    with pytest.raises(ModelLoadError, match=r"merge_size is 3, and config.json says 2 \(vision_config.spatial_merge"):
        encoder.use_pixels(replace(PIXELS, merge_size=3))
    for size in ((8, 12), (0, 8), (4, 4)):
        with pytest.raises(ValueError, match="whose sides must be multiples of 8"):
            encoder.num_tokens(*size)


def test_a_file_without_the_vision_part_reads_no_images(tmp_path: Path) -> None:
    write_checkpoint("qwen3.5-multimodal", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    config = read_config(json.loads((tmp_path / "config.json").read_text()))
    assert config.vision is not None and config.fitted(list(tensors)) == config
    assert build(tmp_path, single_context()).visual is not None

    text = config.without_vision()
    assert text.vision is None and text.without_vision() == text
    assert all(layer.rope is None or not layer.rope.mrope_section for layer in text.layers)
    with open_source(tmp_path) as source:
        model = build_model(single_context(), text, source.names())
        load_weights(model, source)
    assert model.visual is None

    save_file({name: tensor for name, tensor in tensors.items() if "visual" not in name}, file)
    assert build(tmp_path, single_context()).visual is None
    part = {name: tensor for name, tensor in tensors.items() if "visual.blocks.2" not in name}
    save_file(part, file)
    with pytest.raises(ModelLoadError, match=r"the checkpoint lacks 12 tensors of this model: .*visual\.blocks\.2"):
        build(tmp_path, single_context())
