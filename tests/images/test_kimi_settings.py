"""Kimi K2.5's settings are read from its files, and sizes, pixels and prompts are those of transformers' processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast
from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images.kimi_settings import KimiSettings
from pagewick.images.settings import MAX_ASPECT_RATIO
from pagewick.images.settings_files import read_settings, settings_of
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import file_of, noise, prepare
from tests.images.placing import Placing
from tests.images.test_image_settings import write
from tests.images.torch_processors import kimi_k25_processor, navit_resize
from tests.tiny_text import byte_level_backend

# In the form of the files that are published: without the name of a processor.
MEDIA: dict[str, Any] = {
    "in_patch_limit": 16384, "patch_size": 14, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    "merge_kernel_size": 2, "fixed_output_tokens": None, "patch_limit_on_one_side": 512,
    "in_patch_limit_each_frame": 4096, "in_patch_limit_video": None, "sample_fps": 2.0,
    "max_num_frames_each_video": None, "temporal_merge_kernel_size": 4, "timestamp_mode": "hh:mm:ss.fff",
    "config_type": "media_proc.processors.moonvit.MoonViTMediaProcessorConfig",
}  # fmt: skip
# In the form of transformers' processor.
ENTRIES: dict[str, Any] = {"image_processor_type": "Kimi_K25ImageProcessor"}
# Tokens of 8 x 8 pixels, and 22 patches of 4 x 4 at most, in 9 rows and columns.
SMALL: dict[str, Any] = {
    **ENTRIES, "patch_size": 4, "max_patches": 22, "size": {"max_height": 9, "max_width": 9},
    "image_mean": [0.5, 0.4, 0.3],
}  # fmt: skip


def of(entries: dict[str, Any]) -> KimiSettings:
    found = settings_of(entries, "file")
    assert isinstance(found, KimiSettings)
    return found


@pytest.mark.parametrize("changes", [{}, SMALL, {"merge_size": 3, "image_std": [0.2, 0.3, 0.4]}])
def test_settings_are_those_of_transformers(changes: dict[str, Any]) -> None:
    found, wanted = of({**ENTRIES, **changes}), kimi_k25_processor(**changes)
    assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
    assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
    assert (found.patch_size, found.merge_size) == (wanted.patch_size, wanted.merge_size)
    assert (found.max_pixels, found.max_side) == (wanted.max_patches * wanted.patch_size**2, wanted.size["max_height"])


def test_published_files(tmp_path: Path) -> None:
    """Their values are transformers' own; others are honoured, which transformers does not read."""
    found = read_settings(write(tmp_path, {"auto_map": {}, "media_proc_cfg": MEDIA}))
    assert found == of(ENTRIES) == of({"media_proc_cfg": {}})
    assert (found.max_tokens, found.largest_picture, found.token_side) == (4464, 4464 * 28**2, 28)
    changes = {"in_patch_limit": 22, "patch_limit_on_one_side": 9, "patch_size": 4, "image_mean": [0.5, 0.4, 0.3]}
    assert of({"media_proc_cfg": {**MEDIA, **changes}}) == of(SMALL)
    assert of({"media_proc_cfg": {**MEDIA, "merge_kernel_size": [3, 3]}}).merge_size == 3


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"media_proc_cfg": {**MEDIA, "fixed_output_tokens": 64}}, "fixed_output_tokens in media_proc_cfg in file"),
        ({"media_proc_cfg": {**MEDIA, "merge_kernel_size": [2, 4]}}, "merge_kernel_size .* is 2 x 4"),
        ({"media_proc_cfg": {**MEDIA, "in_patch_limit": 0}}, "in_patch_limit in .* must be a whole number from 1"),
        # The largest picture is found row by row, which takes as long as the rows are many.
        (
            {"media_proc_cfg": {**MEDIA, "patch_limit_on_one_side": 2**31 - 1}},
            "patch_limit_on_one_side in media_proc_cfg in file is 2147483647; Pagewick knows 1 to 4096",
        ),
        ({**SMALL, "size": {"max_height": 4097, "max_width": 4097}}, "max_height in size in file is 4097; Pagewick"),
        ({"media_proc_cfg": 5}, "media_proc_cfg in file is not an object"),
        ({**SMALL, "size": {"max_height": 9, "max_width": 8}}, "size in file must have max_height and max_width, the"),
        ({**SMALL, "size": {"height": 9, "width": 9}}, "size in file must have max_height and max_width"),
        ({**SMALL, "do_resize": False}, "do_resize"),
        ({**SMALL, "resample": 2}, "resample"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(entries: dict[str, Any], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        settings_of(entries, "file")


PUBLISHED, LITTLE = of(ENTRIES), of(SMALL)
side = st.one_of(st.integers(1, 100), st.integers(100, 9000))


@given(side, side, st.sampled_from((PUBLISHED, LITTLE)))
@example(1792, 1792, PUBLISHED)
@example(1793, 1805, PUBLISHED)
@example(27, 5400, PUBLISHED)
@example(40, 7999, PUBLISHED)
@example(1, 150, LITTLE)
def test_sizes_are_those_of_transformers(height: int, width: int, settings: KimiSettings) -> None:
    if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
        return
    max_patches = settings.max_pixels // settings.patch_size**2
    wanted = navit_resize(height, width, settings.patch_size, 2, max_patches, settings.max_side)
    (view,) = settings.views(height, width)
    assert (*view.sizes, tuple(view.box)) == (wanted[0], (0, 0, *wanted[1]))
    assert settings.resized(height, width) == wanted[1]
    num_tokens = wanted[1][0] * wanted[1][1] // settings.token_side**2
    assert settings.num_tokens(height, width) == num_tokens <= settings.max_tokens


def test_the_largest_number_of_tokens_is_nearly_reached() -> None:
    assert LITTLE.num_tokens(35, 23) == 12 == LITTLE.max_tokens
    assert PUBLISHED.num_tokens(503, 7168) == 4410 < PUBLISHED.max_tokens


@pytest.mark.parametrize(("tokens", "square"), [(11, 1), (40, 4), (300, 121), (4000, 3721)])
def test_a_limit_of_pixels(tokens: int, square: int) -> None:
    """Narrow pictures have the most black for their patches, and stay within it, too."""
    found = PUBLISHED.limited(28**2 * tokens)
    sizes = [(one, other) for one in (27, 500, 3000) for other in (27, 450, 2600, 5400)]
    most = max(found.num_tokens(*size) for size in sizes)
    assert square == found.num_tokens(3000, 3000) <= most <= found.max_tokens <= tokens


def test_a_limit_that_no_number_of_patches_keeps() -> None:
    assert PUBLISHED.limited(4464 * 28**2) is PUBLISHED
    with pytest.raises(ConfigError, match=f"must be at least {28**2 * 11} with this model; got {28**2 * 11 - 1}"):
        PUBLISHED.limited(28**2 * 11 - 1)


@pytest.mark.parametrize(("height", "width"), [(27, 35), (90, 61), (16, 8), (1, 1), (3, 300), (5, 33), (17, 16)])
def test_pixels_are_those_of_transformers(height: int, width: int) -> None:
    """With black right and below, which is made before red, green and blue are normalised."""
    image = noise(height, width)
    processor = kimi_k25_processor(**{**SMALL, "do_rescale": False, "do_normalize": False})
    expected = processor([image], return_tensors="np")
    _, rows, columns = expected["image_grid_thw"][0]
    pixels = expected["pixel_values"].reshape(rows, columns, 3, 4, 4).transpose(0, 3, 1, 4, 2)
    found = prepare(file_of(image), LITTLE)
    assert np.array_equal(found.pixels, pixels.reshape(4 * rows, 4 * columns, 3))
    assert found.num_tokens == rows * columns // 4


SPECIAL = [
    "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "<|im_user|>", "<|im_assistant|>",
    "<|im_middle|>", "<|im_end|>",
]  # fmt: skip
# The form in which the published template writes messages.
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' }}
    {%- if message['content'] is string %}
        {{- message['content'] }}
    {%- else %}
        {%- for part in message['content'] %}
            {%- if part['type'] == 'image' or part['type'] == 'image_url' %}
                {{- '<|media_begin|>image<|media_content|><|media_pad|><|media_end|>' }}
            {%- else %}
                {{- part['text'] }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>' }}
{%- endfor %}
{{- '<|im_assistant|>assistant<|im_middle|>' }}
"""


def kimi_backend() -> Any:
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    return backend


TOKENIZER = Tokenizer(kimi_backend(), config={"bos_token": "<s>", "eos_token": "</s>"})
# One that is filled up, one that is scaled down and filled up, and one of whole tokens.
PICTURES = [noise(15, 21), noise(90, 61), noise(16, 8)]
PLACING = Placing(TOKENIZER, TEMPLATE, "<|media_pad|>", PICTURES)
IMAGE_ID = PLACING.image_id


class ProcessorOfImages(Kimi_K25Processor):  # type: ignore[misc]
    def check_argument_for_proper_class(self, name: str, given: Any) -> None:
        """Leave out the check of parts: it looks for processors of videos, which need torchvision."""


def test_prompts_are_those_of_transformers() -> None:
    tokens = PLACING.prompts(LITTLE).place_chat([PLACING.user(0, "a <|media_pad|>", 1, 2)])
    image = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>"
    text = f"<|im_user|>user<|im_middle|>{image}a \0{image}{image}<|im_end|><|im_assistant|>assistant<|im_middle|>"
    processor = ProcessorOfImages(kimi_k25_processor(**SMALL), PreTrainedTokenizerFast(tokenizer_object=kimi_backend()))
    expected = list(processor(images=PICTURES, text=text)["input_ids"][0])
    # The words of the message stay text.
    begin = expected.index(PLACING.encode("\0")[-1])
    behind = len(expected) - begin - 1
    assert tokens.token_ids[:begin] == expected[:begin] and tokens.token_ids[-behind:] == expected[-behind:]
    written = tokens.token_ids[begin:-behind]
    assert TOKENIZER.decode(written, skip_special_tokens=False) == "<|media_pad|>" and IMAGE_ID not in written
    assert [one.num_tokens for one in tokens.images] == [2 * 3, 3 * 2, 2]


def test_a_text_and_token_ids_have_one_place_for_an_image() -> None:
    expected = [*PLACING.encode("a"), *[IMAGE_ID] * 6, *PLACING.encode("b")]
    PLACING.assert_one_place(LITTLE, "a<|media_pad|>b", 0, expected)
