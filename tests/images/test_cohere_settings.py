"""Command A Vision's settings are read from its files, and tiles, pixels and prompts are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images import decoding
from pagewick.images.cohere_settings import CohereSettings
from pagewick.images.settings import ImageSettings
from pagewick.images.settings_files import read_settings
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import file_of, noise
from tests.images.placing import Placing
from tests.images.test_image_settings import CLIP_MEAN, CLIP_STD, write
from tests.images.test_internvl_settings import grid
from tests.images.torch_processors import cohere2_vision_processor, optimal_tiled_canvas
from tests.tiny_text import byte_level_backend

# In the form of the files that are published.
ENTRIES = {
    "crop_to_patches": True, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Cohere2VisionImageProcessorFast",
    "image_std": [0.5, 0.5, 0.5], "max_patches": 12, "min_patches": 1, "patch_size": 16, "resample": 3,
    "rescale_factor": 0.00392156862745098, "size": {"height": 512, "width": 512},
}  # fmt: skip
CONFIG = {"downsample_factor": 2, "vision_config": {"image_size": 512, "patch_size": 16}}
SMALL = {**ENTRIES, "size": {"height": 24, "width": 24}, "patch_size": 3, "max_patches": 6}
SMALL_CONFIG = {"downsample_factor": 2, "vision_config": {"image_size": 24, "patch_size": 4}}


def settings_in(directory: Path, entries: dict[str, Any] = ENTRIES, config: Any = CONFIG) -> ImageSettings:
    write(directory, {name: value for name, value in entries.items() if value is not None})
    write(directory, config, "config.json")
    return read_settings(directory)


def small(directory: Path, **changes: Any) -> ImageSettings:
    return settings_in(directory, {**SMALL, **changes}, SMALL_CONFIG)


@pytest.mark.parametrize("changes", [{}, {"image_mean": [0.5, 0.4, 0.3], "resample": 2, "max_patches": 3}])
def test_settings_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    found, wanted = settings_in(tmp_path, {**ENTRIES, **changes}), cohere2_vision_processor(**{**ENTRIES, **changes})
    assert isinstance(found, CohereSettings)
    assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
    assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
    assert (found.min_tiles, found.max_tiles) == (1, wanted.max_patches)
    assert (found.patch_size, found.merge_size, found.tile_tokens) == (16, 2, 256)


def test_what_files_leave_out(tmp_path: Path) -> None:
    kept = settings_in(tmp_path, {**ENTRIES, "image_mean": CLIP_MEAN, "image_std": CLIP_STD})
    left_out = dict.fromkeys(ENTRIES.keys() - {"image_processor_type"})
    assert settings_in(tmp_path, {**ENTRIES, **left_out}, {}) == kept
    assert settings_in(tmp_path, {**ENTRIES, "crop_to_patches": False}).depends_on_turning is False


@pytest.mark.parametrize(
    ("changes", "config", "reason"),
    [
        ({"size": {"height": 512, "width": 256}}, CONFIG, "size in .* is 512 x 256"),
        ({"patch_size": 8}, CONFIG, "size in .* is 512, and patch_size, the tokens in a row, 8; by .* has 32 pixels"),
        ({}, {**CONFIG, "downsample_factor": 4}, "a token has 64 pixels a side"),
        ({"min_patches": 2}, CONFIG, "min_patches in .* is 2, which has no effect in transformers"),
        ({"max_patches": 61}, CONFIG, "max_patches 61; Pagewick knows 1 to 60"),
        ({"do_resize": False}, CONFIG, "do_resize"),
        ({"resample": 7}, CONFIG, "resample"),
        ({"crop_to_patches": 1}, CONFIG, "crop_to_patches"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    tmp_path: Path, changes: dict[str, Any], config: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        settings_in(tmp_path, {**ENTRIES, **changes}, config)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> ImageSettings:
    return settings_in(tmp_path_factory.mktemp("published"))


side = st.one_of(st.integers(1, 600), st.integers(500, 8000))


@given(side, side)
@example(512, 512)
@example(513, 512)
@example(1024, 1536)
@example(512, 6144)
@example(5000, 7000)
def test_tiles_are_those_of_transformers(published: ImageSettings, height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    columns, rows = optimal_tiled_canvas((height, width), (512, 512), 1, 12)
    assert grid(published.views(height, width), 512) == (rows, columns)


@pytest.mark.parametrize(("height", "width"), [(13, 26), (40, 61), (90, 9), (1, 1), (24, 24), (33, 200), (100, 101)])
@pytest.mark.parametrize("changes", [{}, {"resample": 2}, {"max_patches": 1}, {"crop_to_patches": False}])
def test_pixels_are_those_of_transformers(tmp_path: Path, height: int, width: int, changes: dict[str, Any]) -> None:
    image = noise(height, width)
    processor = cohere2_vision_processor(**{**SMALL, **changes, "do_rescale": False, "do_normalize": False})
    expected = processor([image], return_tensors="pt")["pixel_values"].numpy()
    found = decoding.prepare(file_of(image), small(tmp_path, **changes))
    assert len(found) == len(expected)
    for (pixels, num_tokens, *_), theirs in zip(found, expected, strict=True):
        assert np.array_equal(pixels, theirs.transpose(1, 2, 0)) and num_tokens == 9


def test_a_limit_of_pixels_limits_the_tiles(published: ImageSettings) -> None:
    assert grid(published.views(1500, 2000), 512) == (3, 4)
    assert grid(published.limited(12 * 512**2 - 1).views(1500, 2000), 512) == (3, 3)
    assert optimal_tiled_canvas((1500, 2000), (512, 512), 1, 11) == (3, 3)
    one = published.limited(512**2)
    assert grid(one.views(1500, 2000), 512) == (1, 1) and not one.depends_on_turning
    assert (published.most_tokens(len), one.most_tokens(len)) == (13 * 257 + 2, 257 + 2)
    with pytest.raises(ConfigError, match="at least 262144, because the model reads images in tiles of 512 x 512"):
        published.limited(512**2 - 1)


SPECIAL = [
    "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>",
    "<|IMG_LINE_BREAK|>",
]  # fmt: skip
# The published template writes a token for an image, too.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|START_OF_TURN_TOKEN|>{{ message['role'] }}:"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|IMG_PATCH|>{% else %}{{ content['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|END_OF_TURN_TOKEN|>{% endfor %}<|START_OF_TURN_TOKEN|>assistant:"
)


def cohere_backend() -> Any:
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    return backend


TOKENIZER = Tokenizer(cohere_backend(), config={"bos_token": "<s>", "eos_token": "</s>"})
# 1 x 2 tiles and the whole, one tile, 3 x 2 tiles and the whole.
PICTURES = [noise(13, 26), noise(24, 23), noise(90, 60)]
PLACING = Placing(TOKENIZER, TEMPLATE, "<|IMG_PATCH|>", PICTURES)
IMAGE_ID = PLACING.image_id


def prompt_of_transformers(text: str, *numbers: int, **changes: Any) -> list[int]:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=cohere_backend(),
        pad_token="</s>",
        extra_special_tokens={
            "image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
    )  # fmt: skip
    processor = Cohere2VisionProcessor(cohere2_vision_processor(**{**SMALL, **changes}), tokenizer)
    return list(processor(images=[PICTURES[number] for number in numbers], text=text)["input_ids"][0])


@pytest.mark.parametrize("changes", [{}, {"max_patches": 1}])
def test_prompts_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    encoder = PLACING.prompts(small(tmp_path, **changes))
    messages = [PLACING.user(0, "\na ", 1, "b", 2)]
    text = encoder.render_chat(messages).text
    assert text == (
        "<s><|START_OF_TURN_TOKEN|>user:<|IMG_PATCH|>\na <|IMG_PATCH|>b<|IMG_PATCH|><|END_OF_TURN_TOKEN|>"
        "<|START_OF_TURN_TOKEN|>assistant:"
    )
    tokens = encoder.place_chat(messages)
    assert tokens.token_ids == prompt_of_transformers(text, 0, 1, 2, **changes)
    pictures = [one for placed in tokens.images for one in encoder.read_image(placed, "messages")]
    assert [one.num_tokens for one in pictures] == [9] * (3 if changes else 3 + 1 + 7)
    assert all(tokens.token_ids[one.start : one.end] == [IMAGE_ID] * 9 for one in pictures)


def test_text_and_token_ids_have_one_place_for_each_image(tmp_path: Path) -> None:
    text = "a\n<|IMG_PATCH|> b"
    PLACING.assert_one_place(small(tmp_path), text, 0, prompt_of_transformers(text, 0))


@pytest.mark.parametrize("missing", SPECIAL[3:])
def test_tokens_that_the_tokenizer_lacks_are_named(published: ImageSettings, missing: str) -> None:
    PLACING.assert_needed(published, missing)
