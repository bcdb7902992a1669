"""LightOnOCR's settings are read from its files, and sizes, pixels and prompts are those of transformers' processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.models.lighton_ocr.processing_lighton_ocr import LightOnOcrProcessor, get_resize_output_image_size
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.images.lighton_settings import LightOnSettings
from pagewick.images.pixtral_settings import PixtralSettings
from pagewick.images.settings import MAX_ASPECT_RATIO, ImageSettings
from pagewick.images.settings_files import read_settings
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.image_prompts import ImageReader
from pagewick.text.prompts import PromptEncoder
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import address_of, file_of, noise, prepare
from tests.images.test_image_settings import CLIP_MEAN, CLIP_STD, write
from tests.tiny_text import byte_level_backend

# In the form of the files that are published with LightOnOCR-2.
IMAGE_PROCESSOR = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": CLIP_MEAN,
    "image_processor_type": "PixtralImageProcessorFast", "image_std": CLIP_STD, "patch_size": 14, "resample": 3,
    "rescale_factor": 0.00392156862745098, "size": {"longest_edge": 1540},
}  # fmt: skip
PROCESSOR = {"patch_size": 14, "processor_class": "LightOnOcrProcessor", "spatial_merge_size": 2}
CONFIG = {"architectures": ["LightOnOCRForConditionalGeneration"], "model_type": "mistral3", "spatial_merge_size": 2}
SMALL = {**IMAGE_PROCESSOR, "patch_size": {"height": 4, "width": 4}, "size": {"longest_edge": 60}}


def settings_in(directory: Path, entries: dict[str, Any], **processor: Any) -> ImageSettings:
    write(directory, {**PROCESSOR, **processor, "image_processor": entries}, "processor_config.json")
    write(directory, CONFIG, "config.json")
    return read_settings(directory)


def small(directory: Path, step: int = 4, edge: int = 60) -> LightOnSettings:
    entries = {**SMALL, "patch_size": step, "size": {"longest_edge": edge}}
    found = settings_in(directory, entries, patch_size=4)
    assert isinstance(found, LightOnSettings)
    return found


@pytest.mark.parametrize("changes", [{}, {"image_mean": [0.5, 0.4, 0.3], "patch_size": {"height": 28, "width": 28}}])
def test_settings_are_those_of_transformers(tmp_path: Path, changes: dict[str, Any]) -> None:
    found = settings_in(tmp_path, {**IMAGE_PROCESSOR, **changes})
    write(tmp_path, {**IMAGE_PROCESSOR, **changes})
    wanted = PixtralImageProcessorPil.from_pretrained(tmp_path)
    assert isinstance(found, LightOnSettings)
    assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
    assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
    assert found.longest_edge == wanted.size["longest_edge"] == 1540
    assert found.step == (28 if changes else 14)
    assert (found.patch_size, found.merge_size, found.token_side, found.row_break) == (14, 2, 28, 0)
    assert found.max_tokens == 55 * 55


def test_what_files_leave_out(tmp_path: Path) -> None:
    """Models whose config.json says another architecture have the same image processor, and rows of tokens."""
    write(tmp_path, {"image_processor_type": "PixtralImageProcessor", "patch_size": 28})
    write(tmp_path, {**CONFIG, "architectures": ["LightOnOcrForConditionalGeneration"]}, "config.json")
    found = read_settings(tmp_path)
    assert isinstance(found, LightOnSettings)
    assert (found.patch_size, found.merge_size, found.step, found.longest_edge) == (14, 2, 28, 1024)
    for other in ({}, {"architectures": "LightOnOcr"}, {"architectures": ["Mistral3ForConditionalGeneration"]}):
        write(tmp_path, other, "config.json")
        found = read_settings(tmp_path)
        assert isinstance(found, PixtralSettings) and not isinstance(found, LightOnSettings)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"patch_size": 20}, "patch_size in .* is 20, and must be a multiple of that of the encoder, 14"),
        ({"patch_size": None}, "is 16, and must be a multiple"),
        ({"do_center_crop": True}, "do_center_crop"),
        ({"resample": 2}, "resample"),
        ({"size": {"height": 5}}, "no longest_edge"),
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "image_processor_type"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        settings_in(tmp_path, {**IMAGE_PROCESSOR, **changes})


SIDES = st.integers(1, 2000)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[int, LightOnSettings]:
    """By the number of pixels of which sides are multiples."""
    return {step: small(tmp_path_factory.mktemp("small"), step, 150) for step in (4, 8, 12)}


@given(height=SIDES, width=SIDES, step=st.sampled_from((4, 8, 12)))
@example(4, 9, 4)
@example(9, 8, 4)
@example(150, 1, 8)
def test_sizes_are_those_of_transformers(found: dict[int, LightOnSettings], height: int, width: int, step: int) -> None:
    settings = found[step]
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        return
    image = np.broadcast_to(np.uint8(0), (3, height, width))
    expected = get_resize_output_image_size(image, (150, 150), (step, step), "channels_first")
    # transformers has no row for an image that is narrower than a pixel after resizing.
    expected = tuple(max(length, step) for length in expected)
    num_tokens = expected[0] // 8 * (expected[1] // 8)
    if not num_tokens:
        with pytest.raises(InvalidRequestError, match="and a token needs 8 x 8; send a larger image"):
            settings.resized(height, width)
        return
    assert settings.resized(height, width) == expected
    assert settings.num_tokens(height, width) == num_tokens <= settings.max_tokens
    assert expected[0] * expected[1] <= settings.max_pixels


@pytest.mark.parametrize(("height", "width"), [(40, 61), (20, 90), (33, 60), (12, 9), (161, 161)])
@pytest.mark.parametrize("step", [4, 8])
def test_pixels_are_those_of_transformers(tmp_path: Path, height: int, width: int, step: int) -> None:
    image = noise(height, width)
    processor = PixtralImageProcessorPil(
        patch_size={"height": step, "width": step}, size={"longest_edge": 60}, do_rescale=False, do_normalize=False
    )
    (expected,) = processor([image], return_tensors="np")["pixel_values"]
    found = prepare(file_of(image), small(tmp_path, step))
    assert np.array_equal(found.pixels, expected.transpose(1, 2, 0))
    assert found.num_tokens == found.pixels.shape[0] // 8 * (found.pixels.shape[1] // 8)


def test_pixels_can_be_limited(tmp_path: Path) -> None:
    found = small(tmp_path)
    assert found.limited(10**6) == found
    assert found.resized(60, 43) == (60, 44)
    height, width = found.limited(8 * 8 * 10).resized(60, 43)
    assert height % 8 == width % 8 == 0 and 8 * 8 * 5 < height * width <= 8 * 8 * 10


# The form of ChatML, in which the published template writes messages.
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {{- '<|image_pad|>' if part['type'] == 'image' else part['text'] }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' }}
"""
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"]


