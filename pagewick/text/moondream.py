"""The prompts of Moondream 2, whose repository has no chat template: its code makes them of token ids.

The source is that code (https://github.com/vikhyat/moondream, moondream/torch/config.py and moondream.py): the first
token, an image, and a question between tokens that say what to do. It ends questions twice. A caption is a prompt of
its own, for which there is no question. Its vocabulary is that of moondream/starmie-v1, and not in its repository.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from pagewick.errors import ModelLoadError
from pagewick.text.control_tokens import CUT
from pagewick.text.tokenizer import Tokenizer

ARCHITECTURE: Final = "HfMoondream"
_PREFIX, _SUFFIX = [1, 15381, 2], [3]
_CAPTIONS: Final = {"short": [1, 32708, 2, 12492, 3], "normal": [1, 32708, 2, 6382, 3], "long": [1, 32708, 2, 4059, 3]}
_TEMPLATE: Final = """\
{%- set found = namespace(images=0, text='') %}
{%- if messages[0].role != 'user' or messages | length > 2 or messages[-1].role not in ('user', 'assistant') %}
    {{- raise_exception('this model answers one question: send one message, of the user; it reads no other roles') }}
{%- endif %}
{%- if messages | length == 2 and (add_generation_prompt or messages[1].role == 'user') %}
    {{- raise_exception('this model answers one question: send one message, of the user') }}
{%- endif %}
{%- if messages[0].content is string %}
    {%- set found.text = messages[0].content %}
{%- else %}
    {%- for part in messages[0].content or [] %}
        {%- if part.type == 'image' %}
            {%- set found.images = found.images + 1 %}
        {%- else %}
            {%- set found.text = found.text + ('\\n' if found.text else '') + part.text %}
        {%- endif %}
    {%- endfor %}
{%- endif %}
{%- if found.images > 1 %}
    {{- raise_exception('this model reads one image') }}
{%- endif %}
{{- FIRST }}
{%- if found.images %}
    {{- IMAGE }}
{%- endif %}
{%- if caption is defined or (found.images and not found.text | trim) %}
    {%- set captions = CAPTIONS %}
    {%- if not found.images or found.text | trim %}
        {{- raise_exception('a caption is made of an image alone: send one without a text, or leave out caption') }}
    {%- endif %}
    {%- if (caption or 'normal') not in captions %}
        {{- raise_exception('caption must be one of ' ~ captions | join(', ')) }}
    {%- endif %}
    {{- captions[caption or 'normal'] }}
{%- else %}
    {%- if not found.text | trim %}
        {{- raise_exception('the message needs a question, or an image') }}
    {%- endif %}
    {{- BEFORE + found.text + BEHIND }}
{%- endif %}
{%- if messages | length == 2 %}
    {{- messages[1].content if messages[1].content is string else messages[1].content | map(attribute='text') | join }}
{%- endif %}
"""


def moondream_template(config: Mapping[str, Any], tokenizer: Tokenizer) -> str | None:
    """Return the source of a chat template for a model with this config.json; None for any other model.

    Its variable `caption` is short, normal or long. config: was read by pagewick/models/moondream.py before. Raises
    ModelLoadError if the tokenizer is not the model's.
    """
    if (config.get("architectures") or [None])[0] != ARCHITECTURE:
        return None
    tokens = (config.get("config") or {}).get("tokenizer") or {}
    templates = tokens.get("templates") or {}
    query, captions = templates.get("query") or {}, templates.get("caption") or _CAPTIONS
    text_of = _Texts(tokenizer)
    end = text_of(query.get("suffix", _SUFFIX))
    texts = {
        "FIRST": text_of([tokens.get("bos_id", 0)], is_control=True),
        "IMAGE": text_of([tokens.get("size_id", 6)], is_control=True),
        "BEFORE": text_of(query.get("prefix", _PREFIX)) + CUT,
        "BEHIND": CUT + end + end,
        "CAPTIONS": {length: text_of(token_ids) for length, token_ids in captions.items()},
    }
    source = _TEMPLATE
    for name, text in texts.items():
        source = source.replace(f" {name} ", f" {json.dumps(text, ensure_ascii=False)} ")
    return source


class _Texts:
    """Returns the text of tokens, from which the tokenizer must make these tokens again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token_ids: Sequence[int], *, is_control: bool = False) -> str:
        """is_control: it is one token, which no ordinary text has."""
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        found = self._tokenizer.encode(text, add_special_tokens=False)
        if list(found) != list(token_ids) or (is_control and text not in self._tokenizer.added_tokens):
            raise ModelLoadError(
                f"the tokenizer does not belong to {ARCHITECTURE}: its tokens {list(token_ids)} are {text[:80]!r}\n"
                "  the model's repository has the tokenizer of older revisions, which are not supported; give "
                "--tokenizer moondream/starmie-v1"
            )
        return text
