"""Thoughts and answer, told apart by the tags that models write around their thoughts."""

from __future__ import annotations

from typing import Literal, NamedTuple

OPEN, CLOSE = "<think>", "</think>"

Kind = Literal["thoughts", "answer"]


class Piece(NamedTuple):
    """A part of what a model says."""

    kind: Kind
    text: str


class ThoughtSplitter:
    """Cuts a streamed text into thoughts and answer. A tag may come in several pieces.

    Only what begins with a tag has thoughts: an answer may speak of tags later on. is_thinking: the prompt ends with
    the opening tag already, as some chat templates have it.
    """

    def __init__(self, *, is_thinking: bool = False) -> None:
        self._state: Literal["start", "thoughts", "gap", "answer"] = "thoughts" if is_thinking else "start"
        self._held = ""
        self._has_thoughts = False

    def feed(self, text: str) -> list[Piece]:
        """What is known to be thoughts or answer now."""
        self._held += text
        if self._state == "start" and not self._is_decided():
            return []
        pieces = [*self._take_thoughts()] if self._state == "thoughts" else []
        return pieces + self._take_answer()

    def end(self) -> list[Piece]:
        """What was held back because a tag might have followed."""
        held, self._held = self._held, ""
        kind: Kind = "thoughts" if self._state == "thoughts" else "answer"
        return [Piece(kind, held)] if held and self._state != "gap" else []

    def _is_decided(self) -> bool:
        begun = self._held.lstrip()
        if begun.startswith(OPEN):
            self._state, self._held = "thoughts", begun.removeprefix(OPEN)
        elif not OPEN.startswith(begun):
            self._state = "answer"
        return self._state != "start"

    def _take_thoughts(self) -> list[Piece]:
        if not self._has_thoughts:
            self._held = self._held.lstrip("\n")
            self._has_thoughts = bool(self._held)
        thoughts, tag, rest = self._held.partition(CLOSE)
        if tag:
            self._state, self._held = "gap", rest
            return [Piece("thoughts", thoughts)] if thoughts else []
        num_held = _length_of_possible_tag(thoughts)
        cut = len(thoughts) - num_held
        self._held = thoughts[cut:]
        return [Piece("thoughts", thoughts[:cut])] if cut else []

    def _take_answer(self) -> list[Piece]:
        """Empty lines around the thoughts belong to neither."""
        if self._state == "gap":
            self._held = self._held.lstrip()
            if self._held:
                self._state = "answer"
        if self._state != "answer" or not self._held:
            return []
        answer, self._held = self._held, ""
        return [Piece("answer", answer)]


def _length_of_possible_tag(text: str) -> int:
    """How much of the text's end may be the start of the closing tag."""
    return next((size for size in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:size])), 0)
