"""PartFormats: how models write the parts of a response that are neither text nor thoughts, such as tool calls.

A format is a module beside this one and a line in FORMATS.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from pagewick.outputs import PartKind
from pagewick.text.part_splitter import ChainedSplitting, Splitting
from pagewick.text.tokenizer import Tokenizer


class PartFormat(Protocol):
    """Describes how one model writes parts of certain kinds."""

    @property
    def kinds(self) -> frozenset[PartKind]: ...

    def splitting(self, prompt_token_ids: Sequence[int], tools: Sequence[Mapping[str, Any]]) -> Splitting | None:
        """Return how the responses to one prompt are split; None if they need no splitting.

        tools: the tools offered to the model, in OpenAI's form.
        """
        ...


# Each function inspects a model's tokenizer and chat templates, and returns None if the model uses another format.
FORMATS: tuple[Callable[[Tokenizer, Sequence[str]], PartFormat | None], ...] = ()


def find_formats(tokenizer: Tokenizer, templates: Sequence[str]) -> list[PartFormat]:
    """Return the formats that a model uses."""
    found = [find(tokenizer, templates) for find in FORMATS]
    return [one for one in found if one is not None]


def joined(splittings: Sequence[Splitting]) -> Splitting | None:
    """Chain splittings: each splits the text that those before it left. None if there are none."""
    return ChainedSplitting(splittings) if len(splittings) > 1 else next(iter(splittings), None)
