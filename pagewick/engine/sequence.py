"""Request and Sequence: a client's request, and the streams of tokens generated for it, one per choice or beam.

    0            num_cached_tokens     num_computed_tokens        num_tokens
    |-- prefix cache hit --|-- computed here --|-- missing, some of it scheduled --|
    |------------- prompt (num_prompt_tokens) ---------|----- output ------|

There are no phases: the scheduler lets the computed tokens of a sequence catch up with its tokens. A step that computes
one missing token is what people call decoding, a step that computes more is prefill.
"""

from __future__ import annotations

from collections.abc import Sequence as Series
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from pagewick.engine.batch import Candidate
from pagewick.engine.messages import EngineRequest, PrefixMiss, TokenLogprobs
from pagewick.engine.speculation.drafting import Drafting
from pagewick.sampling_params import SamplingParams


class TokenConstraint(Protocol):
    """Restricts which token a sequence may continue with. An exception raised by it ends only that sequence.

    The engine calls allowed_mask in a thread of its own, but never while it calls accept on the same constraint. State
    that several constraints share must be safe to use from two threads.

    is_complete: nothing may follow the tokens so far. The sequence then ends, whatever its stop tokens are.
    """

    @property
    def is_complete(self) -> bool: ...

    def allowed_mask(self) -> bytes | None:
        """Return one bit per token of the vocabulary, least significant first; None allows all of them."""
        ...

    def accept(self, token_id: int) -> None:
        """Note that the sequence continued with this token, one of the allowed ones."""
        ...


@runtime_checkable
class DraftConstraint(TokenConstraint, Protocol):
    """A TokenConstraint that can look ahead, so that its sequence may have draft tokens."""

    def forced_token_ids(self) -> Series[int]:
        """Return the tokens that follow in all likelihood because hardly anything else is allowed; may be empty."""
        ...

    def keep_allowed(self, token_ids: Series[int]) -> list[int]:
        """Return the longest beginning of these tokens that may follow."""
        ...

    def allowed_masks(self, draft_token_ids: Series[int]) -> Series[bytes | None]:
        """Return the masks before each of these tokens, which may follow, and after the last one."""
        ...


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished continuation of a beam search. stop_token_id: None if its length ended it."""

    score: float
    cumulative_logprob: float
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    stop_token_id: int | None


@dataclass(slots=True)
class Beam:
    """A continuation that a beam search is computing. logprobs: of its output tokens, if the request wants them.

    candidates: for its next token, best first; None until a step has given them.
    """

    seq: Sequence
    cumulative_logprob: float = 0.0
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    candidates: list[Candidate] | None = None


@dataclass(slots=True, eq=False)
class Request:
    """A request that the scheduler serves. Times are on the scheduler's clock, in seconds.

    arrival: its number in order of arrival. deadline: when it must be finished.
    stop_token_ids, max_output_tokens: the stop conditions of its sequences, for this model.
    sequences: those that are not finished. num_sequences: all that were ever created.
    num_unspawned: choices that are created once the prompt has been computed.
    unwanted_choices: choices that the client has stopped.
    num_cached_tokens: prompt tokens found in the prefix cache when it was first scheduled; None before that.
    num_charged_tokens: prompt tokens that its fairness key was charged for.
    num_reported_logprobs: prompt log-probabilities already sent. A preempted sequence computes them again.
    started_at: when it was first scheduled. prefilled_at: when its prompt was first computed to its end.
    has_reported_queue_time, has_reported_prefill_time: whether a delta has said how long these took.
    beams: those of a beam search, best first. hypotheses: what the search has finished, best first.
    """

    request: EngineRequest
    arrival: int
    arrived_at: float
    deadline: float | None
    stop_token_ids: frozenset[int]
    max_output_tokens: int
    sequences: list[Sequence] = field(default_factory=list)
    num_sequences: int = 0
    num_unspawned: int = 0
    unwanted_choices: set[int] = field(default_factory=set)
    num_cached_tokens: int | None = None
    num_charged_tokens: int = 0
    num_reported_logprobs: int = 0
    started_at: float | None = None
    prefilled_at: float | None = None
    has_reported_queue_time: bool = False
    has_reported_prefill_time: bool = False
    prefix_miss: PrefixMiss | None = None
    beams: list[Beam] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)

    @property
    def is_beam_search(self) -> bool:
        return self.request.params.use_beam_search


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens. Its fields hold the facts, those that every step asks of its request included.

    order: among sequences of one fairness key, the lowest is served first and preempted last.
    is_prompt_only: nothing is sampled; the sequence is finished as soon as its prompt has been computed.
    slot: its place in the runner, None while it waits. is_started: whether a plan has put it there.
    has_sampled: whether it has sampled in this slot, so that the runner knows its last token.
    block_tables: per cache group the block id of each logical block; NULL_BLOCK where it holds none.
    block_hashes: prefix hashes of the complete hash blocks of token_ids, as far as PrefixHasher has computed them.
    num_tokens_in_flight: tokens that the steps in flight compute.
    num_unknown_tokens: tokens that the steps in flight sample; they are not in token_ids yet.
    drafting: None if it does not speculate.
    max_num_tokens: its number of tokens once it has reached its length limit.
    is_plain: whether nothing but its last token decides what its next step computes; not so for draft tokens,
        constraints and beams.
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
    drafting: Drafting | None = None
    constraint: TokenConstraint | None = None
    mirostat_mu: float | None = None
    is_plain: bool = False
    request: EngineRequest = field(init=False)
    params: SamplingParams = field(init=False)
    fairness_key: str = field(init=False)
    priority: int = field(init=False)
    order: tuple[int, int, int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    max_num_tokens: int = field(init=False)
    is_prompt_only: bool = field(init=False)
    wants_prompt_logprobs: bool = field(init=False)

    def __post_init__(self) -> None:
        self.request = request = self.owner.request
        self.params = params = request.params
        self.fairness_key, self.priority = request.options.fairness_key, request.options.priority
        self.order = (self.priority, self.owner.arrival, self.choice_index)
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.max_num_tokens = self.num_prompt_tokens + self.owner.max_output_tokens
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
        """Number of known tokens that no finished step has computed; 0 only for a beam that waits for the others."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_scheduled_tokens(self) -> int:
        """Number of computed tokens once the steps in flight are done: the next step begins at this position."""
        return self.num_computed_tokens + self.num_tokens_in_flight

    @property
    def num_unscheduled_tokens(self) -> int:
        """Number of tokens, unknown ones included, that neither finished steps nor those in flight compute."""
        return len(self.token_ids) + self.num_unknown_tokens - self.num_computed_tokens - self.num_tokens_in_flight

    @property
    def needs_results(self) -> bool:
        """Whether its next step can only be planned with the tokens of the last one, as for draft tokens and beams."""
        return self.drafting is not None or self.params.use_beam_search

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
        """Whether cached tokens need not be computed. Prompt log-probabilities and means need all hidden states."""
        return not self.wants_prompt_logprobs and self.request.pooling not in ("mean", "cls")
