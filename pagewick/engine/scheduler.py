"""Which sequences get how many tokens in this step; who waits, who is preempted, who has finished.

The rule: let every sequence's computed tokens catch up with its tokens, within the token budget and the blocks there
are. Sequences that miss a single token come first, so that a long prompt never holds up a running stream; then those
that miss more, then the waiting ones, each in order of priority and arrival. When blocks run out, the last in that
order gives its own back and computes them again later.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable

from pagewick.engine.batch import SlotResult, SlotSampling, SlotStart, SlotWork, StepOutput, StepPlan
from pagewick.engine.block_manager import BlockManager
from pagewick.engine.messages import EngineRequest, EngineStats, RequestDelta, TokenLogprobs
from pagewick.engine.sequence import Sequence


class Scheduler:
    """Owns all sequences. schedule() and update() alternate; add and abort come between them."""

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
    ) -> None:
        self._blocks = block_manager
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._sequences: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._scheduled: list[Sequence] = []
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._num_arrivals = 0
        self.stats = EngineStats(num_blocks=sum(pool.num_blocks for pool in block_manager.pools))

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(self, request: EngineRequest) -> None:
        """The request id must be new."""
        seq = Sequence.from_request(request, self._num_arrivals)
        self._num_arrivals += 1
        self._sequences[request.request_id] = seq
        insort(self._waiting, seq, key=lambda seq: seq.order)
        self.stats.prompt_tokens += seq.num_prompt_tokens

    def is_known(self, request_id: str) -> bool:
        return request_id in self._sequences

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these sequences and free their blocks; ids that have finished already are no mistake."""
        for request_id in request_ids:
            seq = self._sequences.get(request_id)
            if seq is not None:
                self._remove(seq)

    def schedule(self) -> StepPlan:
        plan = _PlanBuilder(self._max_num_batched_tokens)
        is_room_left = True
        for seq in sorted(self._running, key=lambda seq: seq.num_missing_tokens > 1):
            if seq.slot is not None:
                is_room_left &= self._continue(seq, plan)
        # Whoever comes new now would only take the tokens or blocks that a running sequence is short of.
        if is_room_left:
            while self._waiting and self._free_slots and self._start(self._waiting[0], plan):
                pass
        self._scheduled = plan.sequences
        return plan.finish()

    def update(self, output: StepOutput) -> list[RequestDelta]:
        """Take in what the scheduled step gave; one delta per sequence that has news."""
        deltas = []
        for seq, result in zip(self._scheduled, output.results, strict=True):
            if seq.is_finished:
                continue
            if result.error is None:  # what failed must not serve others as a prefix
                self._blocks.mark_computed(seq, seq.num_scheduled_tokens)
            seq.num_scheduled_tokens = 0
            delta = self._apply(seq, result)
            if delta.finish_reason is not None:
                self._remove(seq)
            if delta.token_ids or delta.finish_reason or delta.prompt_logprobs:
                deltas.append(delta)
        self._scheduled = []
        self.stats.num_steps += 1
        return deltas

    def refresh_stats(self) -> EngineStats:
        """The running totals, with the gauges as they are now."""
        pools = self._blocks.pools
        self.stats.num_requests_running = len(self._running)
        self.stats.num_requests_waiting = len(self._waiting)
        self.stats.num_free_blocks = sum(pool.num_free for pool in pools)
        self.stats.num_cached_blocks = sum(pool.num_cached for pool in pools)
        self.stats.num_referenced_blocks = sum(pool.num_referenced for pool in pools)
        return self.stats

    def check_integrity(self) -> list[str]:
        """Contradictions in the books; empty if all is well."""
        return self._blocks.check_integrity(self._running)

    def _continue(self, seq: Sequence, plan: _PlanBuilder) -> bool:
        """Schedule a running sequence; whether there were tokens and blocks for it without preempting anyone."""
        num_tokens = self._chunk(seq, plan.budget)
        if num_tokens == 0:
            return False
        is_room_left = True
        while (new_block_ids := self._blocks.allocate(seq, seq.num_computed_tokens + num_tokens)) is None:
            victim = self._running[-1]
            plan.budget += victim.num_scheduled_tokens
            plan.remove(victim)
            self._preempt(victim)
            is_room_left = False
            if victim is seq:
                return False
        plan.add(seq, num_tokens, new_block_ids)
        return is_room_left

    def _start(self, seq: Sequence, plan: _PlanBuilder) -> bool:
        """Move the first waiting sequence into a slot, if budget and blocks allow."""
        self._blocks.adopt_prefix(seq)
        num_tokens = self._chunk(seq, plan.budget)
        end = seq.num_computed_tokens + num_tokens
        if num_tokens == 0 or not self._blocks.can_hold(seq, end, seq.num_tokens):
            self._blocks.free(seq)
            return False
        prefix_tables = [list(table) for table in seq.block_tables]
        new_block_ids = self._blocks.allocate(seq, end)
        assert new_block_ids is not None, "can_hold has just said so"
        self._waiting.pop(0)
        insort(self._running, seq, key=lambda seq: seq.order)
        seq.slot = self._free_slots.pop()
        if seq.num_cached_tokens is None:
            seq.num_cached_tokens = seq.num_computed_tokens
            self.stats.prefix_cache_queries += seq.num_prompt_tokens
            self.stats.prefix_cache_hits += seq.num_cached_tokens
        plan.starts.append(SlotStart(seq.slot, self._sampling(seq), prefix_tables))
        plan.add(seq, num_tokens, new_block_ids)
        return True

    def _chunk(self, seq: Sequence, budget: int) -> int:
        """Tokens to compute now: all that are missing, or as many as the budget and the caches' alignment allow."""
        if seq.num_missing_tokens <= budget:
            return seq.num_missing_tokens
        alignment = self._blocks.chunk_alignment
        return max(0, (seq.num_computed_tokens + budget) // alignment * alignment - seq.num_computed_tokens)

    def _preempt(self, seq: Sequence) -> None:
        self._release(seq)
        insort(self._waiting, seq, key=lambda seq: seq.order)
        self.stats.num_preemptions += 1

    def _remove(self, seq: Sequence) -> None:
        seq.is_finished = True
        del self._sequences[seq.request_id]
        if seq.slot is None:
            self._waiting.remove(seq)
        else:
            self._release(seq)

    def _release(self, seq: Sequence) -> None:
        """Take a running sequence's slot and blocks."""
        assert seq.slot is not None
        self._running.remove(seq)
        self._free_slots.append(seq.slot)
        seq.slot = None
        seq.has_sampled = False
        seq.num_scheduled_tokens = 0
        self._blocks.free(seq)

    def _apply(self, seq: Sequence, result: SlotResult) -> RequestDelta:
        delta = RequestDelta(request_id=seq.request_id, num_cached_tokens=seq.num_cached_tokens or 0)
        delta.prompt_logprobs = self._unreported(seq, result)
        if result.error is not None:
            delta.finish_reason, delta.error = "error", result.error
            return delta
        seq.has_sampled |= bool(result.token_ids)
        for token_id in result.token_ids:
            seq.token_ids.append(token_id)
            delta.token_ids.append(token_id)
            self._check_finished(seq, token_id, delta)
            if delta.finish_reason is not None:
                break
        if result.logprobs is not None:
            delta.logprobs = result.logprobs[: len(delta.token_ids)]
        self.stats.generation_tokens += len(delta.token_ids)
        return delta

    def _unreported(self, seq: Sequence, result: SlotResult) -> list[TokenLogprobs] | None:
        """Prompt log-probabilities that were not given out already, before a preemption."""
        if not result.prompt_logprobs:
            return None
        end = min(seq.num_computed_tokens, seq.num_prompt_tokens - 1)
        num_new = max(0, end - seq.num_reported_logprobs)
        seq.num_reported_logprobs = max(end, seq.num_reported_logprobs)
        return result.prompt_logprobs[-num_new:] if num_new else None

    def _check_finished(self, seq: Sequence, token_id: int, delta: RequestDelta) -> None:
        params = seq.request.params
        if token_id in self._stop_token_ids(seq) and seq.num_output_tokens > params.min_tokens:
            delta.finish_reason, delta.stop_token_id = "stop", token_id
        elif seq.num_output_tokens == params.max_tokens or seq.num_tokens == self._max_model_len:
            delta.finish_reason = "length"

    def _stop_token_ids(self, seq: Sequence) -> frozenset[int]:
        params = seq.request.params
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        return eos.union(params.stop_token_ids)

    def _sampling(self, seq: Sequence) -> SlotSampling:
        params = seq.request.params
        return SlotSampling(
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            seed=seq.request.seed,
            choice_index=seq.request.choice_index,
            min_position=seq.num_prompt_tokens + params.min_tokens,
            stop_token_ids=sorted(self._stop_token_ids(seq)) if params.min_tokens else [],
            logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs,
        )


class _PlanBuilder:
    """A StepPlan in the making: work can still be taken back when its sequence is preempted."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.starts: list[SlotStart] = []
        self._work: dict[Sequence, SlotWork] = {}

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._work)

    def add(self, seq: Sequence, num_tokens: int, new_block_ids: list[list[int]]) -> None:
        assert seq.slot is not None
        start, end = seq.num_computed_tokens, seq.num_computed_tokens + num_tokens
        wants_targets = seq.request.params.prompt_logprobs is not None
        self._work[seq] = SlotWork(
            slot=seq.slot,
            start=start,
            num_tokens=num_tokens,
            token_ids=None if seq.has_sampled and num_tokens == 1 else seq.token_ids[start:end],
            new_block_ids=new_block_ids,
            is_sampled=end == seq.num_tokens,
            prompt_targets=seq.request.prompt_token_ids[start + 1 : end + 1] if wants_targets else [],
        )
        seq.num_scheduled_tokens = num_tokens
        self.budget -= num_tokens

    def remove(self, seq: Sequence) -> None:
        self._work.pop(seq, None)

    def finish(self) -> StepPlan:
        return StepPlan(starts=self.starts, work=list(self._work.values()))
