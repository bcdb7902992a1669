"""Settings of PaddleOCR-VL are read from its files, and sizes, pixels and prompts are those of its processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import (
    PaddleOCRVLImageProcessorPil,
    smart_resize,
)
from transformers.models.paddleocr_vl.processing_paddleocr_vl import PaddleOCRVLProcessor

from pagewick.errors import ModelLoadError
from pagewick.images.paddle_settings import PaddleSettings
from pagewick.images.qwen_settings import QwenSettings
from pagewick.images.settings_files import read_settings, settings_of
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import file_of, noise, prepare
from tests.images.placing import Placing
from tests.images.test_image_settings import write
from tests.tiny_text import byte_level_backend

HALF = [0.5, 0.5, 0.5]
# In the form of the files that were published first, and later.
FIRST: dict[str, Any] = {
    "do_convert_rgb": True, "do_normalize": True, "do_rescale": True, "do_resize": True, "image_mean": HALF,
    "image_processor_type": "SiglipImageProcessor", "image_std": HALF, "max_pixels": 2822400, "merge_size": 2,
    "min_pixels": 147384, "patch_size": 14, "processor_class": "PaddleOCRVLProcessor", "resample": 3,
    "rescale_factor": 0.00392156862745098, "size": {"max_pixels": 2822400, "min_pixels": 147384},
    "temporal_patch_size": 1,
}  # fmt: skip
LATER: dict[str, Any] = {
    "image_mean": HALF, "image_processor_type": "PaddleOCRVLImageProcessor", "image_std": HALF, "merge_size": 2,
    "patch_size": 14, "size": {"shortest_edge": 112896, "longest_edge": 1003520}, "temporal_patch_size": 1,
}  # fmt: skip
CONFIG = {"architectures": ["PaddleOCRVLForConditionalGeneration"]}
SMALL: dict[str, Any] = {
    "image_processor_type": "PaddleOCRVLImageProcessor", "patch_size": 4,
    "size": {"shortest_edge": 6 * 8**2, "longest_edge": 40 * 8**2},
}  # fmt: skip


def test_settings_are_those_of_transformers(tmp_path: Path) -> None:
    write(tmp_path, CONFIG, "config.json")
    for entries in (FIRST, LATER, {"image_processor_type": "PaddleOCRVLImageProcessorFast"}):
        found, wanted = read_settings(write(tmp_path, entries)), PaddleOCRVLImageProcessorPil.from_pretrained(tmp_path)
        assert isinstance(found, PaddleSettings)
        assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
        assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
        assert (found.patch_size, found.merge_size) == (wanted.patch_size, wanted.merge_size)
        assert found.temporal_patch_size == wanted.temporal_patch_size == 1
        assert (found.min_pixels, found.max_pixels) == (wanted.size["shortest_edge"], wanted.size["longest_edge"])
    assert isinstance(settings_of(LATER, "file"), PaddleSettings)
    qwen = {"image_processor_type": "Qwen2VLImageProcessor"}
    assert type(settings_of(qwen, "file", {"architectures": ["Qwen2VLForConditionalGeneration"]})) is QwenSettings


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"do_resize": False}, "do_resize"),
        ({"resample": 2}, "resample"),
        ({"temporal_patch_size": 2}, "temporal_patch_size in .* is '2'; Pagewick knows 1 only"),
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "image_processor_type"),
        ({"size": {"longest_edge": 100}}, "at least 147456 and at most 100 pixels"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        settings_of({**LATER, **changes}, "preprocessor_config.json", CONFIG)


side = st.one_of(st.integers(1, 100), st.integers(100, 6000))


@given(side, side)
@example(1, 200)
@example(27, 28)
@example(9, 1790)
@example(5000, 5000)
def test_sizes_are_those_of_transformers(height: int, width: int) -> None:
    found = settings_of(LATER, "file")
    try:
        wanted = smart_resize(height, width, 28, 112896, 1003520)
    except ValueError:
        return
    if max(height, width) > 200 * min(height, width):
        # Their limit of shapes is ours but for images that are scaled up and rounded before.
        return
    assert found.resized(height, width) == wanted
    assert found.num_tokens(height, width) == wanted[0] * wanted[1] // 28**2


@pytest.mark.parametrize(("height", "width"), [(40, 61), (90, 9), (1, 1), (5, 200), (3, 7), (300, 301)])
def test_pixels_are_those_of_transformers(height: int, width: int) -> None:
    image, settings = noise(height, width), settings_of(SMALL, "file")
    processor = PaddleOCRVLImageProcessorPil(**{**SMALL, "do_rescale": False, "do_normalize": False})
    expected = processor([image], return_tensors="np")
    _, rows, columns = expected["image_grid_thw"][0]
    # Back from patches row by row, each [colour, y, x].
    patches = expected["pixel_values"].reshape(rows, columns, 3, 4, 4)
    found = prepare(file_of(image), settings)
    assert np.array_equal(found.pixels, patches.transpose(0, 3, 1, 4, 2).reshape(rows * 4, columns * 4, 3))
    assert found.num_tokens == rows * columns // 4


SPECIAL = ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"]
# In the form of the template that is published.
TEMPLATE = """\
{{- '<s>' -}}
{%- for message in messages %}
    {%- if message['role'] == 'user' %}
        {{- 'User: ' }}
        {%- for part in message['content'] if part['type'] == 'image' %}
            {{- '<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' }}
        {%- endfor %}
        {%- for part in message['content'] if part['type'] == 'text' %}
            {{- part['text'] }}
        {%- endfor %}
        {{- '\\n' }}
    {%- endif %}
{%- endfor %}
{{- 'Assistant:\\n' }}
"""


def paddle_backend() -> Any:
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    return backend


# One that is rounded, one that is scaled down, and one that is scaled up.
PICTURES = [noise(27, 35), noise(90, 61), noise(16, 3)]
PLACING = Placing(
    Tokenizer(paddle_backend(), config={"bos_token": "<s>", "eos_token": "</s>"}), TEMPLATE, SPECIAL[0], PICTURES
)


def test_prompts_are_those_of_transformers() -> None:
    tokens = PLACING.prompts(settings_of(SMALL, "the test")).place_chat([PLACING.user(0, "a", 1, 2, "b")])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=paddle_backend(), extra_special_tokens={"image_token": SPECIAL[0]}
    )
    processor = PaddleOCRVLProcessor(PaddleOCRVLImageProcessorPil(**SMALL), tokenizer)
    text = f"<s>User: {'<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>' * 3}ab\nAssistant:\n"
    assert tokens.token_ids == processor(images=PICTURES, text=text)["input_ids"][0]
    assert [one.num_tokens for one in tokens.images] == [12, 35, 12]
