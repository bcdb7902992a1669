"""Thoughts that a server leaves in the text are separated from it wherever its stream is cut."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.cli.chatting.remote_model import RemoteModel
from pagewick.cli.chatting.settings import ChatSettings
from pagewick.cli.response_chunk import Choice, Delta, ResponseChunk
from pagewick.cli.server_address import ServerAddress


class Scripted(RemoteModel):
    """A server that sends these pieces, without a connection."""

    def __init__(self, pieces: list[str]) -> None:
        super().__init__(ServerAddress.parse("http://127.0.0.1:9"), "scripted")
        self._script = [ResponseChunk([Choice(Delta(piece))]) for piece in pieces]

    def _events(self, *_: Any) -> Any:
        return iter(self._script)


def split(pieces: list[str]) -> tuple[str, str]:
    found = list(Scripted(pieces).ask([], ChatSettings()))
    assert all(piece.text for piece in found)
    thoughts, text = ("".join(p.text for p in found if p.kind == kind) for kind in ("thoughts", "text"))
    return thoughts, text


CASES = [
    ("<think>\nhm < 3</think>\n\nYes", ("hm < 3", "Yes")),
    ("<think>\nhm\n</think>\n\n  Yes", ("hm", "  Yes")),
    ("\n<think>hm</think>Yes </think> <think>", ("hm", "Yes </think> <think>")),
    ("no tags", ("", "no tags")),
    ("no <think>tags</think>", ("", "no <think>tags</think>")),
    ("<think>never ends </thi", ("never ends ", "")),
    ("<think></think>\n\nYes", ("", "Yes")),
    ("<thin", ("", "<thin")),
    ("<think>a</think>\n ", ("a", " ")),
    ("", ("", "")),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_thoughts_are_separated_letter_by_letter_and_at_once(text: str, expected: tuple[str, str]) -> None:
    assert split([text]) == expected
    assert split(list(text)) == expected


@given(st.sampled_from(CASES), st.sets(st.integers(0, 40)))
def test_cuts_in_the_stream_change_nothing(case: tuple[str, tuple[str, str]], cuts: set[int]) -> None:
    text, expected = case
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    assert split([text[start:end] for start, end in itertools.pairwise(places)]) == expected


def test_text_is_yielded_as_soon_as_its_kind_is_known() -> None:
    pieces = Scripted(["<think>long thought <", "b", " end"]).ask([], ChatSettings())
    assert [next(pieces).text, next(pieces).text] == ["long thought ", "<b"]
