"""StepPlan: the work of one step, as plain data that is sent to the ranks. StepOutput: its results.

A running sequence owns a slot of the runner, which remembers its block tables, its sampling parameters and its last
token. A plan contains only what is new.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from pagewick.engine.messages import ImageInput, TokenLogprobs
from pagewick.sampling_params import SamplingParams

NOT_NUMBERS = (
    "the model computed logits that are not numbers for this request: a weight is not finite, or the numbers are too "
    "large for --dtype; try --dtype float32, or download the model again"
)


class SlotSampling(msgspec.Struct, array_like=True, dict=True):
    """How the tokens of a slot are sampled. The sampler caches values derived from it in __dict__, which is not sent.

    The token at a position is drawn with noise from (seed, choice_index, position), whatever else is in the batch.
    Positions count from 0 over prompt and output. No stop token is sampled before params.min_tokens output tokens.
    bad_word_ids, dry_breaker_ids, dry_breaker_mask, opening_ids, pooling, label_ids, separator_id: as in
    EngineRequest.
    """

    params: SamplingParams
    seed: int
    choice_index: int
    num_prompt_tokens: int
    stop_token_ids: list[int] = []
    bad_word_ids: list[list[int]] = []
    dry_breaker_ids: list[list[int]] = []
    dry_breaker_mask: bytes = b""
    opening_ids: list[int] = []
    pooling: str = ""
    label_ids: list[int] = []
    separator_id: int = -1


class SlotStart(msgspec.Struct, array_like=True):
    """Puts a sequence into a slot.

    block_tables: per cache group the blocks that it has already, -1 where there is none.
    token_ids: all its tokens so far, if sampling or drafting looks back at them; else empty.
    mirostat_mu: its state of mirostat when it was preempted; None before its first token.
    images: those of its prompt, without their pixels where all tokens of an image have been computed.
    adapter: the number of its LoRA adapter, see LoraLayer; -1: none.
    prompt_ids: the tokens of a prompt with images; else empty.
    """

    slot: int
    sampling: SlotSampling
    block_tables: list[list[int]]
    token_ids: list[int] = []
    mirostat_mu: float | None = None
    images: list[ImageInput] = []
    adapter: int = -1
    prompt_ids: list[int] = []


class SlotWork(msgspec.Struct, array_like=True):
    """Asks for the tokens at positions [start, start + num_tokens) of a slot's sequence to be computed.

    token_ids: these tokens; None for the one that the slot sampled last, which the scheduler may not know yet.
    new_block_ids: per cache group, the blocks to append to the slot's block table. In a group of snapshots they replace
        it: the block with the state before these tokens, -1 if they are the first, and the block for the state after.
    is_sampled: whether to sample the token after the last one.
    prompt_targets: the prompt tokens that follow these and whose log-probabilities are wanted; may be one fewer.
    num_draft_tokens: how many of token_ids, at their end, are draft tokens. A token is sampled before the first of them
        and after each, and they are accepted up to the first one that differs from the token sampled in its place.
    num_stored: after how many of these tokens states are stored, in groups of snapshots; 0: after all of them. It is
        never after a draft token, since a state cannot be taken back, so that accepted ones are computed once more.
    num_wanted_drafts: number of draft tokens that the runner should propose for the next step.
    awaits_mask: whether a constraint restricts the sampled tokens. Its masks follow the plan (see StepMasks).
    next_token_id: of a prompt, the token after these, for a layer that predicts further tokens; -1: none, or not known.
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
    next_token_id: int = -1
    num_stored: int = 0

    @property
    def draft_token_ids(self) -> list[int]:
        """The draft tokens, which are the last ones of token_ids."""
        if not self.num_draft_tokens:
            return []
        assert self.token_ids is not None, "draft tokens come with the token before them"
        return self.token_ids[len(self.token_ids) - self.num_draft_tokens :]


class StreamWork(msgspec.Struct, array_like=True):
    """The work of streams, in columns: each continues with the token that its slot sampled last, and samples the next.

    slots, starts: as in SlotWork, for each stream. new_block_ids: as in SlotWork, by the place of a stream in these
        columns; most steps of a stream need no block.
    """

    slots: list[int] = []
    starts: list[int] = []
    new_block_ids: dict[int, list[list[int]]] = {}

    def work(self, place: int) -> SlotWork:
        """Return the work of the stream at `place` as a SlotWork; new_block_ids is empty if it gets no block."""
        return SlotWork(
            slot=self.slots[place],
            start=self.starts[place],
            num_tokens=1,
            token_ids=None,
            new_block_ids=self.new_block_ids.get(place, []),
            is_sampled=True,
        )


