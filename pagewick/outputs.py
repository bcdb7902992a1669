"""What a user gets back from LLM and AsyncEngine; names are vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Self

FinishReason = Literal["stop", "length", "abort", "error"]


class PartKind(StrEnum):
    """What a part of an answer is: a word, so that outputs can be written as JSON.

    is_reasoning: its tokens count as reasoning tokens. has_logprobs: the log-probabilities of its tokens are shown.
    has_stop_strings: a stop string in it ends the answer. In a tool call none does: its arguments are data, of which
    a cut would leave invalid JSON.
    DROPPED is what stands around parts, such as tags, and reaches nobody.
    """

    is_reasoning: bool
    has_logprobs: bool
    has_stop_strings: bool

    TEXT = "text", False, True, True
    REASONING = "reasoning", True, False, True
    TOOL_CALL = "tool_call", False, False, False
    REFUSAL = "refusal", False, False, True
    DROPPED = "dropped", False, False, True

    def __new__(cls, word: str, is_reasoning: bool, has_logprobs: bool, has_stop_strings: bool) -> Self:
        kind = str.__new__(cls, word)
        kind._value_ = word
        kind.is_reasoning = is_reasoning
        kind.has_logprobs = has_logprobs
        kind.has_stop_strings = has_stop_strings
        return kind


@dataclass(frozen=True, slots=True)
class ToolCall:
    """Which tool call a part is of. index: from 0, among the calls of its choice. name: the tool's."""

    index: int
    call_id: str
    name: str


@dataclass(slots=True)
class PartDelta:
    """More of a part of an answer; joined, the whole part.

    text: of a tool call, its arguments, which are JSON. call: of a tool call only.
    """

    kind: PartKind
    text: str = ""
    call: ToolCall | None = None


# Python 3.11 takes a tenth of a microsecond to look up a member, and every token asks for some.
_TEXT, _REASONING = PartKind.TEXT, PartKind.REASONING


def join_parts(parts: list[PartDelta], more: Iterable[PartDelta]) -> None:
    """Append to parts what follows them. Of a part that goes on, the text grows; `more` stays as it is."""
    for delta in more:
        if parts and (last := parts[-1]).kind is delta.kind and last.call == delta.call:
            last.text += delta.text
        else:
            parts.append(PartDelta(delta.kind, delta.text, delta.call))


def text_of(parts: Iterable[PartDelta], kind: PartKind) -> str:
    """The joined text of all parts of a kind."""
    return "".join([part.text for part in parts if part.kind is kind])


@dataclass(slots=True)
class Logprob:
    """One candidate at one position: its log-probability (natural logarithm), its rank from 1, its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request.

    parts: all that it says, in order, each part whole as far as it is known.
    text: of its text parts, joined. reasoning: its thoughts, if they were to be told apart; `text` is then without
        them. num_reasoning_tokens: how many tokens the thoughts take, the tags' among them; 0 without a thought.
    logprobs: per output token a map from token id to Logprob, the chosen token's first; None if not asked for.
    finish_reason: None while the choice is running.
    stop_reason: the stop string or stop token id that ended it, if one did.
    cumulative_logprob: the sum of its tokens' log-probabilities; None if they are not known.
    num_draft_tokens: how many tokens speculation guessed for it. num_accepted_tokens: how many of them it kept.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    cumulative_logprob: float | None = None
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    reasoning: str = ""
    num_reasoning_tokens: int = 0
    parts: list[PartDelta] = field(default_factory=list)

    def add(self, parts: Sequence[PartDelta]) -> None:
        """The choice goes on with these."""
        join_parts(self.parts, parts)
        for part in parts:
            kind = part.kind
            if kind is _TEXT:
                self.text += part.text
            elif kind is _REASONING:
                self.reasoning += part.text


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """Why no more of a prompt was found in the prefix cache.

    position: of the first prompt token that differs from the closest cached prefix. token_id: the prompt's there.
    cached_token_id: the cached prefix's, which may be another user's; None if that prefix ends there.
    """

    position: int
    token_id: int
    cached_token_id: int | None


@dataclass(slots=True)
class RequestOutput:
    """A request and what has come of it so far.

    num_cached_tokens: how many of the prompt's tokens were found in the prefix cache.
    prompt_logprobs: per prompt token a map as in CompletionOutput.logprobs; None for the first token.
    prefix_miss: where and why the prefix cache knew no further; None if it was not asked or knew the whole prompt.
    queue_s: seconds until it was first scheduled. prefill_s: seconds from then to its first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prefix_miss: PrefixMiss | None = None
    queue_s: float = 0.0
    prefill_s: float = 0.0
