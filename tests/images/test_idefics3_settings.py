"""Settings of Idefics3 and SmolVLM are read from files, and tiles, pixels and prompts are those of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.idefics3.processing_idefics3 import Idefics3Processor
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from pagewick.errors import ConfigError, InvalidRequestError, ModelLoadError
from pagewick.images import decoding
from pagewick.images.idefics3_settings import Idefics3Settings
from pagewick.images.settings import MAX_IMAGES, ImageSettings
from pagewick.images.settings_files import read_settings
from pagewick.text.image_prompts import MAX_RESIZED_PIXELS
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import file_of, noise
from tests.images.placing import Placing
from tests.images.test_image_settings import write
from tests.tiny_text import byte_level_backend

# The files as they are published for SmolVLM2 500M.
PREPROCESSOR = {
    "do_convert_rgb": True,
    "do_image_splitting": True,
    "do_normalize": True,
    "do_pad": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "SmolVLMImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_image_size": {"longest_edge": 512},
    "processor_class": "SmolVLMProcessor",
    "resample": 1,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 2048},
    "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": 512}},
}
PROCESSOR = {"image_seq_len": 64, "processor_class": "SmolVLMProcessor"}
CONFIG = {"scale_factor": 4, "vision_config": {"image_size": 512, "patch_size": 16}}
# A tile has 27 x 27 pixels, of which 24 x 24 are seen: 2 x 2 tokens. The longer side has three tiles.
SMALL = {**PREPROCESSOR, "max_image_size": {"longest_edge": 27}, "size": {"longest_edge": 81}}
SMALL_CONFIG = {"scale_factor": 3, "vision_config": {"image_size": 27, "patch_size": 4}}


def settings_in(
    directory: Path, entries: dict[str, Any] = PREPROCESSOR, processor: Any = PROCESSOR, config: Any = CONFIG
) -> ImageSettings:
    write(directory, entries)
    write(directory, processor, "processor_config.json")
    write(directory, config, "config.json")
    return read_settings(directory)


def small(directory: Path, **changes: Any) -> ImageSettings:
    return settings_in(directory, {**SMALL, **changes}, {"image_seq_len": 4}, SMALL_CONFIG)


@pytest.mark.parametrize("changes", [{}, {"image_std": [0.5, 0.4, 0.3], "rescale_factor": 0.25, "resample": 3}])
def test_settings_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    entries = {**PREPROCESSOR, **changes}
    found, wanted = settings_in(tmp_path, entries), SmolVLMImageProcessorPil.from_pretrained(tmp_path)
    assert isinstance(found, Idefics3Settings)
    assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
    assert found.rescale_factor == wanted.rescale_factor and found.resample == wanted.resample
    assert (found.patch_size, found.merge_size, found.temporal_patch_size, found.token_side) == (16, 4, 1, 64)
    assert (found.tile_side, found.longest_edge) == (512, wanted.size["longest_edge"])
    assert found.is_cut is wanted.do_image_splitting
    assert found.largest_picture == 512**2 and found.tile_tokens == 64


def test_entries_that_files_leave_out(tmp_path: Path) -> None:
    """Those of Idefics3 8B, whose patches cover the tile."""
    entries = {"image_processor_type": "Idefics3ImageProcessor"}
    config = {"vision_config": {"image_size": 364, "patch_size": 14}}
    found, wanted = settings_in(tmp_path, entries, {}, config), Idefics3ImageProcessorPil()
    assert isinstance(found, Idefics3Settings)
    assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
    assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
    assert (found.tile_side, found.longest_edge) == (wanted.max_image_size["longest_edge"], wanted.size["longest_edge"])
    assert (found.merge_size, found.tile_tokens, found.is_cut) == (2, 169, wanted.do_image_splitting)


@pytest.mark.parametrize(
    ("changes", "processor", "config", "reason"),
    [
        ({"do_resize": False}, PROCESSOR, CONFIG, "do_resize"),
        ({"resample": 6}, PROCESSOR, CONFIG, "resample"),
        ({"size": {"height": 5, "width": 5}}, PROCESSOR, CONFIG, "size in .* must have a longest_edge and"),
        ({"max_image_size": 512}, PROCESSOR, CONFIG, "max_image_size in .* must have a longest_edge"),
        ({"max_image_size": {"longest_edge": 364}}, PROCESSOR, CONFIG, "is 364, and vision_config.image_size in "),
        ({}, {"image_seq_len": 81}, CONFIG, r"image_seq_len in .* is 81, and by .*config\.json a tile has 64 tokens"),
        ({}, PROCESSOR, CONFIG | {"scale_factor": 5}, "scale_factor is 5, and must divide the 32 patches in a row"),
        ({}, PROCESSOR, CONFIG | {"vision_config": {"image_size": 512, "patch_size": 513}}, "divide the 0 patches"),
        ({"do_image_splitting": "no"}, PROCESSOR, CONFIG, "do_image_splitting in .* must be true or false"),
        (
            SMALL | {"size": {"longest_edge": 217}}, {"image_seq_len": 4}, SMALL_CONFIG,
            r"size \(217\) is more than 8 times max_image_size \(27\)",
        ),
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


side = st.one_of(st.integers(1, 200), st.integers(200, 6000))


@given(side, side)
@example(2048, 2048)
@example(2048, 513)
@example(4095, 3073)
@example(200, 1)
def test_tiles_are_those_of_transformers(published: ImageSettings, height: int, width: int) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    # Their number of rows and columns follows from a size; an image of one tile has 0.
    num_tiles, rows, columns = SmolVLMImageProcessorPil(
        size={"longest_edge": 2048}, max_image_size={"longest_edge": 512}
    ).get_number_of_image_patches(height, width)
    views = published.views(height, width)
    assert len(views) == max(num_tiles, 1)
    if num_tiles:
        last = views[-2]
        assert (last.box.top // 512 + 1, last.box.left // 512 + 1) == (rows, columns)
        assert last.sizes[-1] == (512 * rows, 512 * columns)
    assert all((view.box.height, view.box.width) == (512, 512) for view in views)


@pytest.mark.parametrize(
    ("height", "width"), [(13, 26), (40, 61), (90, 9), (1, 1), (81, 81), (33, 200), (7, 3), (60, 59), (1, 100)]
)
@pytest.mark.parametrize(
    "changes", [{}, {"resample": 3}, {"do_image_splitting": False}, {"size": {"longest_edge": 20}}]
)
def test_pixels_are_those_of_transformers(tmp_path: Path, height: int, width: int, changes: dict[str, Any]) -> None:
    image, entries = noise(height, width), {**SMALL, **changes}
    processor = SmolVLMImageProcessorPil(**{**entries, "do_rescale": False, "do_normalize": False})
    (expected,) = processor([[image]], return_tensors="np")["pixel_values"]
    found = decoding.prepare(file_of(image), small(tmp_path, **changes))
    assert len(found) == len(expected)
    for (pixels, num_tokens, *_), theirs in zip(found, expected, strict=True):
        assert np.array_equal(pixels, theirs.transpose(1, 2, 0)[:24, :24]) and num_tokens == 4
        assert theirs.shape == (3, 27, 27)


def test_a_tile_keeps_no_other_pixels_in_memory(published: ImageSettings) -> None:
    pictures = decoding.prepare(file_of(noise(30, 40)), published)
    assert len(pictures) == 13
    for picture in pictures:
        owner = picture.pixels if picture.pixels.base is None else picture.pixels.base
        assert memoryview(owner).nbytes == picture.pixels.nbytes


def test_sides_have_a_limit(tmp_path: Path) -> None:
    """Images are not scaled beyond 4,096 pixels, though the file says so."""
    entries = {**SMALL, "size": {"longest_edge": 5000}, "max_image_size": {"longest_edge": 2700}}
    config = {"scale_factor": 3, "vision_config": {"image_size": 2700, "patch_size": 900}}
    found = settings_in(tmp_path, entries, {"image_seq_len": 1}, config)
    processor = SmolVLMImageProcessorPil(**{**entries, "do_rescale": False, "do_normalize": False})
    for height, width in ((20, 31), (31, 20)):
        (expected,) = processor([[noise(height, width)]], return_tensors="np")["pixel_values"]
        pictures = decoding.prepare(file_of(noise(height, width)), found)
        assert len(pictures) == len(expected)
        assert np.array_equal(pictures[0].pixels, expected[0].transpose(1, 2, 0))


def test_a_limit_of_pixels_limits_the_tiles(tmp_path: Path, published: ImageSettings) -> None:
    def grid(found: ImageSettings, height: int, width: int) -> tuple[int, int]:
        sizes = found.views(height, width)[0].sizes
        return sizes[1][0] // 512, sizes[1][1] // 512

    assert grid(published, 1200, 1600) == (3, 4)
    assert grid(published.limited(12 * 512**2), 1200, 1600) == (3, 4)
    assert grid(published.limited(12 * 512**2 - 1), 1200, 1600) == (3, 3)
    assert grid(published.limited(5 * 512**2), 1200, 1600) == (2, 2)
    one = published.limited(512**2)
    assert grid(one, 1200, 1600) == (1, 1) and len(one.views(1200, 1600)) == 1
    count = counter_of(TOKENIZER)
    assert published.most_tokens(count) == 16 * 66 + 5 + 67 and one.most_tokens(count) == 67
    # 7 rows of one tile have more tokens than 2 x 3: a line ends behind each.
    assert published.limited(7 * 512**2).most_tokens(count) == 6 * 66 + 4 + 67
    assert small(tmp_path, do_image_splitting=False).most_tokens(count) == 7
    assert published.limited(2**30).most_tokens(count) == published.most_tokens(count)
    with pytest.raises(
        ConfigError, match="at least 262144, because the model reads images in tiles of 512 x 512 pixels"
    ):
        published.limited(512**2 - 1)


@pytest.mark.parametrize(
    ("tile", "patch", "scale", "numbers"),
    [(512, 16, 4, (15, 19, 28)), (384, 14, 3, (27, 36, 52)), (364, 14, 2, (29, 38, 56))],
)
def test_how_many_images_a_request_has(
    tmp_path: Path, tile: int, patch: int, scale: int, numbers: tuple[int, int, int]
) -> None:
    """docs/multimodal.md has these numbers, of images that are square, 4:3 and 2:1."""
    entries = {**PREPROCESSOR, "max_image_size": {"longest_edge": tile}, "size": {"longest_edge": 4 * tile}}
    config = {"scale_factor": scale, "vision_config": {"image_size": tile, "patch_size": patch}}
    found = settings_in(tmp_path, entries, {"image_seq_len": (tile // patch // scale) ** 2}, config)

    def number_of(settings: ImageSettings, height: int, width: int) -> int:
        pixels = sum(view.box.height * view.box.width for view in settings.views(height, width))
        return MAX_RESIZED_PIXELS // pixels

    assert tuple(number_of(found, *size) for size in ((64, 64), (60, 80), (50, 100))) == numbers
    assert number_of(found.limited(tile**2), 64, 64) >= MAX_IMAGES


SPECIAL = ["<end_of_utterance>", "<image>", "<fake_token_around_image>", "<|im_start|>"]
PLACES = ["<global-img>", *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))]
# As it is published, without videos.
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}"
    "{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}"
    "{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}"
    "{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<end_of_utterance>\n"
    "{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)


def smolvlm_backend(*, has_places: bool = True) -> Any:
    """Idefics3's tokenizer has no tokens for the places of tiles, whose names are words to it."""
    backend = byte_level_backend()
    backend.add_special_tokens([*SPECIAL, *(PLACES if has_places else ())])
    return backend


