"""The tokenizer agrees with the `tokenizers` library and refuses unusable files."""

import threading
from pathlib import Path
from typing import Any, cast

import pytest
import tokenizers
from tokenizers.processors import TemplateProcessing

from pagewick.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from pagewick.text.tokenizer import MAX_CHARS_PER_TOKEN, MAX_TRUNCATED_CHARS, Tokenizer, check_truncated
from tests.tiny_text import byte_level_backend, sentencepiece_backend, write_model_directory

TEXTS = ["", " ", "hello", " hello  world\n\n", "Grüße 你好 👩‍👩‍👧!", "<|im_start|>user\n<think>", "a\x00b\ufdd0"]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_encode_decode_round_trip(text: str) -> None:
    backend = byte_level_backend()
    tokenizer = Tokenizer(backend, config={})
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert token_ids == byte_level_backend().encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(token_ids, skip_special_tokens=False) == text
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == text


@pytest.mark.parametrize("text", ["hello hello", "xyz 你好 👩‍👩‍👧 hello", "tab\tand\nline"])
def test_sentencepiece_token_bytes_spell_the_text_after_its_leading_space(text: str) -> None:
    tokenizer = Tokenizer(sentencepiece_backend(), config={})
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, token_ids)).decode() == " " + text
    assert tokenizer.decode(token_ids, skip_special_tokens=True) == text


def test_long_texts_have_the_same_tokens() -> None:
    text = "".join(TEXTS) * 100
    tokenizer = Tokenizer(byte_level_backend(), config={})
    assert len(text) > 2048
    for part in (text, text[:1023], text[:1024], text[:1025]):
        expected = byte_level_backend().encode(part, add_special_tokens=False).ids
        assert tokenizer.encode(part, add_special_tokens=False) == expected


def test_unknown_ids_have_no_text() -> None:
    tokenizer = Tokenizer(byte_level_backend(), config={})
    assert tokenizer.token_bytes(tokenizer.vocab_size) == b""
    assert tokenizer.token_bytes(2**31) == b""
    assert tokenizer.decode([tokenizer.vocab_size], skip_special_tokens=False) == ""


def test_truncation_and_padding_from_training_are_dropped(tmp_path: Path) -> None:
    backend = byte_level_backend()
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=8)
    tokenizer = Tokenizer.from_directory(write_model_directory(tmp_path, backend))
    text = "the lazy dog and the quick fox"
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=True), skip_special_tokens=False) == text
    assert len(tokenizer.encode("x", add_special_tokens=True)) == 1


def test_special_tokens_and_their_ids(tmp_path: Path) -> None:
    backend = byte_level_backend()
    end, im_end = backend.token_to_id("</s>"), backend.token_to_id("<|im_end|>")
    bos = {"__type": "AddedToken", "content": "<s>"}
    path = write_model_directory(tmp_path, backend, bos_token=bos, pad_token=None)
    tokenizer = Tokenizer.from_directory(path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert tokenizer.eos_token_ids == (end,)
    assert im_end in tokenizer.special_token_ids
    assert backend.token_to_id("<think>") not in tokenizer.special_token_ids
    write_model_directory(tmp_path, backend, generation_config={"eos_token_id": [im_end, end]})
    assert Tokenizer.from_directory(path).eos_token_ids == (im_end, end)
    write_model_directory(tmp_path, backend, generation_config={"eos_token_id": im_end})
    assert Tokenizer.from_directory(path).eos_token_ids == (im_end, end)
    (path / "generation_config.json").unlink()
    (path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_directory(path).eos_token_ids == (7, end)


def test_bos_token_is_added_once(tmp_path: Path) -> None:
    backend = byte_level_backend()
    bos = backend.token_to_id("<s>")
    for processor in (None, TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])):
        if processor is not None:
            backend.post_processor = processor
        path = write_model_directory(tmp_path, backend, add_bos_token=True)
        tokenizer = Tokenizer.from_directory(path)
        assert tokenizer.encode("hello", add_special_tokens=True).count(bos) == 1
        assert tokenizer.encode("", add_special_tokens=True) == [bos]
        assert bos not in tokenizer.encode("hello", add_special_tokens=False)


def test_long_text_is_refused_unread() -> None:
    tokenizer = Tokenizer(byte_level_backend(), config={})
    assert tokenizer.encode("x" * 10 * MAX_CHARS_PER_TOKEN, add_special_tokens=False, max_len=10)
    with pytest.raises(ContextLengthError, match="This model's maximum context length is 10 tokens"):
        tokenizer.encode("x" * (10 * MAX_CHARS_PER_TOKEN + 1), add_special_tokens=False, max_len=10)


