"""Reads tiktoken.model, the file of Kimi's tokenizer (Kimi K2, Moonlight): byte strings in base64, each with its rank.

The 256 ids behind them are special tokens: those that tokenizer_config.json lists, and reserved ones.

Source: tokenization_kimi.py in moonshotai/Kimi-K2-Instruct on the Hugging Face hub, which is not executed.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, decoders, models

from pagewick.text.pre_tokenizers import PRE_TOKENIZERS
from pagewick.text.tekken import merges_of
from pagewick.text.token_spelling import CHAR_OF_LATIN_1

TIKTOKEN_FILE: Final = "tiktoken.model"
# The name of its class in tokenizer_config.json. Files do not say how text is split into words.
_CLASS: Final = "TikTokenTokenizer"
_NUM_SPECIAL: Final = 256


def make_kimi(content: bytes, config: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Make the tokenizer of a file's content. config: of tokenizer_config.json.

    Raises any exception for content that is malformed, and for the file of another tokenizer.
    """
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    if name != _CLASS:
        raise ValueError(
            f"it does not say how text is split, and tokenizer_class is {name or 'not given'}, not Kimi's {_CLASS}; "
            "use a model that has a tokenizer.json"
        )
    ranks = dict(_token_and_rank(number, line) for number, line in enumerate(content.splitlines(), 1) if line.strip())
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("its tokens are not numbered from 0")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"it has no token for the byte {missing[0]}")
    spelled = [token.decode("latin-1").translate(CHAR_OF_LATIN_1) for token in sorted(ranks, key=ranks.__getitem__)]
    listed = config.get("added_tokens_decoder") or {}
    special = [listed.get(str(token_id), {}) for token_id in range(len(ranks), len(ranks) + _NUM_SPECIAL)]
    names = [
        entry.get("content", f"<|reserved_token_{token_id}|>") for token_id, entry in enumerate(special, len(ranks))
    ]
    vocabulary = {token: rank for rank, token in enumerate([*spelled, *names])}
    if len(vocabulary) != len(spelled) + _NUM_SPECIAL:
        raise ValueError("a special token of tokenizer_config.json has the text of another token")
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, list(merges_of(spelled)), ignore_merges=True))
    backend.pre_tokenizer = PRE_TOKENIZERS["kimi-k2"].make()
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(
        [
            AddedToken(text, special=bool(entry.get("special", True)), normalized=False)
            for text, entry in zip(names, special, strict=True)
        ]
    )
    return backend


def _token_and_rank(number: int, line: bytes) -> tuple[bytes, int]:
    try:
        token, rank = line.split()
        return base64.b64decode(token, validate=True), int(rank)
    except ValueError:
        raise ValueError(f"line {number} is not a token in base64 and its rank") from None
