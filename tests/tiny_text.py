"""Tokenizers and chat templates that tests build instead of downloading."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors

WORDS = [
    "The quick brown fox jumps over the lazy dog. ",
    "Grüße, 你好, 😀 and 👩‍👩‍👧! ",
    "system user assistant hello ",
]

MODEL_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 1000,
    "max_position_embeddings": 2**20,
}

QWEN_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning_content = '' %}
        {%- if message.reasoning_content is string %}
            {%- set reasoning_content = message.reasoning_content %}
        {%- elif content and '</think>' in content %}
            {%- set reasoning_content = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or reasoning_content) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
            {{- content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>' + message.role + '\\n' ~ (content or '') }}
        {%- endif %}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments if tool_call.arguments is string else tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

LLAMA_TEMPLATE = """\
{{- bos_token }}
{%- set date_string = date_string or strftime_now("%d %b %Y") %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|im_start|>system\\n\\nToday Date: " + date_string + "\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{{- "<|im_end|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|im_start|>' + message['role'] + '\\n\\n'+ message['content'] | trim + '<|im_end|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '<|im_start|>assistant\\n\\n{"name": "' + tool_call.name + '", "parameters": ' }}
        {{- tool_call.arguments | tojson }}
        {{- "}<|im_end|>" }}
    {%- elif message.role == "tool" %}
        {{- "<|im_start|>ipython\\n\\n" }}
        {{- message.content | tojson }}
        {{- "<|im_end|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n\\n' }}{%- endif %}
"""

MISTRAL_TEMPLATE = """\
{%- macro turn(text) -%}[INST] {{ text }} [/INST]{%- endmacro -%}
{{ bos_token }}
{%- for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif %}
{%- if message['role'] == 'user' %}{{ turn(message['content']) }}
{%- elif message['role'] == 'assistant' %}
{% generation %}
{{ ' ' + message['content'] + eos_token }}
{% endgeneration %}
{%- endif %}
{%- endfor %}
"""


def byte_level_backend() -> tokenizers.Tokenizer:
    """Return a GPT-2 style tokenizer: a token for every byte, some merges, and Qwen3's control tokens.

    `<think>` is not a special token, as in Qwen3.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator(WORDS * 20, trainer)
    backend.add_special_tokens(["<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<table>"]
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in plain])
    return backend


def sentencepiece_backend() -> tokenizers.Tokenizer:
    """Return a Llama 2 style tokenizer: spaces are U+2581, and characters outside the vocabulary become byte tokens."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["\u2581", *"abcdefghijklmnopqrstuvwxyz.<>/|_", "\u2581h", "\u2581he", "ll", "llo", "\u2581hello"]:
        vocab[piece] = len(vocab)
    merges = [("\u2581", "h"), ("\u2581h", "e"), ("l", "l"), ("ll", "o"), ("\u2581he", "llo")]
    backend = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    return backend


def write_model_directory(
    path: Path,
    backend: tokenizers.Tokenizer,
    *,
    chat_template: Any = None,
    generation_config: dict[str, Any] | None = None,
    **tokenizer_config: Any,
) -> Path:
    """Write the files that pagewick/text reads, and a model with weights of zero."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
    header: dict[str, Any] = {}
    end = 0
    for tensor in model_tensors(read_config(MODEL_CONFIG)):
        start, end = end, end + 2 * tensor.num_elements
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded)) + encoded + bytes(end))
    backend.save(str(path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **tokenizer_config}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config), encoding="utf-8")
    return path