def lighton_backend() -> Any:
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    return backend


TOKENIZER = Tokenizer(lighton_backend(), config={"bos_token": "<s>", "eos_token": "</s>"})
IMAGE_ID = TOKENIZER.encode("<|image_pad|>", add_special_tokens=False)[0]
# One whose rows and columns fill squares but for one patch, one that is scaled down, and one of whole squares.
PICTURES = [noise(27, 35), noise(90, 61), noise(16, 8)]


def test_prompts_are_those_of_transformers(tmp_path: Path) -> None:
    images = ImageReader.of(small(tmp_path), IMAGE_ID, "<|image_pad|>", id_of=TOKENIZER.id_of)
    template = ChatTemplate({"default": TEMPLATE}, TOKENIZER)
    encoder = PromptEncoder(TOKENIZER, template, max_model_len=900, images=images)
    parts = [{"type": "image_url", "image_url": {"url": address_of(file_of(one))}} for one in PICTURES]
    content = [parts[0], {"type": "text", "text": "a <|image_pad|>"}, *parts[1:]]
    tokens = encoder.place_chat([{"role": "user", "content": content}])

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=lighton_backend(),
        extra_special_tokens={
            "image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>", "image_end_token": "<|vision_end|>",
        },
    )  # fmt: skip
    processor = LightOnOcrProcessor(PixtralImageProcessorPil(**SMALL), tokenizer, patch_size=4)
    text = "<|im_start|>user\n<|image_pad|>a \0<|image_pad|><|image_pad|><|im_end|>\n<|im_start|>assistant\n"
    expected = list(processor(images=PICTURES, text=text)["input_ids"][0])
    # The words of the message stay text.
    begin = expected.index(TOKENIZER.encode("\0", add_special_tokens=False)[-1])
    behind = len(expected) - begin - 1
    assert tokens.token_ids[:begin] == expected[:begin] and tokens.token_ids[-behind:] == expected[-behind:]
    written = tokens.token_ids[begin:-behind]
    assert TOKENIZER.decode(written, skip_special_tokens=False) == "<|image_pad|>" and IMAGE_ID not in written
    sizes = []
    for one in tokens.images:
        (image,) = encoder.read_image(one, "messages")
        assert tokens.token_ids[image.start : image.end] == [IMAGE_ID] * image.num_tokens and image.row_length == 0
        sizes.append((image.height, image.width, image.num_tokens))
    assert sizes == [(28, 36, 3 * 4), (60, 40, 7 * 5), (16, 8, 2)]
