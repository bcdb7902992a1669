"""Settings of Gemma 3 are read from its files, and pixels and prompts are those of its processor in transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

from pagewick.errors import ConfigError, InvalidRequestError, ModelLoadError
from pagewick.images.gemma3_settings import Gemma3Settings
from pagewick.images.settings import ImageSettings
from pagewick.images.settings_files import read_settings
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.image_prompts import ImageReader
from pagewick.text.prompts import PromptEncoder
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import address_of, file_of, noise, prepare
from tests.images.test_image_settings import write
from tests.tiny_text import byte_level_backend

# The files as they are published for Gemma 3 4B.
PREPROCESSOR = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": 256,
    "image_std": [0.5, 0.5, 0.5],
    "pan_and_scan_max_num_crops": None,
    "pan_and_scan_min_crop_size": None,
    "pan_and_scan_min_ratio_to_activate": None,
    "processor_class": "Gemma3Processor",
    "resample": 2,
    "rescale_factor": 0.00392156862745098,
    "size": {"height": 896, "width": 896},
}
PROCESSOR = {"image_seq_length": 256, "processor_class": "Gemma3Processor"}
CONFIG = {"mm_tokens_per_image": 256, "vision_config": {"image_size": 896, "patch_size": 14}}
# An image becomes 12 x 12 pixels, of which 6 x 6 are a token.
SMALL = {"mm_tokens_per_image": 4, "vision_config": {"image_size": 12, "patch_size": 3}}
SMALL_ENTRIES = {**PREPROCESSOR, "image_seq_length": 4, "size": {"height": 12, "width": 12}}


def settings_in(
    directory: Path, entries: dict[str, Any] = PREPROCESSOR, processor: Any = PROCESSOR, config: Any = CONFIG
) -> ImageSettings:
    write(directory, entries)
    write(directory, processor, "processor_config.json")
    write(directory, config, "config.json")
    return read_settings(directory)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> ImageSettings:
    return settings_in(tmp_path_factory.mktemp("small"), SMALL_ENTRIES, {}, SMALL)


@pytest.mark.parametrize("changes", [{}, {"image_std": [0.5, 0.4, 0.3], "rescale_factor": 0.25, "resample": 3}])
@pytest.mark.parametrize("is_nested", [False, True])
def test_settings_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any], is_nested: bool) -> None:
    entries = {**PREPROCESSOR, **changes}
    if is_nested:
        found = settings_in(tmp_path, {}, {**PROCESSOR, "image_processor": entries})
        write(tmp_path, entries)
    else:
        found = settings_in(tmp_path, entries)
    wanted = Gemma3ImageProcessorPil.from_pretrained(tmp_path)
    assert isinstance(found, Gemma3Settings)
    assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
    assert found.rescale_factor == wanted.rescale_factor and found.resample == wanted.resample
    assert (found.patch_size, found.merge_size, found.temporal_patch_size, found.token_side) == (14, 4, 1, 56)
    assert found.resized(3, 500) == (wanted.size["height"], wanted.size["width"]) == (896, 896)
    assert found.num_tokens(3, 500) == found.max_tokens == 256 and found.has_fixed_tokens
    assert found.limited(896**2) == found.limited(10**9) == found
    with pytest.raises(ConfigError, match="at least 802816, because the model reads every image as 896 x 896 pixels"):
        found.limited(896**2 - 1)


def test_entries_that_files_leave_out(tmp_path: Path) -> None:
    config = {"vision_config": {"image_size": 512, "patch_size": 16}}
    entries = {"image_processor_type": "Gemma3ImageProcessorFast", "size": {"height": 512, "width": 512}}
    found, wanted = settings_in(tmp_path, entries, {}, config), Gemma3ImageProcessorPil()
    assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
    assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
    assert (found.max_tokens, found.merge_size) == (256, 2)


@pytest.mark.parametrize(
    ("changes", "processor", "config", "reason"),
    [
        ({"do_pan_and_scan": True}, {}, CONFIG, "do_pan_and_scan in .* is true"),
        ({"do_resize": False}, {}, CONFIG, "do_resize"),
        ({"resample": 6}, {}, CONFIG, "resample"),
        ({"resample": True}, {}, CONFIG, "resample"),
        ({"size": {"height": 896, "width": 448}}, {}, CONFIG, "size in .* is 896 x 448; Pagewick knows squares"),
        ({"size": {"height": 448, "width": 448}}, {}, CONFIG, "is 448, and vision_config.image_size in .* is 896"),
        ({"image_seq_length": 64}, {}, CONFIG, r"image_seq_length in .*preprocessor_config\.json is 64, and mm_tokens"),
        ({}, {"image_seq_length": 64}, CONFIG, r"image_seq_length in .*processor_config\.json is 64, and mm_tokens"),
        (
            {},
            {},
            CONFIG | {"mm_tokens_per_image": 255},
            "mm_tokens_per_image is 255, and must be the number of squares",
        ),
        ({}, {}, CONFIG | {"mm_tokens_per_image": 9}, "mm_tokens_per_image is 9"),
        ({}, {}, CONFIG | {"vision_config": {"image_size": 896, "patch_size": 15}}, "patches of 15 x 15 pixels"),
        ({}, {}, CONFIG | {"vision_config": []}, "vision_config in .* is not an object"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    tmp_path: Path, changes: dict[str, Any], processor: dict[str, Any], config: Any, reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        settings_in(tmp_path, PREPROCESSOR | changes, processor, config)


@pytest.mark.parametrize(("height", "width"), [(40, 61), (200, 9), (1, 1), (12, 12), (900, 901)])
@pytest.mark.parametrize(("resample", "size"), [(2, 56), (3, 50)])
def test_pixels_are_those_of_transformers(tmp_path: Path, height: int, width: int, resample: int, size: int) -> None:
    image, sides = noise(height, width), {"height": size, "width": size}
    processor = Gemma3ImageProcessorPil(size=sides, resample=resample, do_rescale=False, do_normalize=False)
    (expected,) = processor([image], return_tensors="np")["pixel_values"]
    config = {"mm_tokens_per_image": 1, "vision_config": {"image_size": size, "patch_size": 2}}
    entries = {**PREPROCESSOR, "size": sides, "resample": resample, "image_seq_length": 1}
    found = prepare(file_of(image), settings_in(tmp_path, entries, {}, config))
    assert np.array_equal(found.pixels, expected.transpose(1, 2, 0)) and found.num_tokens == 1


def test_an_image_that_is_too_narrow_is_refused(small: ImageSettings) -> None:
    with pytest.raises(InvalidRequestError, match="at most 200 times its shorter side"):
        small.resized(1, 201)


SPECIAL = ["<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<image_soft_token>", "<end_of_image>"]
# In the form of Gemma's templates.
TEMPLATE = """\
{{ '<s>' }}
{%- for message in messages -%}
    {{ '<start_of_turn>' + message.role + '\\n' }}
    {%- if message.content is string -%}
        {{ message.content | trim }}
    {%- else -%}
        {%- for item in message.content -%}
            {%- if item.type == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item.type == 'text' -%}
                {{ item.text }}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
    {{ '<end_of_turn>\\n' }}
{%- endfor -%}
"""


def gemma_backend() -> Any:
    """Gemma's vocabularies have tokens for several line breaks, which reach across the ends of what is inserted."""
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    breaks = ["\n" * number for number in (2, 3, 4, 5)]
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in breaks])
    return backend


