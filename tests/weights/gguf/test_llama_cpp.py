"""llama.cpp reads the files that `pagewick quantize` writes, and predicts the tokens that we predict.

Skipped unless PAGEWICK_DEEP=1 and llama-cpp-python is installed.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewick.demo import MODEL_DIR
from pagewick.text.gguf_vocabulary import gguf_vocabulary
from pagewick.text.tokenizer import Tokenizer
from pagewick.weights.gguf.export import TYPES
from pagewick.weights.gguf.writing import header_bytes
from tests.text.test_gguf_vocabulary import WRITTEN
from tests.text.tokenizers.hostile import HOSTILE
from tests.text.tokenizers.kinds import KINDS
from tests.weights.gguf.quality import held_out_chats, learnt, predictions
from tests.weights.gguf.written import write
from training.batches import Example

if os.environ.get("PAGEWICK_DEEP") != "1":
    pytest.skip("PAGEWICK_DEEP=1 runs these tests", allow_module_level=True)
llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")

NUM_TOKENS: Final = 3000
LEAST_AGREEMENT: Final = {"q8_0": 0.995, "f16": 0.999, "q4_k_m": 0.97, "q6_k": 0.985}
# llama.cpp does not compose letters and marks, as the tokenizer of Qwen2 does.
TEXT: Final = "What is Pagewick? It's 12345 years old.\n\n  def f(x):\treturn 'x'  # é 你好 🙂<|im_end|>\n"


def llama(path: Path) -> Any:
    return llama_cpp.Llama(str(path), n_ctx=2048, n_batch=2048, logits_all=True, n_threads=1, verbose=False)


def their_predictions(path: Path, examples: list[Example]) -> Iterator[Tensor]:
    """Yield llama.cpp's most likely tokens at the positions of `predictions`."""
    model = llama(path)
    for example in examples:
        model.reset()
        model.eval(example.token_ids)
        yield torch.from_numpy(np.array(model.scores[: len(example.token_ids)]))[learnt(example)].argmax(-1)


@pytest.mark.parametrize("kind", TYPES)
def test_llama_cpp_loads_each_type(kind: str, tmp_path: Path) -> None:
    path = write(MODEL_DIR, tmp_path / "model.gguf", kind)
    model = llama(path)
    ids = Tokenizer.from_directory(path).encode(TEXT, add_special_tokens=True)
    assert model.tokenize(TEXT.encode(), add_bos=True, special=True) == ids
    model.eval(ids)
    assert np.isfinite(model.scores[: len(ids)]).all()
    assert model.metadata["general.name"] == "a-model"
    question = [{"role": "user", "content": "What is Pagewick?"}]
    answer = model.create_chat_completion(question, temperature=0, max_tokens=8)["choices"][0]["message"]["content"]
    assert answer


@pytest.mark.parametrize("kind", sorted(WRITTEN))
def test_llama_cpp_makes_the_same_tokens(kind: str, tmp_path: Path) -> None:
    directory, path = KINDS[kind].write(tmp_path / "m"), tmp_path / "vocabulary.gguf"
    tokenizer = Tokenizer.from_directory(directory)
    values, _ = gguf_vocabulary(directory, tokenizer.vocab_size)
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 64, "feed_forward_length": 64}
    sizes |= {"attention.head_count": 4, "vocab_size": tokenizer.vocab_size, "rope.dimension_count": 16}
    sizes |= {"attention.layer_norm_rms_epsilon": 1e-5}
    model = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in sizes.items()}}
    path.write_bytes(header_bytes({**model, **values}, []))
    vocabulary = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    texts = [text for text in HOSTILE if not any(token in text for token in tokenizer.added_tokens)]
    # llama.cpp composes no letters and marks, and puts a space before every text of Llama 2.
    texts = [text for text in texts if unicodedata.normalize("NFC", text) == text]
    texts = [text for text in texts if kind != "llama-2" or not text.startswith((" ", "\u2581"))]
    assert len(texts) > 20
    for text in texts:
        expected = tokenizer.encode(text, add_special_tokens=False)
        assert vocabulary.tokenize(text.encode(), add_bos=False, special=True) == expected, text


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    return held_out_chats(NUM_TOKENS)


@pytest.mark.parametrize("kind", LEAST_AGREEMENT)
@pytest.mark.timeout(1800)
def test_llama_cpp_predicts_the_same_tokens(kind: str, examples: list[Example], tmp_path: Path) -> None:
    path = write(MODEL_DIR, tmp_path / "model.gguf", kind)
    pairs = zip(predictions(path, examples, "float32"), their_predictions(path, examples), strict=True)
    equal = torch.cat([ours.argmax(-1) == theirs for ours, theirs in pairs])
    agreement = equal.double().mean().item()
    print(f"{kind}: {agreement:.4%} of {len(equal)} tokens")
    assert agreement >= LEAST_AGREEMENT[kind]
