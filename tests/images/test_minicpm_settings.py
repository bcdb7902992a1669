"""Settings of MiniCPM-V 4.6 are read from its files, and slices, pixels and prompts are those of its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.minicpmv4_6.processing_minicpmv4_6 import MiniCPMV4_6Processor

from pagewick.errors import ConfigError, InvalidRequestError, ModelLoadError
from pagewick.images import decoding
from pagewick.images.minicpm_settings import MiniCPMSettings
from pagewick.images.settings import ImageSettings
from pagewick.images.settings_files import read_settings, settings_of
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.image_prompts import ImageReader
from pagewick.text.prompts import PromptEncoder
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import address_of, file_of, noise
from tests.images.test_image_settings import write
from tests.tiny_text import byte_level_backend

# In the form of the files that are published.
ENTRIES = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "downsample_mode": "16x",
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "MiniCPMV4_6ImageProcessor",
    "image_std": [0.5, 0.5, 0.5],
    "max_slice_nums": 9,
    "patch_size": 14,
    "processor_class": "MiniCPMV4_6Processor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "scale_resolution": 448,
    "slice_mode": True,
    "use_image_id": True,
}
SMALL = {**ENTRIES, "patch_size": 4, "scale_resolution": 32, "max_slice_nums": 6}


def processor_of(entries: dict[str, Any]) -> Any:
    return MiniCPMV4_6ImageProcessorPil(**entries)


@pytest.mark.parametrize(
    "changes",
    [{}, {"image_std": [0.5, 0.4, 0.3], "rescale_factor": 0.25, "resample": 2}, {"max_slice_nums": 36}],
)
def test_settings_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    for entries in ({**ENTRIES, **changes}, {"image_processor_type": "MiniCPMV4_6ImageProcessorFast"}):
        found = read_settings(write(tmp_path, entries))
        wanted = MiniCPMV4_6ImageProcessorPil.from_pretrained(tmp_path)
        assert isinstance(found, MiniCPMSettings)
        assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
        assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
        assert (found.patch_size, found.merge_size, found.temporal_patch_size) == (wanted.patch_size, 4, 1)
        assert (found.max_pixels, found.most_slices) == (wanted.scale_resolution**2, wanted.max_slice_nums)
        assert found.has_ids == wanted.use_image_id


def test_modes() -> None:
    assert settings_of({**ENTRIES, "downsample_mode": "4x"}, "file").merge_size == 2
    whole = settings_of({**ENTRIES, "slice_mode": False}, "file")
    assert isinstance(whole, MiniCPMSettings)
    assert whole.most_slices == 1 and whole.tile_tokens == 0 and len(whole.views(2000, 3000)) == 1
    assert "<slice>" not in whole.marks


@pytest.mark.parametrize(("of_processor", "of_image", "expected"), [(None, False, False), (False, True, False)])
def test_both_files_may_say_whether_images_have_numbers(
    tmp_path: Path, of_processor: bool | None, of_image: bool, expected: bool
) -> None:
    write(tmp_path, {**ENTRIES, "use_image_id": of_image})
    write(tmp_path, {"use_image_id": of_processor}, "processor_config.json")
    found = read_settings(tmp_path)
    assert isinstance(found, MiniCPMSettings) and found.has_ids == expected
    assert found.before_image(3) == "" and "<image_id>" not in found.marks


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"resample": 6}, "resample"),
        ({"downsample_mode": "8x"}, "downsample_mode in .* is '8x'; Pagewick knows '16x', '4x' only"),
        ({"scale_resolution": 20000}, "scale_resolution in .* is 20000; Pagewick knows at most 16384"),
        ({"max_slice_nums": 61}, "max_slice_nums in .* is 61; Pagewick knows at most 60"),
        ({"scale_resolution": 0}, "scale_resolution in .* must be a whole number from 1"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        settings_of({**ENTRIES, **changes}, "preprocessor_config.json")


side = st.one_of(st.integers(1, 200), st.integers(200, 6000))


@given(side, side, st.sampled_from(["16x", "4x"]), st.sampled_from([1, 2, 9, 36]))
@example(448, 448, "16x", 9)
@example(448, 449, "16x", 9)
@example(6000, 31, "16x", 9)
@example(30, 6000, "4x", 9)
@example(1344, 1344, "16x", 9)
def test_slices_are_those_of_transformers(height: int, width: int, mode: str, most: int) -> None:
    entries = {**ENTRIES, "downsample_mode": mode, "max_slice_nums": most}
    found, processor = settings_of(entries, "file"), processor_of(entries)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(InvalidRequestError, match="at most 200 times its shorter side"):
            found.views(height, width)
        return
    size, rules = (height, width), {"scale_resolution": 448, "patch_size": 14, "downsample_mode": mode}
    grid = processor.get_sliced_grid(size, most, 448)
    whole, *slices = found.views(height, width)
    assert whole.sizes == (processor.find_best_resize(size, **rules, allow_upscale=grid is None),)
    assert (whole.box.top, whole.box.left, whole.box.height, whole.box.width) == (0, 0, *whole.sizes[0])
    assert len(slices) == (0 if grid is None else grid[0] * grid[1])
    if grid is not None:
        refined = processor.get_refine_size(size, grid, **rules, allow_upscale=True)
        each = refined[0] // grid[0], refined[1] // grid[1]
        boxes = [(row * each[0], column * each[1], *each) for row in range(grid[0]) for column in range(grid[1])]
        assert [tuple(one.box) for one in slices] == boxes and {one.sizes for one in slices} == {(refined,)}
    pictures = [one.box.height * one.box.width for one in (whole, *slices)]
    assert max(pictures) <= found.largest_picture
    # Each mark is a token, and so is each digit of a number.
    assert found.num_tokens(height, width) + 5 + 3 * len(slices) <= found.most_tokens(lambda text: 1)


@pytest.mark.parametrize(("height", "width"), [(13, 26), (40, 61), (90, 9), (1, 1), (32, 32), (33, 200), (100, 101)])
@pytest.mark.parametrize("changes", [{}, {"resample": 2, "downsample_mode": "4x"}, {"max_slice_nums": 1}])
def test_pixels_are_those_of_transformers(height: int, width: int, changes: dict[str, Any]) -> None:
    image, entries = noise(height, width), {**SMALL, **changes}
    processor = processor_of({**entries, "do_rescale": False, "do_normalize": False})
    expected = processor([image], return_tensors="np")
    found, settings = decoding.prepare(file_of(image), settings_of(entries, "file")), settings_of(entries, "file")
    assert len(found) == len(expected["target_sizes"])
    # The patches of all pictures follow each other: [1, colour, y, patches and x].
    patches, begin = expected["pixel_values"][0], 0
    for (pixels, num_tokens, *_), (rows, columns) in zip(found, expected["target_sizes"], strict=True):
        own = patches[:, :, begin : (begin := begin + rows * columns * 4)].reshape(3, 4, rows, columns, 4)
        assert np.array_equal(pixels, own.transpose(2, 1, 3, 4, 0).reshape(rows * 4, columns * 4, 3))
        assert num_tokens == rows * columns // settings.merge_size**2


def test_a_limit_of_pixels_limits_the_slices() -> None:
    published = settings_of(ENTRIES, "file")
    assert len(published.views(1200, 1600)) == 10
    assert len(published.limited(9 * 448**2).views(1200, 1600)) == 10
    assert len(published.limited(9 * 448**2 - 1).views(1200, 1600)) == 9
    one = published.limited(448**2)
    assert len(one.views(1200, 1600)) == 1
    assert (published.tile_tokens, one.tile_tokens) == (64, 0)
    # A narrow picture: 1 x 116 tokens. Around it 3 texts, and 3 with each slice.
    assert published.max_tokens == one.max_tokens == 116
    assert published.most_tokens(lambda text: 1) == 3 + 116 + 9 * (116 + 3)
    assert one.most_tokens(lambda text: 1) == 3 + 116
    with pytest.raises(ConfigError, match="at least 200704, because the model scales every image to about as many"):
        published.limited(448**2 - 1)


SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|image_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>",
    "</image_id>",
]  # fmt: skip
# In the form of Qwen3.5's, without the tokens around an image.
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n'}}{% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' %}"
    "{{ '<|image_pad|>\n' }}{% elif content['type'] == 'text' %}{{ content['text'] }}{% endif %}{% endfor %}"
    "{% endif %}{{'<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{'<|im_start|>assistant\n' }}{% endif %}"
)


def minicpm_backend() -> Any:
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    return backend


TOKENIZER = Tokenizer(minicpm_backend(), config={"bos_token": "<s>", "eos_token": "</s>"})
IMAGE_ID = TOKENIZER.encode("<|image_pad|>", add_special_tokens=False)[0]
# The entries of config.json for the tokens around pictures.
MARKS = {
    name: TOKENIZER.encode(text, add_special_tokens=False)[0]
    for name, text in {
        "image_start_id": "<image>", "image_end_id": "</image>", "slice_start_id": "<slice>",
        "slice_end_id": "</slice>", "newline_id": "\n",
    }.items()
}  # fmt: skip
# The whole alone; with 2 x 1 slices; with 2 x 3 slices.
PICTURES = [noise(13, 26), noise(60, 30), noise(60, 90)]


def prompt_of_transformers(entries: dict[str, Any], text: str, *numbers: int) -> list[int]:
    """Its rule for the texts of images; the whole class needs a reader of videos."""
    maker = MiniCPMV4_6Processor.__new__(MiniCPMV4_6Processor)
    maker.image_processor, maker.slice_mode = processor_of(entries), entries["slice_mode"]
    for name in ("image", "slice", "image_id"):
        setattr(maker, f"{name}_start_token", f"<{name}>")
        setattr(maker, f"{name}_end_token", f"</{name}>")
    maker.image_token = "<|image_pad|>"
    _, texts = maker._process_images([PICTURES[number] for number in numbers], return_tensors="np")
    if entries["use_image_id"]:
        texts = maker._prepend_local_ids([text], texts, maker.image_token)
    first, *others = text.split("<|image_pad|>")
    whole = first + "".join(of_image + after for of_image, after in zip(texts, others, strict=True))
    return TOKENIZER.encode(whole, add_special_tokens=False)


def prompts(found: ImageSettings) -> PromptEncoder:
    def encode(text: str) -> list[int]:
        return TOKENIZER.encode(text, add_special_tokens=False)

    images = ImageReader.of(found, IMAGE_ID, "<|image_pad|>", id_of=TOKENIZER.id_of, encode=encode)
    return PromptEncoder(TOKENIZER, ChatTemplate({"default": TEMPLATE}, TOKENIZER), max_model_len=900, images=images)


def part(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address_of(file_of(PICTURES[number]))}}


def user(*parts: Any) -> dict[str, Any]:
    given = [{"type": "text", "text": one} if isinstance(one, str) else part(one) for one in parts]
    return {"role": "user", "content": given}


@pytest.mark.parametrize(
    "changes", [{}, {"use_image_id": False}, {"downsample_mode": "4x"}, {"slice_mode": False, "use_image_id": False}]
)
def test_prompts_are_those_of_transformers(changes: dict[str, Any]) -> None:
    messages = [user(0, "\n\na", 1, "\nb"), {"role": "assistant", "content": "c"}, user("d ", 2)]
    entries = {**SMALL, **changes}
    encoder = prompts(settings_of(entries, "file"))
    text = encoder.render_chat(messages).text
    tokens = encoder.place_chat(messages)
    assert tokens.token_ids == prompt_of_transformers(entries, text, 0, 1, 2)
    pictures = [[*encoder.read_image(placed, "messages")] for placed in tokens.images]
    assert [len(of_image) for of_image in pictures] == ([1, 3, 7] if entries["slice_mode"] else [1, 1, 1])
    for one in (one for of_image in pictures for one in of_image):
        assert tokens.token_ids[one.start : one.end] == [IMAGE_ID] * one.num_tokens
    assert tokens.token_ids.count(IMAGE_ID) == sum(one.num_tokens for of_image in pictures for one in of_image)


def test_pictures_of_an_image_have_its_layout() -> None:
    """By which the prefix cache tells images apart whose whole is the same and whose slices are others."""
    encoder = prompts(settings_of(SMALL, "file"))
    tokens = encoder.place_images("<|image_pad|>a<|image_pad|>b<|image_pad|>", [PICTURES[0], PICTURES[1], PICTURES[1]])
    alone, cut, again = ([one.layout for one in encoder.read_image(placed, "p")] for placed in tokens.images)
    # Where each picture's tokens begin among those of the image, and its height and width.
    assert alone == [b""] and cut == again == [b"4:48x16,9:32x32,16:32x32"] * 3


def test_many_images_are_counted() -> None:
    """The number of an image may have two digits, and it begins with 0."""
    encoder = prompts(settings_of(SMALL, "file"))
    found = encoder.place_images("<|image_pad|>" * 12, [PICTURES[0]] * 12)
    expected = prompt_of_transformers(SMALL, "<|image_pad|>" * 12, *[0] * 12)
    assert found.token_ids == [*TOKENIZER.start_token_ids, *expected]


@pytest.mark.parametrize("missing", ["<image>", "</slice>", "<image_id>"])
def test_tokens_that_the_tokenizer_lacks_are_named(missing: str) -> None:
    with pytest.raises(ModelLoadError, match=f"the tokenizer lacks '{missing}', which marks the places of images"):
        ImageReader.of(
            settings_of(ENTRIES, "file"),
            IMAGE_ID,
            "<|image_pad|>",
            id_of=lambda text: None if text == missing else TOKENIZER.id_of(text),
        )
