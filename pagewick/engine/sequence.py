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
    """What a sequence may say next. An exception from it ends that sequence alone.

    allowed_mask is called in a thread of its own, never beside accept of the same constraint. What several constraints
    share must be safe to use from two threads.
    """

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
    stop_token_ids, max_output_tokens: what ends its sequences, besides what the request says of text.
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
    stop_token_ids: frozenset[int] = frozenset()
    max_output_tokens: int = 0
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
    """Stored facts, among them what never changes of its request; everything else is a property.

    order: who is served first and preempted last, among those of one fairness key: the lower.
    is_prompt_only: nothing is sampled: it is over as soon as its prompt has been computed.
    slot: the runner's place for it, None while it waits. is_started: whether the runner has been told of that.
    has_sampled: in this slot, so that the runner knows its last token.
    block_tables: per cache group the block id of each logical block; NULL_BLOCK where it holds none.
    block_hashes: prefix hash of each complete hash block of token_ids, as far as asked for; PrefixHasher's.
    num_tokens_in_flight: tokens that the steps in flight compute.
    num_unknown_tokens: tokens that the steps in flight sample; they are not in token_ids yet.
    """

    owner: Request
    choice_index: int
    token_ids: list[int]
    num_computed_tokens: int = 0
    num_tokens_in_flight: int = 0
    num_unknown_tokens: int = 0
    slot: int | None = None
    is_started: bool = False
    has_sampled: bool = False
    is_finished: bool = False
    block_tables: list[list[int]] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    guesses: Guesses | None = None
    constraint: TokenConstraint | None = None
    mirostat_mu: float | None = None
    request: EngineRequest = field(init=False)
    params: SamplingParams = field(init=False)
    fairness_key: str = field(init=False)
    priority: int = field(init=False)
    order: tuple[int, int, int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    is_prompt_only: bool = field(init=False)
    wants_prompt_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        # All of them are asked for in every step.
        self.request = request = self.owner.request
        self.params = params = request.params
        self.fairness_key, self.priority = request.options.fairness_key, request.options.priority
        self.order = (self.priority, self.owner.arrival, self.choice_index)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.is_prompt_only = params.max_tokens == 0
        self.wants_prompt_logprobs = self.choice_index == 0 and params.prompt_logprobs is not None

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def arrival(self) -> int:
        return self.owner.arrival

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_tokens(self) -> int:
        """Known tokens that no finished step has computed; 0 only for a beam that waits for the others."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_scheduled_tokens(self) -> int:
        """The number of computed tokens once the steps in flight are done: the next step begins at this position."""
        return self.num_computed_tokens + self.num_tokens_in_flight

    @property
    def num_unscheduled_tokens(self) -> int:
        """Tokens, unknown ones included, that neither finished steps nor those in flight compute."""
        return len(self.token_ids) + self.num_unknown_tokens - self.num_computed_tokens - self.num_tokens_in_flight

    @property
    def needs_results(self) -> bool:
        """Whether its next step can only be planned with the tokens of the last one, as guesses and beams can."""
        return self.guesses is not None or self.owner.beams is not None

    @property
    def can_continue(self) -> bool:
        """Whether the next step of this sequence can be planned before the results of those in flight are known.

        A sequence that reaches its length limit has no next step.
        """
        if not self.num_unknown_tokens:
            return True
        is_below_limit = self.num_output_tokens + self.num_unknown_tokens < self.owner.max_output_tokens
        return is_below_limit and not self.needs_results

    @property
    def may_use_prefix_cache(self) -> bool:
        """Prompt log-probabilities need the hidden state of every prompt token, so these are computed."""
        return not self.wants_prompt_logprobs
