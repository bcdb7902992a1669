"""Tokenizer: encodes text to token ids and decodes it, with the vocabulary of a model directory."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pagewick.errors import ContextLengthError, InvalidRequestError
from pagewick.text.token_spelling import TokenSpelling
from pagewick.text.tokenizer_files import (
    SPECIAL_TOKEN_NAMES,
    apply_config,
    read_tokenizer,
    token_text,
)

# Real text has fewer characters per token. Longer text is refused before time is spent on it.
MAX_CHARS_PER_TOKEN = 16
# Length of text that is always read if only its end is needed: about a second of work.
MAX_TRUNCATED_CHARS = 2**20
_LONG_TEXT_CHARS = 1024


class Tokenizer:
    """A vocabulary with its rules.

    config: the content of `tokenizer_config.json`.
    eos_token_ids: the tokens that end a sequence, from generation_config.json, else config.json, and eos_token.
    edge_token_ids: the tokens that begin or end a whole text; they do not show that a new turn has begun.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: dict[str, Any],
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        # A tokenizer.json may have these settings from its training; they would silently truncate or pad prompts.
        backend.no_truncation()
        backend.no_padding()
        apply_config(backend, config)
        self._backend = backend
        self._added_tokens = backend.get_added_tokens_decoder()
        self._spelling = TokenSpelling(backend)
        self._token_bytes: dict[int, bytes] = {}
        self.config = config
        self.special_token_ids = frozenset(token_id for token_id, token in self._added_tokens.items() if token.special)
        self.all_texts = TokenTexts(self, hidden=frozenset())
        self.shown_texts = TokenTexts(self, hidden=self.special_token_ids)
        self.special_tokens = _special_tokens(config)
        self.eos_token_ids = tuple(dict.fromkeys([*(eos_token_ids or ()), *self._ids_of("eos_token")]))
        self.edge_token_ids = frozenset((*self.eos_token_ids, *self._ids_of("bos_token")))

    @classmethod
    def from_directory(cls, path: str | Path, eos_token_ids: Sequence[int] | None = None) -> Tokenizer:
        """Read the tokenizer in a model directory, or a GGUF file, or one of a tokenizer's files.

        eos_token_ids: those of the model, if it has another tokenizer than its own. Raises ModelLoadError if there is
        no tokenizer, or an unusable one.
        """
        backend, config, own_ids = read_tokenizer(Path(path))
        return cls(backend, config=config, eos_token_ids=eos_token_ids or own_ids)

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its name in the vocabulary; None if it is not there."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The tokens that are recognised before all others -> whether they are special (hidden from the text)."""
        return {token.content: token.special for token in self._added_tokens.values()}

    @functools.cached_property
    def vocab_size(self) -> int:
        """One more than the highest id. Computed when first needed, because the library builds a dictionary for it."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @property
    def last_token(self) -> tuple[str, int] | None:
        """The token of ordinary text with the highest id, found by counting; None if there are gaps between the ids."""
        last = max((self._backend.get_vocab_size(with_added_tokens=True) - 1, *self._added_tokens), default=-1)
        while last in self.special_token_ids:
            last -= 1
        token = self._backend.id_to_token(last)
        return None if token is None else (token, last)

    @functools.cached_property
    def start_token_ids(self) -> list[int]:
        """The tokens that `encode` adds before a text if add_special_tokens is set."""
        plain, whole = (self.encode("a", add_special_tokens=added) for added in (False, True))
        starts = (start for start in range(len(whole)) if whole[start : start + len(plain)] == plain)
        return whole[: next(starts, 0)]

    @functools.cached_property
    def end_token_ids(self) -> list[int]:
        """The tokens that `encode` adds behind a text if add_special_tokens is set."""
        num_plain = len(self.encode("a", add_special_tokens=False))
        return self.encode("a", add_special_tokens=True)[len(self.start_token_ids) + num_plain :]

    @functools.cached_property
    def has_pair_types(self) -> bool:
        """Whether the tokens of a pair's second text have another type than those of the first, as in transformers."""
        listed = self.config.get("model_input_names")
        is_read = not isinstance(listed, list) or "token_type_ids" in listed
        return is_read and 1 in self._backend.encode("a", "a", add_special_tokens=True).type_ids

    @functools.cached_property
    def pair_edges(self) -> tuple[list[int], list[int], list[int]]:
        """The tokens that the model expects before, between and behind the two texts of a pair."""
        encoding = self._backend.encode("a", "a", add_special_tokens=True)
        # None stands for a token of neither text.
        places = encoding.sequence_ids
        first, second = places.index(0), places.index(1)
        end = len(places) - places[::-1].index(0)
        behind = len(places) - places[::-1].index(1)
        ids: list[int] = encoding.ids
        return ids[:first], ids[end:second], ids[behind:]

    def encode(self, text: str, *, add_special_tokens: bool, max_len: int | None = None) -> list[int]:
        """Encode a text. Special tokens written in it are recognised.

        add_special_tokens: add the tokens that the model expects around a text, such as a beginning-of-sequence token.
        max_len: the model's context length. Raises ContextLengthError for a text that is certainly too long, and
        InvalidRequestError for a text that is not valid Unicode (a lone surrogate).
        """
        _check_num_chars(len(text), max_len)
        try:
            if len(text) < _LONG_TEXT_CHARS:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                # The library releases the GIL only for a batch.
                encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
            token_ids: list[int] = encoding.ids
        except (TypeError, UnicodeEncodeError):
            message = "the prompt is not valid Unicode; remove the lone surrogate"
            raise InvalidRequestError(message, param="prompt") from None
        return token_ids

    def encode_beginning(self, text: str, limit: int, *, add_special_tokens: bool) -> list[int]:
        """Encode a text, and cut tokens from its end so that at most `limit` remain with those that are added to it.

        Raises InvalidRequestError as `encode` does, and if nothing of the text were left.
        """
        token_ids = self.encode(text, add_special_tokens=add_special_tokens)
        if len(token_ids) <= limit:
            return token_ids
        start = len(self.start_token_ids) if add_special_tokens else 0
        end = len(self.end_token_ids) if add_special_tokens else 0
        if limit <= start + end:
            message = f"{limit} tokens leave no room for a text: the model adds {start + end} to each"
            raise InvalidRequestError(f"{message}; raise truncate_prompt_tokens", param="truncate_prompt_tokens")
        return token_ids[: limit - end] + token_ids[len(token_ids) - end :]

    def encode_pieces(
        self, pieces: Sequence[str], *, max_len: int | None = None, num_last: int | None = None
    ) -> list[int]:
        """Encode a text in pieces; no token spans a cut between two pieces.

        pagewick/text/chat_template.py explains the cuts. There may be as many pieces as characters. max_len: as in
        `encode`; encoding stops once there are more tokens. num_last: return at least this number of tokens from the
        end, not necessarily more. Raises ContextLengthError, InvalidRequestError.
        """
        num_chars = sum(map(len, pieces))
        if num_last is not None:
            check_truncated(num_chars, num_last)
            return self._encode_last(pieces, num_last)
        _check_num_chars(num_chars, max_len)
        token_ids: list[int] = []
        for index in range(len(pieces)):
            if max_len is not None and len(token_ids) > max_len:
                message = f"This model's maximum context length is {max_len} tokens. The prompt has more; shorten it."
                raise ContextLengthError(message)
            token_ids += self._encode_piece(pieces, index)
        return token_ids

    def _encode_last(self, pieces: Sequence[str], num_last: int) -> list[int]:
        parts, num_known = [], 0
        for index in range(len(pieces) - 1, -1, -1):
            if num_known >= num_last:
                break
            parts.append(self._encode_piece(pieces, index))
            num_known += len(parts[-1])
        return list(itertools.chain.from_iterable(reversed(parts)))

    def _encode_piece(self, pieces: Sequence[str], index: int) -> list[int]:
        piece = pieces[index]
        if not index or not piece:
            return self.encode(piece, add_special_tokens=False) if piece else []
        # A SentencePiece vocabulary adds a space before its input. Another character in front receives that space.
        for before, before_ids in self._anchors:
            token_ids = self.encode(before + piece, add_special_tokens=False)
            if token_ids[: len(before_ids)] == before_ids:
                return token_ids[len(before_ids) :]
        return self.encode(piece, add_special_tokens=False)

    @functools.cached_property
    def _anchors(self) -> list[tuple[str, list[int]]]:
        """Characters that can precede a text without changing its tokens, and the tokens of these characters.

        A line break is usually a word of its own, but some vocabularies merge it with line breaks of the text. For a
        vocabulary that adds a space, a null character works: such a vocabulary has no words, and no token contains it.
        """
        line_break = self.encode("\n", add_special_tokens=False)
        has_space = b"".join(map(self._compute_token_bytes, line_break)).startswith(b" ")
        null = [("\0", self.encode("\0", add_special_tokens=False))] if has_space else []
        return [("\n", line_break), *null]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode a whole sequence. Incomplete characters become U+FFFD; ids outside the vocabulary are ignored."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes, possibly part of a character, that a token adds to a text; empty for an unknown id."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._compute_token_bytes(token_id)
        return known

    def iterate_token_bytes(self, num_tokens: int) -> Iterator[tuple[int, bytes]]:
        """Yield (id, bytes) of the vocabulary's first `num_tokens` tokens, without caching them."""
        for token_id in range(min(num_tokens, self.vocab_size)):
            yield token_id, self._compute_token_bytes(token_id)

    def _compute_token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        return self._spelling.bytes_of(token)

    def _ids_of(self, name: str) -> list[int]:
        token = self.special_tokens.get(name)
        token_id = None if token is None else self.id_of(token)
        return [] if token_id is None else [token_id]