TOKENIZER = Tokenizer(gemma_backend(), config={"bos_token": "<s>", "eos_token": "</s>"})
IMAGE_ID = TOKENIZER.encode("<image_soft_token>", add_special_tokens=False)[0]
PICTURES = [noise(10, 20), noise(3, 4), noise(30, 7)]


def processor_of_transformers() -> Gemma3Processor:
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=gemma_backend(),
        extra_special_tokens={
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
            "image_token": "<image_soft_token>",
        },
    )
    return Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 12, "width": 12}), tokenizer, image_seq_length=4)


def prompt_of_transformers(text: str, *numbers: int) -> list[int]:
    images = [PICTURES[number] for number in numbers]
    return list(processor_of_transformers()(images=images, text=text, add_special_tokens=False)["input_ids"][0])


def prompts(settings: ImageSettings) -> PromptEncoder:
    images = ImageReader.of(settings, IMAGE_ID, "<image_soft_token>", id_of=TOKENIZER.id_of)
    return PromptEncoder(TOKENIZER, ChatTemplate({"default": TEMPLATE}, TOKENIZER), max_model_len=300, images=images)


def part(number: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": address_of(file_of(PICTURES[number]))}}


def user(*parts: Any) -> dict[str, Any]:
    given = [{"type": "text", "text": one} if isinstance(one, str) else part(one) for one in parts]
    return {"role": "user", "content": given}


def test_prompts_are_those_of_transformers(small: ImageSettings) -> None:
    """Line breaks of the message and of the text around an image are one token."""
    messages = [user(0, "\na\n", 1, "b"), {"role": "assistant", "content": "c"}, user("d ", 2)]
    encoder = prompts(small)
    text = encoder.render_chat(messages).text
    assert text == (
        "<s><start_of_turn>user\n<start_of_image>\na\n<start_of_image>b<end_of_turn>\n<start_of_turn>assistant\n"
        "c<end_of_turn>\n<start_of_turn>user\nd <start_of_image><end_of_turn>\n"
    )
    tokens, expected = encoder.place_chat(messages), prompt_of_transformers(text, 0, 1, 2)
    assert tokens.token_ids == expected and expected.count(IMAGE_ID) == 12
    assert TOKENIZER.id_of("\n\n\n") in expected
    for one in tokens.images:
        assert tokens.token_ids[one.start : one.start + one.num_tokens] == [IMAGE_ID] * 4
        (image,) = encoder.read_image(one, "messages")
        assert (image.height, image.width, image.num_tokens, image.row_length) == (12, 12, 4, 0)


def test_text_prompts_are_those_of_transformers(small: ImageSettings) -> None:
    text = "a\n<start_of_image>\n b"
    tokens = prompts(small).place_images(text, [PICTURES[1]])
    assert tokens.token_ids == prompt_of_transformers(text, 1)
    # Without an image, the words stay as they are.
    assert prompts(small).place_images(text, []).token_ids == prompts(small).encode(text)


def test_token_ids_stay_as_they_are(small: ImageSettings) -> None:
    encoder, start = prompts(small), TOKENIZER.id_of("<start_of_image>")
    assert start is not None
    tokens = encoder.place_images([5, IMAGE_ID, start, 6], [PICTURES[0]])
    assert tokens.token_ids == [5, *[IMAGE_ID] * 4, start, 6]
    with pytest.raises(InvalidRequestError, match="<start_of_image> in a text, and <image_soft_token> among token ids"):
        encoder.place_images([5, start, 6], [PICTURES[0]])


@pytest.mark.parametrize("words", ["<start_of_image>", "<image_soft_token>"])
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_words_of_a_message_stay_text(small: ImageSettings, words: str, role: str) -> None:
    messages = [user("a", 0), {"role": role, "content": f"b{words}c"}]
    found = prompts(small).place_chat(messages)
    (image,) = found.images
    without = prompts(small).place_chat([user("a", 0), {"role": role, "content": "bc"}])
    begin = len(without.token_ids) - 3
    assert found.token_ids[:begin] == without.token_ids[:begin] and image.start < begin
    written = found.token_ids[begin:]
    assert not {IMAGE_ID, TOKENIZER.id_of("<start_of_image>")} & {*written}
    assert words in TOKENIZER.decode(written, skip_special_tokens=False)


@pytest.mark.parametrize("missing", ["<start_of_image>", "<end_of_image>"])
def test_tokens_that_the_tokenizer_lacks_are_named(small: ImageSettings, missing: str) -> None:
    with pytest.raises(ModelLoadError, match=f"the tokenizer lacks '{missing}', which marks the places of images"):
        ImageReader.of(
            small,
            IMAGE_ID,
            "<image_soft_token>",
            id_of=lambda text: None if text == missing else TOKENIZER.id_of(text),
        )
