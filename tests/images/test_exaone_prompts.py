"""Prompts of EXAONE 4.5 with images have the tokens that its processor gives them."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerFast
from transformers.models.exaone4_5.processing_exaone4_5 import Exaone4_5_Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from pagewick.images.settings_files import settings_of
from pagewick.text.tokenizer import Tokenizer
from tests.images.pictures import noise
from tests.images.placing import Placing
from tests.tiny_text import byte_level_backend

# Tokens of 8 x 8 pixels, at least 6 of them and at most 40.
SMALL: dict[str, Any] = {
    "patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 6 * 8**2, "longest_edge": 40 * 8**2},
}  # fmt: skip
SPECIAL = ["<|image_pad|>", "<|video_pad|>", "<vision>", "</vision>"]
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|' + message['role'] + '|>\\n' }}
    {%- for part in message['content'] %}
        {{- '<vision><|image_pad|></vision>' if part['type'] == 'image' else part['text'] }}
    {%- endfor %}
{%- endfor %}
{{- '<|assistant|>\\n' }}
"""


def exaone_backend() -> Any:
    backend = byte_level_backend()
    backend.add_special_tokens(SPECIAL)
    return backend


# One that is rounded, one that is scaled down, and one that is scaled up.
PICTURES = [noise(27, 35), noise(90, 61), noise(16, 8)]
PLACING = Placing(
    Tokenizer(exaone_backend(), config={"bos_token": "<s>", "eos_token": "</s>"}), TEMPLATE, SPECIAL[0], PICTURES
)


class ProcessorOfImages(Exaone4_5_Processor):  # type: ignore[misc]
    def check_argument_for_proper_class(self, name: str, given: Any) -> None:
        """Leave out the check of parts: it looks for processors of videos, which need torchvision."""


def test_prompts_are_those_of_transformers() -> None:
    settings = settings_of({**SMALL, "image_processor_type": "Exaone4_5_ImageProcessor"}, "the test")
    tokens = PLACING.prompts(settings).place_chat([PLACING.user(0, "a", 1, 2, "b")])
    processor = ProcessorOfImages(
        Qwen2VLImageProcessorPil(**SMALL), PreTrainedTokenizerFast(tokenizer_object=exaone_backend())
    )
    image = "<vision><|image_pad|></vision>"
    text = f"<|user|>\n{image}a{image}{image}b<|assistant|>\n"
    assert tokens.token_ids == processor(images=PICTURES, text=text)["input_ids"][0]
    assert [one.num_tokens for one in tokens.images] == [12, 35, 8]
