"""The text on which a model is calibrated, as sequences of tokens."""

from __future__ import annotations

import random
from pathlib import Path

from pagewick.cli.imatrix import read_chunks
from pagewick.errors import ConfigError
from pagewick.text.tokenizer import Tokenizer

_SEQUENCE = 512
# English, code, a few other languages: a text of this project's.
_BUILTIN = Path(__file__).with_name("text.txt")


def calibration_tokens(
    text: Path | None, tokenizer: Tokenizer, num_tokens: int, longest: int, seed: int
) -> list[list[int]]:
    """Return num_tokens tokens of a text in sequences, taken from anywhere in it.

    text: a file; None: the built-in text. longest: what the model reads together. seed: of the choice. Raises
    ConfigError if the text cannot be read, or is too short.
    """
    text = text or _BUILTIN
    chunks = read_chunks(text, tokenizer, min(_SEQUENCE, longest))
    there = sum(map(len, chunks))
    if there < num_tokens:
        raise ConfigError(
            f"{text} has {there} tokens, and {num_tokens} are wanted\n"
            f"  give a longer text: --text, or take fewer: --num-tokens {there}"
        )
    random.Random(seed).shuffle(chunks)
    found: list[list[int]] = []
    while num_tokens > 0:
        found.append(chunks[len(found)][:num_tokens])
        num_tokens -= len(found[-1])
    return found