class Tier(IntEnum):
    """Places for the content of a block: the pool that attention reads, host memory, disk."""

    DEVICE = 0
    HOST = 1
    DISK = 2


class Transfer(msgspec.Struct, array_like=True):
    """Copies the content of one block of a cache group, in all its layers; transfers run in the order of the plan.

    source, destination: block numbers of that tier. key: the prefix hash, which is the name of a block on disk.
    A transfer from disk to disk deletes the block there.
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


class AdapterLoad(msgspec.Struct, array_like=True):
    """Loads the LoRA adapter at `path` as adapter `number`, which no sequence in a slot uses.

    name: with it, a rank on another machine finds in its own config where the adapter lies there.
    """

    number: int
    path: str
    name: str = ""


class StepPlan(msgspec.Struct):
    """The work of a step. The runner does the transfers, then the starts, then the work of each scheduled sequence.

    A sequence is either a stream or has a SlotWork of its own. In the step's batch the streams come first.
    adapter: to be loaded; such a plan has nothing else. publishes: wait until other servers can read what the transfers
    have written.
    """

    transfers: list[Transfer] = []
    starts: list[SlotStart] = []
    streams: StreamWork = msgspec.field(default_factory=StreamWork)
    work: list[SlotWork] = []
    adapter: AdapterLoad | None = None
    publishes: bool = False

    @property
    def has_work(self) -> bool:
        return bool(self.streams.slots or self.work)

    @property
    def reads_disk(self) -> bool:
        """Whether it brings blocks back from disk. That can fail, and then no work of the plan is done."""
        return any(transfer.is_read for transfer in self.transfers)


class StepMasks(msgspec.Struct, array_like=True):
    """The masks that the work of a plan awaits. They are computed during the forward pass and needed before sampling.

    masks: for each SlotWork that awaits them, in the plan's order, one per token that it samples. One bit per token of
    the vocabulary, least significant first, is set for the tokens that the constraint allows next; None allows all.
    """

    masks: list[list[bytes | None]] = []


@dataclass(frozen=True, slots=True)
class Candidate:
    """A token that a beam may continue with.

    score: its log-probability after bans and bias, which ranks it. logprobs: the model's own, for the response; None if
    the request does not want any.
    """

    token_id: int
    score: float
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class SlotResult:
    """The result of one SlotWork: 0..k tokens, and perhaps an error that ends only this sequence, after these tokens.

    logprobs: one per token.
    error_kind: the name of its class in pagewick.errors.
    candidates: for a beam search, in place of tokens, the best next tokens, best first.
    is_poisoned: the logits were not numbers, so the sequence's contents of the cache may be wrong.
    draft_token_ids: draft tokens for the next step, if any were wanted and the drafter has some.
    embedding: that of the prompt, or logits, once its last token has been computed, if the request wants it.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: str | None = None
    error_kind: str = "EngineError"
    is_poisoned: bool = False
    candidates: list[Candidate] = field(default_factory=list)
    draft_token_ids: list[int] = field(default_factory=list)
    mirostat_mu: float | None = None
    embedding: bytes = b""


@dataclass(slots=True)
class StreamResults:
    """The results of a plan's streams, in their order.

    token_ids: one of each stream. details: by place, the results of streams that have more or less to tell than a
    token: log-probabilities, a state of mirostat or an error. Their element of token_ids is not used.
    """

    token_ids: list[int] = field(default_factory=list)
    details: dict[int, SlotResult] = field(default_factory=dict)


@dataclass(slots=True)
class StepOutput:
    """One result per SlotWork of the plan, in its order. streams: the results of the plan's streams.

    unreadable: keys of blocks that could not be read from disk. If there are any, no work was done; results is empty.
    can_write: false once the disk has refused a block; from then on none is written.
    adapter_digest, adapter_error: of the plan's adapter, the digest of its contents, or why no rank has loaded it.
    """

    results: list[SlotResult]
    unreadable: list[bytes] = field(default_factory=list)
    can_write: bool = True
    streams: StreamResults = field(default_factory=StreamResults)
    adapter_digest: bytes = b""
    adapter_error: str = ""
