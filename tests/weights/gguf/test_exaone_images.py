"""The vision part of EXAONE 4.5 is read from GGUF files; test_images.py compares its answers and tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pagewick.config import EngineConfig
from pagewick.engine.image_settings import image_settings
from pagewick.errors import ModelLoadError
from pagewick.images.qwen_settings import QwenSettings
from pagewick.models.registry import read_config
from pagewick.models.vision.config import VisionConfig
from pagewick.weights.description import describe
from tests.models.checkpoints import save
from tests.weights.gguf.mixes import rewrite
from tests.weights.gguf.test_images import unchanged
from tests.weights.gguf.vision_models import Pair, original, write_pair

NAME = "exaone-4.5"


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return write_pair(NAME, tmp_path)


def changed(pair: Pair, values: Mapping[str, Any]) -> Path:
    return rewrite(pair.vision, pair.vision.with_name("other.gguf"), unchanged, values)


def vision_of(pair: Pair, **values: Any) -> VisionConfig:
    path = changed(pair, {f"clip.vision.{key.replace('__', '.')}": value for key, value in values.items()})
    found = read_config(describe(pair.text, str(path)).config).vision
    assert isinstance(found, VisionConfig)
    return found


def test_config_is_that_of_the_checkpoint(pair: Pair, tmp_path: Path) -> None:
    save(original(NAME), tmp_path / "checkpoint")
    expected = read_config(describe(tmp_path / "checkpoint").config)
    found = read_config(describe(pair.text, str(pair.vision)).config)
    assert found.vision == expected.vision and vision_of(pair) == found.vision
    assert [layer.window for layer in found.layers] == [layer.window for layer in expected.layers]
    assert all(layer.rope is None or not layer.rope.mrope_section for layer in found.layers)


def test_keys_that_files_may_lack(pair: Pair) -> None:
    usual = vision_of(pair)
    assert (usual.num_kv_heads, usual.full_blocks, usual.window) == (3, (1,), 2)
    assert vision_of(pair, n_wa_pattern=None).full_blocks == (0, 1, 2)
    assert vision_of(pair, window_size=None).window == 112 // 8
    settings = image_settings(EngineConfig(str(pair.text), mmproj=str(pair.vision)))
    assert isinstance(settings, QwenSettings)
    assert (settings.min_pixels, settings.max_pixels, settings.token_side) == (1, 2**20, 8)
    path = changed(pair, {"clip.vision.image_min_pixels": None, "clip.vision.image_max_pixels": None})
    settings = image_settings(EngineConfig(str(pair.text), mmproj=str(path)))
    assert settings is not None and (settings.min_pixels, settings.max_pixels) == (56**2, 1280 * 28**2)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"attention.head_count_kv": 4}, r"num_key_value_heads is 4, and must be a divisor of num_heads \(6\)"),
        ({"n_wa_pattern": 0}, "clip.vision.n_wa_pattern is 0, and must be a whole number from 1"),
        ({"attention.layer_norm_epsilon": 1e-5}, "layer_norm_epsilon is .*, and only 1e-06 is supported"),
        ({"block_count": 2}, r"block_count is 2, and the file also holds v\.blk\.2"),
    ],
)
def test_files_that_cannot_be_used(values: dict[str, Any], complaint: str, pair: Pair) -> None:
    path = changed(pair, {f"clip.vision.{key}": value for key, value in values.items()})
    with pytest.raises(ModelLoadError, match=complaint):
        read_config(describe(pair.text, str(path)).config)
