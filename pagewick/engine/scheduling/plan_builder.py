"""PlanBuilder: collects the work of a StepPlan. ScheduledStep: a finished plan and the sequences that it serves."""

from __future__ import annotations

from dataclasses import dataclass

from pagewick.engine.batch import SlotSampling, SlotStart, SlotWork, StepPlan, StreamWork, Transfer
from pagewick.engine.images import without_computed
from pagewick.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan in flight. work: the SlotWork of each sequence, in the plan's order. streams: those of the plan."""

    plan: StepPlan
    work: dict[Sequence, SlotWork]
    streams: list[Sequence]


class PlanBuilder:
    """budget: tokens that this step may still schedule. work: the SlotWork of each sequence, in the plan's order.

    streams: the streams of the plan and the positions at which they continue. They have no SlotWork.
    keeps_history: whether every slot needs all tokens of its sequence, as a draft model does. looks_ahead: whether a
    part of a prompt comes with the token after it.
    """

    def __init__(self, budget: int, *, keeps_history: bool, looks_ahead: bool = False) -> None:
        self.budget = budget
        self.work: dict[Sequence, SlotWork] = {}
        self.streams: dict[Sequence, int] = {}
        self._keeps_history, self._looks_ahead = keeps_history, looks_ahead
        self._starts: dict[Sequence, SlotStart] = {}
        self._stream_blocks: dict[Sequence, list[list[int]]] = {}

    @property
    def num_sequences(self) -> int:
        return len(self.work) + len(self.streams)

    def start(self, seq: Sequence) -> None:
        """Tell the runner about a sequence that has got a slot, with the blocks that it has now."""
        assert seq.slot is not None
        request = seq.request
        sampling = SlotSampling(
            params=request.params,
            seed=request.seed,
            choice_index=seq.choice_index,
            num_prompt_tokens=seq.num_prompt_tokens,
            stop_token_ids=sorted(seq.owner.stop_token_ids),
            bad_word_ids=request.bad_word_ids,
            dry_breaker_ids=request.dry_breaker_ids,
            dry_breaker_mask=request.dry_breaker_mask,
            opening_ids=request.opening_ids,
            pooling=request.pooling,
            label_ids=request.label_ids,
            separator_id=request.separator_id,
        )
        needs_history = self._keeps_history or request.params.needs_history or bool(request.bad_word_ids)
        self._starts[seq] = SlotStart(
            slot=seq.slot,
            sampling=sampling,
            block_tables=[list(table) for table in seq.block_tables],
            token_ids=list(seq.token_ids) if needs_history else [],
            mirostat_mu=seq.mirostat_mu,
            images=without_computed(request.images, seq.num_scheduled_tokens),
            adapter=request.adapter_number,
            prompt_ids=list(seq.token_ids[: seq.num_prompt_tokens]) if request.images else [],
        )
        seq.is_started = True

    def add(self, seq: Sequence, num_tokens: int, new_block_ids: list[list[int]], num_stored: int = 0) -> None:
        """Compute the next `num_tokens` tokens of a sequence; sample if no known token follows them.

        num_stored: as in SlotWork.
        """
        assert seq.slot is not None
        start = seq.num_scheduled_tokens
        end = start + num_tokens
        has_all = num_tokens == seq.num_unscheduled_tokens
        is_sampled = has_all and not seq.is_prompt_only
        # Where layers keep states, a sequence may also miss accepted draft tokens ahead of the one sampled last.
        is_last_sampled = num_tokens == 1 and has_all and (seq.has_sampled or seq.num_unknown_tokens > 0)
        if is_last_sampled and is_sampled and seq.is_plain:
            if any(new_block_ids):
                self._stream_blocks[seq] = new_block_ids
            self.add_stream(seq, start)
            return
        self.work[seq] = SlotWork(
            slot=seq.slot,
            start=start,
            num_tokens=num_tokens,
            token_ids=None if is_last_sampled else seq.token_ids[start:end],
            new_block_ids=new_block_ids,
            is_sampled=is_sampled,
            prompt_targets=seq.request.prompt_token_ids[start + 1 : end + 1] if seq.wants_prompt_logprobs else [],
            awaits_mask=is_sampled and seq.constraint is not None,
            next_token_id=seq.token_ids[end] if self._looks_ahead and end < len(seq.token_ids) else -1,
            num_stored=num_stored,
        )
        seq.num_tokens_in_flight += num_tokens
        seq.num_unknown_tokens += is_sampled
        self.budget -= num_tokens

    def add_stream(self, seq: Sequence, start: int) -> None:
        """Continue a plain sequence with the token at `start`, which its slot has sampled, and sample the next one."""
        self.streams[seq] = start
        seq.num_tokens_in_flight += 1
        seq.num_unknown_tokens += 1
        self.budget -= 1

    def add_draft_tokens(
        self, seq: Sequence, token_ids: list[int], new_block_ids: list[list[int]], *, has_states: bool
    ) -> None:
        """Let the sequence's work, which samples, continue with draft tokens, and give it further blocks.

        has_states: whether there are states, which are not stored behind draft tokens.
        """
        work = self.work[seq]
        if token_ids:
            work.token_ids = [*(work.token_ids or seq.token_ids[-1:]), *token_ids]
            work.num_stored = work.num_stored or (work.num_tokens if has_states else 0)
        work.num_tokens += len(token_ids)
        work.num_draft_tokens = len(token_ids)
        for blocks, more in zip(work.new_block_ids, new_block_ids, strict=True):
            blocks += more
        seq.num_tokens_in_flight += len(token_ids)
        self.budget -= len(token_ids)

    def remove(self, seq: Sequence) -> None:
        """Take back everything that was planned for a sequence."""
        if work := self.work.pop(seq, None):
            self.budget += work.num_tokens
            seq.num_tokens_in_flight -= work.num_tokens
            seq.num_unknown_tokens -= work.is_sampled
        if self.streams.pop(seq, None) is not None:
            self.budget += 1
            seq.num_tokens_in_flight -= 1
            seq.num_unknown_tokens -= 1
            self._stream_blocks.pop(seq, None)
        if self._starts.pop(seq, None):
            seq.is_started = False

    def finish(self, transfers: list[Transfer]) -> ScheduledStep:
        new_blocks = self._stream_blocks
        streams = StreamWork(
            slots=[seq.slot for seq in self.streams if seq.slot is not None],
            starts=list(self.streams.values()),
            new_block_ids={place: new_blocks[seq] for place, seq in enumerate(self.streams) if seq in new_blocks},
        )
        assert len(streams.slots) == len(streams.starts), "a stream has no slot"
        plan = StepPlan(transfers, list(self._starts.values()), streams, list(self.work.values()))
        return ScheduledStep(plan, self.work, list(self.streams))
