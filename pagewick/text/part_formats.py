"""PartFormats: how models write parts of an answer that are neither text nor thoughts, such as tool calls.

A format is a module of its own beside this one, and a line in FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pagewick.outputs import PartKind
from pagewick.text.part_splitter import ChainedSplitting, Splitting
from pagewick.text.tokenizer import Tokenizer


class PartFormat(Protocol):
    """How one model writes parts of certain kinds."""

    @property
    def kinds(self) -> frozenset[PartKind]: ...

    def splitting(self, prompt_token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Splitting | None:
        """How the answers to one prompt are split; None where they need not be.

        tools: those that the model is offered, as OpenAI writes them.
        """
        ...


# Each looks into a model's tokenizer and the sources of its chat templates, and gives None if the model is another's.
FORMATS: tuple[Callable[[Tokenizer, Sequence[str]], PartFormat | None], ...] = ()


def find_formats(tokenizer: Tokenizer, templates: Sequence[str]) -> list[PartFormat]:
    """The formats of a model."""
    found = [find(tokenizer, templates) for find in FORMATS]
    return [one for one in found if one is not None]


def joined(splittings: Sequence[Splitting]) -> Splitting | None:
    """All of them in one, the first of which reads first; None if there are none."""
    return ChainedSplitting(splittings) if len(splittings) > 1 else next(iter(splittings), None)
