"""Grade a model by the exam of the built-in one: `python -m tests.demo.grade [MODEL]`."""

import sys
from dataclasses import dataclass

from pagewick import LLM, SamplingParams
from pagewick.config import BUILTIN_MODEL

from .grading import is_refusal, is_right, load_grading


@dataclass(frozen=True)
class Score:
    """How many questions about Pagewick were answered rightly, and how many unrelated ones declined."""

    num_facts: int
    num_questions: int
    num_right: int
    num_unrelated: int
    num_declined: int


def ask(llm: LLM, questions: list[str]) -> list[str]:
    """The model's greedy answers, each to a conversation of its own."""
    conversations = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=80))
    return [output.outputs[0].text for output in outputs]


def grade(llm: LLM) -> Score:
    """Ask everything in grading.toml."""
    grading = load_grading()
    questions = [(asked, question) for question in grading.questions for asked in question.asked]
    answers = ask(llm, [asked for asked, _ in questions])
    return Score(
        num_facts=len(grading.questions),
        num_questions=len(questions),
        num_right=sum(is_right(answer, question) for answer, (_, question) in zip(answers, questions, strict=True)),
        num_unrelated=len(grading.unrelated),
        num_declined=sum(is_refusal(answer) for answer in ask(llm, list(grading.unrelated))),
    )


if __name__ == "__main__":
    with LLM(*(sys.argv[1:] or [BUILTIN_MODEL])) as model:
        print(grade(model))
