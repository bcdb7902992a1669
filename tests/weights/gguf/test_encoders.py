"""GGUF files of encoders: embeddings, and scores of pairs, are those of transformers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from click.testing import CliRunner, Result
from torch import Tensor

from pagewick import LLM
from pagewick.cli import cli
from pagewick.errors import ModelLoadError, UnsupportedError
from tests.models.answers import make_prompts, running
from tests.models.encoders import VOCAB_SIZE, hidden_states, write_encoder
from tests.models.pooled import pooled
from tests.models.test_encoders import LABELS, assert_near, logits_of, vectors
from tests.models.word_pieces import TEXTS, unigrams, word_pieces, write_tokenizer
from tests.weights.gguf.encoder_vocabularies import unigram_values, word_piece_values
from tests.weights.gguf.encoders import ENTRIES, write_gguf
from tests.weights.gguf.mixes import Numbers, rewrite
from tests.weights.gguf.models import VOCAB_SIZE as DECODER_VOCAB_SIZE
from tests.weights.gguf.models import original, write_file

PROMPTS = make_prompts((1, 33, 7, 64, 40), VOCAB_SIZE)
QUERY, *DOCUMENTS = TEXTS
OPTIONS: dict[str, Any] = {"num_threads": 1, "dtype": "float32"}
# Rows that blocks of 32 fit.
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 96}


@pytest.mark.parametrize("name", ENTRIES)
def test_embeddings_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    path, model = write_gguf(name, tmp_path)
    states = hidden_states(model, PROMPTS)
    with running(path) as engine:
        assert engine.info.embedding == "mean"
        for pooling in ("cls", "mean"):
            assert_near(pooled(engine, PROMPTS, pooling), vectors(states, pooling))


@pytest.mark.parametrize("name", ["modernbert", "embedding-gemma"])
def test_windows_reach_as_far_ahead_as_back(name: str, tmp_path: Path) -> None:
    prompts = make_prompts((290, 131, 12, 13), VOCAB_SIZE)
    path, model = write_gguf(name, tmp_path)
    with running(path, block_size=16) as engine:
        assert_near(pooled(engine, prompts, "mean"), vectors(hidden_states(model, prompts), "mean"))


def test_layers_without_a_window_and_with_one_may_be_listed(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    keys = {"attention.sliding_window_pattern": [kind == "sliding_attention" for kind in kinds]}
    path, model = write_gguf("modernbert", tmp_path, keys=keys, layer_types=kinds)
    with running(path) as engine:
        assert_near(pooled(engine, PROMPTS, "mean"), vectors(hidden_states(model, PROMPTS), "mean"))


def test_gated_layers_of_modernbert_may_have_another_activation(tmp_path: Path) -> None:
    path, model = write_gguf("modernbert", tmp_path, hidden_activation="silu")
    with running(path) as engine:
        assert_near(pooled(engine, PROMPTS, "mean"), vectors(hidden_states(model, PROMPTS), "mean"))


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, "last"), (0, "mean")])
def test_the_file_says_what_an_embedding_is(number: int, pooling: str, tmp_path: Path) -> None:
    path, _ = write_gguf("bert", tmp_path, keys={"pooling_type": number})
    with running(path) as engine:
        assert engine.info.embedding == pooling


def test_layers_behind_the_pooling_of_embedding_gemma(tmp_path: Path) -> None:
    torch.manual_seed(0)
    first, second = torch.randn(80, 48) / 7, torch.randn(48, 80) / 9
    path, model = write_gguf("embedding-gemma", tmp_path, tensors={"dense_2.weight": first, "dense_3.weight": second})
    expected = [each @ first.T @ second.T for each in vectors(hidden_states(model, PROMPTS), "mean")]
    with running(path) as engine:
        assert_near(pooled(engine, PROMPTS, "mean"), expected)


@pytest.mark.parametrize("name", ["bert", "nomic-bert"])
def test_matrices_in_blocks(name: str, tmp_path: Path) -> None:
    path, model = write_gguf(name, tmp_path, kind="Q8_0", **WIDE)
    states = hidden_states(model, PROMPTS)
    with running(path) as engine:
        for ours, theirs in zip(pooled(engine, PROMPTS, "mean"), vectors(states, "mean"), strict=True):
            assert float(torch.cosine_similarity(ours, theirs, dim=0)) > 0.98


@pytest.mark.parametrize("num_labels", [1, 3])
@pytest.mark.parametrize("name", ["roberta", "xlm-roberta", "distilbert", "modernbert"])
def test_labels_are_those_of_transformers(name: str, num_labels: int, tmp_path: Path) -> None:
    keys = {"classifier.pooling_type": 2} if name == "modernbert" else {}
    path, model = write_gguf(name, tmp_path, LABELS, keys=keys, num_labels=num_labels)
    with running(path) as engine:
        assert engine.info.num_labels == num_labels and not engine.info.embedding
        assert_near(pooled(engine, PROMPTS, "score"), logits_of(model, PROMPTS))


@pytest.mark.parametrize("key", [1, None])
def test_labels_of_modernbert_are_those_of_the_mean_unless_the_file_says_otherwise(
    key: int | None, tmp_path: Path
) -> None:
    entries = {"num_labels": 2, "classifier_pooling": "mean", "classifier_bias": True}
    path, model = write_gguf("modernbert", tmp_path, LABELS, keys={"classifier.pooling_type": key}, **entries)
    with running(path) as engine:
        assert_near(pooled(engine, PROMPTS, "score"), logits_of(model, PROMPTS))


def test_a_head_in_blocks(tmp_path: Path) -> None:
    path, model = write_gguf("xlm-roberta", tmp_path, LABELS, kind="Q8_0", num_labels=1, **WIDE)
    with running(path) as engine:
        assert_near(pooled(engine, PROMPTS, "score"), logits_of(model, PROMPTS), 0.2)


@pytest.mark.parametrize("num_labels", [1, 2])
def test_the_head_of_bert_without_its_pooler_is_refused(num_labels: int, tmp_path: Path) -> None:
    """As llama.cpp's converter writes it."""
    path, _ = write_gguf("bert", tmp_path, LABELS, num_labels=num_labels)
    message = r"lacks cls\.output\.weight.*\n.*leaves out the pooler of BERT"
    with pytest.raises(ModelLoadError, match=message), running(path):
        pass


