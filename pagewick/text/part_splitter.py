"""PartSplitter: splits an output into thoughts, text, tool calls and other parts. PartFormat: how models write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pagewick.outputs import PartDelta, PartKind
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.tool_calls.offer import ToolOffer

# Either a piece of the output with its kind, or a part that replaces output which was read and DROPPED.
Run = tuple[PartKind, str] | PartDelta


class PartSplitter(Protocol):
    """Reads one choice's output piece by piece.

    marks: token id -> the character to feed in place of the token's text, for tokens that have a meaning of their own.
        A mark is a lone surrogate, which no decoded text has, and belongs to one splitter only.
    kind: the kind of the tokens that were read last; None while it is undecided.
    is_over: all further output is text, and nothing is held back.
    """

    @property
    def marks(self) -> Mapping[int, str]: ...
    @property
    def kind(self) -> PartKind | None: ...
    @property
    def is_over(self) -> bool: ...

    def feed(self, marked: str) -> Sequence[Run]:
        """Read more output; return the runs that are now decided.

        The texts of all pairs, joined over all calls, are everything that was fed. A tool call's text is DROPPED, and
        its PartDeltas follow the text from which they were made.
        """
        ...

    def flush(self) -> Sequence[Run]:
        """End the output; return what was held back."""
        ...


class Splitting(Protocol):
    """Makes the splitters for one request's choices."""

    def splitter(self) -> PartSplitter:
        """Make a splitter for one choice."""
        ...


class ChainedSplitter:
    """Two splitters in a row: the second one splits what is text for the first.

    is_joined: all that the first one reads is text in the end, though the second one does not read the other parts.
    """

    def __init__(self, first: PartSplitter, second: PartSplitter, *, is_joined: bool = False) -> None:
        self._first = first
        self._second = second
        self._is_joined = is_joined

    @property
    def marks(self) -> Mapping[int, str]:
        if self._first.is_over:
            return self._second.marks
        return self._first.marks if self._second.is_over else {**self._first.marks, **self._second.marks}

    @property
    def kind(self) -> PartKind | None:
        kind = self._first.kind
        if kind is PartKind.TEXT:
            return self._second.kind
        return PartKind.TEXT if self._is_joined and kind is not None else kind

    @property
    def is_over(self) -> bool:
        return self._first.is_over and self._second.is_over

    def feed(self, marked: str) -> Sequence[Run]:
        if self._first.is_over:
            return self._second.feed(marked)
        return self._split(self._first.feed(marked))

    def flush(self) -> Sequence[Run]:
        return [*self._split(self._first.flush()), *self._second.flush()]

    def _split(self, runs: Sequence[Run]) -> list[Run]:
        split: list[Run] = []
        for run in runs:
            if not isinstance(run, PartDelta) and run[0] is PartKind.TEXT:
                split += self._second.feed(run[1])
            else:
                # A part of the first splitter ends whatever the second holds back.
                split += self._second.flush()
                split.append(run if isinstance(run, PartDelta) or not self._is_joined else (PartKind.TEXT, run[1]))
        return split


class ChainedSplitting:
    """One or more Splittings in a row; each splits what is text for those before it."""

    def __init__(self, splittings: Sequence[Splitting]) -> None:
        self._splittings = splittings

    def splitter(self) -> PartSplitter:
        chain, *more = [one.splitter() for one in self._splittings]
        for splitter in more:
            chain = ChainedSplitter(chain, splitter)
        return chain


class JoinedSplitting:
    """A Splitting whose parts stay in the text, and another one for the text behind them."""

    def __init__(self, first: Splitting, second: Splitting) -> None:
        self._first = first
        self._second = second

    def splitter(self) -> PartSplitter:
        return ChainedSplitter(self._first.splitter(), self._second.splitter(), is_joined=True)


class PartFormat(Protocol):
    """How one model writes parts of certain kinds that are neither text nor thoughts, such as tool calls.

    json_spacing: llguidance's options for the white space of forms that are JSON, beside tools; None: any.
    """

    @property
    def json_spacing(self) -> Mapping[str, Any] | None: ...
    @property
    def kinds(self) -> frozenset[PartKind]: ...

    def splitting(
        self, prompt_token_ids: Sequence[int], offer: ToolOffer | None, *, is_guided: bool = False
    ) -> Splitting | None:
        """Return how the responses to one prompt are split; None if they need no splitting.

        offer: the tools that the model may call. is_guided: a grammar keeps the calls valid.
        """
        ...

    def grammar(self, offer: ToolOffer, limits: GrammarLimits) -> str | None:
        """Return the grammar of responses with calls of these tools, in llguidance's Lark; None if the format has none.

        If a response without calls has a form, the grammar refers to it as `@answer`.
        Raises InvalidRequestError for tools that it cannot express.
        """
        ...

    def form_grammar(self, limits: GrammarLimits) -> str | None:
        """Return the grammar of responses that have a form, `@answer`, without tools; None: nothing is around it."""
        ...

    def beginnings(self, offer: ToolOffer) -> Sequence[str]:
        """Return the texts with which calls begin."""
        ...


def joined(splittings: Sequence[Splitting]) -> Splitting | None:
    """Chain splittings: each splits the text that those before it left. None if there are none."""
    return ChainedSplitting(splittings) if len(splittings) > 1 else next(iter(splittings), None)
