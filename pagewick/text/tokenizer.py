"""Tokenizer: text to token ids and back, over a model directory's `tokenizer.json`."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from pagewick.errors import ContextLengthError, InvalidRequestError, ModelLoadError

# The largest vocabularies in use need about 35 MB of JSON.
MAX_TOKENIZER_BYTES = 256 * 2**20
# No real text has fewer tokens than this; a longer one is refused before time is spent on it.
MAX_CHARS_PER_TOKEN = 16
# Of a text whose end alone is wanted, if that is more: a second of work or so.
MAX_TRUNCATED_CHARS = 2**20
_LONG_TEXT_CHARS = 1024
SPECIAL_TOKEN_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. Raises ModelLoadError if it is anything
    else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON ({error}); download the model again") from None
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path} must hold a JSON object; download the model again")
    return content


class Tokenizer:
    """A vocabulary with its rules.

    config: the content of `tokenizer_config.json`.
    eos_token_ids: the tokens that end a sequence, from generation_config.json, else config.json, else the
    tokenizer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        config: dict[str, Any],
        eos_token_ids: Sequence[int] | None = None,
    ) -> None:
        # A tokenizer.json may carry these settings from its training; they would silently cut or fill
        # prompts.
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._added_tokens = backend.get_added_tokens_decoder()
        self._is_byte_level = "ByteLevel" in _decoder_types(backend)
        self._token_bytes: dict[int, bytes] = {}
        self.config = config
        self.vocab_size: int = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        self.special_token_ids = frozenset(token_id for token_id, token in self._added_tokens.items() if token.special)
        self.special_tokens = _special_tokens(config)
        self.eos_token_ids = tuple(eos_token_ids or self._ids_of("eos_token"))
        # What begins and ends a whole text, and so is no sign that somebody's turn has begun.
        self.edge_token_ids = frozenset((*self.eos_token_ids, *self._ids_of("bos_token")))
        self._bos_token_ids = self._ids_of("bos_token") if config.get("add_bos_token") is True else []

    @classmethod
    def from_directory(cls, path: str | Path) -> Tokenizer:
        """The tokenizer of a model directory. Raises ModelLoadError if it has none or an unusable one."""
        directory = Path(path)
        file = directory / "tokenizer.json"
        if not file.is_file():
            raise ModelLoadError(
                f"{directory} has no tokenizer.json; use a model that has one, or write it with "
                f'transformers: AutoTokenizer.from_pretrained("{directory}").save_pretrained("{directory}")'
            )
        if file.stat().st_size > MAX_TOKENIZER_BYTES:
            raise ModelLoadError(f"{file} is larger than {MAX_TOKENIZER_BYTES} bytes; it is not a tokenizer")
        return cls(
            _load_backend(file),
            config=read_json_object(directory / "tokenizer_config.json"),
            eos_token_ids=_eos_token_ids(directory),
        )

    @property
    def bos_token(self) -> str | None:
        return self.special_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        return self.special_tokens.get("eos_token")

    def id_of(self, token: str) -> int | None:
        """The id of the vocabulary's entry of that name; None if there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    @property
    def added_tokens(self) -> dict[str, bool]:
        """The tokens recognised before all others, mapped to whether they are special (hidden from the
        text)."""
        return {token.content: token.special for token in self._added_tokens.values()}

    def encode(self, text: str, *, add_special_tokens: bool, max_len: int | None = None) -> list[int]:
        """The token ids of a text. Special tokens written in it are recognised.

        add_special_tokens: add what the model expects around a text, such as a beginning-of-sequence token.
        max_len: the model's context length. Raises ContextLengthError for a text that cannot fit whatever its
        tokens.
        Raises InvalidRequestError for a text that is not Unicode (a lone surrogate).
        """
        _check_num_chars(len(text), max_len)
        try:
            if len(text) < _LONG_TEXT_CHARS:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            else:
                # For a batch the library lets go of the interpreter, so that other threads go on.
                encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
            token_ids: list[int] = encoding.ids
        except (TypeError, UnicodeEncodeError):
            message = "the prompt is not valid Unicode; remove the lone surrogate"
            raise InvalidRequestError(message, param="prompt") from None
        if add_special_tokens and token_ids[: len(self._bos_token_ids)] != self._bos_token_ids:
            return self._bos_token_ids + token_ids
        return token_ids

    def encode_pieces(
        self, pieces: Sequence[str], *, max_len: int | None = None, num_last: int | None = None
    ) -> list[int]:
        """The token ids of pieces of one text, such that no token spans a cut between two pieces.

        See pagewick/text/chat_template.py for what it is cut for. There may be as many pieces as characters.
        max_len: as in `encode`; reading stops where more tokens than that are known. num_last: so many tokens from the
        end are needed; how many there are before them is open. Raises ContextLengthError, InvalidRequestError.
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
        # A sentencepiece vocabulary puts a space before the text it is given; a line break takes it instead.
        token_ids = self.encode("\n" + piece, add_special_tokens=False)
        num_before = len(self._line_break)
        if token_ids[:num_before] == self._line_break:
            return token_ids[num_before:]
        return self.encode(piece, add_special_tokens=False)

    @functools.cached_property
    def _line_break(self) -> list[int]:
        return self.encode("\n", add_special_tokens=False)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of a whole sequence. Incomplete characters become U+FFFD, ids outside the vocabulary
        nothing."""
        text: str = self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text (part of a character, perhaps); empty for an unknown id."""
        known = self._token_bytes.get(token_id)
        if known is None:
            known = self._token_bytes[token_id] = self._compute_token_bytes(token_id)
        return known

    def iterate_token_bytes(self, num_tokens: int) -> Iterator[tuple[int, bytes]]:
        """Id and bytes of the vocabulary's first tokens, none of which is remembered: there are very many."""
        for token_id in range(min(num_tokens, self.vocab_size)):
            yield token_id, self._compute_token_bytes(token_id)

    def _compute_token_bytes(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            try:
                return token.translate(_LATIN_1_OF_CHAR).encode("latin-1")
            except UnicodeEncodeError:  # an added token, in its own letters
                return token.encode()
        if token_id in self._added_tokens:
            return token.encode()
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])
        return token.replace("\u2581", " ").encode()

    def _ids_of(self, name: str) -> list[int]:
        token = self.special_tokens.get(name)
        token_id = None if token is None else self.id_of(token)
        return [] if token_id is None else [token_id]


