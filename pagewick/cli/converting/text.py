"""The text on which a model is calibrated, as sequences of tokens."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from pagewick.cli.imatrix import read_chunks
from pagewick.errors import ConfigError, InvalidRequestError
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.tokenizer import Tokenizer

_SEQUENCE = 512
# Chats, and passages of English, code and a few other languages as responses. training/write_conversations.py wrote it.
BUILTIN = Path(__file__).with_name("conversations.jsonl")


def calibration_tokens(text: Path | None, directory: Path, num_tokens: int, longest: int, seed: int) -> list[list[int]]:
    """Return num_tokens tokens of a text in sequences, taken from anywhere in it.

    text: a file; None: the built-in conversations, as the chat template of the model in `directory` renders them.
    longest: the most tokens that the model reads at once. seed: of the choice. Raises ConfigError if the text cannot be
    read, or is too short.
    """
    tokenizer, length = Tokenizer.from_directory(directory), min(_SEQUENCE, longest)
    sequences = _conversations(directory, tokenizer, length) if text is None else read_chunks(text, tokenizer, length)
    there = sum(map(len, sequences))
    if there < num_tokens:
        raise ConfigError(
            f"{text or 'the built-in text'} has {there} tokens, and {num_tokens} are wanted\n"
            f"  give a longer text: --text, or take fewer: --num-tokens {there}"
        )
    random.Random(seed).shuffle(sequences)
    found: list[list[int]] = []
    while num_tokens > 0:
        found.append(sequences[len(found)][:num_tokens])
        num_tokens -= len(found[-1])
    return found


def _conversations(directory: Path, tokenizer: Tokenizer, length: int) -> list[list[int]]:
    """Leave out conversations that the template rejects, such as those with tools."""
    template = ChatTemplate.from_directory(directory, tokenizer)
    found = (
        _encode(json.loads(line), template, tokenizer) for line in BUILTIN.read_text(encoding="utf-8").splitlines()
    )
    return [token_ids[:length] for token_ids in found if token_ids]


def _encode(conversation: dict[str, Any], template: ChatTemplate | None, tokenizer: Tokenizer) -> list[int]:
    messages = conversation["messages"]
    if template is None:
        text = "\n\n".join(message["content"] for message in messages)
        return [*tokenizer.start_token_ids, *tokenizer.encode(text, add_special_tokens=False)]
    try:
        prompt = template.render(messages, conversation.get("tools"), add_generation_prompt=False)
    except InvalidRequestError:
        return []
    return tokenizer.encode_pieces(prompt.pieces)
