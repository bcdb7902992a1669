"""Reads tekken.json, the file of Mistral's newer tokenizers, such as that of Devstral and Magistral.

Its vocabulary is a list of byte strings, from the first to be merged to the last; there is no list of merges. Special
tokens come before all others: the ids of others begin at default_num_special_tokens.

Source: https://github.com/mistralai/mistral-common (mistral_common/tokens/tokenizers/tekken.py).
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from pagewick.text.token_spelling import CHAR_OF_LATIN_1

TEKKEN_FILE: Final = "tekken.json"
_MAX_TOKEN_BYTES: Final = 1024
# Entry of tokenizer_config.json -> the token that has this part in every such file.
_ROLES: Final = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


def make_tekken(content: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """Make the tokenizer of a file's content, and its configuration as in tokenizer_config.json.

    Raises any exception for content that is malformed.
    """
    settings, special = content["config"], content.get("special_tokens")
    if special is None:
        raise ValueError("it has no special_tokens, as the oldest files of this kind; use a model with tokenizer.json")
    names = {entry["rank"]: entry["token_str"] for entry in special}
    count = settings.get("default_num_special_tokens", len(names))
    if sorted(names) != list(range(len(names))) or len(names) > count:
        raise ValueError(f"its special_tokens are not numbered from 0 to {count - 1}")
    # Ids without a token are reserved.
    names |= {token_id: f"<SPECIAL_{token_id}>" for token_id in range(len(names), count)}
    tokens = [base64.b64decode(entry["token_bytes"]) for entry in content["vocab"]]
    # Files may hold more tokens than the models of their time have.
    tokens = tokens[: settings.get("default_vocab_size", count + len(tokens)) - count]
    spelled = [token.decode("latin-1").translate(CHAR_OF_LATIN_1) for token in tokens]
    vocabulary = {token: count + rank for rank, token in enumerate(spelled)}
    vocabulary |= {name: token_id for token_id, name in names.items()}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, list(merges_of(spelled)), ignore_merges=True))
    words = pre_tokenizers.Split(Regex(settings["pattern"]), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(names[token_id], special=True, normalized=False) for token_id in range(count)])
    roles = {role: name for role, name in _ROLES.items() if name in names.values()}
    return backend, {"add_bos_token": "bos_token" in roles, **roles}


def merges_of(tokens: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of tokens that make another, in the order of the latter: the first that fits is merged first.

    Raises ValueError for a token that is longer than those of any model: its pairs would take hours.
    """
    if (longest := max(map(len, tokens), default=0)) > _MAX_TOKEN_BYTES:
        raise ValueError(f"a token has {longest:,} bytes, and the limit is {_MAX_TOKEN_BYTES:,}")
    ranks = {token: rank for rank, token in enumerate(tokens)}
    for token in tokens:
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        known = [pair for pair in pairs if pair[0] in ranks and pair[1] in ranks]
        yield from sorted(known, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
