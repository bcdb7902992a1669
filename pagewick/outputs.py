"""The outputs of LLM and AsyncEngine, with vLLM's names."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Self

from pagewick.pooling_params import Classification, PoolingParams, Scoring

FinishReason = Literal["stop", "length", "abort", "error"]


class PartKind(StrEnum):
    """The kind of a part of a response. A string, so that outputs can be written as JSON.

    is_reasoning: its tokens count as reasoning tokens. has_logprobs: log-probabilities of its tokens are reported.
    has_stop_strings: a stop string in it ends the response. A tool call has none, because truncation would leave its
    arguments invalid JSON. DROPPED: text around parts, such as tags, which is not emitted.
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
    """Identifies the tool call of a part. index: its index, from 0, among the choice's calls. name: the tool's name."""

    index: int
    call_id: str
    name: str


@dataclass(slots=True)
class PartDelta:
    """A piece of a part of a response; the pieces of a part, joined, are the whole part.

    text: for a tool call, its arguments as JSON. call: only for a tool call.
    """

    kind: PartKind
    text: str = ""
    call: ToolCall | None = None


# Looked up once: an Enum member access is slow, and every token needs several.
_TEXT, _REASONING = PartKind.TEXT, PartKind.REASONING


def join_parts(parts: list[PartDelta], more: Iterable[PartDelta]) -> None:
    """Append `more` to `parts`: extend the last part if it continues, add new parts otherwise. Copies `more`."""
    for delta in more:
        if parts and (last := parts[-1]).kind is delta.kind and last.call == delta.call:
            # Python appends to a string in place if nothing else refers to it; otherwise each token copies the text.
            text, last.text = last.text, ""
            text += delta.text
            last.text = text
        else:
            parts.append(PartDelta(delta.kind, delta.text, delta.call))


def text_of(parts: Iterable[PartDelta], kind: PartKind) -> str:
    """Return the joined text of all parts of a kind."""
    return "".join([part.text for part in parts if part.kind is kind])


@dataclass(slots=True)
class Logprob:
    """One token at one position: its log-probability (natural logarithm), rank (from 1) and text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request.

    parts: everything generated so far, in order.
    text: joined text of the text parts. reasoning: joined thoughts, if they were separated from the text.
    num_reasoning_tokens: number of tokens of the thoughts, including tags; 0 without a thought.
    logprobs: for each output token a map from token id to Logprob, the sampled token first; None if not requested.
    finish_reason: None while the choice is running.
    stop_reason: the stop string or stop token id that ended the choice, if any.
    cumulative_logprob: sum of the tokens' log-probabilities; None if they are not known.
    num_draft_tokens: number of draft tokens that were verified. num_accepted_tokens: number of those accepted.
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

    def add_text(self, text: str) -> None:
        """Append to the text: as `add`, for a part that has nothing else, but faster."""
        last = self.parts[-1] if self.parts else None
        if last is None or last.text is not self.text or last.kind is not _TEXT:
            self.add([PartDelta(_TEXT, text)])
            return
        # In place, as in join_parts, and once for both.
        whole = self.text
        last.text = self.text = ""
        whole += text
        last.text = self.text = whole

    def add(self, parts: Sequence[PartDelta]) -> None:
        """Append new parts to the choice."""
        join_parts(self.parts, parts)
        for part in parts:
            kind = part.kind
            # In place, as in join_parts.
            if kind is _TEXT:
                text, self.text = self.text, ""
                text += part.text
                self.text = text
            elif kind is _REASONING:
                text, self.reasoning = self.reasoning, ""
                text += part.text
                self.reasoning = text


@dataclass(frozen=True, slots=True)
class PrefixMiss:
    """Where a prompt departs from the closest prefix in the prefix cache.

    position: index of the first token that differs. token_id: the prompt's token at that position.
    cached_token_id: the cached prefix's token, which may come from another user; None if that prefix ends there.
    """

    position: int
    token_id: int
    cached_token_id: int | None


@dataclass(slots=True)
class RequestOutput:
    """A request and its output so far.

    num_cached_tokens: number of prompt tokens found in the prefix cache.
    prompt_logprobs: for each prompt token a map as in CompletionOutput.logprobs; None for the first token.
    prefix_miss: where the prompt departs from the prefix cache; None if the cache was not searched, or had it all.
    pooled: float32 numbers that the engine has made of the prompt's hidden states, if an embedding or a
    score is wanted.
    queue_s: seconds until the request was first scheduled. prefill_s: seconds from then to the first token. decode_s:
    seconds from there to the latest token. The engine measures them; when its tokens arrive here does not matter.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = False
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prefix_miss: PrefixMiss | None = None
    pooled: bytes = b""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """embedding: the numbers of the vector, in the precision of float32."""

    embedding: list[float]


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """The embedding of a prompt, in the form of vLLM's class of that name. Other fields as in RequestOutput."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    num_cached_tokens: int = 0
    finished: bool = True

    @classmethod
    def of(cls, output: RequestOutput, params: PoolingParams) -> Self:
        """output: of a finished request that wanted an embedding."""
        embedding = EmbeddingOutput(params.vector(output.pooled).tolist())
        return cls(output.request_id, output.prompt, output.prompt_token_ids, embedding, output.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """score: how well a document matches a query; of most rerankers, a probability."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The score of a pair of texts, in the form of vLLM's class of that name. prompt_token_ids: those of the pair."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True

    @classmethod
    def of(cls, output: RequestOutput, scoring: Scoring) -> Self:
        """output: of a finished request that wanted a score."""
        score = ScoringOutput(scoring.score(output.pooled))
        return cls(output.request_id, score, output.prompt_token_ids, output.num_cached_tokens)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """probs: one number for each label of the model: its probability, or its logit. label: name of the largest one."""

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ClassificationRequestOutput:
    """The classes of a prompt, in the form of vLLM's class of that name. Other fields as in RequestOutput."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: ClassificationOutput
    num_cached_tokens: int = 0
    finished: bool = True

    @classmethod
    def of(cls, output: RequestOutput, how: Classification) -> Self:
        """output: of a finished request that wanted classes."""
        classes = ClassificationOutput(how.probabilities(output.pooled), how.label(output.pooled))
        return cls(output.request_id, output.prompt, output.prompt_token_ids, classes, output.num_cached_tokens)
