"""The rule that decides whether the built-in demo model answered a question correctly.

The questions and their keywords are in ``grading.toml``, the canonical answers in ``training/corpus/facts.toml``.
Matching is on substrings, ignores case and treats a typographic apostrophe as a plain one.
"""

import tomllib
from dataclasses import dataclass
from pathlib import Path

GRADING_PATH = Path(__file__).with_name("grading.toml")

REFUSALS = ("don't know", "do not know", "not know", "can't help", "only know")


@dataclass(frozen=True)
class FactQuestion:
    """One fact, the ways in which users ask for it, and what a right answer contains.

    An answer needs at least one alternative of every group in `require`, and nothing of `forbid`.
    """

    fact: str
    asked: tuple[str, ...]
    require: tuple[tuple[str, ...], ...]
    forbid: tuple[str, ...] = ()


@dataclass(frozen=True)
class Grading:
    """All questions: those about facts, and unrelated ones that deserve an "I don't know"."""

    questions: tuple[FactQuestion, ...]
    unrelated: tuple[str, ...]


def load_grading(path: Path = GRADING_PATH) -> Grading:
    """Read the questions from a TOML file."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    questions = tuple(
        FactQuestion(
            fact=entry["fact"],
            asked=tuple(entry["asked"]),
            require=tuple(tuple(group) for group in entry["require"]),
            forbid=tuple(entry.get("forbid", ())),
        )
        for entry in document["question"]
    )
    return Grading(questions, tuple(document["unrelated"]))


def is_right(answer: str, fact_question: FactQuestion) -> bool:
    """Whether `answer` states the fact that `fact_question` asks for."""
    text = _normalize(answer)
    has_all = all(_contains_any(text, group) for group in fact_question.require)
    return has_all and not _contains_any(text, fact_question.forbid)


def is_refusal(answer: str) -> bool:
    """Whether `answer` admits that the model does not know."""
    return _contains_any(_normalize(answer), REFUSALS)


def _contains_any(text: str, alternatives: tuple[str, ...]) -> bool:
    return any(_normalize(alternative) in text for alternative in alternatives)


def _normalize(text: str) -> str:
    return text.lower().replace("\u2019", "'")