class CountingBackend:
    """A backend that records its inputs."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.encoded: list[str] = []
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def encode(self, text: str, **options: Any) -> Any:
        self.encoded.append(text)
        return self._backend.encode(text, **options)


def counted(backend: tokenizers.Tokenizer) -> tuple[Tokenizer, list[str]]:
    counting = CountingBackend(backend)
    tokenizer = Tokenizer(cast(tokenizers.Tokenizer, counting), config={})
    tokenizer.encode_pieces(["", "a"])  # lookups that are done once
    counting.encoded.clear()
    return tokenizer, counting.encoded


PIECES = ["hello ", "", "<s>", "\n\nhello", " hello", "</", "s>", "", "x\n"]


@pytest.mark.parametrize("backend", [byte_level_backend(), sentencepiece_backend()], ids=["bytes", "sentencepiece"])
def test_pieces_are_encoded_one_by_one(backend: tokenizers.Tokenizer) -> None:
    tokenizer, encoded = counted(backend)
    whole = tokenizer.encode_pieces(PIECES)
    assert tokenizer.decode(whole, skip_special_tokens=False) == "".join(PIECES)
    # An empty piece costs nothing. Other pieces are encoded once, except those that merge with a line break.
    assert len(encoded) <= len([piece for piece in PIECES if piece]) + len([piece for piece in PIECES if "\n" in piece])
    for num_last in range(1, len(whole) + 3):
        assert tokenizer.encode_pieces(PIECES, num_last=num_last)[-num_last:] == whole[-num_last:]


def test_pieces_that_are_too_long_together_are_refused_unread() -> None:
    tokenizer, encoded = counted(byte_level_backend())
    pieces = ["<", *["|im_end|><"] * 15, "x" * 9]
    assert sum(map(len, pieces)) == 10 * MAX_CHARS_PER_TOKEN
    with pytest.raises(ContextLengthError, match=r"maximum context length is 10 tokens.* has 161 characters"):
        tokenizer.encode_pieces([*pieces, "y"], max_len=10)
    assert encoded == []


def test_pieces_are_read_until_they_cannot_fit() -> None:
    tokenizer, encoded = counted(byte_level_backend())
    pieces = ["<"] * 1000
    with pytest.raises(ContextLengthError, match=r"context length is 100 tokens.* has more; shorten it"):
        tokenizer.encode_pieces(pieces, max_len=100)
    assert len(encoded) == 101
    assert len(tokenizer.encode_pieces(pieces, max_len=1000)) == 1000


def test_of_pieces_only_those_that_are_kept_are_read() -> None:
    tokenizer, encoded = counted(byte_level_backend())
    assert len(tokenizer.encode_pieces(["<"] * 1000, num_last=7)) == len(encoded) == 7


def test_lone_surrogate_is_a_user_error() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        Tokenizer(byte_level_backend(), config={}).encode("a\ud800b", add_special_tokens=False)


def test_missing_tokenizer_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json, .* no tokenizer\.model, .*use a model that"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"\xff\xfe",
        b"[" * 10_000,
        b'{"version":"1.0","model":{"type":"BPE","vocab":{"a":0},"merges":[["a","b"]]}}',
        b'{"version":"1.0","added_tokens":[{"id":-1}],"model":{"type":"BPE","vocab":{},"merges":[]}}',
    ],
)
def test_corrupt_tokenizer_is_a_clear_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match="is not a usable tokenizer"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"[" * 100_000])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_corrupt_config_is_a_clear_error(tmp_path: Path, name: str, content: bytes) -> None:
    path = write_model_directory(tmp_path, byte_level_backend())
    (path / name).write_bytes(content)
    with pytest.raises(ModelLoadError, match=name):
        Tokenizer.from_directory(path)


def test_other_threads_go_on_while_a_long_text_is_read() -> None:
    """Counted, not timed: a thread that only counts gets to run during the encoding."""
    tokenizer = Tokenizer(byte_level_backend(), config={})
    text = " ".join(str(number * 7919) for number in range(60_000))
    num_ticks = 0
    is_over = threading.Event()

    def tick() -> None:
        nonlocal num_ticks
        while not is_over.wait(0.001):
            num_ticks += 1

    ticker = threading.Thread(target=tick)
    ticker.start()
    before = num_ticks
    tokenizer.encode(text, add_special_tokens=False)
    during = num_ticks - before
    is_over.set()
    ticker.join()
    assert during >= 5


@pytest.mark.parametrize("num_last", [3, 100_000])
def test_truncation_reads_no_more_than_a_limit(num_last: int) -> None:
    limit = max(MAX_TRUNCATED_CHARS, num_last * MAX_CHARS_PER_TOKEN)
    check_truncated(limit, num_last)
    with pytest.raises(ContextLengthError, match=f"the limit of {limit} for truncation to {num_last} tokens"):
        check_truncated(limit + 1, num_last)
