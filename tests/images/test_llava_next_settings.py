"""Settings of LLaVA-NeXT are read from its files, and sizes, pixels and prompts are those of its processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images.decoding import prepare
from pagewick.images.llava_next_settings import LlavaNextSettings
from pagewick.images.settings import ImageSettings
from pagewick.images.settings_files import read_settings, settings_of
from tests.images.pictures import file_of, noise
from tests.images.placing import Placing
from tests.images.test_image_settings import CLIP_MEAN, CLIP_STD, write
from tests.images.test_llava_settings import IMAGE_ID, TEMPLATE, TOKENIZER, llava_backend

__all__ = ["IMAGE_ID", "TEMPLATE", "TOKENIZER"]

CANVASES = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
# In the form of the files that are published.
ENTRIES: dict[str, Any] = {
    "aspect_ratio_setting": "anyres", "crop_size": {"height": 336, "width": 336}, "do_center_crop": True,
    "do_convert_rgb": True, "do_normalize": True, "do_pad": True, "do_rescale": True, "do_resize": True,
    "image_grid_pinpoints": CANVASES, "image_mean": CLIP_MEAN, "image_processor_type": "LlavaNextImageProcessor",
    "image_std": CLIP_STD, "processor_class": "LlavaNextProcessor", "resample": 3,
    "rescale_factor": 0.00392156862745098, "size": {"shortest_edge": 336},
}  # fmt: skip
CONFIG: dict[str, Any] = {
    "image_grid_pinpoints": CANVASES,
    "vision_config": {"image_size": 336, "model_type": "clip_vision_model", "patch_size": 14},
}
PROCESSOR = {"image_token": "<image>", "num_additional_image_tokens": 1, "patch_size": 14}
SMALL_CANVASES = [[14, 28], [28, 14], [28, 28], [42, 14], [14, 42]]
SMALL = {
    **ENTRIES, "crop_size": {"height": 14, "width": 14}, "image_grid_pinpoints": SMALL_CANVASES,
    "size": {"shortest_edge": 14},
}  # fmt: skip
SMALL_CONFIG: dict[str, Any] = {
    "image_grid_pinpoints": SMALL_CANVASES,
    "vision_config": {"image_size": 14, "model_type": "clip_vision_model", "patch_size": 4},
}
PICTURES = [noise(27, 35), noise(90, 61), noise(16, 3)]
PLACING = Placing(TOKENIZER, TEMPLATE, "<image>", PICTURES)


def small() -> ImageSettings:
    return settings_of(SMALL, "file", SMALL_CONFIG)


def processor_of(entries: dict[str, Any], patch_size: int) -> Any:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=llava_backend())
    return LlavaNextProcessor(
        LlavaNextImageProcessorPil(**entries), tokenizer, patch_size=patch_size,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip


def test_settings_are_those_of_transformers(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, "config.json")
    write(tmp_path, PROCESSOR, "processor_config.json")
    for entries in (ENTRIES, {**ENTRIES, "rescale_factor": 0.25, "resample": 2}):
        found, wanted = read_settings(write(tmp_path, entries)), LlavaNextImageProcessorPil.from_pretrained(tmp_path)
        assert isinstance(found, LlavaNextSettings)
        assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
        assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
        assert (found.tile_side, [*map(list, found.canvases)]) == (336, wanted.image_grid_pinpoints)
        assert found.largest_picture == 672 * 672 and found.most_tokens(len) == 576 + 48 * 49
    for left_out in (ENTRIES, CONFIG):
        given = {name: value for name, value in left_out.items() if name != "image_grid_pinpoints"}
        parts = (given, CONFIG) if left_out is ENTRIES else (ENTRIES, given)
        assert settings_of(parts[0], "file", parts[1]) == settings_of(ENTRIES, "file", CONFIG)


@pytest.mark.parametrize(
    ("entries", "processor", "reason"),
    [
        ({"do_resize": False}, {}, "do_resize"),
        ({"do_center_crop": False}, {}, "do_center_crop"),
        ({"size": {"shortest_edge": 400}}, {}, "size and crop_size in .* must both be 336"),
        ({"crop_size": 224, "size": 224}, {}, "size and crop_size in .* must both be 336"),
        ({"image_grid_pinpoints": [[336, 672]]}, {}, "image_grid_pinpoints in .* and .* differ"),
        ({"image_grid_pinpoints": [[336, 600]]}, {}, "must be a list of heights and widths, multiples of 336"),
        ({"image_grid_pinpoints": [[336 * 8, 336 * 8]]}, {}, "with at most 60 tiles"),
        ({"image_grid_pinpoints": [336]}, {}, "must be a list of heights and widths"),
        ({}, {"patch_size": 16}, "patch_size in .* is '16'; Pagewick knows 14 only"),
        ({}, {"num_additional_image_tokens": 0}, "num_additional_image_tokens in .* is '0'; Pagewick knows 1 only"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    entries: dict[str, Any], processor: dict[str, Any], reason: str
) -> None:
    settings_of(ENTRIES, "file", CONFIG, PROCESSOR)
    with pytest.raises(ModelLoadError, match=reason):
        settings_of({**ENTRIES, **entries}, "preprocessor_config.json", CONFIG, {**PROCESSOR, **processor})


@pytest.mark.parametrize(
    ("entries", "vision", "reason"),
    [
        ({"rescale_factor": 10**400}, {}, "rescale_factor in .* must be a number; got '1000"),
        ({"image_mean": [0.5, 0.5, -(10**400)]}, {}, "image_mean in .* must be a number; got '-1000"),
        ({}, {"model_type": ["clip_vision_model"]}, "model_type in .* must be a text"),
        ({}, {"patch_size": 337}, "patch_size is 337, more than image_size"),
    ],
)
def test_numbers_that_cannot_be_are_refused(entries: dict[str, Any], vision: dict[str, Any], reason: str) -> None:
    config = {**CONFIG, "vision_config": {**CONFIG["vision_config"], **vision}}
    for family in ("LlavaNextImageProcessor", "CLIPImageProcessor"):
        with pytest.raises(ModelLoadError, match=reason):
            settings_of({**ENTRIES, "do_pad": None, **entries, "image_processor_type": family}, "the file", config)


side = st.one_of(st.integers(1, 100), st.integers(100, 6000))
LARGE = processor_of(ENTRIES, 14)


@given(side, side)
@example(1, 200)
@example(200, 1)
@example(333, 500)
@example(5000, 5000)
def test_numbers_of_tokens_are_those_of_transformers(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    found = settings_of(ENTRIES, "file", CONFIG)
    wanted = LARGE._get_num_multimodal_tokens([(height, width)])["num_image_tokens"]
    assert [found.num_tokens(height, width)] == wanted
    assert found.num_tokens(height, width) <= found.most_tokens(len)


@pytest.mark.parametrize(
    ("height", "width"), [(40, 61), (90, 9), (1, 1), (28, 28), (5, 200), (14, 29), (300, 301), (21, 17)]
)
def test_pixels_are_those_of_transformers(height: int, width: int) -> None:
    image = noise(height, width)
    processor = LlavaNextImageProcessorPil(**{**SMALL, "do_rescale": False, "do_normalize": False})
    (expected,) = processor([image], return_tensors="np")["pixel_values"]
    whole, *tiled = prepare(file_of(image), small())
    # The model sees 3 x 3 patches of 14 x 14 pixels.
    assert np.array_equal(whole.pixels, expected[0].transpose(1, 2, 0)[:12, :12])
    assert whole.num_tokens == 9 and whole.edges is None
    for one in tiled:
        rows, columns = (length // 14 for length in one.pixels.shape[:2])
        tiles = one.pixels.reshape(rows, 14, columns, 14, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, 14, 14)
        assert np.array_equal(tiles, expected[1:])


def test_a_very_narrow_image_has_no_patches_in_tiles() -> None:
    found = settings_of(ENTRIES, "file", CONFIG)
    (whole,) = found.views(1, 200)
    assert whole.edges is None and found.num_tokens(1, 200) == 576
    whole, tiled = found.views(200, 1)
    assert tiled.edges == (0, 24) and found.num_tokens(200, 1) == 576 + 24


def test_a_limit_of_pixels() -> None:
    found = settings_of(ENTRIES, "file", CONFIG)
    assert found.limited(672 * 672) == found
    limited = found.limited(672 * 672 - 1)
    assert isinstance(limited, LlavaNextSettings) and len(limited.canvases) == 4
    assert limited.num_tokens(500, 500) < found.num_tokens(500, 500) == 576 + 48 * 49
    with pytest.raises(ConfigError, match="must be at least 225792, because the model scales images into canvases"):
        found.limited(225791)


def test_prompts_are_those_of_transformers() -> None:
    tokens = PLACING.prompts(small()).place_chat([PLACING.user(0, "a", 1, 2, "b")])
    text = f"USER: {('<image>' + chr(10)) * 3}a b ASSISTANT:"
    assert tokens.token_ids == processor_of(SMALL, 4)(images=PICTURES, text=text)["input_ids"][0]
    assert all(len(one.pictures) == 2 for one in tokens.images)
