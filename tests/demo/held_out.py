"""Grade a model by questions that were kept from its training: `python -m tests.demo.held_out [MODEL]`.

The questions, their keywords and the rule in words are in ``held_out.toml``.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any

from pagewick import LLM, SamplingParams
from pagewick.config import BUILTIN_MODEL

HELD_OUT_PATH = Path(__file__).with_name("held_out.toml")
MAX_WORDS = 70
MAX_FACTS = 9


class Outcome(StrEnum):
    """How an answer is judged."""

    RIGHT = "right"
    UNKNOWN = "unknown"
    FALSE = "false"


@dataclass(frozen=True)
class Fact:
    """A fact about Pagewick, the ways in which users ask for it, and the keywords of a right answer.

    A keyword of `page` replaces those of `require`. The keywords of facts with `is_loose` are common words.
    """

    about: str
    asked: tuple[tuple[str, ...], ...]
    require: tuple[tuple[str, ...], ...]
    forbid: tuple[str, ...]
    page: tuple[str, ...]
    admits: bool
    is_loose: bool


@dataclass(frozen=True)
class Unknowable:
    """Questions that the model cannot answer. One of `right` is as good as admitting that."""

    asked: tuple[tuple[str, ...], ...]
    right: tuple[str, ...]
    forbid: tuple[str, ...]


@dataclass(frozen=True)
class Exam:
    """The content of held_out.toml."""

    facts: tuple[Fact, ...]
    unknowable: tuple[Unknowable, ...]
    does_not_know: tuple[str, ...]
    declines: tuple[str, ...]
    names_docs: tuple[str, ...]
    runs: dict[str, bool]

    def judge(self, answer: str, topic: Fact | Unknowable) -> Outcome:
        """Apply the rule at the head of held_out.toml."""
        doubts = contains_any(answer, self.does_not_know)
        if not 0 < len(answer.split()) <= MAX_WORDS or contains_any(answer, topic.forbid):
            return Outcome.FALSE
        if isinstance(topic, Unknowable):
            is_right = doubts or contains_any(answer, (*topic.right, *self.declines))
            return Outcome.RIGHT if is_right else Outcome.FALSE
        num_facts = sum(_has_keywords(answer, fact) for fact in self.facts if not fact.is_loose)
        if _has_keywords(answer, topic) and num_facts <= MAX_FACTS and (topic.admits or not doubts):
            return Outcome.RIGHT
        return Outcome.UNKNOWN if doubts else Outcome.FALSE


@dataclass(frozen=True)
class Graded:
    """One question, the model's answer to it, and how that was judged."""

    about: str
    asked: tuple[str, ...]
    answer: str
    outcome: Outcome
    names_docs: bool


def load_exam(path: Path = HELD_OUT_PATH) -> Exam:
    """Read the questions from a TOML file."""
    document = tomllib.loads(path.read_text(encoding="utf-8"))
    unknowable = (
        Unknowable(_conversations(entry), tuple(entry.get("right", ())), tuple(entry.get("forbid", ())))
        for entry in document["unknowable"]
    )
    return Exam(
        facts=tuple(_read_fact(entry, document) for entry in document["fact"]),
        unknowable=tuple(unknowable),
        does_not_know=tuple(document["does_not_know"]),
        declines=tuple(document["declines"]),
        names_docs=tuple(document["names_docs"]),
        runs=document["runs"],
    )


def _read_fact(entry: dict[str, Any], document: dict[str, Any]) -> Fact:
    require, forbid, feature = entry.get("require", []), entry.get("forbid", []), entry.get("feature")
    if feature is not None:
        runs = document["runs"][feature]
        require = [entry["subject"], document["affirms" if runs else "no"]]
        forbid = document["denies" if runs else "yes"]
    return Fact(
        about=entry["about"],
        asked=_conversations(entry),
        require=tuple(tuple(group) for group in require),
        forbid=tuple(forbid),
        page=tuple(entry.get("page", ())),
        admits=entry.get("admits", False),
        is_loose=entry.get("loose", False) or feature is not None,
    )


def _conversations(entry: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    return tuple((asked,) if isinstance(asked, str) else tuple(asked) for asked in entry["asked"])


def _has_keywords(answer: str, fact: Fact) -> bool:
    has_all = all(contains_any(answer, group) for group in fact.require)
    return has_all or contains_any(answer, fact.page)


def contains_any(text: str, keywords: Iterable[str]) -> bool:
    """Whether `text` has one of the keywords as whole words; an asterisk stands for the rest of a word."""
    text = " ".join(text.lower().replace("\u2019", "'").replace("`", "").replace("*", "").split())
    return any(_pattern(keyword).search(text) for keyword in keywords)


@cache
def _pattern(keyword: str) -> re.Pattern[str]:
    body = re.escape(keyword.strip("*"))
    before = "" if keyword.startswith("*") or not body[0].isalnum() else r"(?<![\w-])"
    after = "" if keyword.endswith("*") or not body[-1].isalnum() else r"(?![\w-])"
    return re.compile(before + body + after)


def converse(llm: LLM, conversations: list[tuple[str, ...]]) -> list[str]:
    """Have every conversation with the model, greedily, and return its last answers."""
    histories: list[list[dict[str, str]]] = [[] for _ in conversations]
    for turn in range(max(map(len, conversations))):
        active = [idx for idx, asked in enumerate(conversations) if turn < len(asked)]
        for idx in active:
            histories[idx].append({"role": "user", "content": conversations[idx][turn]})
        outputs = llm.chat([histories[idx] for idx in active], SamplingParams(temperature=0, max_tokens=96))
        for idx, output in zip(active, outputs, strict=True):
            histories[idx].append({"role": "assistant", "content": output.outputs[0].text})
    return [history[-1]["content"] for history in histories]


def grade(llm: LLM, exam: Exam) -> list[Graded]:
    """Ask the model everything, and judge its answers."""
    topics: list[Fact | Unknowable] = [*exam.facts, *exam.unknowable]
    questions = [(topic, asked) for topic in topics for asked in topic.asked]
    answers = converse(llm, [asked for _, asked in questions])
    return [
        Graded(
            about=topic.about if isinstance(topic, Fact) else "cannot be known",
            asked=asked,
            answer=answer,
            outcome=exam.judge(answer, topic),
            names_docs=contains_any(answer, exam.names_docs),
        )
        for (topic, asked), answer in zip(questions, answers, strict=True)
    ]


def report(graded: list[Graded]) -> str:
    """Return the totals, after each question that was not answered rightly."""
    lines = [
        f"{entry.outcome:8}{entry.about}: {' / '.join(entry.asked)!r}\n{'':8}{entry.answer!r}"
        for entry in sorted(graded, key=lambda entry: entry.outcome)
        if entry.outcome is not Outcome.RIGHT
    ]
    counts = Counter(entry.outcome for entry in graded)
    totals = ", ".join(f"{counts[outcome]} {outcome} ({counts[outcome] / len(graded):.1%})" for outcome in Outcome)
    num_silent = sum(entry.outcome is Outcome.UNKNOWN and not entry.names_docs for entry in graded)
    silent = f"{num_silent} of the unknown ones do not name the docs"
    return "\n".join([*lines, f"{len(graded)} questions: {totals}; {silent}"])


if __name__ == "__main__":
    with LLM(*(sys.argv[1:] or [BUILTIN_MODEL])) as model:
        print(report(grade(model, load_exam())))
