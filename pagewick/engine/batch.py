"""StepPlan: what to run in one step, as plain data that ranks can be sent. StepOutput: what came of it.

A running sequence owns a slot of the runner, which remembers its block tables, its sampling parameters and its last
token. A plan says only what is new.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from pagewick.engine.messages import TokenLogprobs
from pagewick.sampling_params import SamplingParams


class SlotSampling(msgspec.Struct, array_like=True, dict=True):
    """How the tokens of a slot are chosen. Its __dict__, which is not sent, keeps what the sampler has made of it.

    The token at a position is drawn with noise from (seed, choice_index, position), whatever else is in the batch.
    Positions count from 0 over prompt and output. stop_token_ids are impossible before params.min_tokens are out.
    bad_word_ids, dry_breaker_ids, dry_breaker_mask: as in EngineRequest.
    """

    params: SamplingParams
    seed: int
    choice_index: int
    num_prompt_tokens: int
    stop_token_ids: list[int] = []
    bad_word_ids: list[list[int]] = []
    dry_breaker_ids: list[list[int]] = []
    dry_breaker_mask: bytes = b""


class SlotStart(msgspec.Struct, array_like=True):
    """A sequence moves into a slot.

    block_tables: per cache group the blocks it has already, -1 where there is none.
    token_ids: all its tokens so far, if sampling or drafting looks back at them; else empty.
    mirostat_mu: where its mirostat had got to when it was preempted; None before its first token.
    """

    slot: int
    sampling: SlotSampling
    block_tables: list[list[int]]
    token_ids: list[int] = []
    mirostat_mu: float | None = None


class SlotWork(msgspec.Struct, array_like=True):
    """Compute the tokens at positions [start, start + num_tokens) of a slot's sequence.

    token_ids: these tokens; None for the one that the slot sampled last, which the plan's maker may not know yet.
    new_block_ids: per cache group, to be appended to the slot's block table. In a group of snapshots they replace it:
        the block with the state before these tokens, -1 if they are the first, and the one that takes the state after.
    is_sampled: whether the token after the last one is wanted.
    prompt_targets: the prompt's tokens after each of these, whose log-probabilities are wanted; may be one fewer.
    num_draft_tokens: so many of the last of token_ids are guesses: after each, and before the first of them, a token is
        sampled, and the guesses hold as far as they are the tokens sampled.
    num_wanted_drafts: so many tokens are to be guessed for the next step by the draft model.
    awaits_mask: a constraint says which tokens may come next. Its mask follows the plan (see StepMasks).
    """

    slot: int
    start: int
    num_tokens: int
    token_ids: list[int] | None
    new_block_ids: list[list[int]]
    is_sampled: bool
    prompt_targets: list[int] = []
    num_draft_tokens: int = 0
    num_wanted_drafts: int = 0
    awaits_mask: bool = False


class Tier(IntEnum):
    """Where the content of a block can be: in the pool that attention reads, in host memory, on disk."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Transfer(msgspec.Struct, array_like=True):
    """Copy the content of one block of a cache group, in all its layers; transfers run in the order of the plan.

    source, destination: block numbers of that tier. key: the prefix hash, which is the name of a block on disk.
    From disk to disk means that the block is deleted there.
    """

    group: int
    source_tier: int
    source: int
    destination_tier: int
    destination: int
    key: bytes = b""

    @property
    def is_read(self) -> bool:
        """Whether it reads from disk, which can fail."""
        return self.source_tier == Tier.DISK and self.destination_tier != Tier.DISK


class StepPlan(msgspec.Struct):
    """In this order: the transfers, the starts, the work, one entry per scheduled sequence."""

    transfers: list[Transfer] = []
    starts: list[SlotStart] = []
    work: list[SlotWork] = []

    @property
    def reads_disk(self) -> bool:
        """Whether it brings blocks back from disk. That can fail, and then nothing of the plan is done."""
        return any(transfer.is_read for transfer in self.transfers)


class StepMasks(msgspec.Struct, array_like=True):
    """Follows a plan some of whose work awaits a mask: computed beside the forward pass, needed before sampling.

    masks: one per SlotWork that awaits one, in the plan's order. One bit per token of the vocabulary, least significant
    first, is set for the tokens that the constraint allows next; None allows all of them.
    """

    masks: list[bytes | None] = []


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that a beam may go on with.

    score: its log-probability after bans and bias, by which it is chosen. logprobs: what is reported of it, the model's
    own; None if nobody asked.
    """

    token_id: int
    score: float
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class SlotResult:
    """What one SlotWork gave: 0..k tokens, or an error that ends this sequence alone (after these tokens).

    logprobs: one per token.
    candidates: of a beam search, in place of tokens: the best for the next one, best first.
    is_poisoned: the error is that logits were not numbers, so that what the cache holds of the sequence may be wrong.
    draft_token_ids: guesses for the next step, if any were wanted and the drafter has some.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    is_poisoned: bool = False
    candidates: list[Candidate] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    mirostat_mu: float | None = None


@dataclass(slots=True)
class StepOutput:
    """One result per SlotWork of the plan, in its order.

    unreadable: keys of blocks that could not be read from disk. The work was then not done and results is empty.
    can_write: false once the disk has refused a block; from then on none is written.
    """

    results: list[SlotResult]
    unreadable: list[bytes] = field(default_factory=list)
    can_write: bool = True
