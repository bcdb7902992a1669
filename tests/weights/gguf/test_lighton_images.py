"""The pair of GGUF files that llama.cpp's converter wrote for LightOnOCR: it sees what the checkpoint sees."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewick.config import EngineConfig
from pagewick.engine.image_settings import image_settings
from pagewick.errors import ModelLoadError
from pagewick.images.lighton_settings import LightOnSettings
from pagewick.models.registry import read_config
from pagewick.weights.description import describe
from pagewick.weights.opening import open_source
from tests.engine.serving import running
from tests.models.checkpoints import IMAGE_MEAN, IMAGE_STD, save
from tests.weights.gguf.mixes import rewrite
from tests.weights.gguf.test_images import OPTIONS, answers, exact, unchanged
from tests.weights.gguf.vision_models import Pair, original, write_pair

NAME = "lighton-ocr"
PLACES = tuple(f"{place}{part}." for place in ("", "model.") for part in ("vision_encoder", "vision_projection"))
# Tensors of three blocks, and of all else.
NUM_TENSORS = 3 * 9 + 6
EDGE = 160


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair(NAME, tmp_path)


@exact
def test_bits_are_those_of_the_checkpoint(pair: Pair, tmp_path: Path) -> None:
    save(original(NAME), tmp_path / "checkpoint")
    found, expected = answers(*pair), answers(tmp_path / "checkpoint")
    assert found == expected
    assert found["r1", 0].logprobs != found["r2", 0].logprobs, "the picture matters"


def test_tensors_and_config_are_those_of_the_checkpoint(pair: Pair, tmp_path: Path) -> None:
    save(original(NAME), tmp_path / "checkpoint")
    found, expected = (
        read_config(describe(*one).config) for one in ((pair.text, str(pair.vision)), (tmp_path / "checkpoint",))
    )
    assert found.vision is not None and expected.vision is not None
    assert replace(found.vision, projector_eps=None) == replace(expected.vision, projector_eps=None)
    with open_source(tmp_path / "checkpoint") as checkpoint, open_source(pair.text, mmproj=str(pair.vision)) as source:
        stored = {one.removeprefix("model."): one for one in checkpoint.names() if one.startswith(PLACES)}
        assert len(stored) == NUM_TENSORS
        assert sorted(one for one in source.names() if one.startswith(PLACES)) == sorted(stored)
        for ours, theirs in stored.items():
            assert torch.equal(source.get(ours), checkpoint.get(theirs)), ours


def test_settings_are_those_of_the_file(pair: Pair) -> None:
    """Sides are multiples of a patch, as in the files that are published with LightOnOCR 2."""
    settings = image_settings(EngineConfig(str(pair.text), mmproj=str(pair.vision)))
    assert isinstance(settings, LightOnSettings)
    assert (settings.patch_size, settings.token_side, settings.step, settings.longest_edge) == (4, 8, 4, EDGE)
    assert settings.mean == pytest.approx(IMAGE_MEAN) and settings.std == pytest.approx(IMAGE_STD)
    assert image_settings(EngineConfig(str(pair.text))) is None
    path = rewrite(pair.vision, pair.vision.with_name("o.gguf"), unchanged, {"clip.vision.preproc_image_size": 60})
    settings = image_settings(EngineConfig(str(pair.text), mmproj=str(path)))
    assert isinstance(settings, LightOnSettings) and settings.longest_edge == 60


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"clip.projector_type": "pixtral"}, "of the kind pixtral belong to llama, mistral3, mistral4, and this is"),
        ({"clip.vision.image_size": None}, "clip.vision.image_size is missing"),
        ({"clip.use_silu": False, "clip.use_gelu": True}, "clip.use_gelu is not what lightonocr has"),
        ({"clip.vision.spatial_merge_size": 3}, "merging_layer"),
    ],
)
def test_files_that_cannot_be_used(values: dict[str, Any], complaint: str, pair: Pair) -> None:
    path = rewrite(pair.vision, pair.vision.with_name("bad.gguf"), unchanged, values)
    with pytest.raises(ModelLoadError, match=complaint), running(pair.text, **OPTIONS, mmproj=str(path)):
        pass
