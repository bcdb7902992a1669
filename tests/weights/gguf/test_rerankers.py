"""GGUF files of Qwen3-Reranker: their scores are the probability of yes, with the template of the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pagewick import LLM
from pagewick.cli import cli
from pagewick.errors import ModelLoadError, UnsupportedError
from tests.models.rerankers import DOCUMENTS, QUERY, card_prompt, card_score, encode, write_reranker
from tests.weights.gguf.rerankers import write_gguf

OPTIONS: dict[str, Any] = {"num_threads": 1, "dtype": "float32"}
SIZES = {"hidden_size": 64, "intermediate_size": 96}


def scores(file: Path) -> list[float]:
    with LLM(str(file), **OPTIONS) as llm:
        outputs = llm.score(QUERY, DOCUMENTS)
    assert [one.prompt_token_ids for one in outputs] == [card_prompt(QUERY, document) for document in DOCUMENTS]
    return [one.outputs.score for one in outputs]


@pytest.mark.parametrize("is_tied", [True, False])
def test_scores_are_those_of_the_model_card(is_tied: bool, tmp_path: Path) -> None:
    model = write_reranker(tmp_path / "checkpoint", tie_word_embeddings=is_tied, **SIZES)
    expected = [card_score(model, card_prompt(QUERY, document)) for document in DOCUMENTS]
    assert len({round(score, 3) for score in expected}) > 2, "the documents must differ"
    assert scores(write_gguf(tmp_path / "model.gguf", model)) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    # A head in blocks, as in files of the converter's type q8_0.
    assert scores(write_gguf(tmp_path / "blocks.gguf", model, kind="Q8_0")) == pytest.approx(expected, abs=0.1)


def test_it_rates_texts_and_says_so(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", write_reranker(tmp_path / "checkpoint", **SIZES))
    with LLM(str(file), rerank=True, **OPTIONS) as llm:
        assert (llm.info.num_labels, llm.info.label_activation) == (2, "softmax")
        with pytest.raises(UnsupportedError, match="rates texts and writes none"):
            llm.generate("a")
        # The file's template is the usual one, so that another instruction can stand in it.
        (found,) = llm.score("a", "b", instruction="c")
        assert found.prompt_token_ids == card_prompt("a", "b", "c")
        limit = len(card_prompt(QUERY, "")) + 3
        (cut,) = llm.score(QUERY, DOCUMENTS[0], truncate_prompt_tokens=limit)
    assert cut.prompt_token_ids == card_prompt(QUERY, DOCUMENTS[0], max_len=limit)


def test_templates_that_cannot_be_used(tmp_path: Path) -> None:
    model = write_reranker(tmp_path / "checkpoint", **SIZES)
    file = write_gguf(tmp_path / "without.gguf", model, template=None)
    with pytest.raises(ModelLoadError, match=r"has no template for pairs of texts.*\n  give --rerank"):
        LLM(str(file), **OPTIONS)
    with LLM(str(file), rerank=True, **OPTIONS) as llm:
        (found,) = llm.score("a", "b")
    assert found.prompt_token_ids == card_prompt("a", "b")
    file = write_gguf(tmp_path / "model.gguf", model, template="{{ messages[0].content }}")
    with pytest.raises(ModelLoadError, match=r"template for pairs must have \{query\} and one \{document\}"):
        LLM(str(file), **OPTIONS)
    file = write_gguf(tmp_path / "open.gguf", model, template="{query} or {document}?")
    with LLM(str(file), **OPTIONS) as llm:
        (found,) = llm.score("a", "b")
        with pytest.raises(UnsupportedError, match="no place for an instruction"):
            llm.score("a", "b", instruction="c")
        with pytest.raises(UnsupportedError, match="no control token follows the document"):
            llm.score("a", "b", truncate_prompt_tokens=2)
    assert found.prompt_token_ids == encode("a or b?")


def test_a_file_that_is_quantized_again_stays_a_reranker(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", write_reranker(tmp_path / "checkpoint", **SIZES))
    copy = tmp_path / "copy.gguf"
    result = CliRunner().invoke(cli, ["quantize", str(file), "-o", str(copy), "--to", "q8_0"])
    assert result.exit_code == 0, result.output
    assert scores(copy) == pytest.approx(scores(file), abs=0.1)


def test_a_checkpoint_with_labels_is_not_written_as_another_model(tmp_path: Path) -> None:
    write_reranker(tmp_path / "checkpoint", num_labels=1, **SIZES)
    result = CliRunner().invoke(cli, ["quantize", str(tmp_path / "checkpoint"), "-o", str(tmp_path / "copy.gguf")])
    assert result.exit_code != 0 and "Qwen3ForSequenceClassification has no form in GGUF files" in result.output
    # The architectures that have one are too many to list on a terminal.
    assert len(result.output) < 6 * 80, result.output
