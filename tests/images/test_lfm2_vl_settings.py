"""Settings of LFM2-VL are read from its files, and tiles, pixels and prompts are those of its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor

from pagewick.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelLoadError
from pagewick.images import decoding
from pagewick.images.lfm2_vl_settings import Lfm2VlSettings
from pagewick.images.settings import Box, ImageSettings, View
from pagewick.images.settings_files import read_settings, settings_of
from pagewick.text import image_prompts
from pagewick.text.image_prompts import ImageReader
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import file_of, noise
from tests.images.placing import Placing
from tests.images.test_image_settings import write
from tests.images.torch_processors import lfm2_vl_processor
from tests.tiny_text import byte_level_backend

# The entries that published files share out between preprocessor_config.json and processor_config.json.
PREPROCESSOR = {
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": False,
    "downsample_factor": 2,
    "encoder_patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Lfm2VlImageProcessorFast",
    "image_std": [0.5, 0.5, 0.5],
    "max_image_tokens": 256,
    "max_pixels_tolerance": 2.0,
    "max_tiles": 10,
    "min_image_tokens": 64,
    "min_tiles": 2,
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 512, "width": 512},
    "tile_size": 512,
    "use_thumbnail": True,
}
# 8 x 8 pixels are a token, a tile has 2 x 2 of them, and the whole image 2 to 6.
SMALL = {
    **PREPROCESSOR, "encoder_patch_size": 4, "min_image_tokens": 2, "max_image_tokens": 6, "tile_size": 16,
    "max_tiles": 6,
}  # fmt: skip


def settings(**changes: Any) -> ImageSettings:
    return settings_of({**SMALL, **changes}, "preprocessor_config.json")


def test_settings_are_those_of_transformers(tmp_path: Path) -> None:
    entries = {**PREPROCESSOR, "image_std": [0.5, 0.4, 0.3], "resample": 3, "use_thumbnail": False, "max_tiles": 8}
    found = read_settings(write(tmp_path, entries))
    wanted = lfm2_vl_processor(**entries)
    assert isinstance(found, Lfm2VlSettings)
    assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
    assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
    assert (found.patch_size, found.merge_size, found.temporal_patch_size) == (16, 2, 1)
    assert (found.min_tiles, found.max_tiles, found.tile_side) == (2, 8, 512)
    assert (found.tolerance, found.has_overview) == (wanted.max_pixels_tolerance, wanted.use_thumbnail)
    assert (found.min_pixels, found.max_pixels, found.largest_picture) == (2**16, 2**18, 2**18)


def test_entries_that_files_leave_out(tmp_path: Path) -> None:
    found = read_settings(write(tmp_path, {"image_processor_type": "Lfm2VlImageProcessor"}))
    assert found == read_settings(write(tmp_path, PREPROCESSOR))
    wanted = lfm2_vl_processor()
    assert {name: getattr(wanted, name) for name in ("min_tiles", "max_tiles", "use_thumbnail", "resample")} == {
        name: PREPROCESSOR[name] for name in ("min_tiles", "max_tiles", "use_thumbnail", "resample")
    }


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"do_normalize": False}, "do_normalize"),
        ({"use_image_special_tokens": False}, "use_image_special_tokens"),
        ({"resample": 6}, "resample"),
        ({"min_tiles": 1}, "min_tiles in .* is 1, and max_tiles 6; Pagewick knows 2 to 60"),
        ({"max_tiles": 61}, "max_tiles 61"),
        ({"min_tiles": 7}, "min_tiles in .* is 7"),
        ({"tile_size": 20}, "tile_size in .* is 20, and must be a multiple of 8"),
        ({"min_image_tokens": 7}, "min_image_tokens in .* is 7, and max_image_tokens 6"),
        ({"use_thumbnail": 1}, "use_thumbnail in .* must be true or false"),
        ({"image_processor_type": "Siglip2ImageProcessor"}, "image_processor_type"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        settings(**changes)


def layout(found: ImageSettings, height: int, width: int) -> tuple[int, int, tuple[int, int]]:
    """Return the rows and columns of tiles, and the size of the whole image."""
    *tiles, last = found.views(height, width)
    whole = last.sizes[-1]
    if not tiles:
        return 1, 1, whole
    side = tiles[0].box.height
    rows, columns = (length // side for length in tiles[0].sizes[0])
    expected = [
        View(((rows * side, columns * side),), Box(row * side, column * side, side, side))
        for row in range(rows)
        for column in range(columns)
    ]
    assert [tile._replace(before="") for tile in tiles] == expected and last.box == Box(0, 0, *whole)
    return rows, columns, whole


side = st.one_of(st.integers(1, 200), st.integers(200, 6000))


@given(side, side)
@example(724, 724)
@example(725, 725)
@example(512, 1024)
@example(513, 1025)
@example(16, 2000)
def test_tiles_are_those_of_transformers(height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    found, processor = settings_of(PREPROCESSOR, "file"), PROCESSOR
    sizes = {"downsample_factor": 2, "max_image_tokens": 256, "encoder_patch_size": 16}
    new_width, new_height = processor.smart_resize(height, width, min_image_tokens=64, **sizes)
    rows, columns = 1, 1
    if processor._is_image_too_large(height, width, max_pixels_tolerance=2.0, **sizes):
        columns, rows, *_ = processor._get_grid_layout(height, width, 2, 10, 512)
    assert layout(found, height, width) == (rows, columns, (new_height, new_width))


PROCESSOR = lfm2_vl_processor()


@pytest.mark.parametrize(("height", "width"), [(13, 26), (40, 61), (90, 9), (1, 1), (16, 24), (33, 40), (50, 24)])
@pytest.mark.parametrize(
    "changes", [{}, {"resample": 3, "use_thumbnail": False}, {"do_image_splitting": False}, {"max_tiles": 3}]
)
def test_pixels_are_those_of_transformers(height: int, width: int, changes: dict[str, Any]) -> None:
    image, entries = noise(height, width), {**SMALL, **changes}
    processor = lfm2_vl_processor(**{**entries, "do_rescale": False, "do_normalize": False})
    expected = processor([image], return_tensors="pt")
    found = decoding.prepare(file_of(image), settings(**changes))
    shapes = expected["spatial_shapes"].tolist()
    assert len(found) == len(shapes)
    for (pixels, num_tokens, *_), patches, (rows, columns) in zip(found, expected["pixel_values"], shapes, strict=True):
        # Row by row of patches, each [row, column, colour].
        squares = patches[: rows * columns].numpy().reshape(rows, columns, 4, 4, 3)
        assert np.array_equal(pixels, squares.transpose(0, 2, 1, 3, 4).reshape(4 * rows, 4 * columns, 3))
        assert num_tokens == rows * columns // 4
    assert settings(**changes).num_tokens(height, width) == sum(one.num_tokens for one in found)


def test_a_limit_of_pixels_limits_the_tiles() -> None:
    found = settings_of(PREPROCESSOR, "file")
    assert layout(found, 1100, 1700)[:2] == (2, 3)
    assert layout(found.limited(5 * 2**18), 1100, 1700)[:2] == (1, 2)
    few = found.limited(2**19 - 1)
    assert layout(few, 1100, 1700) == (1, 1, layout(found, 1100, 1700)[2])
    assert few.most_tokens(len) == 256 + 2 and not few.depends_on_turning
    assert found.most_tokens(len) == 10 * 257 + 257 + 2
    assert found.limited(2**30) == found
    height, width = found.limited(2**16).resized(2000, 3000)
    assert 2**15 < height * width <= 2**16
    with pytest.raises(ConfigError, match="at least 1024"):
        found.limited(1023)
    assert settings(tile_size=32).largest_picture == 32**2


SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 7) for column in range(1, 7)),
]  # fmt: skip
# As it is published.
TEMPLATE = (
    "{{bos_token}}{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for content in message['content'] %}"
    "{% if content['type'] == 'image' %}{{ '<image>' }}{% elif content['type'] == 'text' %}{{ content['text'] }}"
    "{% endif %}{% endfor %}{% endif %}{{'<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)


def lfm2_backend() -> Any:
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    return backend


TOKENIZER = Tokenizer(lfm2_backend(), config={"bos_token": "<s>", "eos_token": "</s>"})
# One that is not cut, 3 x 2 tiles and the whole, and 2 tiles beside each other.
PICTURES = [noise(13, 26), noise(60, 40), noise(24, 50)]
PLACING = Placing(TOKENIZER, TEMPLATE, "<image>", PICTURES)
IMAGE_ID = PLACING.image_id


def prompt_of_transformers(text: str, *numbers: int, **changes: Any) -> list[int]:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=lfm2_backend(), extra_special_tokens={"image_token": "<image>"}
    )
    processor = Lfm2VlProcessor(lfm2_vl_processor(**{**SMALL, **changes}), tokenizer)
    images = [PICTURES[number] for number in numbers]
    return list(processor(images=images, text=text)["input_ids"][0])


@pytest.mark.parametrize("changes", [{}, {"use_thumbnail": False}, {"do_image_splitting": False}])
def test_prompts_are_those_of_transformers(changes: dict[str, Any]) -> None:
    messages = [
        PLACING.user(0, "\na\n", 1, "b"), {"role": "assistant", "content": "c"}, PLACING.user("d ", 2),
    ]  # fmt: skip
    encoder = PLACING.prompts(settings(**changes))
    text = encoder.render_chat(messages).text
    assert text == (
        "<s><|im_start|>user\n<image>\na\n<image>b<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\nd <image><|im_end|>\n<|im_start|>assistant\n"
    )
    tokens = encoder.place_chat(messages)
    assert tokens.token_ids == prompt_of_transformers(text, 0, 1, 2, **changes)
    pictures = [one for placed in tokens.images for one in encoder.read_image(placed, "messages")]
    assert len(pictures) == {"{}": 11, "use_thumbnail": 9, "do_image_splitting": 3}[next(iter(changes), "{}")]
    end, num_placeholders = 0, 0
    for one in pictures:
        assert one.start > end and tokens.token_ids[one.start : one.end] == [IMAGE_ID] * one.num_tokens
        assert one.num_tokens == one.height * one.width // 64 and one.row_length == 0
        end, num_placeholders = one.end, num_placeholders + one.num_tokens
    assert tokens.token_ids.count(IMAGE_ID) == num_placeholders
    # The pictures of an image have the pixels of its tiles.
    first, *_ = decoding.prepare(file_of(PICTURES[1]), settings(**changes))
    assert pictures[1].pixels == first.pixels.tobytes()


def test_text_and_token_ids_have_one_place_for_each_image() -> None:
    PLACING.assert_one_place(settings(), "a<image> b", 1, prompt_of_transformers("a<image> b", 1))


@pytest.mark.parametrize("words", ["<image>", "<|image_start|>", "<|img_row_1_col_1|>"])
def test_words_of_a_message_stay_text(words: str) -> None:
    found = PLACING.prompts(settings()).place_chat([PLACING.user("a", 0), PLACING.user(f"b{words}c")])
    without = PLACING.prompts(settings()).place_chat([PLACING.user("a", 0), PLACING.user("bc")])
    begin = len(without.token_ids) - 10
    assert found.token_ids[:begin] == without.token_ids[:begin]
    assert not {TOKENIZER.id_of(token) for token in SPECIAL[2:]} & {*found.token_ids[begin:]}


def test_the_size_of_a_turned_image_is_that_of_the_upright_one() -> None:
    image = noise(60, 40)
    exif = image.getexif()
    exif[0x0112] = 6
    data = file_of(image, "JPEG", exif=exif)
    encoder = PLACING.prompts(settings())
    (placed,) = encoder.place_images("<image>", [data]).images
    pictures = encoder.read_image(placed, "images")
    assert layout(settings(), 40, 60)[:2] == (2, 3) and len(pictures) == 7
    assert TOKENIZER.id_of("<|img_row_2_col_3|>") in placed.token_ids


def test_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ContextLengthError, match=r"The images alone have 39"):
        PLACING.prompts(settings(), max_model_len=38).place_images("<image>", [PICTURES[1]])
    monkeypatch.setattr(image_prompts, "MAX_PICTURES", 6)
    with pytest.raises(InvalidRequestError, match="at most 6 tiles; they have 7"):
        PLACING.prompts(settings()).place_images("<image>", [PICTURES[1]])


@pytest.mark.parametrize("missing", ["<|image_start|>", "<|image_end|>", "<|img_row_1_col_1|>", "<|img_thumbnail|>"])
def test_tokens_that_the_tokenizer_lacks_are_named(missing: str) -> None:
    PLACING.assert_needed(settings(), missing)


@pytest.mark.parametrize(("token_id", "token"), [(IMAGE_ID + 1, "<image>"), (IMAGE_ID, "<picture>"), (IMAGE_ID, None)])
def test_the_image_token_must_be_known_by_its_text(token_id: int, token: str | None) -> None:
    with pytest.raises(ModelLoadError, match=rf"does not know the image token {token_id} \({token}\) by its text"):
        ImageReader.of(settings(), token_id, token, id_of=TOKENIZER.id_of)