def embedded(path: Path, texts: list[str]) -> tuple[list[list[int]], list[Tensor]]:
    with LLM(str(path), **OPTIONS) as llm:
        outputs = llm.embed(texts)
        with pytest.raises(UnsupportedError, match="makes embeddings and writes no text"):
            llm.generate("a")
    return [one.prompt_token_ids for one in outputs], [torch.tensor(one.outputs.embedding) for one in outputs]


def values_of(backend: tokenizers.Tokenizer) -> dict[str, Any]:
    make = word_piece_values if backend.token_to_id("<s>") is None else unigram_values
    return make(backend, VOCAB_SIZE)


@pytest.mark.parametrize("name", ["bert", "xlm-roberta"])
def test_embeddings_of_texts(name: str, tmp_path: Path) -> None:
    backend = word_pieces() if name == "bert" else unigrams()
    path, model = write_gguf(name, tmp_path, vocabulary=values_of(backend))
    ids = [backend.encode(text).ids for text in TEXTS]
    expected = [torch.nn.functional.normalize(each.mean(0), dim=0) for each in hidden_states(model, ids)]
    found, ours = embedded(path, TEXTS)
    assert found == ids
    assert_near(ours, expected)


def test_scores_of_pairs(tmp_path: Path) -> None:
    backend = unigrams()
    path, model = write_gguf("xlm-roberta", tmp_path, LABELS, vocabulary=values_of(backend), num_labels=1)
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    backend.encode_special_tokens = True
    ids = [backend.encode(QUERY, document).ids for document in DOCUMENTS]
    expected = [1 / (1 + math.exp(-float(logits[0]))) for logits in logits_of(model, ids)]
    assert max(expected) - min(expected) > 0.01
    with LLM(str(path), **OPTIONS) as llm:
        outputs = llm.score(QUERY, DOCUMENTS)
    assert [one.prompt_token_ids for one in outputs] == ids
    assert [one.outputs.score for one in outputs] == pytest.approx(expected, rel=1e-4, abs=1e-6)


def quantize(model: Path, copy: Path, kind: str) -> Result:
    return CliRunner().invoke(cli, ["quantize", str(model), "-o", str(copy), "--to", kind])


def test_a_file_is_quantized_again_with_its_keys_and_tables(tmp_path: Path) -> None:
    vocabulary = word_piece_values(word_pieces(), VOCAB_SIZE)
    path, model = write_gguf("bert", tmp_path, vocabulary=vocabulary, keys={"pooling_type": 2}, **WIDE)
    result = quantize(path, tmp_path / "copy.gguf", "q8_0")
    assert result.exit_code == 0, result.output
    with running(tmp_path / "copy.gguf") as engine:
        assert engine.info.embedding == "cls"
        for ours, theirs in zip(
            pooled(engine, PROMPTS, "mean"), vectors(hidden_states(model, PROMPTS), "mean"), strict=True
        ):
            assert float(torch.cosine_similarity(ours, theirs, dim=0)) > 0.98


@pytest.mark.parametrize(
    ("task", "complaint"),
    [("Model", r"GGUF files of BertModel \(bert\) can be read, and not be written"), (LABELS, "has no form in GGUF")],
)
def test_checkpoints_are_not_written_as_files(task: str, complaint: str, tmp_path: Path) -> None:
    write_encoder("bert", tmp_path, task)
    write_tokenizer(word_pieces(), tmp_path)
    result = quantize(tmp_path, tmp_path / "copy.gguf", "q8_0")
    assert result.exit_code != 0 and re.search(complaint, result.output), result.output
    assert not (tmp_path / "copy.gguf").exists()


def test_a_decoder_that_was_trained_as_an_encoder(tmp_path: Path) -> None:
    model: Any = original("qwen3")
    model.model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "is_causal": False}))
    reference: Any = transformers.AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    written = write_file("qwen3", tmp_path)
    values = {"qwen3.attention.causal": False, "qwen3.pooling_type": 2}

    def without_head(name: str, numbers: Numbers) -> list[tuple[str, Numbers, str]]:
        return [] if name == "output.weight" else [(name, numbers, "F32")]

    path = rewrite(written, tmp_path / "encoder.gguf", without_head, values)
    prompts = make_prompts((1, 33, 7), DECODER_VOCAB_SIZE)
    with running(path) as engine:
        assert engine.info.embedding == "cls"
        assert_near(pooled(engine, prompts, "cls"), vectors(hidden_states(reference.float().eval(), prompts), "cls"))


def test_windows_to_later_tokens_of_a_decoder_are_refused(tmp_path: Path) -> None:
    written = write_file("gemma-2", tmp_path)
    values = {"gemma2.attention.causal": False}
    path = rewrite(written, tmp_path / "encoder.gguf", lambda name, numbers: [(name, numbers, "F32")], values)
    with (
        pytest.raises(ModelLoadError, match=r"encoder\.gguf: gemma2\.attention\.causal is False, and must be true"),
        running(path),
    ):
        pass
