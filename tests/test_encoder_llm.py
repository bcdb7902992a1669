"""LLM with encoders: embeddings and scores as transformers makes them, with the tokens around texts and pairs."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from safetensors.torch import load
from torch import nn

from pagewick import LLM, AsyncEngine, InvalidRequestError, PoolingParams
from pagewick.errors import ContextLengthError, UnsupportedError
from tests.models.encoders import hidden_states, write_encoder
from tests.models.word_pieces import TEXTS, unigrams, word_pieces, write_tokenizer
from tests.weights.modules import dense, dense_weights, modules, write_files

QUERY, *DOCUMENTS = TEXTS
OPTIONS: dict[str, Any] = {"num_threads": 1, "dtype": "float32"}
LABELS = "ForSequenceClassification"


def made_of(directory: Path, name: str, backend: tokenizers.Tokenizer, task: str, **entries: Any) -> nn.Module:
    model = write_encoder(name, directory, task, **entries)
    write_tokenizer(backend, directory)
    return model


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, nn.Module]:
    directory = tmp_path_factory.mktemp("reranker")
    return directory, made_of(directory, "bert", word_pieces(), LABELS, num_labels=1)


@pytest.fixture(scope="module")
def llm(reranker: tuple[Path, nn.Module]) -> Iterator[LLM]:
    with LLM(str(reranker[0]), **OPTIONS) as made:
        yield made


def expected_score(model: nn.Module, backend: tokenizers.Tokenizer, document: str) -> float:
    # Text is never a control token, in transformers it would be.
    backend = tokenizers.Tokenizer.from_str(backend.to_str())
    backend.encode_special_tokens = True
    pair = backend.encode(QUERY, document)
    inputs = {} if backend.token_to_id("[CLS]") is None else {"token_type_ids": torch.tensor([pair.type_ids])}
    with torch.no_grad():
        logit = float(model(torch.tensor([pair.ids]), **inputs).logits[0, 0])
    return 1 / (1 + math.exp(-logit))


@pytest.mark.parametrize(("name", "make"), [("bert", word_pieces), ("xlm-roberta", unigrams)])
def test_embeddings_of_texts(name: str, make: Any, tmp_path: Path) -> None:
    backend = make()
    model = made_of(tmp_path, name, backend, "Model")
    ids = [backend.encode(text).ids for text in TEXTS]
    expected = [torch.nn.functional.normalize(each.mean(0), dim=0) for each in hidden_states(model, ids)]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        outputs = llm.embed(TEXTS)
        assert [one.prompt_token_ids for one in outputs] == ids
        for one, vector in zip(outputs, expected, strict=True):
            torch.testing.assert_close(torch.tensor(one.outputs.embedding), vector, rtol=1e-4, atol=1e-5)
        (first,) = llm.embed(TEXTS[0], PoolingParams(pooling="cls", dimensions=5, normalize=False))
        torch.testing.assert_close(
            torch.tensor(first.outputs.embedding), hidden_states(model, ids[:1])[0][0, :5], rtol=1e-4, atol=1e-4
        )
        with pytest.raises(UnsupportedError, match="makes embeddings and writes no text"):
            llm.generate("a")
        with pytest.raises(UnsupportedError, match="nothing says that this model is a reranker"):
            llm.score("a", "b")


@pytest.mark.parametrize(("name", "make"), [("bert", word_pieces), ("xlm-roberta", unigrams)])
def test_scores_of_pairs(name: str, make: Any, tmp_path: Path) -> None:
    backend = make()
    model = made_of(tmp_path, name, backend, LABELS, num_labels=1)
    expected = [expected_score(model, backend, document) for document in DOCUMENTS]
    assert max(expected) - min(expected) > 0.01
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS)]
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("entries", [{"model_input_names": ["input_ids", "attention_mask"]}, None])
def test_a_tokenizer_without_types_gives_all_tokens_the_first(entries: dict[str, Any] | None, tmp_path: Path) -> None:
    """The types are those of the tokenizer: one of XLM-RoBERTa has none, whatever the model's table of types."""
    backend = unigrams() if entries is None else word_pieces()
    model = made_of(tmp_path, "bert", backend, LABELS, num_labels=1)
    file = tmp_path / "tokenizer_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **(entries or {})}))
    with torch.no_grad():
        logits = [float(model(torch.tensor([backend.encode(QUERY, one).ids])).logits[0, 0]) for one in DOCUMENTS[:3]]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found = [one.outputs.score for one in llm.score(QUERY, DOCUMENTS[:3])]
    assert found == pytest.approx([1 / (1 + math.exp(-logit)) for logit in logits], rel=1e-4, abs=1e-6)


def test_a_document_is_cut_before_the_last_separator(llm: LLM) -> None:
    backend = word_pieces()
    whole = backend.encode(QUERY, DOCUMENTS[0]).ids
    (cut,) = llm.score(QUERY, DOCUMENTS[0], truncate_prompt_tokens=len(whole) - 2)
    assert cut.prompt_token_ids == [*whole[:-3], backend.token_to_id("[SEP]")]
    with pytest.raises(InvalidRequestError, match="leave no room for a document"):
        llm.score(QUERY, DOCUMENTS[0], truncate_prompt_tokens=5)
    with pytest.raises(ContextLengthError, match="maximum context length is 80"):
        llm.score(QUERY, "china " * 90)
    (fitting,) = llm.score(QUERY, "china " * 90, truncate_prompt_tokens=-1)
    assert len(fitting.prompt_token_ids) == 80