class TokenTexts(dict[int, str | None]):
    """The texts of tokens by their ids, computed when first needed; None if a token has a part of a character.

    hidden: tokens without text.
    """

    def __init__(self, tokenizer: Tokenizer, *, hidden: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._hidden = hidden

    def __missing__(self, token_id: int) -> str | None:
        spelling = b"" if token_id in self._hidden else self._tokenizer.token_bytes(token_id)
        try:
            text = spelling.decode()
        except UnicodeDecodeError:
            text = None
        self[token_id] = text
        return text


def check_truncated(num_chars: int, num_last: int) -> None:
    """Raises ContextLengthError if the text is too long to find its last `num_last` tokens."""
    limit = max(MAX_TRUNCATED_CHARS, num_last * MAX_CHARS_PER_TOKEN)
    if num_chars > limit:
        raise ContextLengthError(
            f"the prompt has {num_chars} characters, more than the limit of {limit} for truncation to {num_last} "
            "tokens; send only the part to keep"
        )


def _check_num_chars(num_chars: int, max_len: int | None) -> None:
    if max_len is not None and num_chars > max_len * MAX_CHARS_PER_TOKEN:
        raise ContextLengthError(
            f"This model's maximum context length is {max_len} tokens. The prompt has {num_chars} "
            "characters, more than could ever fit; shorten it."
        )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Read bos_token and the like; each is a string or an object with the string as its `content`."""
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        if (text := token_text(config.get(name))) is not None:
            found[name] = text
    return found
