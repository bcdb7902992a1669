"""The text stack of a model that reads images: a tokenizer with placeholders, a template and settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pagewick.async_llm import AsyncEngine
from pagewick.images.qwen_settings import QwenSettings
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.image_prompts import ImageReader
from pagewick.text.prompts import PromptEncoder
from pagewick.text.tokenizer import Tokenizer
from tests.fake_engine import FakeClient
from tests.images.pictures import address_of, file_of, noise
from tests.tiny_text import byte_level_backend

PAD = "<|image_pad|>"
# In the form of Qwen's templates.
TEMPLATE = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- else %}
        {%- for part in message.content %}
            {%- if part.type == 'image' or 'image_url' in part %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in part %}
                {{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# In the form of Qwen3.5's templates, which join the parts in a macro.
MACRO_TEMPLATE = """\
{%- set count = namespace(images=0) %}
{%- macro joined(content, counts, is_system=false) %}
    {%- if content is string %}
        {{- content }}
    {%- elif content is iterable and content is not mapping %}
        {%- for item in content %}
            {%- if 'image' in item or 'image_url' in item or item.type == 'image' %}
                {%- if is_system %}
                    {{- raise_exception('no images in system messages') }}
                {%- endif %}
                {%- if counts %}
                    {%- set count.images = count.images + 1 %}
                {%- endif %}
                {%- if add_vision_id %}
                    {{- 'Picture ' ~ count.images ~ ': ' }}
                {%- endif %}
                {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- elif 'text' in item %}
                {{- item.text }}
            {%- endif %}
        {%- endfor %}
    {%- elif content is none or content is undefined %}
        {{- '' }}
    {%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {%- set content = joined(message.content, true, message.role == 'system') | trim %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>' + call.function.name }}
        {%- for name, value in call.function.arguments | items %}
            {{- '<parameter=' + name + '>' + value | tojson }}
        {%- endfor %}
        {{- '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
# 6 x 6 pixels for each token.
SETTINGS = QwenSettings(3, 2, 2, 36, 36 * 200, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 1 / 255)
ENTRIES = {
    "patch_size": 3,
    "merge_size": 2,
    "min_pixels": 36,
    "max_pixels": 36 * 200,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def reading_tokenizer() -> Tokenizer:
    backend = byte_level_backend()
    backend.add_special_tokens(["<|vision_start|>", PAD, "<|vision_end|>"])
    return Tokenizer(backend, config={"bos_token": "<s>", "eos_token": "</s>"})


TOKENIZER = reading_tokenizer()
PAD_ID = TOKENIZER.encode(PAD, add_special_tokens=False)[0]
# 2 x 3 tokens, 1 token, and 5 x 1 tokens.
FILES = [file_of(noise(12, 18)), file_of(noise(6, 6)), file_of(noise(30, 6), "JPEG")]
NUM_TOKENS = [6, 1, 5]
SIZES = [(12, 18), (6, 6), (30, 6)]


def reader() -> ImageReader:
    return ImageReader(SETTINGS, PAD_ID, PAD)


def reading_encoder(source: str = TEMPLATE, *, max_model_len: int = 10_000, reads: bool = True) -> PromptEncoder:
    template = ChatTemplate({"default": source}, TOKENIZER)
    images = reader() if reads else None
    return PromptEncoder(TOKENIZER, template, max_model_len=max_model_len, images=images)


def reading_engine(client: FakeClient, source: str = TEMPLATE) -> AsyncEngine:
    """Return an AsyncEngine over a fake client for a model that reads images."""
    client.info.vocab_size = TOKENIZER.vocab_size
    client.info.image_token_id, client.info.image_side = PAD_ID, SETTINGS.token_side
    return AsyncEngine(client, TOKENIZER, ChatTemplate({"default": source}, TOKENIZER), images=reader())


def image_part(number: int) -> dict[str, Any]:
    """Return the part of a message with one of FILES."""
    return {"type": "image_url", "image_url": {"url": address_of(FILES[number])}}


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": [text_part(one) if isinstance(one, str) else one for one in parts]}


def expanded(text: str, *numbers: int) -> list[int]:
    """Return the tokens of a text in which each placeholder is written as often as one of FILES has tokens."""
    for number in numbers:
        text = text.replace(PAD, "\0" * NUM_TOKENS[number], 1)
    return TOKENIZER.encode(text.replace("\0", PAD), add_special_tokens=False)


def write_settings(directory: Path) -> None:
    import json

    (directory / "preprocessor_config.json").write_text(json.dumps(ENTRIES), encoding="utf-8")
