"""Tokenizers and chat templates from GGUF metadata, against the files that they were made from."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from pagewick.demo import MODEL_DIR
from pagewick.errors import ModelLoadError
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.gguf_tokenizer import gguf_tokenizer
from pagewick.text.gguf_vocabulary import gguf_vocabulary
from pagewick.text.pre_tokenizers import PRE_TOKENIZERS
from pagewick.text.tokenizer import Tokenizer
from pagewick.weights.gguf.vocabulary import end_token_ids
from tests.text.tokenizers.hostile import HOSTILE
from tests.text.tokenizers.kinds import KINDS
from tests.weights.gguf.demo import write_demo

TEXTS = (
    "", " ", "Hello, world!", "  two  spaces\n\n\tand tabs ", "I'll can't THEY'RE 1234567 3.14",
    "naïve café 北京 🙂👍🏽 ß",
    "مرحبا नमस्ते ไทย", "x" * 300, "<|im_start|>user\nhi<|im_end|>", "\u200b\ufeff\u0301e\u0301", "a\r\nb\rc",
)  # fmt: skip


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("gguf") / "demo.gguf", "BF16")


def test_ids_are_those_of_the_tokenizer_files(demo: Path) -> None:
    ours, theirs = Tokenizer.from_directory(demo), Tokenizer.from_directory(MODEL_DIR)
    for text in TEXTS:
        for special in (False, True):
            found = ours.encode(text, add_special_tokens=special)
            assert found == theirs.encode(text, add_special_tokens=special), text
        assert ours.decode(found, skip_special_tokens=True) == theirs.decode(found, skip_special_tokens=True)
    assert ours.added_tokens == theirs.added_tokens and ours.eos_token == theirs.eos_token


def test_all_tokens_that_end_a_response_are_known(demo: Path) -> None:
    tokenizer = Tokenizer.from_directory(demo)
    names = ("<|endoftext|>", "<|im_end|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>")
    ends = {tokenizer.id_of(name) for name in names}
    assert set(tokenizer.eos_token_ids) == ends


def test_prompts_are_those_of_the_template_file(demo: Path) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a prefix cache?"}]
    rendered = []
    for path in (demo, MODEL_DIR):
        template = ChatTemplate.from_directory(path, Tokenizer.from_directory(path))
        assert template is not None
        rendered.append(template.render(messages).pieces)
    assert rendered[0] == rendered[1]


def values_of(pieces: Sequence[tuple[str, float, int]], **more: Any) -> dict[str, Any]:
    tokens, scores, types = zip(*pieces, strict=True)
    keys = {"model": "llama", "tokens": list(tokens), "scores": list(scores), "token_type": list(types), **more}
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items()}


@pytest.fixture(scope="module")
def processor(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A vocabulary of the sentencepiece library's own making."""
    directory = tmp_path_factory.mktemp("spm")
    (directory / "text").write_text("\n".join(TEXTS[2:6] * 50 + ("the cat sat on the mat and sang " * 20,)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text"), model_prefix=str(directory / "m"), vocab_size=400, model_type="bpe",
        byte_fallback=True, character_coverage=0.99, normalization_rule_name="identity",
        remove_extra_whitespaces=False, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "m.model"))


def pieces_of(processor: Any) -> list[tuple[str, float, int]]:
    kinds = ((processor.IsUnknown, 2), (processor.IsControl, 3), (processor.IsUnused, 5), (processor.IsByte, 6))
    return [
        (processor.IdToPiece(i), processor.GetScore(i), next((kind for is_kind, kind in kinds if is_kind(i)), 1))
        for i in range(processor.GetPieceSize())
    ]


def test_ids_are_those_of_the_sentencepiece_library(processor: Any) -> None:
    backend, config = gguf_tokenizer(values_of(pieces_of(processor), bos_token_id=1, eos_token_id=2), "m.gguf")
    tokenizer = Tokenizer(backend, config=config)
    for text in TEXTS[1:8]:
        assert tokenizer.encode(text, add_special_tokens=False) == processor.encode(text), text
        assert tokenizer.encode(text, add_special_tokens=True) == [1, *processor.encode(text)], text


