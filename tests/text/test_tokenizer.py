"""The tokenizer agrees with the `tokenizers` library and refuses unusable files."""

from pathlib import Path

import pytest
from tokenizers.processors import TemplateProcessing

from pagewick.errors import ContextLengthError, InvalidRequestError, ModelLoadError
from pagewick.text.tokenizer import MAX_CHARS_PER_TOKEN, Tokenizer
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
    assert Tokenizer.from_directory(path).eos_token_ids == (im_end,)
    (path / "generation_config.json").unlink()
    (path / "config.json").write_text('{"eos_token_id": 7}')
    assert Tokenizer.from_directory(path).eos_token_ids == (7,)


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


def test_lone_surrogate_is_a_user_error() -> None:
    with pytest.raises(InvalidRequestError, match="not valid Unicode"):
        Tokenizer(byte_level_backend(), config={}).encode("a\ud800b", add_special_tokens=False)


def test_missing_tokenizer_names_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.json; use a model that has one"):
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
