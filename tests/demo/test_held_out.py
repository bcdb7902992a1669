"""The rule for held-out questions tells right, evasive and false answers apart, and the built-in model passes by it."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from pagewick import LLM

from .held_out import Graded, Outcome, contains_any, grade, load_exam, report

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
EXAM = load_exam()
FACTS = {fact.about: fact for fact in EXAM.facts}
RIGHT, UNKNOWN, FALSE = Outcome.RIGHT, Outcome.UNKNOWN, Outcome.FALSE


@pytest.mark.parametrize(
    ("text", "keyword", "found"),
    [
        ("Pass --port 9000.", "--port", True),
        ("Pass `--port` 9000.", "--port", True),
        ("It opens --ports.", "--port", False),
        ("The port is set.", "--port", False),
        ("Reports are long.", "port", False),
        ("Reports are long.", "*port*", True),
        ("Use an API-key.", "key", False),
        ("Use an API-key.", "*key", True),
        ("http://127.0.0.1:8000/metrics", "/metrics", True),
        ("I don\u2019t\nknow.", "don't know", True),
        ("Start it with --no-ui.", "no", False),
    ],
)
def test_a_keyword_is_a_whole_word(text: str, keyword: str, found: bool) -> None:
    assert contains_any(text, [keyword]) is found


@pytest.mark.parametrize(
    ("about", "answer", "outcome"),
    [
        ("changing the port", "--port sets it: pagewick serve --port 9000.", RIGHT),
        ("changing the port", "The server listens on port 8000.", FALSE),
        ("changing the port", "I don't know that. docs/command-line.md lists all flags.", UNKNOWN),
        ("changing the port", "I don't know, perhaps --port.", UNKNOWN),
        ("changing the port", "", FALSE),
        ("changing the port", "--port " * 71, FALSE),
        ("setting an API key", "Pass --host 0.0.0.0 to accept connections from other machines.", FALSE),
        ("setting an API key", "Start the server with --api-key-file, which names a file of keys.", RIGHT),
        ("setting an API key", "Start the server with --api-key or --password.", FALSE),
        ("listening on other addresses needs --host and a key", "Pass --host 0.0.0.0.", FALSE),
        ("listening on other addresses needs --host and a key", "Pass --host 0.0.0.0 and an API key.", RIGHT),
        ("images", "No, Pagewick reads text only.", FALSE),
        ("images", "docs/multimodal.md", RIGHT),
        ("images", "Yes, send pictures as image_url.", RIGHT),
        ("images", "Send a list of messages.", FALSE),
        ("beam search", "Yes: send use_beam_search, and n as the width.", RIGHT),
        ("beam search", "Beam search is not yet supported.", FALSE),
        ("licence", "Apache-2.0.", RIGHT),
        ("licence", "It has the MIT license.", FALSE),
        ("what the model is", "I am a model of 5 million parameters. I only know Pagewick.", RIGHT),
        ("what the model is", "Yes, I am a model for Pagewick.", FALSE),
        ("greetings", "I don't know that.", UNKNOWN),
    ],
)
def test_an_answer_is_right_unknown_or_false(about: str, answer: str, outcome: Outcome) -> None:
    assert EXAM.judge(answer, FACTS[about]) is outcome


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        ("I don't know that. I only know Pagewick; its docs are in docs/.", RIGHT),
        ("I answer questions about Pagewick and know only that.", RIGHT),
        ("The flag --port sets the port.", FALSE),
        ("", FALSE),
    ],
)
def test_what_cannot_be_known_is_declined(answer: str, outcome: Outcome) -> None:
    assert {EXAM.judge(answer, question) for question in EXAM.unknowable} == {outcome}


def test_a_true_answer_to_what_cannot_be_known_is_right() -> None:
    (product,) = (question for question in EXAM.unknowable if "30883" in question.right)
    (invented,) = (question for question in EXAM.unknowable if "no such" in question.right)
    assert EXAM.judge("It is 30883.", product) is RIGHT
    assert EXAM.judge("There is no such flag.", invented) is RIGHT
    assert EXAM.judge("There is no such flag, but try pagewick serve --turbo-boost.", invented) is FALSE


def test_a_heap_of_keywords_is_never_right() -> None:
    heap = (
        "pagewick serve --port 8000 --host --api-key-file --max-model-len --kv-cache-memory --num-threads --dtype "
        "--device --log-format --no-ui /metrics /health /v1/models /v1/chat/completions logprobs stop max_tokens "
        "apache docs/models.md ctrl-c pagewick chat pagewick bench pagewick doctor models pull models list /reset "
        "/save LLM SamplingParams yes"
    )
    assert {EXAM.judge(heap, fact) for fact in EXAM.facts} == {FALSE}


def test_evasive_answers_are_never_right() -> None:
    answers = [
        "The docs explain that.",
        "See the documentation.",
        "That depends.",
        "Please ask again.",
        "Good question!",
    ]
    for fact in EXAM.facts:
        assert [answer for answer in answers if EXAM.judge(answer, fact) is RIGHT] == [], fact.about


def test_repeating_the_question_is_not_right() -> None:
    right = {asked[-1] for fact in EXAM.facts for asked in fact.asked if EXAM.judge(asked[-1], fact) is RIGHT}
    assert right <= {"hello there!", "ok bye", "what is pagewick"}, right


def test_there_are_200_questions_and_all_differ() -> None:
    facts = [asked for fact in EXAM.facts for asked in fact.asked]
    unknowable = [asked for question in EXAM.unknowable for asked in question.asked]
    assert (len(facts), len(unknowable)) == (160, 40)
    assert len({tuple(map(str.casefold, asked)) for asked in facts + unknowable}) == 200
    assert len(FACTS) == len(EXAM.facts) >= 100


def test_the_training_has_none_of_the_longer_questions() -> None:
    """Short ones, such as "licence?", occur to everybody. The chat page prints one as an example."""
    files = [*(ROOT / "training").rglob("*.toml"), *(ROOT / "training").rglob("*.py")]
    texts = [" ".join(path.read_text(encoding="utf-8").casefold().split()) for path in files]
    topics = [*EXAM.facts, *EXAM.unknowable]
    asked = {message for topic in topics for asked in topic.asked for message in asked if len(message.split()) >= 6}
    assert len(asked) >= 100
    found = [message for message in asked if any(message.casefold() in text for text in texts)]
    assert [message.casefold() for message in found] == ["how do i change the port?"]


@pytest.mark.parametrize("feature", EXAM.runs)
def test_features_run_as_the_readme_says(feature: str) -> None:
    rows = [line.split("|")[1:-1] for line in README.read_text(encoding="utf-8").splitlines() if line.startswith("|")]
    (row,) = (row for row in rows if len(row) == 3 and feature in row[1] + row[2])
    assert (feature in row[1]) is EXAM.runs[feature], f"change [runs] in held_out.toml: {feature}"


@pytest.fixture(scope="module")
def graded() -> list[Graded]:
    with LLM() as model:
        return grade(model, load_exam())


def test_the_built_in_model_knows_or_says_that_it_does_not(graded: list[Graded]) -> None:
    counts = Counter(entry.outcome for entry in graded)
    assert counts[RIGHT] >= 0.9 * len(graded), report(graded)
    assert counts[FALSE] <= 0.02 * len(graded), report(graded)


def test_the_built_in_model_names_the_docs_if_it_does_not_know(graded: list[Graded]) -> None:
    assert [entry for entry in graded if entry.outcome is UNKNOWN and not entry.names_docs] == []
