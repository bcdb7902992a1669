"""Stored responses are bounded in number, bytes and time, and belong to one API key."""

from __future__ import annotations

import pytest

from pagewick.server.core import stored_responses
from pagewick.server.core.stored_responses import StoredResponses


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def kept(responses: StoredResponses, *names: str) -> list[str]:
    return [name for name in names if responses.find("", name) is not None]


def test_the_one_that_was_used_longest_ago_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MAX_RESPONSES", 3)
    responses = StoredResponses()
    for name in "abc":
        responses.keep("", name, b"x", [])
    assert responses.find("", "a") == b"x"
    responses.keep("", "d", b"x", [])
    assert kept(responses, *"abcd") == ["a", "c", "d"]


def test_bytes_are_bounded_and_the_latest_always_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_responses, "MAX_TOTAL_BYTES", 10)
    responses = StoredResponses()
    responses.keep("", "a", b"x" * 6, [])
    responses.keep("", "a", b"x" * 5, [])  # in place of the first
    responses.keep("", "b", b"x" * 5, [])
    assert kept(responses, "a", "b") == ["a", "b"]
    responses.keep("", "c", b"x" * 11, [])
    assert kept(responses, "a", "b", "c") == ["c"]
    responses.keep("", "d", b"x" * 10, [])
    assert kept(responses, "c", "d") == ["d"]
    assert responses.forget("", "d") and not responses.forget("", "d")
    responses.keep("", "e", b"x" * 5, [])
    responses.keep("", "f", b"x" * 5, [])
    assert kept(responses, "e", "f") == ["e", "f"]


def test_a_response_that_is_not_used_is_forgotten() -> None:
    clock = Clock()
    responses = StoredResponses(10.0, clock)
    responses.keep("", "a", b"x", ["i"])
    responses.keep("", "b", b"x", [])
    clock.now = 9.0
    assert kept(responses, "a") == ["a"]
    clock.now = 15.0
    assert kept(responses, "a", "b") == ["a"]
    clock.now = 30.0
    assert responses.find_by_item("", "i") is None and not responses.forget("", "a")


def test_items_are_found_in_the_latest_response_that_has_them() -> None:
    responses = StoredResponses()
    responses.keep("", "a", b"a", ["i", "j"])
    responses.keep("", "b", b"b", ["j"])
    responses.keep("other", "c", b"c", ["i"])
    assert [responses.find_by_item("", item) for item in "ijk"] == [b"a", b"b", None]
    assert responses.find_by_item("other", "i") == b"c" and responses.find("other", "a") is None
    responses.forget("", "a")
    assert responses.find_by_item("", "i") is None and responses.find_by_item("", "j") == b"b"
