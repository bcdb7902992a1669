"""Chats with tools: the chat page's example is offered as it stands there, and its requests are all served."""

import json
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

from training.corpus import Document
from training.corpus.questions import UNKNOWN_ANSWER
from training.corpus.tools import page_schemas, tool_chat
from training.corpus.values import draw_argument
from training.corpus.wording import disturb_lightly, expand, read_toml

PAGE = Path(__file__).parents[2] / "pagewick" / "server" / "page" / "tools.js"
NAMES = [schema["name"] for schema in page_schemas()]
RNG = random.Random(31)
CHATS = [tool_chat(RNG) for _ in range(1500)]


def names_of(document: Document) -> list[str]:
    return [tool["function"]["name"] for tool in document.tools]


def of_page(documents: list[Document]) -> list[Document]:
    return [document for document in documents if sorted(names_of(document)) == sorted(NAMES)]


def entries() -> dict[str, dict[str, Any]]:
    return {entry["name"]: entry for entry in read_toml("tools.toml")["tool"]}


def test_the_tools_of_the_page_are_those_of_its_example() -> None:
    found = re.search(r"EXAMPLE = `(.*?)`;", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    assert found is not None
    assert json.dumps(page_schemas()) == json.dumps(json.loads(found.group(1)))


def test_the_tools_of_the_page_are_often_offered_together_and_half_of_them_in_its_order() -> None:
    documents = of_page(CHATS)
    assert 0.4 < len(documents) / len(CHATS) < 0.5
    in_order = sum(names_of(document) == NAMES for document in documents)
    assert 0.5 < in_order / len(documents) < 0.68
    for document in documents:
        by_name = {tool["function"]["name"]: tool for tool in document.tools}
        assert [by_name[name] for name in NAMES] == [{"type": "function", "function": s} for s in page_schemas()]


def test_a_request_that_a_tool_of_the_page_serves_is_never_declined() -> None:
    served = re.compile(
        r"\b(?:weather|rain(?:s|ing)?|snow(?:s|ing)?|umbrella|forecast|what time|clock|late|plus)\b|\d ?\+ ?\d"
    )
    declined = 0
    for document in of_page(CHATS):
        for question, message in zip(document.messages, document.messages[1:], strict=False):
            if message.get("content") == UNKNOWN_ANSWER:
                declined += 1
                assert not served.search(question["content"].lower()), question["content"]
    assert declined >= 30


def test_every_tool_of_the_page_is_called_alone_and_after_another() -> None:
    called: Counter[tuple[str, ...]] = Counter()
    for document in of_page(CHATS):
        calls = [
            message["tool_calls"][0]["function"]["name"] for message in document.messages if "tool_calls" in message
        ]
        called.update((name,) for name in calls[:1])
        called.update(pairwise(calls))
    assert all(called[(name,)] > 100 for name in NAMES)
    assert all(called[(first, second)] > 10 for first in NAMES for second in NAMES if first != second)


def test_requests_for_the_tools_of_the_page_vary() -> None:
    for name, count in (("get_weather", 60), ("get_time", 60), ("add", 50)):
        lines = entries()[name]["requests"]
        assert len(set(lines)) == len(lines) >= count
    rng = random.Random(32)
    for entry in entries().values():
        placeholders = {f"<{key}>" for key in entry["parameters"]}
        for line in entry["requests"]:
            text = expand(line, {}, rng)
            assert set(re.findall(r"<\w+>", text)) - {"<elsewhere>"} == placeholders
            assert not set("{}|") & set(text)


def test_no_request_has_pattern_marks() -> None:
    for document in CHATS:
        for message in document.messages:
            assert message["role"] != "user" or not set("{}<>|") & set(message["content"])


def test_light_disturbance_keeps_placeholders() -> None:
    rng = random.Random(33)
    texts = {disturb_lightly("is it warm in <city> or <elsewhere>?", rng, has_tail=True) for _ in range(300)}
    assert all("<city>" in text and "<elsewhere>" in text for text in texts)
    assert len(texts) > 40


def test_cities_are_many_and_often_invented_or_of_several_words() -> None:
    cities: list[str] = read_toml("words.toml")["choices"]["city"]
    assert len(set(cities)) == len(cities) >= 400
    assert sum(bool(re.search(r"[ -]|[^\x00-\x7f]", city)) for city in cities) >= 120
    rng = random.Random(34)
    drawn = [str(draw_argument("city", "string", rng)) for _ in range(2000)]
    known = {city.lower() for city in cities}
    assert 0.35 < sum(city.lower() not in known for city in drawn) / len(drawn) < 0.45
    assert 0.15 < sum(city == city.lower() for city in drawn) / len(drawn) < 0.3


def test_numbers_have_one_to_five_digits_and_fit_their_type() -> None:
    rng = random.Random(35)
    whole = [draw_argument("amount", "integer", rng) for _ in range(1000)]
    assert {len(str(abs(int(value)))) for value in whole} == {1, 2, 3, 4, 5}
    assert all(type(value) is int for value in whole) and min(map(int, whole)) < 0
    assert {type(draw_argument("amount", "number", rng)) for _ in range(100)} == {int, float}
