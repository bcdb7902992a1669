"""Thoughts and answer are told apart wherever a stream is cut."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.cli.chatting.thoughts import ThoughtSplitter


def split(pieces: list[str], *, is_thinking: bool = False) -> tuple[str, str]:
    splitter = ThoughtSplitter(is_thinking=is_thinking)
    found = [piece for text in pieces for piece in splitter.feed(text)] + splitter.end()
    assert all(piece.text for piece in found)
    thoughts, answer = ("".join(p.text for p in found if p.kind == kind) for kind in ("thoughts", "answer"))
    return thoughts, answer


CASES = [
    ("<think>\nhm < 3</think>\n\nYes", False, ("hm < 3", "Yes")),
    ("\n<think>hm</think>Yes </think> <think>", False, ("hm", "Yes </think> <think>")),
    ("hm</think>\n\nYes", True, ("hm", "Yes")),
    ("no tags", False, ("", "no tags")),
    ("no <think>tags</think>", False, ("", "no <think>tags</think>")),
    ("<think>never ends </thi", False, ("never ends </thi", "")),
    ("<think></think>\n\nYes", False, ("", "Yes")),
    ("<thin", False, ("", "<thin")),
    ("<think>a</think>\n ", False, ("a", "")),
    ("", False, ("", "")),
]


@pytest.mark.parametrize(("text", "is_thinking", "expected"), CASES)
def test_letter_by_letter_and_at_once(text: str, is_thinking: bool, expected: tuple[str, str]) -> None:
    assert split([text], is_thinking=is_thinking) == expected
    assert split(list(text), is_thinking=is_thinking) == expected


@given(st.sampled_from(CASES), st.sets(st.integers(0, 40)))
def test_cuts_change_nothing(case: tuple[str, bool, tuple[str, str]], cuts: set[int]) -> None:
    text, is_thinking, expected = case
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert split(pieces, is_thinking=is_thinking) == expected


def test_what_is_known_is_not_held_back() -> None:
    splitter = ThoughtSplitter()
    assert [piece.text for piece in splitter.feed("<think>long thought <")] == ["long thought "]
    assert [piece.text for piece in splitter.feed("b")] == ["<b"]
