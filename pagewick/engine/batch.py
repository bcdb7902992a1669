"""StepPlan: what to run in one step, as plain data that ranks can be sent. StepOutput: what came of it.

A running sequence owns a slot of the runner, which remembers its block tables, its sampling parameters and its last
token. A plan says only what is new.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from pagewick.engine.messages import TokenLogprobs


class SlotSampling(msgspec.Struct, array_like=True):
    """How the tokens of a slot are chosen; see SamplingParams.

    stop_token_ids are impossible at positions below min_position. Positions count from 0 over prompt and output; the
    token at a position is drawn with noise from (seed, choice_index, position), whatever else is in the batch.
    """

    temperature: float
    top_k: int
    top_p: float
    seed: int
    choice_index: int
    min_position: int
    stop_token_ids: list[int]
    logprobs: int | None
    prompt_logprobs: int | None


class SlotStart(msgspec.Struct, array_like=True):
    """A sequence moves into a slot; block_tables (per cache group) hold its prefix hit, -1 where there is none."""

    slot: int
    sampling: SlotSampling
    block_tables: list[list[int]]


class SlotWork(msgspec.Struct, array_like=True):
    """Compute the tokens at positions [start, start + num_tokens) of a slot's sequence.

    token_ids: these tokens; None for the one that the slot sampled last.
    new_block_ids: per cache group, to be appended to the slot's block table.
    is_sampled: whether the token after the last one is wanted.
    prompt_targets: the prompt's tokens after each of these, whose log-probabilities are wanted; may be one fewer.
    """

    slot: int
    start: int
    num_tokens: int
    token_ids: list[int] | None
    new_block_ids: list[list[int]]
    is_sampled: bool
    prompt_targets: list[int]


class StepPlan(msgspec.Struct):
    """First the starts, then the work, one entry per scheduled sequence."""

    starts: list[SlotStart] = []
    work: list[SlotWork] = []


@dataclass(slots=True)
class SlotResult:
    """What one SlotWork gave: 0..k tokens, or an error that ends this sequence alone."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None


@dataclass(slots=True)
class StepOutput:
    """One result per SlotWork of the plan, in its order."""

    results: list[SlotResult]
