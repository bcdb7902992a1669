"""The built-in model, graded by questions that its corpus was written without; it is run as a user would run it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from pagewick import LLM
from pagewick.demo import MODEL_DIR
from training.corpus.questions import Question, usual_questions

from .grade import Score, ask, grade

MAX_BYTES = 12_000_000


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as model:
        yield model


@pytest.fixture(scope="module")
def score(llm: LLM) -> Score:
    return grade(llm)


def test_is_right_about_pagewick(score: Score) -> None:
    assert score.num_facts >= 60 and score.num_questions == 3 * score.num_facts
    assert score.num_right / score.num_questions >= 0.8


def test_says_what_it_does_not_know(score: Score) -> None:
    assert score.num_unrelated >= 30
    assert score.num_declined / score.num_unrelated >= 0.9


@pytest.mark.parametrize("question", usual_questions(), ids=lambda question: question.text)
def test_answers_the_questions_that_newcomers_ask_first(llm: LLM, question: Question) -> None:
    assert ask(llm, [question.text, question.text.lower()]) == [question.answer] * 2


def test_fits_into_the_package() -> None:
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= MAX_BYTES
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    widths = [config["hidden_size"], config["intermediate_size"], config["num_attention_heads"] * config["head_dim"]]
    assert all(width % 256 == 0 for width in widths)
    assert config["num_attention_heads"] % 2 == config["num_key_value_heads"] % 2 == 0


@pytest.mark.parametrize(
    ("token", "count"),
    [("<think>", 1), ("</tool_call>", 1), ("<|fim_prefix|>", 1), ("<|fim_middle|>", 1), ("<|fim_suffix|>", 1)],
)
def test_has_qwen3s_special_tokens(llm: LLM, token: str, count: int) -> None:
    assert len(llm.get_tokenizer().encode(token, add_special_tokens=False)) == count
