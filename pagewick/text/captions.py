"""Prompts of BLIP, which writes captions of images: its tokenizer's files know neither these nor their first token.

A prompt is the token that stands for the image, then the one that begins a caption, and then the beginning of the
caption, if the user gives one. transformers' processor puts [CLS] and [SEP] around that beginning; generate replaces
the first of these by the token that begins a caption, and drops the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers.processors import TemplateProcessing

from pagewick.errors import ModelLoadError

_ARCHITECTURES: Final = ["BlipForConditionalGeneration"]
# The name that the authors give to the token that begins a caption, which no file of theirs has.
_BEGIN: Final = "[DEC]"
# Defaults of transformers' class.
_IDS: Final = {"bos_token_id": 30522, "pad_token_id": 0}
_TEMPLATE: Final = """\
{%- if messages | length != 1 or messages[0]['role'] != 'user' -%}
{{- raise_exception('this model writes a caption of an image, and reads one message of the user: an image, and perhaps \
the beginning of its caption') -}}
{%- endif -%}
{%- for part in messages[0]['content'] if part['type'] == 'image' -%}{{- IMAGE -}}{%- endfor -%}
{{- BEGIN -}}
{%- for part in messages[0]['content'] if part['type'] == 'text' -%}{{- ' ' + part['text'] -}}{%- endfor -%}
"""


def writes_captions(config: Mapping[str, Any]) -> bool:
    """Return whether a config.json is that of such a model."""
    return config.get("architectures") == _ARCHITECTURES


def expect_captions(backend: tokenizers.Tokenizer, settings: dict[str, Any], config: Mapping[str, Any]) -> None:
    """Let a tokenizer know the token that begins a caption, and put it and the image's ahead of texts.

    settings: tokenizer_config.json, to which that token and a chat template are added. config: config.json. Raises
    ModelLoadError.
    """
    image, begin = _ids(config)
    if backend.id_to_token(image) is None:
        raise ModelLoadError(f"the tokenizer has no token {image}, pad_token_id in config.json; download both again")
    listed = settings.get("added_tokens_decoder") or {}
    if (name := backend.id_to_token(begin)) is None:
        added = listed.get(str(begin)) or {"content": _BEGIN, "special": True}
        settings["added_tokens_decoder"], name = {**listed, str(begin): added}, added["content"]
    tokens = [(backend.id_to_token(image), image), (name, begin)]
    ahead = [text for text, _ in tokens]
    backend.post_processor = TemplateProcessing(single=[*ahead, "$A"], special_tokens=tokens)
    given = "".join(f"{{%- set {use} = {text!r} -%}}" for use, text in zip(("IMAGE", "BEGIN"), ahead, strict=True))
    settings.setdefault("chat_template", given + _TEMPLATE)


def _ids(config: Mapping[str, Any]) -> tuple[int, int]:
    """Return the token of images and the one that begins a caption; models/blip.py has checked them."""
    given = config.get("text_config")
    text = {**_IDS, **{name: value for name, value in (given or {}).items() if value is not None}}
    return text["pad_token_id"], text["bos_token_id"]
