"""Vocabularies of GGUF files, cut to the tokens that some texts need, with the ids that llama.cpp gives those texts.

python -m tests.text.gguf_vocabularies LLAMA_CPP writes them from llama.cpp's sources, whose folder models/ has a file
with the whole vocabulary of each kind, texts (.inp) and their ids (.out). LLAMA_CPP is the directory of these sources,
as they also lie in vendor/ of llama-cpp-python's. Those here are of llama-cpp-python 0.3.36.

Only parts of a text are ever merged, so that it has the same tokens without those that are no part of it.
"""

from __future__ import annotations

import json
import lzma
import sys
import unicodedata
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer, ByteLevel

from pagewick.weights.gguf.header import read_gguf_header
from pagewick.weights.gguf.vocabulary import TokenType

FILE: Final = Path(__file__).parent / "gguf_vocabularies.json.xz"
FAMILIES: Final = (
    "bert-bge", "command-r", "deepseek-coder", "deepseek-llm", "falcon", "gpt-2", "llama-bpe", "llama-spm", "mpt",
    "phi-3", "qwen2", "qwen35", "refact", "starcoder",
)  # fmt: skip
_PREFIX: Final = "tokenizer.ggml."
_SEPARATOR: Final = "\n__ggml_vocab_test__\n"


def read_vocabularies() -> dict[str, dict[str, Any]]:
    """Return by family: `values`, key-values of a GGUF file; `texts`, and their `token_ids`."""
    found: dict[str, dict[str, Any]] = json.loads(lzma.decompress(FILE.read_bytes()))
    return found


def cut(values: Mapping[str, Any], texts: list[str], token_ids: list[list[int]]) -> dict[str, Any]:
    """Return the entry of a family."""
    tokens, types = values[f"{_PREFIX}tokens"], values[f"{_PREFIX}token_type"]
    spelled = "\n".join(_spelled(text, values[f"{_PREFIX}model"]) for text in texts)
    kept = [i for i, token in enumerate(tokens) if types[i] != TokenType.NORMAL or len(token) == 1 or token in spelled]
    new_id = {old: new for new, old in enumerate(kept)}
    found = {key: value for key, value in values.items() if key.startswith(_PREFIX) and not isinstance(value, list)}
    for key, value in found.items():
        if key.endswith("_token_id"):
            found[key] = new_id.get(value, 0)
    for key in ("tokens", "token_type", "scores"):
        if (entries := values.get(f"{_PREFIX}{key}")) is not None:
            found[f"{_PREFIX}{key}"] = [entries[old] for old in kept]
    if (merges := values.get(f"{_PREFIX}merges")) is not None:
        known = {tokens[old] for old in kept}
        found[f"{_PREFIX}merges"] = [merge for merge in merges if merge.replace(" ", "", 1) in known]
    return {"values": found, "texts": texts, "token_ids": [[new_id[old] for old in ids] for ids in token_ids]}


def _spelled(text: str, model: str) -> str:
    """The text in the letters of tokens, also as a normalizer may change it."""
    if model == "llama":
        return "▁" + text.replace(" ", "▁")
    if model == "bert":
        words = BertPreTokenizer().pre_tokenize_str(BertNormalizer().normalize_str(text))
        return "\n".join(f"▁{word}" for word, _ in words)
    letters = ByteLevel(add_prefix_space=False, use_regex=False)
    forms = (text, unicodedata.normalize("NFC", text))
    return "\n".join(word for form in forms for word, _ in letters.pre_tokenize_str(form))


def main() -> None:
    found = {}
    for family in FAMILIES:
        path = Path(sys.argv[1]) / "models" / f"ggml-vocab-{family}.gguf"
        texts = Path(f"{path}.inp").read_text().split(_SEPARATOR)
        lines = Path(f"{path}.out").read_text().split("\n")
        token_ids = [[int(word) for word in line.split()] for line in lines[: len(texts)]]
        found[family] = cut(read_gguf_header(path).values, texts, token_ids)
        print(family, len(found[family]["values"][f"{_PREFIX}tokens"]), len(texts))
    FILE.write_bytes(lzma.compress(json.dumps(found).encode(), preset=9))
    print(FILE.stat().st_size)


if __name__ == "__main__":
    main()
