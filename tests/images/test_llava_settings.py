"""Settings of LLaVA 1.5 are read from its files, and sizes, pixels and prompts are those of its processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from pagewick.errors import ConfigError, InvalidRequestError, ModelLoadError
from pagewick.images.llava_settings import LlavaSettings
from pagewick.images.settings import ImageSettings
from pagewick.images.settings_files import read_settings, settings_of
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import file_of, noise, prepare
from tests.images.placing import Placing
from tests.images.test_image_settings import CLIP_MEAN, CLIP_STD, write
from tests.tiny_text import byte_level_backend

# In the form of the files that are published.
ENTRIES: dict[str, Any] = {
    "crop_size": {"height": 336, "width": 336}, "do_center_crop": True, "do_convert_rgb": True, "do_normalize": True,
    "do_rescale": True, "do_resize": True, "image_mean": CLIP_MEAN, "image_processor_type": "CLIPImageProcessor",
    "image_std": CLIP_STD, "processor_class": "LlavaProcessor", "resample": 3, "rescale_factor": 0.00392156862745098,
    "size": {"shortest_edge": 336},
}  # fmt: skip
PROCESSOR = {
    "image_token": "<image>", "num_additional_image_tokens": 1, "patch_size": 14, "processor_class": "LlavaProcessor",
    "vision_feature_select_strategy": "default",
}  # fmt: skip
CONFIG: dict[str, Any] = {"vision_config": {"image_size": 336, "model_type": "clip_vision_model", "patch_size": 14}}
SMALL = {**ENTRIES, "crop_size": {"height": 14, "width": 14}, "size": {"shortest_edge": 16}}
SMALL_CONFIG: dict[str, Any] = {"vision_config": {"image_size": 14, "model_type": "clip_vision_model", "patch_size": 4}}
STRETCHED = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 14, "width": 14}}
SIGLIP_CONFIG = {"vision_config": {**SMALL_CONFIG["vision_config"], "model_type": "siglip_vision_model"}}


def small() -> ImageSettings:
    return settings_of(SMALL, "file", SMALL_CONFIG)


@pytest.mark.parametrize("kind", ["CLIP", "Llava"])
def test_settings_are_those_of_transformers(tmp_path: Path, kind: str) -> None:
    write(tmp_path, CONFIG, "config.json")
    write(tmp_path, PROCESSOR, "processor_config.json")
    changed = {"rescale_factor": 0.25, "resample": 2, "image_processor_type": f"{kind}ImageProcessorFast"}
    for entries in (ENTRIES, {**ENTRIES, **changed}, {**ENTRIES, "size": 336, "crop_size": 336}):
        found, wanted = read_settings(write(tmp_path, entries)), CLIPImageProcessorPil.from_pretrained(tmp_path)
        assert isinstance(found, LlavaSettings)
        assert (found.mean, found.std) == (tuple(wanted.image_mean), tuple(wanted.image_std))
        assert (found.rescale_factor, found.resample) == (wanted.rescale_factor, wanted.resample)
        assert found.shortest_edge == wanted.size["shortest_edge"] == found.cut == wanted.crop_size["height"] == 336
        assert (found.patch_size, found.num_tokens(100, 500), found.max_tokens) == (14, 576, 576)
    usual, wanted = settings_of({"image_processor_type": "CLIPImageProcessor"}, "file"), CLIPImageProcessorPil()
    assert isinstance(usual, LlavaSettings)
    assert (usual.shortest_edge, usual.cut, usual.patch_size) == (224, wanted.crop_size["width"], 32)
    assert (usual.mean, usual.resample) == (tuple(wanted.image_mean), wanted.resample)
    usual, wanted = settings_of(STRETCHED, "file", SIGLIP_CONFIG), SiglipImageProcessorPil()
    assert isinstance(usual, LlavaSettings) and (usual.shortest_edge, usual.cut) == (None, 14)
    assert (usual.mean, usual.std, usual.resample) == (
        tuple(wanted.image_mean), tuple(wanted.image_std), wanted.resample,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("entries", "processor", "reason"),
    [
        ({"do_resize": False}, {}, "do_resize"),
        ({"do_pad": True}, {}, "do_pad in .* is 'True'; Pagewick knows False only"),
        ({"do_center_crop": False}, {}, "do_center_crop"),
        ({"resample": 9}, {}, "resample"),
        ({"size": {"shortest_edge": 300}}, {}, "size in .* is 300, and crop_size 336"),
        ({"size": {"longest_edge": 300}}, {}, "size.longest_edge in .* is not known"),
        ({"size": {"height": 336, "width": 300}}, {}, "336 x 300; Pagewick knows squares only"),
        ({"size": {"height": 330, "width": 330}}, {}, r"crop_size in .* is not that of size \(330\)"),
        ({"crop_size": 224}, {}, "makes images of 224 x 224 pixels, and vision_config.image_size .* is 336"),
        ({}, {"patch_size": 16}, "patch_size in .* is '16'; Pagewick knows 14 only"),
        ({}, {"num_additional_image_tokens": 0}, "num_additional_image_tokens in .* is '0'; Pagewick knows 1 only"),
    ],
)
def test_settings_that_cannot_be_honoured_are_refused(
    entries: dict[str, Any], processor: dict[str, Any], reason: str
) -> None:
    settings_of(ENTRIES, "file", CONFIG, PROCESSOR)
    with pytest.raises(ModelLoadError, match=reason):
        settings_of({**ENTRIES, **entries}, "preprocessor_config.json", CONFIG, {**PROCESSOR, **processor})


SIZES = [(40, 61), (90, 9), (1, 1), (16, 16), (5, 200), (14, 15), (300, 301), (21, 17)]


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pixels_are_those_of_transformers(height: int, width: int) -> None:
    image = noise(height, width)
    plain = {"do_rescale": False, "do_normalize": False}
    for settings, processor in (
        (small(), CLIPImageProcessorPil(**{**SMALL, **plain})),
        (settings_of(STRETCHED, "file", SIGLIP_CONFIG), SiglipImageProcessorPil(**{**STRETCHED, **plain})),
    ):
        (expected,) = processor([image], return_tensors="np")["pixel_values"]
        found = prepare(file_of(image), settings)
        # The model sees 3 x 3 patches of 14 x 14 pixels.
        assert np.array_equal(found.pixels, expected.transpose(1, 2, 0)[:12, :12]) and found.num_tokens == 9


def test_a_limit_of_pixels() -> None:
    assert small().limited(144) == small()
    with pytest.raises(ConfigError, match="must be at least 144, because the model reads every image as 12 x 12"):
        small().limited(143)


def test_an_image_may_not_become_too_large() -> None:
    """Its shorter side is scaled up before a square is cut."""
    config = {"vision_config": {**CONFIG["vision_config"], "image_size": 1008}}
    large = settings_of({**ENTRIES, "crop_size": 1008, "size": {"shortest_edge": 1008}}, "file", config)
    assert large.num_tokens(30, 10) == 72**2
    with pytest.raises(InvalidRequestError, match="scales its 100 x 1 pixels to 100800 x 1008"):
        large.num_tokens(1, 100)
    with pytest.raises(InvalidRequestError, match="at most 200 times its shorter side"):
        small().num_tokens(1, 201)


# In the form of the template that is published.
TEMPLATE = """\
{%- for message in messages %}
    {%- if message['role'] == 'assistant' %}
        {{- 'ASSISTANT: ' + message['content'] + ' ' }}
    {%- else %}
        {{- 'USER: ' }}
        {%- if message['content'] is string %}
            {{- message['content'] }}
        {%- else %}
            {%- for part in message['content'] if part['type'] == 'image' %}
                {{- '<image>\\n' }}
            {%- endfor %}
            {%- for part in message['content'] if part['type'] == 'text' %}
                {{- part['text'] + ' ' }}
            {%- endfor %}
        {%- endif %}
    {%- endif %}
{%- endfor %}
{{- 'ASSISTANT:' }}
"""


def llava_backend() -> Backend:
    backend = byte_level_backend()
    backend.add_special_tokens(["<image>"])
    return backend


TOKENIZER = Tokenizer(llava_backend(), config={"bos_token": "<s>", "eos_token": "</s>"})
IMAGE_ID = TOKENIZER.encode("<image>", add_special_tokens=False)[0]
PICTURES = [noise(27, 35), noise(90, 61), noise(16, 3)]
PLACING = Placing(TOKENIZER, TEMPLATE, "<image>", PICTURES)


def test_prompts_are_those_of_transformers() -> None:
    tokens = PLACING.prompts(small()).place_chat([PLACING.user(0, "a", 1, 2, "b")])
    processor = LlavaProcessor(
        CLIPImageProcessorPil(**SMALL), PreTrainedTokenizerFast(tokenizer_object=llava_backend()),
        patch_size=4, vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    text = f"USER: {'<image>' + chr(10)}{'<image>' + chr(10)}{'<image>' + chr(10)}a b ASSISTANT:"
    assert tokens.token_ids == processor(images=PICTURES, text=text)["input_ids"][0]
    assert [one.num_tokens for one in tokens.images] == [9, 9, 9]
