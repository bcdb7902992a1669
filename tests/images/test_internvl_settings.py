"""Settings of InternVL are read from its files, and tiles, pixels and prompts are those of its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import (
    GotOcr2ImageProcessorPil,
    get_optimal_tiled_canvas,
)
from transformers.models.internvl.processing_internvl import InternVLProcessor

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images import decoding
from pagewick.images.internvl_settings import InternVLSettings
from pagewick.images.settings import Box, ImageSettings, View
from pagewick.images.settings_files import read_settings
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import file_of, noise
from tests.images.placing import Placing
from tests.images.test_image_settings import write
from tests.tiny_text import byte_level_backend

IMAGENET_MEAN, IMAGENET_STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
# In the form of the files that are published.
PREPROCESSOR = {
    "crop_to_patches": False,
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": IMAGENET_MEAN,
    "image_processor_type": "GotOcr2ImageProcessorFast",
    "image_std": IMAGENET_STD,
    "max_patches": 12,
    "min_patches": 1,
    "processor_class": "InternVLProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 448, "width": 448},
}
PROCESSOR = {"image_seq_length": 256, "processor_class": "InternVLProcessor"}
CONFIG = {
    "downsample_ratio": 0.5, "image_seq_length": 256,
    "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
}  # fmt: skip
# A tile has 24 x 24 pixels, 3 x 3 tokens.
SMALL = {**PREPROCESSOR, "size": {"height": 24, "width": 24}, "max_patches": 6}
SMALL_CONFIG = {"image_seq_length": 9, "vision_config": {"image_size": 24, "patch_size": 4}}


def settings_in(
    directory: Path, entries: dict[str, Any] = PREPROCESSOR, processor: Any = PROCESSOR, config: Any = CONFIG
) -> ImageSettings:
    write(directory, entries)
    write(directory, processor, "processor_config.json")
    write(directory, config, "config.json")
    return read_settings(directory)


def small(directory: Path, **changes: Any) -> ImageSettings:
    return settings_in(directory, {**SMALL, **changes}, {"image_seq_length": 9}, SMALL_CONFIG)


@pytest.mark.parametrize("changes", [{}, {"image_std": [0.5, 0.4, 0.3], "rescale_factor": 0.25, "resample": 2}])
def test_settings_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    entries = {**PREPROCESSOR, **changes, "min_patches": 2, "max_patches": 9}
    found, wanted = settings_in(tmp_path, entries), GotOcr2ImageProcessorPil.from_pretrained(tmp_path)
    assert isinstance(found, InternVLSettings)
    assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
    assert found.rescale_factor == wanted.rescale_factor and found.resample == wanted.resample
    assert (found.patch_size, found.merge_size, found.temporal_patch_size, found.token_side) == (14, 2, 1, 28)
    assert (found.min_tiles, found.max_tiles) == (wanted.min_patches, wanted.max_patches) == (2, 9)
    assert found.largest_picture == 448**2 and found.tile_tokens == 256


def test_entries_that_files_leave_out(tmp_path: Path) -> None:
    config = {"image_seq_length": 9, "vision_config": {"image_size": 384, "patch_size": 64}}
    found = settings_in(tmp_path, {"image_processor_type": "GotOcr2ImageProcessor"}, {"image_seq_length": 9}, config)
    wanted = GotOcr2ImageProcessorPil()
    assert isinstance(found, InternVLSettings)
    assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
    assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
    assert (found.min_tiles, found.max_tiles) == (wanted.min_patches, wanted.max_patches)
    assert found.largest_picture == wanted.size["height"] ** 2 and found.merge_size == 2
    whole = settings_in(tmp_path, PREPROCESSOR, {}, {})
    assert whole == settings_in(tmp_path)


@pytest.mark.parametrize(
    ("changes", "processor", "config", "reason"),
    [
        ({"do_resize": False}, PROCESSOR, CONFIG, "do_resize"),
        ({"resample": 6}, PROCESSOR, CONFIG, "resample"),
        ({"size": {"height": 448, "width": 224}}, PROCESSOR, CONFIG, "Pagewick knows squares only"),
        ({"size": {"height": 224, "width": 224}}, PROCESSOR, CONFIG, "is 224, and vision_config.image_size in "),
        ({"min_patches": 13}, PROCESSOR, CONFIG, "min_patches in .* is 13, and max_patches 12; Pagewick knows 1 to 60"),
        ({"max_patches": 61}, PROCESSOR, CONFIG, "max_patches 61"),
        ({}, {"image_seq_length": 64}, CONFIG, "image_seq_length in .*processor_config.json is 64, and by .* has 256"),
        ({}, PROCESSOR, CONFIG | {"image_seq_length": 64}, "image_seq_length in .*config.json is 64"),
        ({}, PROCESSOR, CONFIG | {"downsample_ratio": 0.3}, "downsample_ratio is 0.3, and must make whole squares"),
        ({}, PROCESSOR, CONFIG | {"downsample_ratio": -1}, "downsample_ratio is -1"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_honoured_are_refused(
    tmp_path: Path, changes: dict[str, Any], processor: dict[str, Any], config: Any, reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        settings_in(tmp_path, PREPROCESSOR | changes, processor, config)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> ImageSettings:
    return settings_in(tmp_path_factory.mktemp("published"))


def grid(views: tuple[View, ...], side: int = 448) -> tuple[int, int]:
    """Return the rows and columns of tiles, which the whole image follows if there are several."""
    if len(views) == 1:
        assert views[0].sizes == ((side, side),) and views[0].box == Box(0, 0, side, side)
        return 1, 1
    *tiles, whole = (view._replace(before="") for view in views)
    rows, columns = (length // side for length in tiles[0].sizes[0])
    expected = [
        View(((rows * side, columns * side),), Box(row * side, column * side, side, side))
        for row in range(rows)
        for column in range(columns)
    ]
    assert tiles == expected and whole == View.whole((side, side))
    return rows, columns


side = st.one_of(st.integers(1, 200), st.integers(200, 6000))


@given(side, side)
@example(448, 896)
@example(896, 896)
@example(400, 500)
def test_tiles_are_those_of_transformers(published: ImageSettings, height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    columns, rows = get_optimal_tiled_canvas((height, width), (448, 448), 1, 12)
    assert grid(published.views(height, width)) == (rows, columns)


@pytest.mark.parametrize(("height", "width"), [(13, 26), (40, 61), (90, 9), (1, 1), (24, 24), (33, 200), (100, 101)])
@pytest.mark.parametrize("changes", [{}, {"resample": 2, "min_patches": 3}, {"max_patches": 1}])
def test_pixels_are_those_of_transformers(tmp_path: Path, height: int, width: int, changes: dict[str, Any]) -> None:
    image, entries = noise(height, width), {**SMALL, **changes}
    processor = GotOcr2ImageProcessorPil(**{**entries, "do_rescale": False, "do_normalize": False})
    expected = processor([image], return_tensors="np", crop_to_patches=True)["pixel_values"]
    found = decoding.prepare(file_of(image), small(tmp_path, **changes))
    assert len(found) == len(expected)
    for (pixels, num_tokens, *_), theirs in zip(found, expected, strict=True):
        assert np.array_equal(pixels, theirs.transpose(1, 2, 0)) and num_tokens == 9


def test_a_limit_of_pixels_limits_the_tiles(published: ImageSettings) -> None:
    assert grid(published.views(1200, 1600)) == (3, 4)
    assert grid(published.limited(12 * 448**2).views(1200, 1600)) == (3, 4)
    assert grid(published.limited(12 * 448**2 - 1).views(1200, 1600)) == (2, 3)
    one = published.limited(448**2)
    assert grid(one.views(1200, 1600)) == (1, 1) and not one.depends_on_turning
    assert (published.most_tokens(len), one.most_tokens(len)) == (13 * 256 + 2, 256 + 2)
    assert (published.tile_tokens, one.tile_tokens) == (256, 0)
    with pytest.raises(
        ConfigError, match="at least 200704, because the model reads images in tiles of 448 x 448 pixels"
    ):
        published.limited(448**2 - 1)


SPECIAL = ["<|im_start|>", "<|im_end|>", "<IMG_CONTEXT>", "<img>", "</img>", "<video>"]
# As it is published.
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<IMG_CONTEXT>\n' }}{% elif content['type'] == 'video' %}{{ '<video>\n' }}"
    "{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}{% endif %}{{'<|im_end|>\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)


def internvl_backend() -> Any:
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    return backend


TOKENIZER = Tokenizer(internvl_backend(), config={"bos_token": "<s>", "eos_token": "</s>"})
# 1 x 2 tiles and the whole, one tile, 3 x 2 tiles and the whole.
PICTURES = [noise(13, 26), noise(24, 25), noise(90, 60)]
PLACING = Placing(TOKENIZER, TEMPLATE, "<IMG_CONTEXT>", PICTURES)
IMAGE_ID = PLACING.image_id


def prompt_of_transformers(directory: Path, text: str, *numbers: int) -> list[int]:
    """Its rule for the text of an image, from the number of tiles; the whole class needs a reader of videos."""
    processor = GotOcr2ImageProcessorPil.from_pretrained(directory)
    given = processor([PICTURES[number] for number in numbers], crop_to_patches=True, return_tensors="np")
    maker = InternVLProcessor.__new__(InternVLProcessor)
    maker.start_image_token, maker.end_image_token = "<img>", "</img>"
    maker.image_token, maker.image_seq_length = "<IMG_CONTEXT>", 9
    for index in range(len(numbers)):
        text = text.replace("<IMG_CONTEXT>", maker.replace_image_token(given, index).replace("<IMG_CONTEXT>", "\0"), 1)
    return TOKENIZER.encode(text.replace("\0", "<IMG_CONTEXT>"), add_special_tokens=False)


def test_prompts_are_those_of_transformers(tmp_path: Path) -> None:
    messages = [
        PLACING.user(0, "\n\na", 1, "\nb"), {"role": "assistant", "content": "c"}, PLACING.user("d ", 2),
    ]  # fmt: skip
    encoder = PLACING.prompts(small(tmp_path))
    text = encoder.render_chat(messages).text
    assert text == (
        "<|im_start|>user\n<IMG_CONTEXT>\n\n\na<IMG_CONTEXT>\n\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\nd <IMG_CONTEXT>\n<|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = encoder.place_chat(messages)
    assert tokens.token_ids == prompt_of_transformers(tmp_path, text, 0, 1, 2)
    pictures = [[*encoder.read_image(placed, "messages")] for placed in tokens.images]
    assert [len(of_image) for of_image in pictures] == [3, 1, 7]
    # The pictures of an image follow each other without a token between them.
    for of_image in pictures:
        start = of_image[0].start
        assert tokens.token_ids[start - 1] == TOKENIZER.id_of("<img>")
        for number, one in enumerate(of_image):
            assert (one.start, one.num_tokens) == (start + 9 * number, 9)
        assert tokens.token_ids[start : of_image[-1].end] == [IMAGE_ID] * 9 * len(of_image)
        assert tokens.token_ids[of_image[-1].end] == TOKENIZER.id_of("</img>")


def test_text_and_token_ids_have_one_place_for_each_image(tmp_path: Path) -> None:
    found, text = small(tmp_path), "a\n<IMG_CONTEXT>\n b"
    PLACING.assert_one_place(found, text, 0, prompt_of_transformers(tmp_path, text, 0))


@pytest.mark.parametrize("missing", ["<img>", "</img>"])
def test_tokens_that_the_tokenizer_lacks_are_named(published: ImageSettings, missing: str) -> None:
    PLACING.assert_needed(published, missing)