def check_truncated(num_chars: int, num_last: int) -> None:
    """Raises ContextLengthError for a text of which too much would be read for its last `num_last` tokens."""
    limit = max(MAX_TRUNCATED_CHARS, num_last * MAX_CHARS_PER_TOKEN)
    if num_chars > limit:
        raise ContextLengthError(
            f"the prompt has {num_chars} characters; for its last {num_last} tokens at most {limit} are read: send the "
            "end of it"
        )


def _check_num_chars(num_chars: int, max_len: int | None) -> None:
    if max_len is not None and num_chars > max_len * MAX_CHARS_PER_TOKEN:
        raise ContextLengthError(
            f"This model's maximum context length is {max_len} tokens. The prompt has {num_chars} "
            "characters, more than could ever fit; shorten it."
        )


def _load_backend(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except (KeyboardInterrupt, SystemExit):
        raise
    # The library raises a bare Exception for a bad file and a BaseException where its Rust code panics.
    except BaseException as error:
        raise ModelLoadError(f"{file} is not a usable tokenizer ({error}); download the model again") from None


def _decoder_types(backend: tokenizers.Tokenizer) -> set[str]:
    decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    if decoder is None:
        return set()
    return {part["type"] for part in decoder.get("decoders", [decoder])}


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token and others; each is a string or an object with the string as its `content`."""
    found = {}
    for name in SPECIAL_TOKEN_NAMES:
        value = config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _eos_token_ids(directory: Path) -> list[int] | None:
    for name in ("generation_config.json", "config.json"):
        value = read_json_object(directory / name).get("eos_token_id")
        candidates = value if isinstance(value, list) else [value]
        token_ids = [token_id for token_id in candidates if isinstance(token_id, int)]
        if token_ids:
            return token_ids
    return None


def _chars_of_bytes() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes: Latin-1's visible ones stand for themselves, the others
    follow from U+0100 on. Source: openai/gpt-2, `bytes_to_unicode` in src/encoder.py."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


# What stands for no byte becomes what Latin-1 does not have.
_LATIN_1_OF_CHAR = str.maketrans(
    {chr(code): "\uffff" for code in range(256)} | {char: chr(byte) for char, byte in _chars_of_bytes().items()}
)
