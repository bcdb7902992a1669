"""The tokenizer of the demo model: a byte-level BPE with Qwen's split pattern and special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from training.corpus.document import NO_THINKING, TOOLS_FOOTER, TOOLS_HEADER

END_OF_TEXT = "<|endoftext|>"
END_OF_TURN = "<|im_end|>"
CONTROL_TOKENS = (END_OF_TEXT, "<|im_start|>", END_OF_TURN)
"""Never shown to a user."""
MARKER_TOKENS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|fim_prefix|>",
    "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
"""One token each, but ordinary text to a decoder: parsers must see them."""

# Words with one leading character, single digits, runs of punctuation, line ends, other space (Qwen2's pattern).
_SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _jinja_string(text: str) -> str:
    return json.dumps(text)


CHAT_TEMPLATE = (
    """{%- set has_system = messages[0].role == 'system' -%}
{%- if tools -%}
    {{- '<|im_start|>system\\n' -}}
    {%- if has_system -%}{{- messages[0].content + '\\n\\n' -}}{%- endif -%}
    {{- """
    + _jinja_string(TOOLS_HEADER)
    + """ -}}
    {%- for tool in tools -%}{{- '\\n' + (tool | tojson) -}}{%- endfor -%}
    {{- """
    + _jinja_string(TOOLS_FOOTER)
    + """ + '<|im_end|>\\n' -}}
{%- elif has_system -%}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' -}}
{%- endif -%}
{%- set state = namespace(last_query=-1) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set state.last_query = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
    {%- elif message.role == 'assistant' -%}
        {%- set reasoning = message.reasoning_content if message.reasoning_content is string else '' -%}
        {%- if not reasoning and '</think>' in content -%}
            {%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
        {%- endif -%}
        {{- '<|im_start|>assistant\\n' -}}
        {%- if reasoning and loop.index0 > state.last_query -%}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' -}}
        {%- endif -%}
        {{- content -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function or call -%}
            {%- if content or not loop.first -%}{{- '\\n' -}}{%- endif -%}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' -}}
            {{- function.arguments if function.arguments is string else function.arguments | tojson -}}
            {{- '}\\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\\n' -}}
    {%- elif message.role == 'tool' -%}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' -%}{{- '<|im_start|>user' -}}{%- endif -%}
        {{- '\\n<tool_response>\\n' + content + '\\n</tool_response>' -}}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{- '<|im_end|>\\n' -}}{%- endif -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if enable_thinking is defined and not enable_thinking -%}{{- """
    + _jinja_string(NO_THINKING)
    + """ -}}{%- endif -%}
{%- endif -%}
"""
)
"""Qwen3's chat semantics: system, tools, user, assistant with calls, tool responses as user turns, thinking."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn the merges from `texts`. Special tokens get the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[AddedToken(text, special=True) for text in (*CONTROL_TOKENS, *MARKER_TOKENS)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(texts, trainer)
    described = json.loads(tokenizer.to_str())
    for entry in described["added_tokens"]:
        entry["special"] = entry["content"] in CONTROL_TOKENS
    return Tokenizer.from_str(json.dumps(described))


def token_id(tokenizer: Tokenizer, text: str) -> int:
    """Id of a special token."""
    found = tokenizer.token_to_id(text)
    if found is None:
        raise ValueError(f"the tokenizer has no token {text!r}; train it with train_tokenizer")
    return found


def encode_all(tokenizer: Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of many texts."""
    return [encoding.ids for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_length: int) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template)."""
    tokenizer.save(str(directory / "tokenizer.json"))
    added: dict[str, Any] = {
        str(tokenizer.token_to_id(text)): {
            "content": text, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
            "special": text in CONTROL_TOKENS,
        }
        for text in (*CONTROL_TOKENS, *MARKER_TOKENS)
    }  # fmt: skip
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": False,
        "added_tokens_decoder": added,
        "bos_token": None,
        "eos_token": END_OF_TURN,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
