"""Request and Sequence: what was asked for, and the streams of tokens generated for it, one per choice or beam.

    0            num_cached_tokens     num_computed_tokens        num_tokens
    |-- prefix cache hit --|-- computed here --|-- missing, some of it scheduled --|
    |------------- prompt (num_prompt_tokens) ---------|----- output ------|

There are no phases: a sequence is always catching up. One missing token is what people call decoding, more are prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from pagewick.engine.messages import EngineRequest, PrefixMiss
from pagewick.sampling_params import SamplingParams

if TYPE_CHECKING:
    from pagewick.engine.scheduling.beam_search import BeamSearch
    from pagewick.engine.scheduling.guesses import Guesses


class TokenConstraint(Protocol):
    """What a sequence may say next. An exception from it ends that sequence alone."""

    def allowed_mask(self) -> bytes | None:
        """One bit per token of the vocabulary, least significant first; None allows all of them."""
        ...

    def accept(self, token_id: int) -> None:
        """The sequence went on with this token, one of the allowed ones."""
        ...


@dataclass(slots=True, eq=False)
class Request:
    """A request in the scheduler's hands.

    arrival: its running number. arrived_at, deadline: on the scheduler's clock, in seconds.
    sequences: those that are not finished; num_sequences: that there ever were.
    num_unspawned: choices that begin once the prompt has been computed. unwanted_choices: those that were stopped.
    num_cached_tokens: of the prompt, found in the prefix cache when it first started; None before that.
    num_charged_tokens: of the prompt, that its fairness key was charged for.
    num_reported_logprobs: prompt log-probabilities already given out; a preempted sequence computes them again.
    started_at: when it was first scheduled. prefilled_at: when its prompt was first computed to its end.
    is_queue_told, is_prefill_told: whether a delta has said how long these took.
    """

    request: EngineRequest
    arrival: int
    arrived_at: float
    deadline: float | None
    sequences: list[Sequence] = field(default_factory=list)
    num_sequences: int = 0
    num_unspawned: int = 0
    unwanted_choices: set[int] = field(default_factory=set)
    num_cached_tokens: int | None = None
    num_charged_tokens: int = 0
    num_reported_logprobs: int = 0
    started_at: float | None = None
    prefilled_at: float | None = None
    is_queue_told: bool = False
    is_prefill_told: bool = False
    prefix_miss: PrefixMiss | None = None
    beams: BeamSearch | None = None


@dataclass(slots=True, eq=False)
class Sequence:
    """Stored facts; everything else is a property.

    slot: the runner's place for it, None while it waits. is_started: whether the runner has been told of that.
    has_sampled: in this slot, so that the runner knows its last token.
    block_tables: per cache group the block id of each logical block; NULL_BLOCK where it holds none.
    block_hashes: prefix hash of each complete hash block of token_ids, as far as asked for; PrefixHasher's.
    num_scheduled_tokens: of the step under way, num_scheduled_drafts of them guesses.
    """

    owner: Request
    choice_index: int
    token_ids: list[int]
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_scheduled_drafts: int = 0
    slot: int | None = None
    is_started: bool = False
    has_sampled: bool = False
    is_finished: bool = False
    block_tables: list[list[int]] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    guesses: Guesses | None = None
    constraint: TokenConstraint | None = None
    mirostat_mu: float | None = None

    @property
    def request(self) -> EngineRequest:
        return self.owner.request

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def arrival(self) -> int:
        return self.owner.arrival

    @property
    def fairness_key(self) -> str:
        return self.request.options.fairness_key

    @property
    def priority(self) -> int:
        return self.request.options.priority

    @property
    def order(self) -> tuple[int, int, int]:
        """Who is served first and preempted last, among those of one fairness key: the lower."""
        return (self.priority, self.arrival, self.choice_index)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def is_prompt_only(self) -> bool:
        """Nothing is sampled: it is over as soon as its prompt has been computed."""
        return self.params.max_tokens == 0

    @property
    def num_missing_tokens(self) -> int:
        """0 only for a beam that waits for the others."""
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_scheduled_prompt_tokens(self) -> int:
        """Of the step under way, those of the prompt."""
        return max(0, min(self.num_scheduled_tokens, self.num_prompt_tokens - self.num_computed_tokens))

    @property
    def wants_prompt_logprobs(self) -> bool:
        return self.choice_index == 0 and self.params.prompt_logprobs is not None

    @property
    def may_use_prefix_cache(self) -> bool:
        """Prompt log-probabilities need the hidden state of every prompt token, so these are computed."""
        return not self.wants_prompt_logprobs