def test_a_text_is_cut_before_the_tokens_behind_it(reranker: tuple[Path, nn.Module], llm: LLM) -> None:
    long = "china " * 200
    ids = word_pieces().encode(long).ids
    given: list[Any] = [long, ids, {"prompt": long}, TEXTS[0]]
    whole = word_pieces().encode(TEXTS[0]).ids
    for limit, kept in ((-1, 80), (9, 9), (1000, None)):
        if kept is None:
            with pytest.raises(ContextLengthError, match="maximum context length is 80"):
                llm.embed(given, truncate_prompt_tokens=limit)
            continue
        cut = [*ids[: kept - 1], ids[-1]]
        short = [*whole[: kept - 1], whole[-1]] if kept < len(whole) else whole
        outputs = llm.embed(given, truncate_prompt_tokens=limit)
        assert [one.prompt_token_ids for one in outputs] == [cut, ids[:kept], cut, short]
    with pytest.raises(InvalidRequestError, match="2 tokens leave no room for a text"):
        llm.embed(long, truncate_prompt_tokens=2)
    for wrong in (0, -2, True, "9"):
        with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens must be 1 or more"):
            llm.embed(ids, truncate_prompt_tokens=wrong)  # type: ignore[arg-type]

    async def embed() -> list[list[int]]:
        engine = await AsyncEngine.start(str(reranker[0]), **OPTIONS)
        try:
            return [(await engine.embed(one, truncate_prompt_tokens=9)).prompt_token_ids for one in given]
        finally:
            await engine.close()

    assert asyncio.run(embed()) == [one.prompt_token_ids for one in llm.embed(given, truncate_prompt_tokens=9)]


def test_no_prompt_has_a_place_for_an_instruction(llm: LLM) -> None:
    with pytest.raises(UnsupportedError, match="no place for an instruction"):
        llm.score(QUERY, DOCUMENTS, instruction="Find the opposite")


def test_many_prompts_share_steps_and_lose_no_blocks(llm: LLM) -> None:
    together = llm.score(QUERY, DOCUMENTS * 12)
    scores = [one.outputs.score for one in together]
    assert scores == scores[: len(DOCUMENTS)] * 12
    assert all(one.num_cached_tokens == 0 for one in together)


def test_an_engine_process_scores_pairs(reranker: tuple[Path, nn.Module]) -> None:
    directory, model = reranker

    async def scores() -> list[float]:
        engine = await AsyncEngine.start(str(directory), **OPTIONS)
        try:
            outputs = await asyncio.gather(*(engine.score(QUERY, document) for document in DOCUMENTS))
        finally:
            await engine.close()
        return [one.outputs.score for one in outputs]

    expected = [expected_score(model, word_pieces(), document) for document in DOCUMENTS]
    assert asyncio.run(scores()) == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_layers_behind_the_pooling_change_the_embeddings(pooling: str, tmp_path: Path) -> None:
    """As EmbeddingGemma has them, with the files that sentence-transformers writes."""
    backend = word_pieces()
    model = made_of(tmp_path, "embedding-gemma", backend, "Model")
    identity = "torch.nn.modules.linear.Identity"
    write_files(tmp_path, {
        "modules.json": modules(["Transformer", "Pooling", "Dense", "Dense", "Normalize"]),
        "1_Pooling/config.json": {
            "word_embedding_dimension": 48, "pooling_mode_cls_token": pooling == "cls",
            "pooling_mode_mean_tokens": pooling == "mean",
        },
        "2_Dense/config.json": dense(48, 80), "2_Dense/model.safetensors": dense_weights(48, 80, seed=1),
        "3_Dense/config.json": dense(80, 20, bias=False, activation_function=identity),
        "3_Dense/model.safetensors": dense_weights(80, 20, bias=False, seed=2),
    })  # fmt: skip
    first, second = (load((tmp_path / f"{index}_Dense/model.safetensors").read_bytes()) for index in (2, 3))
    ids = [backend.encode(text).ids for text in TEXTS]
    pooled = [each[0] if pooling == "cls" else each.mean(0) for each in hidden_states(model, ids)]
    wide = [torch.tanh(first["linear.weight"] @ each + first["linear.bias"]) for each in pooled]
    expected = [torch.nn.functional.normalize(second["linear.weight"] @ each, dim=0) for each in wide]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert (llm.info.embedding, llm.info.embedding_size) == (pooling, 20)
        for one, vector in zip(llm.embed(TEXTS), expected, strict=True):
            torch.testing.assert_close(torch.tensor(one.outputs.embedding), vector, rtol=1e-4, atol=1e-5)
        with pytest.raises(InvalidRequestError, match="dimensions must be 1 to 20"):
            llm.embed("a", PoolingParams(dimensions=21))
    with LLM(str(tmp_path), **OPTIONS, tensor_parallel_size=2) as llm:
        (alone,) = llm.embed(TEXTS[1])
        torch.testing.assert_close(torch.tensor(alone.outputs.embedding), expected[1], rtol=1e-4, atol=1e-5)
