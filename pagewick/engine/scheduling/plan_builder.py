"""PlanBuilder: collects the work of a StepPlan. ScheduledStep: a finished plan and the sequences that it serves."""

from __future__ import annotations

from dataclasses import dataclass

from pagewick.engine.batch import SlotSampling, SlotStart, SlotWork, StepPlan, Transfer
from pagewick.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A plan in flight. work: the SlotWork of each sequence, in the plan's order."""

    plan: StepPlan
    work: dict[Sequence, SlotWork]


class PlanBuilder:
    """Work can be extended by guesses, and taken back. budget: the tokens that may still be scheduled in this step."""

    def __init__(self, budget: int, *, keeps_history: bool) -> None:
        self.budget = budget
        self._keeps_history = keeps_history
        self._starts: dict[Sequence, SlotStart] = {}
        self._work: dict[Sequence, SlotWork] = {}

    def __contains__(self, seq: Sequence) -> bool:
        return seq in self._work

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._work)

    def start(self, seq: Sequence, stop_token_ids: list[int]) -> None:
        """Tell the runner of a sequence that has got a slot, with the blocks that it has now."""
        assert seq.slot is not None
        request = seq.request
        sampling = SlotSampling(
            params=request.params,
            seed=request.seed,
            choice_index=seq.choice_index,
            num_prompt_tokens=seq.num_prompt_tokens,
            stop_token_ids=stop_token_ids,
            bad_word_ids=request.bad_word_ids,
            dry_breaker_ids=request.dry_breaker_ids,
            dry_breaker_mask=request.dry_breaker_mask,
        )
        needs_history = self._keeps_history or request.params.needs_history or bool(request.bad_word_ids)
        self._starts[seq] = SlotStart(
            slot=seq.slot,
            sampling=sampling,
            block_tables=[list(table) for table in seq.block_tables],
            token_ids=list(seq.token_ids) if needs_history else [],
            mirostat_mu=seq.mirostat_mu,
        )
        seq.is_started = True

    def add(self, seq: Sequence, num_tokens: int, new_block_ids: list[list[int]]) -> None:
        assert seq.slot is not None
        start = seq.num_scheduled_tokens
        end = start + num_tokens
        is_sampled = num_tokens == seq.num_unscheduled_tokens and not seq.is_prompt_only
        is_last_sampled = num_tokens == 1 and (seq.has_sampled or seq.num_unknown_tokens > 0)
        self._work[seq] = SlotWork(
            slot=seq.slot,
            start=start,
            num_tokens=num_tokens,
            token_ids=None if is_last_sampled else seq.token_ids[start:end],
            new_block_ids=new_block_ids,
            is_sampled=is_sampled,
            prompt_targets=seq.request.prompt_token_ids[start + 1 : end + 1] if seq.wants_prompt_logprobs else [],
            awaits_mask=is_sampled and seq.constraint is not None,
        )
        seq.num_tokens_in_flight += num_tokens
        seq.num_unknown_tokens += is_sampled
        self.budget -= num_tokens

    def work_of(self, seq: Sequence) -> SlotWork:
        return self._work[seq]

    def add_guesses(self, seq: Sequence, token_ids: list[int], new_block_ids: list[list[int]]) -> None:
        """Let the sequence's work, which samples, go on with guesses for what comes next."""
        work = self._work[seq]
        work.token_ids = [*(work.token_ids or seq.token_ids[-1:]), *token_ids]
        work.num_tokens += len(token_ids)
        work.num_draft_tokens = len(token_ids)
        for blocks, more in zip(work.new_block_ids, new_block_ids, strict=True):
            blocks += more
        seq.num_tokens_in_flight += len(token_ids)
        self.budget -= len(token_ids)

    def remove(self, seq: Sequence) -> None:
        """Take back what was planned for a sequence that is preempted."""
        if work := self._work.pop(seq, None):
            self.budget += work.num_tokens
            seq.num_tokens_in_flight -= work.num_tokens
            seq.num_unknown_tokens -= work.is_sampled
        if self._starts.pop(seq, None):
            seq.is_started = False

    def finish(self, transfers: list[Transfer]) -> ScheduledStep:
        plan = StepPlan(transfers=transfers, starts=list(self._starts.values()), work=list(self._work.values()))
        return ScheduledStep(plan, self._work)
