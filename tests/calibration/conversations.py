"""A text for calibration: conversations in conversations.jsonl, which write_conversations.py wrote."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Final

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.tokenizer import Tokenizer

_FILE: Final = Path(__file__).with_name("conversations.jsonl")


def conversation_token_ids(directory: Path, tokenizer: Tokenizer, num_tokens: int, seed: int = 0) -> list[list[int]]:
    """Return at least num_tokens tokens of conversations as the model in a directory reads them, if there are as many.

    The model's chat template renders them; conversations that it rejects, such as those with tools, are left out. A
    model without a template reads what was said as plain text. seed: of the order, and so of the choice.
    """
    template = ChatTemplate.from_directory(directory, tokenizer)
    lines = _FILE.read_text(encoding="utf-8").splitlines()
    random.Random(seed).shuffle(lines)
    found: list[list[int]] = []
    for line in lines:
        if num_tokens <= 0:
            break
        if token_ids := _encode(json.loads(line), template, tokenizer):
            found.append(token_ids)
            num_tokens -= len(token_ids)
    return found


def _encode(
    conversation: dict[str, list[dict[str, str]]], template: ChatTemplate | None, tokenizer: Tokenizer
) -> list[int]:
    messages = conversation["messages"]
    if template is None:
        text = "\n\n".join(message["content"] for message in messages)
        return [*tokenizer.start_token_ids, *tokenizer.encode(text, add_special_tokens=False)]
    try:
        prompt = template.render(messages, conversation.get("tools"), add_generation_prompt=False)
    except (InvalidRequestError, UnsupportedError):
        return []
    return tokenizer.encode_pieces(prompt.pieces)
