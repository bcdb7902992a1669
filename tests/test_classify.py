"""LLM.classify and AsyncEngine.classify: the labels of texts as transformers' pipeline finds them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagewick import LLM, AsyncEngine, ClassificationRequestOutput, InvalidRequestError, PoolingParams
from pagewick.errors import ContextLengthError, UnsupportedError
from pagewick.pooling_params import Classification
from tests.models.encoders import write_encoder
from tests.models.rerankers import DOCUMENTS, encode, write_reranker
from tests.models.word_pieces import TEXTS, unigrams, word_pieces, write_tokenizer

OPTIONS: dict[str, Any] = {"num_threads": 1, "dtype": "float32"}
LABELS = "ForSequenceClassification"
NAMES = ["negative", "neutral", "positive"]


def write_classifier(directory: Path, name: str = "bert", **entries: Any) -> None:
    write_encoder(name, directory, LABELS, **entries)
    write_tokenizer(unigrams() if "roberta" in name else word_pieces(), directory)


def by_pipeline(directory: Path, texts: Sequence[str], **how: Any) -> list[dict[str, float]]:
    """The labels of each text by name; `how` as for the pipeline."""
    pipeline: Any = transformers.pipeline("text-classification", model=str(directory), tokenizer=str(directory))
    return [{one["label"]: one["score"] for one in found} for found in pipeline(list(texts), top_k=None, **how)]


def check(found: Sequence[ClassificationRequestOutput], expected: Sequence[dict[str, float]]) -> None:
    """Labels are in the order of their names in `expected`, sorted."""
    for one, scores in zip(found, expected, strict=True):
        assert one.outputs.probs == pytest.approx([scores[name] for name in sorted(scores)], rel=1e-4, abs=1e-5)
        assert one.outputs.label == max(scores, key=scores.__getitem__)
        assert one.outputs.num_classes == len(scores) and one.finished


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("classifier")
    write_classifier(directory, num_labels=3, id2label=dict(enumerate(NAMES)))
    return directory


@pytest.fixture(scope="module")
def llm(classifier: Path) -> Iterator[LLM]:
    with LLM(str(classifier), **OPTIONS) as made:
        yield made


def test_labels_are_those_of_the_pipeline(llm: LLM, classifier: Path) -> None:
    outputs = llm.classify(TEXTS)
    expected = by_pipeline(classifier, TEXTS)
    check(outputs, expected)
    assert [one.prompt for one in outputs] == TEXTS
    ids = [word_pieces().encode(text).ids for text in TEXTS]
    assert [one.prompt_token_ids for one in outputs] == ids
    assert [one.outputs for one in llm.classify(ids)] == [one.outputs for one in outputs]
    (alone,) = llm.classify({"prompt": TEXTS[1]})
    assert alone.outputs.probs == pytest.approx(outputs[1].outputs.probs, rel=1e-5)
    assert sum(alone.outputs.probs) == pytest.approx(1, abs=1e-12)


def test_logits_in_place_of_probabilities(llm: LLM, classifier: Path) -> None:
    found = llm.classify(TEXTS, PoolingParams(use_activation=False))
    check(found, by_pipeline(classifier, TEXTS, function_to_apply="none"))
    with_it = llm.classify(TEXTS, pooling_params=PoolingParams(use_activation=True))
    assert [one.outputs for one in with_it] == [one.outputs for one in llm.classify(TEXTS)]


@pytest.mark.parametrize(
    "entries",
    [
        {"num_labels": 1},
        {"num_labels": 1, "problem_type": "regression"},
        {"num_labels": 2, "problem_type": "single_label_classification"},
        {"num_labels": 4, "problem_type": "multi_label_classification"},
        {"num_labels": 4, "problem_type": "regression"},
        {"num_labels": 3, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    ],
    ids=str,
)
def test_the_kinds_of_labels(entries: dict[str, Any], tmp_path: Path) -> None:
    """The names of these are transformers' own, since the file has none."""
    write_classifier(tmp_path, **entries)
    config = tmp_path / "config.json"
    kept = {
        name: value for name, value in json.loads(config.read_text()).items() if name not in ("id2label", "label2id")
    }
    config.write_text(json.dumps({**kept, "num_labels": entries["num_labels"]}))
    with LLM(str(tmp_path), **OPTIONS) as llm:
        assert llm.info.label_names == []
        outputs = llm.classify(TEXTS)
    check(outputs, by_pipeline(tmp_path, TEXTS))