def test_flags_of_the_file_count(processor: Any) -> None:
    values = values_of(
        pieces_of(processor), bos_token_id=1, eos_token_id=2, add_bos_token=False, add_eos_token=True,
        add_space_prefix=False,
    )  # fmt: skip
    backend, config = gguf_tokenizer(values, "m.gguf")
    tokenizer = Tokenizer(backend, config=config)
    assert tokenizer.encode("cat", add_special_tokens=True)[-1] == 2
    assert tokenizer.encode(" cat", add_special_tokens=False) == processor.encode("cat")


def test_ids_are_those_of_a_tokenizer_like_that_of_gemma_4(tmp_path: Path) -> None:
    directory = KINDS["gemma"].write(tmp_path / "m")
    theirs = Tokenizer.from_directory(directory)
    state = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = sorted(state["model"]["vocab"], key=state["model"]["vocab"].get)
    added = {token["content"]: 3 if token["special"] else 4 for token in state["added_tokens"]}
    keys = {
        "model": "gemma4",
        "tokens": tokens,
        "token_type": [added.get(token, 6 if token.startswith("<0x") else 1) for token in tokens],
        "scores": [-1000.0] * len(tokens),
        "merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "bos_token_id": tokens.index("<bos>"),
        "unknown_token_id": tokens.index("<unk>"),
        "add_space_prefix": False,
    }
    ours, config = gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items()}, "m.gguf")
    assert config["add_bos_token"] and config["bos_token"] == "<bos>"
    for text in HOSTILE:
        found = ours.encode(text, add_special_tokens=False).ids
        assert found == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(found, skip_special_tokens=False) == theirs.decode(found, skip_special_tokens=False), text
    written, _ = gguf_vocabulary(directory, len(tokens), keeps_merges=True)
    for key in ("model", "tokens", "scores", "merges", "add_space_prefix"):
        assert written[f"tokenizer.ggml.{key}"] == keys[key], key
    again, _ = gguf_tokenizer(written, "m.gguf")
    for text in HOSTILE:
        assert again.encode(text, add_special_tokens=False).ids == ours.encode(text, add_special_tokens=False).ids, text
    with pytest.raises(ModelLoadError, match=r"has no tokenizer\.ggml\.merges"):
        gguf_tokenizer({f"tokenizer.ggml.{key}": value for key, value in keys.items() if key != "merges"}, "m.gguf")


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], [1, 2]),
        (["<|end|>", "x"], [0]),
        (["</s>", "<turn|>", "<|tool_response>"], [1, 2]),
        (["</s>", "[e~["], [0, 1]),
    ],
)
def test_tokens_that_end_a_response_in_some_models_only(tokens: list[str], ends: list[int]) -> None:
    values = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * len(tokens)}
    assert end_token_ids(values) == ends


@pytest.mark.parametrize("name", PRE_TOKENIZERS)
def test_every_way_of_splitting_keeps_the_whole_text(name: str) -> None:
    splitting = PRE_TOKENIZERS[name].make()
    for text in TEXTS[1:]:
        spans = [span for _, span in splitting.pre_tokenize_str(text)]
        assert spans[0][0] == 0 and spans[-1][1] == len(text)
        assert all(before[1] == after[0] for before, after in itertools.pairwise(spans))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"model": "rwkv"}, "a tokenizer of the kind 'rwkv'"),
        ({"model": None}, "a tokenizer of the kind None"),
        ({"tokens": []}, "has no vocabulary"),
        ({"model": "gpt2", "pre": "unheard-of"}, "splits text in the way 'unheard-of'"),
        ({"model": "gpt2", "pre": "qwen2"}, "has no tokenizer.ggml.merges"),
        ({"model": "gpt2", "pre": "qwen2", "merges": ["x"]}, r"m\.gguf is not a usable tokenizer"),
        ({"model": "gpt2", "pre": "qwen2", "merges": ["no such"]}, r"m\.gguf is not a usable tokenizer"),
        ({"scores": [1.0]}, "no score for each"),
        ({"token_type": [1]}, "token_type has 1 entries"),
        ({"tokens": "abc"}, "must be list"),
        ({"bos_token_id": "x"}, "must be int"),
    ],
)
def test_an_unusable_vocabulary_is_refused(change: dict[str, Any], complaint: str) -> None:
    values = values_of([("<unk>", 0.0, 2), ("a", -1.0, 1), ("b", -2.0, 1)])
    values |= {f"tokenizer.ggml.{key}": value for key, value in change.items()}
    with pytest.raises(ModelLoadError, match=complaint):
        gguf_tokenizer({key: value for key, value in values.items() if value is not None}, "m.gguf")
