"""The built-in model, graded by questions that its corpus was written without; it is run as a user would run it."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from pagewick import LLM, SamplingParams
from pagewick.demo import MODEL_DIR

from .grading import Grading, is_refusal, is_right, load_grading

MAX_BYTES = 12_000_000


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM() as model:
        yield model


@pytest.fixture(scope="module")
def grading() -> Grading:
    return load_grading()


def ask(llm: LLM, questions: list[str]) -> list[str]:
    conversations = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=80))
    return [output.outputs[0].text for output in outputs]


def test_is_right_about_pagewick(llm: LLM, grading: Grading) -> None:
    questions = [(asked, question) for question in grading.questions for asked in question.asked]
    answers = ask(llm, [asked for asked, _ in questions])
    right = [is_right(answer, question) for answer, (_, question) in zip(answers, questions, strict=True)]
    assert len({question.fact for _, question in questions}) >= 60
    assert sum(right) / len(right) >= 0.8


def test_says_what_it_does_not_know(llm: LLM, grading: Grading) -> None:
    refusals = [is_refusal(answer) for answer in ask(llm, list(grading.unrelated))]
    assert len(refusals) >= 30
    assert sum(refusals) / len(refusals) >= 0.9


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
