"""Sequence: one stream of tokens being generated, and how far the engine has got with it.

    0            num_cached_tokens     num_computed_tokens        num_tokens
    |-- prefix cache hit --|-- computed here --|-- missing, some of it scheduled --|
    |------------- prompt (num_prompt_tokens) ---------|----- output ------|

There are no phases: a sequence is always catching up. One missing token is what people call decoding, more are prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from pagewick.engine.messages import EngineRequest


@dataclass(slots=True, eq=False)
class Sequence:
    """Stored facts; everything else is a property.

    num_cached_tokens: of the prompt, found in the prefix cache when it first started; None before that.
    arrival: running number of its request, the order of service among equal priorities.
    slot: the runner's place for it, None while it waits.
    has_sampled: in this slot, so that the runner knows its last token.
    block_tables: per cache group the block id of each logical block; NULL_BLOCK where it holds none.
    block_hashes: prefix hash of each complete hash block of token_ids, as far as asked for; the block manager's.
    num_reported_logprobs: prompt log-probabilities already given out (a preempted sequence computes them again).
    """

    request: EngineRequest
    arrival: int
    token_ids: list[int]
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0
    num_cached_tokens: int | None = None
    slot: int | None = None
    has_sampled: bool = False
    is_finished: bool = False
    block_tables: list[list[int]] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_reported_logprobs: int = 0

    @classmethod
    def from_request(cls, request: EngineRequest, arrival: int) -> Sequence:
        return cls(request=request, arrival=arrival, token_ids=list(request.prompt_token_ids))

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def order(self) -> tuple[int, int]:
        """Who is served first and preempted last: the lower."""
        return (self.request.priority, self.arrival)

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
    def num_missing_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def may_use_prefix_cache(self) -> bool:
        """Prompt log-probabilities need the hidden state of every prompt token, so these are computed."""
        return self.request.params.prompt_logprobs is None
