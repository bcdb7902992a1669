"""The model in the package says nothing that the code contradicts, except about facts that wait for a training."""

from __future__ import annotations

import json
import tomllib

from pagewick import LLM
from pagewick.demo import MODEL_DIR
from training.corpus.questions import facts, held_out_questions
from training.known import ROOT

from .grade import ask
from .grading import is_refusal

ANSWERS = {fact["id"]: fact["answer"] for fact in facts()}
TAUGHT: dict[str, str] = json.loads((MODEL_DIR / "TRAINING.json").read_text(encoding="utf-8"))["answers"]
WAITING = tomllib.loads((ROOT / "training" / "waiting.toml").read_text(encoding="utf-8")).get("waiting", [])
WAITING_FACTS = [fact for group in WAITING for fact in group["facts"]]
MAX_STRANGE = 0.02


def test_exactly_the_facts_that_changed_since_the_training_wait_for_the_next_one() -> None:
    """If this fails: add the fact to training/waiting.toml with the reason, or, after a training, remove it there."""
    changed = {name for name in ANSWERS.keys() | TAUGHT.keys() if ANSWERS.get(name) != TAUGHT.get(name)}
    assert sorted(WAITING_FACTS) == sorted(changed)
    assert all(group["reason"].endswith(".") for group in WAITING)


def test_the_model_gives_no_answer_that_is_out_of_date() -> None:
    """Every greedy answer is one that the corpus has today, which agrees with the code; or it belongs to a fact that
    waits; or it declines. A very small share may be garbled."""
    true_answers = set(ANSWERS.values()) | {TAUGHT[name] for name in WAITING_FACTS if name in TAUGHT}
    questions = [question for question in held_out_questions() if question.fact_id not in WAITING_FACTS]
    assert len(questions) >= 50, "the list of waiting facts is long: train"
    with LLM() as llm:
        answers = ask(llm, [question.text for question in questions])
    strange = {
        question.text: answer
        for question, answer in zip(questions, answers, strict=True)
        if answer not in true_answers and not is_refusal(answer)
    }
    assert len(strange) <= MAX_STRANGE * len(questions), strange
