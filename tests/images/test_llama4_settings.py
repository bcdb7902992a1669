"""Llama 4's settings are read from its files, and canvases, pixels and prompts are those of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.models.llama4.processing_llama4 import Llama4Processor

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images import decoding
from pagewick.images.llama4_settings import Llama4Settings
from pagewick.images.settings import MAX_ASPECT_RATIO
from pagewick.images.settings_files import read_settings
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import file_of, noise
from tests.images.placing import Placing
from tests.images.test_image_settings import write
from tests.images.torch_processors import llama4_processor, llama4_sizes
from tests.tiny_text import byte_level_backend

# In the form of the files that are published.
ENTRIES: dict[str, Any] = {
    "crop_size": None, "do_center_crop": None, "do_convert_rgb": True, "do_normalize": True, "do_rescale": True,
    "do_resize": True, "image_mean": [0.5, 0.5, 0.5], "image_processor_type": "Llama4ImageProcessorFast",
    "image_std": [0.5, 0.5, 0.5], "max_patches": 16, "processor_class": "Llama4Processor", "resample": 2,
    "rescale_factor": 0.00392156862745098, "resize_to_max_canvas": False, "size": {"height": 336, "width": 336},
}  # fmt: skip
PROCESSOR: dict[str, Any] = {"fake_image_token": "<|image|>", "image_token": "<|image|>", "patch_size": 14}
CONFIG: dict[str, Any] = {"vision_config": {"patch_size": 14, "pixel_shuffle_ratio": 0.5}}
SMALL: dict[str, Any] = {**ENTRIES, "size": {"height": 24, "width": 24}, "max_patches": 6}


def settings_in(
    directory: Path, entries: dict[str, Any], processor: dict[str, Any] | None = None, config: Any = CONFIG
) -> Llama4Settings:
    write(directory, entries)
    write(directory, PROCESSOR if processor is None else processor, "processor_config.json")
    write(directory, config, "config.json")
    found = read_settings(directory)
    assert isinstance(found, Llama4Settings)
    return found


def small(directory: Path, **changes: Any) -> Llama4Settings:
    return settings_in(directory, {**SMALL, **changes}, {**PROCESSOR, "patch_size": 4})


@pytest.mark.parametrize("changes", [{}, {"image_mean": [0.5, 0.4, 0.3], "resample": 3, "resize_to_max_canvas": True}])
def test_settings_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    found, wanted = settings_in(tmp_path, {**ENTRIES, **changes}), llama4_processor(**{**ENTRIES, **changes})
    assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
    assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
    assert (found.max_tiles, found.fills_canvas) == (wanted.max_patches, wanted.resize_to_max_canvas)
    assert (found.patch_size, found.merge_size, found.tile_tokens) == (14, 2, 144)


def test_what_files_leave_out(tmp_path: Path) -> None:
    kept = settings_in(tmp_path, ENTRIES)
    assert settings_in(tmp_path, {"image_processor_type": "Llama4ImageProcessor"}, {}, {}) == kept
    assert settings_in(tmp_path, ENTRIES, {**PROCESSOR, "pixel_shuffle_ratio": 0.25}).merge_size == 4


@pytest.mark.parametrize(
    ("changes", "processor", "reason"),
    [
        ({"size": {"height": 336, "width": 168}}, PROCESSOR, "size in .* is 336 x 168"),
        ({"max_patches": 61}, PROCESSOR, "max_patches in .* is 61; Pagewick knows 1 to 60"),
        ({}, {"patch_size": 16}, r"size in .* is 336, and must be a multiple of patch_size \(16\) divided by"),
        ({}, {"pixel_shuffle_ratio": 0}, r"divided by pixel_shuffle_ratio \(0.0\)"),
        ({"do_resize": False}, PROCESSOR, "do_resize"),
        ({"resample": 7}, PROCESSOR, "resample"),
        ({"resize_to_max_canvas": 1}, PROCESSOR, "resize_to_max_canvas"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    tmp_path: Path, changes: dict[str, Any], processor: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        settings_in(tmp_path, {**ENTRIES, **changes}, processor)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Llama4Settings]:
    """By whether images fill their canvas."""
    directory = tmp_path_factory.mktemp("published")
    return {fills: settings_in(directory, {**ENTRIES, "resize_to_max_canvas": fills}) for fills in (False, True)}


side = st.one_of(st.integers(1, 700), st.integers(500, 8000))


@given(side, side, st.booleans())
@example(336, 336, False)
@example(337, 336, False)
@example(1, 200, True)
@example(4000, 5000, True)
@example(672, 1008, False)
@example(5378, 1345, False)
def test_canvases_are_those_of_transformers(
    published: dict[bool, Llama4Settings], height: int, width: int, fills: bool
) -> None:
    """Also the sizes of images in them, which it finds in float32 or float64."""
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        return
    canvas, size = llama4_sizes(height, width, 336, 16, fills)
    tiles = published[fills].views(height, width)
    tiles = tiles if len(tiles) == 1 else tiles[:-1]
    assert {tile.sizes for tile in tiles} == {(size,)}
    last = tiles[-1].box
    assert (last.top + 336, last.left + 336) == canvas and len(tiles) == canvas[0] * canvas[1] // 336**2


@pytest.mark.parametrize(("height", "width"), [(13, 26), (40, 61), (90, 9), (1, 1), (24, 24), (33, 200), (100, 101)])
@pytest.mark.parametrize("changes", [{}, {"resample": 3}, {"max_patches": 1}, {"resize_to_max_canvas": True}])
def test_pixels_are_those_of_transformers(tmp_path: Path, height: int, width: int, changes: dict[str, Any]) -> None:
    image = noise(height, width)
    processor = llama4_processor(**{**SMALL, **changes, "do_rescale": False, "do_normalize": False})
    expected = processor([image], return_tensors="pt")["pixel_values"].numpy()
    found = decoding.prepare(file_of(image), small(tmp_path, **changes))
    assert len(found) == len(expected)
    for (pixels, num_tokens, *_), theirs in zip(found, expected, strict=True):
        assert np.array_equal(pixels, theirs.transpose(1, 2, 0)) and num_tokens == 9


def test_a_limit_of_pixels_limits_the_tiles(published: dict[bool, Llama4Settings]) -> None:
    found = published[False]
    assert len(found.views(1344, 1344)) == 17 and found.most_tokens(lambda text: 1) == 17 * 144 + 16 + 3
    assert len(found.limited(16 * 336**2 - 1).views(1344, 1344)) == 10
    one = found.limited(336**2)
    assert len(one.views(1344, 1344)) == 1 and one.most_tokens(lambda text: 1) == 144 + 3
    with pytest.raises(ConfigError, match="at least 112896, because the model reads images in tiles of 336 x 336"):
        found.limited(336**2 - 1)


SPECIAL = [
    "<|header_start|>", "<|header_end|>", "<|eot|>", "<|patch|>", "<|image|>", "<|image_start|>", "<|image_end|>",
    "<|tile_x_separator|>", "<|tile_y_separator|>",
]  # fmt: skip
# The form in which the published template writes messages.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|header_start|>{{ message['role'] }}<|header_end|>\n\n"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}<|image|>{% else %}{{ content['text'] }}{% endif %}{% endfor %}"
    "{% endif %}<|eot|>{% endfor %}{{ '<|header_start|>assistant<|header_end|>\n\n' }}"
)


def llama4_backend() -> Any:
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    return backend


TOKENIZER = Tokenizer(llama4_backend(), config={"bos_token": "<s>", "eos_token": "</s>"})
# 1 x 2 tiles and the whole, one tile, 3 x 2 tiles and the whole.
PICTURES = [noise(13, 26), noise(24, 23), noise(90, 60)]
PLACING = Placing(TOKENIZER, TEMPLATE, "<|patch|>", PICTURES)
IMAGE_ID = PLACING.image_id


def prompt_of_transformers(text: str, *numbers: int, **changes: Any) -> list[int]:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=llama4_backend(), pad_token="</s>")
    processor = Llama4Processor(llama4_processor(**{**SMALL, **changes}), tokenizer, patch_size=4)
    return list(processor(images=[PICTURES[number] for number in numbers], text=text)["input_ids"][0])


@pytest.mark.parametrize("changes", [{}, {"max_patches": 1}])
def test_prompts_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    encoder = PLACING.prompts(small(tmp_path, **changes))
    tokens = encoder.place_chat([PLACING.user(0, "\na ", 1, "b", 2)])
    text = (
        "<s><|header_start|>user<|header_end|>\n\n<|image|>\na <|image|>b<|image|><|eot|>"
        "<|header_start|>assistant<|header_end|>\n\n"
    )
    assert tokens.token_ids == prompt_of_transformers(text, 0, 1, 2, **changes)
    pictures = [one for placed in tokens.images for one in encoder.read_image(placed, "messages")]
    assert [one.num_tokens for one in pictures] == [9] * (3 if changes else 3 + 1 + 7)
    assert all(tokens.token_ids[one.start : one.end] == [IMAGE_ID] * 9 for one in pictures)


def test_words_of_messages_stay_text(tmp_path: Path) -> None:
    encoder = PLACING.prompts(small(tmp_path))
    (tokens,) = [encoder.place_chat([PLACING.user("<|image|> <|patch|>", 1)]).token_ids]
    assert tokens.count(IMAGE_ID) == 9 and tokens.count(PLACING.encode("<|image|>")[0]) == 1


def test_texts_and_token_ids_have_places_for_images(tmp_path: Path) -> None:
    encoder = PLACING.prompts(small(tmp_path))
    text = "a\n<|image|> b"
    expected = prompt_of_transformers(text, 0)
    assert encoder.place_images(text, [PICTURES[0]]).token_ids == [*TOKENIZER.start_token_ids, *expected]
    given_ids = PLACING.encode(text.replace("<|image|>", "<|patch|>"))
    assert encoder.place_images(given_ids, [PICTURES[0]]).token_ids == expected


@pytest.mark.parametrize("missing", SPECIAL[4:])
def test_tokens_that_the_tokenizer_lacks_are_named(published: dict[bool, Llama4Settings], missing: str) -> None:
    PLACING.assert_needed(published[False], missing)
