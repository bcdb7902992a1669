"""The encoder and projector of Command A Vision against transformers, and what its files say."""

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
from pagewick.models.vision.merging_config import MergingSiglipConfig
from tests.layers.ranks import single_context
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.plain_images import by_transformers, encoder_of
from tests.models.test_vision import Pixels, build, image_of

NAME = "command-a-vision"
PIXELS = Pixels(temporal_patch_size=1)


def entries_of(**entries: Any) -> dict[str, Any]:
    """The config.json that transformers writes, with other entries; None: left out."""
    config = transformers.Cohere2VisionConfig(**VARIANTS[NAME].all_entries()).to_dict()
    found = {**config, "architectures": ["Cohere2VisionForConditionalGeneration"], **entries}
    return {key: value for key, value in json.loads(json.dumps(found)).items() if value is not None}


def vision_of(config: dict[str, Any]) -> MergingSiglipConfig:
    found = read_config(config).vision
    assert isinstance(found, MergingSiglipConfig)
    return found


@torch.inference_mode()
def test_rows_are_those_of_transformers(tmp_path: Path) -> None:
    reference = write_checkpoint(NAME, tmp_path)
    encoder = encoder_of(tmp_path, PIXELS)
    for turn in range(3):
        image = image_of(24, 24).roll(turn, 0)
        expected, found = by_transformers(reference, image, PIXELS), encoder(image)
        spread = float(expected.std())
        assert spread > 0.5 and expected.shape == (9, 96) and found.deepstack.shape == (0, 9, 96)
        torch.testing.assert_close(found.rows, expected, atol=4e-5 * spread, rtol=0)
    with pytest.raises(ValueError, match="and this model reads 24 x 24"):
        encoder(image_of(24, 48))


@torch.inference_mode()
def test_files_may_have_older_names(tmp_path: Path) -> None:
    write_checkpoint(NAME, tmp_path)
    image, file = image_of(24, 24), tmp_path / "model.safetensors"
    expected = encoder_of(tmp_path, PIXELS)(image).rows
    newer = load_file(file)
    assert any(name.startswith("model.vision_tower.") for name in newer)
    older = {
        name.removeprefix("model.")
        .replace("vision_tower.", "vision_tower.vision_model." if "vision_model" not in name else "vision_tower.")
        .replace("language_model.", "language_model.model."): tensor
        for name, tensor in newer.items()
    }
    # A part that makes one vector of an image, which some files hold, is not used.
    save_file({**older, "vision_tower.vision_model.head.probe": torch.zeros(1, 1, 48)}, file)
    assert torch.equal(encoder_of(tmp_path, PIXELS)(image).rows, expected)
    save_file({name: tensor for name, tensor in older.items() if "linear_1" not in name}, file)
    with pytest.raises(ModelLoadError, match=r"lacks 2 tensors of this model: .*multi_modal_projector\.linear_1"):
        build(tmp_path, single_context())
    save_file({name: tensor for name, tensor in older.items() if name.startswith("language_model.")}, file)
    assert build(tmp_path, single_context()).visual is None


def test_what_is_left_out_is_the_default_of_transformers() -> None:
    usual = transformers.Cohere2VisionConfig().to_dict()
    config = json.loads(json.dumps({**usual, "architectures": ["Cohere2VisionForConditionalGeneration"]}))
    expected = vision_of(config)
    assert (expected.image_token_id, expected.merge_size, expected.projector_size) == (255036, 2, 18432)
    assert (expected.hidden_size, expected.num_heads, expected.positions_per_side) == (1152, 12, 32)
    for key in ("image_token_id", "downsample_factor", "alignment_intermediate_size", "tie_word_embeddings"):
        assert read_config({name: value for name, value in config.items() if name != key}) == read_config(config), key
    plain = json.loads(json.dumps(transformers.SiglipVisionConfig().to_dict()))
    expected = vision_of({**config, "vision_config": plain})
    for key in plain:
        given = {name: value for name, value in plain.items() if name != key}
        assert vision_of({**config, "vision_config": given}) == expected, key


def test_logits_are_scaled_as_the_text_part_says() -> None:
    """As in Cohere2 alone; transformers leaves the factor out in models that read images."""
    config = entries_of()
    assert read_config(config).logit_scale == 1.0
    config["text_config"]["logit_scale"] = 0.25
    assert read_config(config).logit_scale == 0.25


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({"alignment_intermediate_size": 51}, r"alignment_intermediate_size is 51, and must be an even number"),
        ({"downsample_factor": 5}, r"image_size is 24, and must be a multiple of patch_size \* downsample_factor \(20"),
        ({"vision_config": {"model_type": "clip"}}, r"vision_config\.model_type is 'clip'"),
        ({"vision_config": {"num_attention_heads": 7}}, r"num_attention_heads is 7, and must be a divisor"),
        ({"text_config": {"model_type": "cohere"}}, r"text_config\.model_type is 'cohere', and must be one of cohere2"),
    ],
)
def test_mistakes_are_named(entries: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelLoadError, match=said):
        read_config(entries_of(**entries))


def test_a_vocabulary_without_the_token_reads_text() -> None:
    assert read_config(entries_of(image_token_id=193)).vision is None
    assert read_config(entries_of(vision_config=None)).vision is None
