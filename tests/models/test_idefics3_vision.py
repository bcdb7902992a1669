"""The encoder and projector of Idefics3 and SmolVLM against transformers, on several ranks, and in published files."""

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
from pagewick.models.decoder import Decoder
from pagewick.models.registry import read_config
from pagewick.models.vision.merging_config import MergingSiglipConfig
from pagewick.models.vision.pixels import PatchReader
from pagewick.models.vision.siglip import RoundingSiglipEncoder
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.published_2025 import PUBLISHED_2025
from tests.models.test_vision import Pixels, build, image_of

# Variant -> side of a patch in pixels, side of a token in patches, side of an image in the pixels that the model reads.
SIZES = {"smolvlm": (4, 3, 24), "idefics3": (3, 5, 75)}


def pixels_of(name: str) -> Pixels:
    patch_size, merge_size, _ = SIZES[name]
    return Pixels(patch_size=patch_size, merge_size=merge_size, temporal_patch_size=1)


def encoder_of(model: Decoder, name: str) -> PatchReader:
    assert model.visual is not None
    model.visual.use_pixels(pixels_of(name))
    return model.visual


def by_transformers(reference: Any, image: Tensor, *, num_unseen: int = 0) -> Tensor:
    """Rows of an image, which gets `num_unseen` rows and columns of pixels more."""
    pixels = Pixels()
    normed = (image.double() / 255 - torch.tensor(pixels.mean)) / torch.tensor(pixels.std)
    whole = torch.nn.functional.pad(normed.permute(2, 0, 1), (0, num_unseen, 0, num_unseen), value=0.7)
    return reference.model.get_image_features(whole[None, None].to(reference.dtype)).pooler_output[0]  # type: ignore[no-any-return]


def entries_of(name: str = "smolvlm", **entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes, with other entries; None: left out."""
    variant = VARIANTS[name]
    config = getattr(transformers, f"{variant.config}Config")(**variant.all_entries()).to_dict()
    found = {**config, "architectures": [f"{variant.config}ForConditionalGeneration"], **entries}
    return {key: value for key, value in found.items() if value is not None}


def vision_of(config: dict[str, Any]) -> MergingSiglipConfig:
    found = read_config(config).vision
    assert isinstance(found, MergingSiglipConfig)
    return found


@pytest.mark.parametrize("name", SIZES)
@torch.inference_mode()
def test_rows_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference = write_checkpoint(name, tmp_path)
    patch_size, merge_size, side = SIZES[name]
    encoder, image = encoder_of(build(tmp_path, single_context()), name), image_of(side, side)
    num_unseen = VARIANTS[name].all_entries()["vision_config"]["image_size"] - side
    expected, found = by_transformers(reference, image, num_unseen=num_unseen), encoder(image)
    spread, num_rows = float(expected.std()), (side // patch_size // merge_size) ** 2
    assert spread > 0.5 and expected.shape == (num_rows, 48) and found.deepstack.shape == (0, num_rows, 48)
    torch.testing.assert_close(found.rows, expected, atol=4e-5 * spread, rtol=0)
    for height, width in ((side, 2 * side), (12, 12)):
        with pytest.raises(ValueError, match=f"and this model reads {side} x {side}"):
            encoder(image_of(height, width))


@torch.inference_mode()
def test_positions_are_rounded_as_by_transformers(tmp_path: Path) -> None:
    """Without it, the results of the variant with 25 patches in a row are others."""
    reference = write_checkpoint("idefics3", tmp_path)
    encoder, image = encoder_of(build(tmp_path, single_context()), "idefics3"), image_of(75, 75)
    assert isinstance(encoder, RoundingSiglipEncoder)
    assert encoder._place.tolist() != [*range(25)]
    encoder._place = torch.arange(25)
    expected = by_transformers(reference, image)
    assert (encoder(image).rows - expected).abs().max() > 0.1


def test_a_file_without_the_vision_part_reads_no_images(tmp_path: Path) -> None:
    write_checkpoint("smolvlm", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    is_of_text = ("model.text_model.", "lm_head.")
    save_file({key: tensor for key, tensor in tensors.items() if key.startswith(is_of_text)}, file)
    assert build(tmp_path, single_context()).visual is None
    save_file({key: tensor for key, tensor in tensors.items() if "connector" not in key}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensor of this model: model\.connector\.modality_projection"):
        build(tmp_path, single_context())


@pytest.mark.parametrize("kind", ["SmolVLM", "Idefics3"])
def test_what_is_left_out_is_the_default_of_transformers(kind: str) -> None:
    text = {**entries_of()["text_config"], "vocab_size": 128258}
    usual = getattr(transformers, f"{kind}Config")().to_dict()
    # The usual sizes do not fit each other: 7 patches in a row.
    config = {**usual, "text_config": text, "architectures": [f"{kind}ForConditionalGeneration"], "scale_factor": 7}
    expected = vision_of(config)
    assert (expected.image_token_id, expected.hidden_size, expected.patch_size) == (128257, 1152, 32)
    assert vision_of({key: value for key, value in config.items() if key != "image_token_id"}) == expected
    whole = {**config, "vision_config": {**config["vision_config"], "image_size": 256}, "scale_factor": None}
    assert vision_of({key: value for key, value in whole.items() if value is not None}).merge_size == 2
    plain = config["vision_config"]
    for key in plain:
        found = vision_of({**config, "vision_config": {name: value for name, value in plain.items() if name != key}})
        assert found == expected, key


def test_published_files() -> None:
    vision = vision_of(PUBLISHED_2025["SmolVLM2-500M-Video-Instruct"])
    found = (
        vision.image_token_id, vision.hidden_size, vision.out_hidden_size, vision.num_blocks, vision.num_heads,
        vision.intermediate_size, vision.activation, vision.patch_size, vision.side, vision.positions_per_side,
        vision.fixed_pixels,
    )  # fmt: skip
    assert found == (49190, 768, 960, 12, 12, 3072, "gelu_tanh", 16, 64, 32, 512**2)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"scale_factor": 4}, r"scale_factor is 4, and must be a divisor of 6, the patches in a row"),
        ({"vision_config.model_type": "siglip_vision_model"}, r"vision_config\.model_type is 'siglip_vision_model'"),
        ({"vision_config.num_attention_heads": 7}, r"num_attention_heads is 7, and must be a divisor of hidden_size"),
        ({"vision_config.image_size": 3}, r"scale_factor is 3, and must be a divisor of 0"),
        ({"text_config.model_type": "mistral"}, r"text_config\.model_type is 'mistral'"),
        ({"text_config.qk_layer_norms": True}, r"qk_layer_norms is True, and must be False"),
        ({"text_config.rope_interleaved": True}, r"rope_interleaved is True, and must be False"),
        ({"text_config.use_resampler": True}, r"use_resampler is True, and must be False"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    config = json.loads(json.dumps(entries_of()))
    for name, value in entries.items():
        part, _, inner = name.rpartition(".")
        (config[part] if part else config)[inner] = value
    with pytest.raises(ModelLoadError, match=said):
        read_config(config)