def test_another_family_of_encoders(tmp_path: Path) -> None:
    write_classifier(tmp_path, "xlm-roberta", num_labels=5)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        check(llm.classify(TEXTS), by_pipeline(tmp_path, TEXTS))


def test_a_decoder_with_labels(tmp_path: Path) -> None:
    model = write_reranker(tmp_path, num_labels=3)
    prompts = [encode(text) for text in DOCUMENTS]
    with torch.no_grad():
        expected = [torch.softmax(model(torch.tensor([one])).logits[0], dim=0).tolist() for one in prompts]
    with LLM(str(tmp_path), **OPTIONS) as llm:
        outputs = llm.classify(DOCUMENTS)
        assert [one.outputs.probs for one in outputs] == [pytest.approx(one, rel=1e-4, abs=1e-6) for one in expected]
        assert [one.prompt_token_ids for one in outputs] == prompts
        with pytest.raises(UnsupportedError, match=r"sorts texts into 3 classes.*send POST /v1/classify"):
            llm.score("a", "b")
        with pytest.raises(UnsupportedError, match="writes none; send POST /v1/classify, or use classify"):
            llm.generate("a")
        # The model has no chat template, which would be no help.
        conversation = [{"role": "user", "content": "a"}]
        for ask in (llm.chat, lambda messages: next(llm.stream_outputs(messages))):
            with pytest.raises(UnsupportedError, match="writes none; send POST /v1/classify, or use classify"):
                ask(conversation)


def test_wrong_calls_say_what_to_change(llm: LLM) -> None:
    for params, name in (
        (PoolingParams(pooling="mean"), "pooling"),
        (PoolingParams(dimensions=2), "dimensions"),
        (PoolingParams(normalize=False), "normalize"),
        (PoolingParams(use_activation="yes"), "use_activation"),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidRequestError) as refusal:
            llm.classify("a", params)
        assert refusal.value.param == name
    with pytest.raises(ContextLengthError, match="maximum context length is 80"):
        llm.classify("china " * 90)
    with pytest.raises(InvalidRequestError, match="the prompt is empty"):
        llm.classify([[]])


def test_a_model_without_labels_is_refused() -> None:
    with LLM(**OPTIONS) as llm, pytest.raises(UnsupportedError, match=r"has no labels.*ForSequenceClassification"):
        llm.classify("a")


def test_vllms_name_of_normalize(tmp_path: Path) -> None:
    write_encoder("bert", tmp_path)
    write_tokenizer(word_pieces(), tmp_path)
    with LLM(str(tmp_path), **OPTIONS) as llm:
        found, expected, unit = (
            llm.embed(TEXTS[0], params)[0].outputs.embedding
            for params in (PoolingParams(use_activation=False), PoolingParams(normalize=False), PoolingParams())
        )
        assert found == expected != unit
        with pytest.raises(InvalidRequestError, match="use_activation must be true or false"):
            llm.embed("a", PoolingParams(use_activation=0))  # type: ignore[arg-type]


def test_an_engine_process_classifies_texts(llm: LLM, classifier: Path) -> None:
    async def classify() -> list[ClassificationRequestOutput]:
        engine = await AsyncEngine.start(str(classifier), **OPTIONS)
        try:
            raw = await engine.classify(TEXTS[0], PoolingParams(use_activation=False), request_id="mine")
            assert raw.request_id == "mine" and sum(raw.outputs.probs) != pytest.approx(1)
            with pytest.raises(InvalidRequestError, match="dimensions is for embeddings"):
                await engine.classify("a", PoolingParams(dimensions=2))
            ids = word_pieces().encode(TEXTS[0]).ids
            return list(await asyncio.gather(engine.classify(ids), *map(engine.classify, TEXTS[1:])))
        finally:
            await engine.close()

    for one, expected in zip(asyncio.run(classify()), llm.classify(TEXTS), strict=True):
        assert one.outputs.label == expected.outputs.label
        assert one.outputs.probs == pytest.approx(expected.outputs.probs, rel=1e-5)


def test_large_logits() -> None:
    """Probabilities that are equal in float64 do not hide the larger logit."""
    pooled = torch.tensor([800.0, 900.0, -900.0]).numpy().tobytes()
    one, many = (Classification.of(3, kind, "abc") for kind in ("", "multi_label_classification"))
    assert (one.probabilities(pooled), one.label(pooled)) == ([pytest.approx(0, abs=1e-40), 1, 0], "b")
    assert (many.probabilities(pooled), many.label(pooled)) == ([1, 1, 0], "b")
