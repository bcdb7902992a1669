"""Settings are read from the files that Qwen's models have, and sizes are those of the published processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.errors import ConfigError, InvalidRequestError, ModelLoadError
from pagewick.images.qwen_settings import QwenSettings
from pagewick.images.settings import MAX_ASPECT_RATIO
from pagewick.images.settings_files import read_settings

CLIP_MEAN = [0.48145466, 0.4578275, 0.40821073]
CLIP_STD = [0.26862954, 0.26130258, 0.27577711]
# The entries of preprocessor_config.json as they are published for Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5.
QWEN_2 = {
    "min_pixels": 3136,
    "max_pixels": 12845056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": CLIP_MEAN,
    "image_std": CLIP_STD,
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2VLProcessor",
}
QWEN_3 = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
SMALL = QwenSettings(
    patch_size=3,
    merge_size=2,
    temporal_patch_size=2,
    min_pixels=100,
    max_pixels=5000,
    mean=(0.5, 0.5, 0.5),
    std=(0.5, 0.5, 0.5),
    rescale_factor=1 / 255,
)


def write(directory: Path, entries: Any, name: str = "preprocessor_config.json") -> Path:
    (directory / name).write_text(entries if isinstance(entries, str) else json.dumps(entries), encoding="utf-8")
    return directory


def reference(directory: Path) -> Any:
    pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", reason="the reference")
    return pil.Qwen2VLImageProcessorPil.from_pretrained(directory)


@pytest.mark.parametrize(
    "entries",
    [
        QWEN_2,
        QWEN_3,
        QWEN_2 | {"max_pixels": 3211264, "image_processor_type": "Exaone4_5_ImageProcessor"},
        QWEN_3 | {"min_pixels": 4000, "max_pixels": None},
        QWEN_2 | {"size": {"shortest_edge": 7, "longest_edge": 11}},
        {"patch_size": 15, "merge_size": 3, "rescale_factor": 0.25, "resample": 3},
        {},
    ],
)
@pytest.mark.parametrize("is_nested", [False, True])
def test_settings_are_those_of_transformers(tmp_path: Path, entries: dict[str, Any], is_nested: bool) -> None:
    if is_nested:
        write(tmp_path, QWEN_2 | {"patch_size": 99})
        entries = {"image_processor": entries, "processor_class": "Qwen3VLProcessor"}
        write(tmp_path, entries, "processor_config.json")
    else:
        write(tmp_path, {"processor_class": "Qwen2VLProcessor"}, "processor_config.json")
        write(tmp_path, entries)
    wanted = reference(tmp_path)
    found = read_settings(tmp_path)
    assert (found.patch_size, found.merge_size) == (wanted.patch_size, wanted.merge_size)
    assert found.temporal_patch_size == wanted.temporal_patch_size
    assert (found.min_pixels, found.max_pixels) == (wanted.size["shortest_edge"], wanted.size["longest_edge"])
    assert (list(found.mean), list(found.std)) == (list(wanted.image_mean), list(wanted.image_std))
    assert found.rescale_factor == wanted.rescale_factor
    assert found.token_side == wanted.patch_size * wanted.merge_size


def test_older_names_may_stand_in_the_size(tmp_path: Path) -> None:
    found = read_settings(write(tmp_path, {"size": {"min_pixels": 5, "max_pixels": 70}}))
    assert (found.min_pixels, found.max_pixels) == (5, 70)


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"do_normalize": False}, "do_normalize"),
        ({"do_rescale": False}, "do_rescale"),
        ({"do_convert_rgb": False}, "do_convert_rgb"),
        ({"resample": 2}, "resample"),
        ({"image_processor_type": "ViTImageProcessor"}, "image_processor_type"),
        ({"patch_size": 0}, "patch_size"),
        ({"patch_size": True}, "patch_size"),
        ({"merge_size": 2.5}, "merge_size"),
        ({"temporal_patch_size": "2"}, "temporal_patch_size"),
        ({"min_pixels": 0}, "min_pixels"),
        ({"size": {"longest_edge": -1}}, r"size\.longest_edge"),
        ({"min_pixels": 50, "max_pixels": 49}, "at least 50 and at most 49"),
        ({"image_mean": [0.5, 0.5]}, "image_mean"),
        ({"image_mean": 0.5}, "image_mean"),
        ({"image_std": [0.5, 0, 0.5]}, "image_std"),
        ({"image_std": [0.5, "1", 0.5]}, "image_std"),
        ({"rescale_factor": None, "image_mean": [0.5, None, 0.5]}, "image_mean"),
        ("[1]", "not an object"),
        ("{", "cannot be read"),
        ('{"patch_size": "\xff', "cannot be read"),
        (" " * (2**20 + 1), "larger than"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(tmp_path: Path, entries: Any, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason) as raised:
        read_settings(write(tmp_path, entries))
    assert "preprocessor_config.json" in str(raised.value)


def test_a_directory_without_settings_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no preprocessor_config\.json"):
        read_settings(tmp_path)
    with pytest.raises(ModelLoadError, match=r"image_processor in .* is not an object"):
        read_settings(write(tmp_path, {"image_processor": 3}, "processor_config.json"))


SIDES = st.integers(1, 6000)


@given(height=SIDES, width=SIDES, patch_size=st.integers(1, 20), limits=st.tuples(SIDES, st.integers(1, 2**21)))
def test_sizes_are_those_of_transformers(height: int, width: int, patch_size: int, limits: tuple[int, int]) -> None:
    pil = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl", reason="the reference")
    low, high = sorted(limits)
    settings = QwenSettings(patch_size, 2, 2, low, high, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
    try:
        expected = pil.smart_resize(height, width, 2 * patch_size, low, high)
    except ValueError:
        assert max(height, width) / min(height, width) > MAX_ASPECT_RATIO
        with pytest.raises(InvalidRequestError, match="at most 200 times its shorter side"):
            settings.resized(height, width)
        return
    assert settings.resized(height, width) == expected
    assert settings.resized(width, height) == expected[::-1]
    assert settings.num_tokens(height, width) * settings.token_side**2 == expected[0] * expected[1]


def test_the_longest_strip_that_is_allowed() -> None:
    assert SMALL.resized(200, 1) == SMALL.resized(1, 200)[::-1]
    for height, width in ((201, 1), (1, 201), (2001, 10)):
        with pytest.raises(InvalidRequestError, match=f"{width} x {height} pixels"):
            SMALL.resized(height, width)


def test_pixels_can_be_limited() -> None:
    assert SMALL.limited(10**9) == SMALL
    low = SMALL.limited(40)
    assert (low.min_pixels, low.max_pixels) == (40, 40)
    assert low.resized(1000, 1000) == (6, 6)
    assert SMALL.limited(36).resized(7, 900) == (6, 66)
    with pytest.raises(ConfigError, match="--max-image-pixels must be at least 36"):
        SMALL.limited(35)
