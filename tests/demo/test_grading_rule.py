"""The grading rule accepts every canonical answer and tells the facts apart."""

import pytest

from training.corpus.questions import facts

from .grading import FactQuestion, is_refusal, is_right, load_grading

ANSWERS: dict[str, str] = {fact["id"]: fact["answer"] for fact in facts()}
GRADING = load_grading()

PORT = FactQuestion("port", ("which port?",), (("port",), ("8000", "eight thousand")), ("9000",))

by_fact = pytest.mark.parametrize("question", GRADING.questions, ids=lambda question: question.fact)


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("The PORT is 8000.", True),
        ("Port eight thousand.", True),
        ("It is 8000.", False),
        ("The port is 80.", False),
        ("Port 8000 or 9000.", False),
        ("", False),
    ],
)
def test_an_answer_needs_every_group_and_nothing_forbidden(answer: str, right: bool) -> None:
    assert is_right(answer, PORT) is right


@pytest.mark.parametrize(
    ("answer", "refusal"),
    [
        ("I don't know that.", True),
        ("I don\u2019t know that.", True),
        ("Sorry, I only know Pagewick.", True),
        ("I CAN'T HELP with cooking.", True),
        ("The capital is well known.", False),
        ("", False),
    ],
)
def test_a_refusal_admits_not_knowing(answer: str, refusal: bool) -> None:
    assert is_refusal(answer) is refusal


def test_facts_are_unique_and_short() -> None:
    assert len(ANSWERS) == len(facts()) == len(set(ANSWERS.values()))
    assert [name for name, answer in ANSWERS.items() if len(answer.split()) > 30] == []


def test_questions_are_many_and_distinct() -> None:
    asked = [text.casefold() for question in GRADING.questions for text in question.asked]
    asked += [text.casefold() for text in GRADING.unrelated]
    assert len({question.fact for question in GRADING.questions}) == len(GRADING.questions) >= 64
    assert all(len(question.asked) == 3 for question in GRADING.questions)
    assert len(GRADING.unrelated) >= 30
    assert len(asked) == len(set(asked))


@by_fact
def test_the_canonical_answer_is_right_and_no_refusal(question: FactQuestion) -> None:
    assert is_right(ANSWERS[question.fact], question)
    assert not is_refusal(ANSWERS[question.fact])


@by_fact
def test_few_other_answers_are_right(question: FactQuestion) -> None:
    right = {name for name, answer in ANSWERS.items() if is_right(answer, question)}
    assert len(right - {question.fact}) <= 3, right


@by_fact
def test_repeating_the_question_is_not_right(question: FactQuestion) -> None:
    assert [text for text in question.asked if is_right(text, question)] == []