def tokenizer_of(*, has_places: bool = True) -> Tokenizer:
    return Tokenizer(smolvlm_backend(has_places=has_places), config={"bos_token": "<s>", "eos_token": "</s>"})


TOKENIZER = tokenizer_of()
# 2 x 3 tiles and the whole, 3 x 1 tiles and the whole.
PICTURES = [noise(13, 26), noise(90, 20)]
PLACING = Placing(TOKENIZER, TEMPLATE, "<image>", PICTURES)
IMAGE_ID = PLACING.image_id


def counter_of(tokenizer: Tokenizer) -> Callable[[str], int]:
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("has_places", [True, False])
def test_the_most_tokens_are_those_of_the_largest_image(tmp_path: Path, has_places: bool) -> None:
    found, tokenizer = small(tmp_path), tokenizer_of(has_places=has_places)
    encoder = replace(PLACING, tokenizer=tokenizer).prompts(found)
    square = encoder.place_images("<image>", [noise(50, 50)])
    assert len(square.token_ids) - len(tokenizer.start_token_ids) == found.most_tokens(counter_of(tokenizer))
    # Words are more tokens than the names of tiles.
    assert (found.most_tokens(counter_of(tokenizer)) > 16 * 6 + 5 + 7) is not has_places


def prompt_of_transformers(text: str, *numbers: int, has_places: bool = True, **changes: Any) -> list[int]:
    """SmolVLM's own processor wants a package for the names of numbers, and writes images as Idefics3's does."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=smolvlm_backend(has_places=has_places))
    processor = Idefics3Processor(Idefics3ImageProcessorPil(**{**SMALL, **changes}), tokenizer, image_seq_len=4)
    images = [PICTURES[number] for number in numbers]
    return list(processor(images=[images], text=[text], add_special_tokens=False)["input_ids"][0])


@pytest.mark.parametrize("has_places", [True, False])
@pytest.mark.parametrize("changes", [{}, {"do_image_splitting": False}])
def test_prompts_are_those_of_transformers(tmp_path: Path, has_places: bool, changes: dict[str, Any]) -> None:
    messages = [
        PLACING.user(0, "\n\na\n", 1, "\nb"), {"role": "assistant", "content": "c"}, PLACING.user("d ", 0),
    ]  # fmt: skip
    placing = replace(PLACING, tokenizer=tokenizer_of(has_places=has_places))
    encoder = placing.prompts(small(tmp_path, **changes))
    text = encoder.render_chat(messages).text
    assert text == (
        "<|im_start|>User:<image>\n\na\n<image>\nb<end_of_utterance>\nAssistant: c<end_of_utterance>\n"
        "User: d <image><end_of_utterance>\nAssistant:"
    )
    tokens = encoder.place_chat(messages)
    assert tokens.token_ids == prompt_of_transformers(text, 0, 1, 0, has_places=has_places, **changes)
    pictures = [one for placed in tokens.images for one in encoder.read_image(placed, "messages")]
    assert len(pictures) == (3 if changes else 7 + 4 + 7)
    image_id, end = placing.image_id, 0
    for one in pictures:
        assert one.start > end and tokens.token_ids[one.start : one.end] == [image_id] * 4
        end = one.end
    assert tokens.token_ids.count(image_id) == 4 * len(pictures)


def test_text_and_token_ids_have_one_place_for_each_image(tmp_path: Path) -> None:
    text = "a\n<image>\n b"
    PLACING.assert_one_place(small(tmp_path), text, 1, prompt_of_transformers(text, 1))


def test_an_image_that_is_too_narrow_is_refused(published: ImageSettings) -> None:
    with pytest.raises(InvalidRequestError, match="at most 200 times its shorter side"):
        published.views(1, 201)


def test_a_token_that_the_tokenizer_lacks_is_named(published: ImageSettings) -> None:
    PLACING.assert_needed(published, "<fake_token_around_image>")
