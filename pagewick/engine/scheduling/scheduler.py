"""Scheduler: which sequences get how many tokens in this step, which ones start, and which ones are preempted.

The rule: let every sequence's computed tokens catch up with its tokens, within the token budget and the blocks there
are. Sequences that miss a single token come first, so that a long prompt never holds up a running stream; where layers
keep states, they may miss accepted draft tokens as well. Then come those that miss more and those that wait, by
priority, by what their fairness key was served so far, and by arrival. The rest of the budget goes to draft tokens.

When blocks run out, sessions end first. Then a running sequence is preempted: it gives its blocks back and computes
them again later. The victim is a beam that waits for others; else it has the lowest priority, its key has the most
running sequences, and it arrived last. So the first to arrive always continues. A waiting sequence may take the place
of one with a lower priority, or of one whose key has far more running sequences.

Several steps may be in flight: `schedule` then plans the next one before the results of the last are known. A sequence
whose next plan depends on those results sits out (Sequence.can_continue). No sequence is preempted while steps are in
flight: where that would be needed, no further step is scheduled until they are done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from pagewick.engine.batch import StepOutput, StepPlan
from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.cache.session_store import SessionStore
from pagewick.engine.messages import EngineRequest, EngineStats, RequestDelta
from pagewick.engine.scheduling.draft_tokens import Speculation, plan_options
from pagewick.engine.scheduling.fair_queue import FairShares
from pagewick.engine.scheduling.plan_builder import PlanBuilder, ScheduledStep
from pagewick.engine.scheduling.prefix_hits import forget_unreadable, note_prefix
from pagewick.engine.scheduling.queue_limits import QueueLimits
from pagewick.engine.scheduling.result_processor import ResultProcessor
from pagewick.engine.scheduling.sequence_manager import ConstraintFactory, SequenceManager, StopConditions
from pagewick.engine.sequence import Sequence
from pagewick.engine.whole_parts import NO_PARTS, WholeParts
from pagewick.errors import QueueFullError

DEFAULT_SESSION_TTL_S = 600.0


class Scheduler:
    """schedule() plans a step, update() applies the output of the oldest one in flight; add and abort come between.

    Each part owns one kind of state: SequenceManager the requests, the waiting and running sequences and the slots;
    BlockManager the blocks; SessionStore the sessions; FairShares what each key was served. The scheduler itself owns
    the steps in flight.

    max_num_prefill_tokens: the part of the budget for prompts in a step that also serves running streams.
    whole: the parts of prompts that a step must compute to their end.
    speculation: None for none. limits: of the waiting queue. session_ttl_s: how long a session outlives its last
    request. constraint_factory: creates the constraint of every choice of a request that has one. clock: in seconds.
    """

    def __init__(
        self,
        block_manager: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        eos_token_ids: Iterable[int],
        max_num_prefill_tokens: int | None = None,
        whole: WholeParts = NO_PARTS,
        speculation: Speculation | None = None,
        limits: QueueLimits | None = None,
        session_ttl_s: float = DEFAULT_SESSION_TTL_S,
        constraint_factory: ConstraintFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks = block_manager
        self._max_num_batched_tokens = max_num_batched_tokens
        least = max(block_manager.chunks.alignment, whole.most)  # prompts would starve beside streams with less
        self._max_num_prefill_tokens = max(max_num_prefill_tokens or max_num_batched_tokens, least)
        self._whole = whole
        self._speculation = speculation
        self._clock = clock
        self._sessions = SessionStore(block_manager, session_ttl_s)
        self._shares = FairShares()
        self._sequences = SequenceManager(
            block_manager,
            self._sessions,
            self._shares,
            max_num_seqs=max_num_seqs,
            stop_conditions=StopConditions(frozenset(eos_token_ids), max_model_len),
            limits=limits or QueueLimits(),
            speculation=speculation,
            constraint_factory=constraint_factory,
            clock=clock,
        )
        self.stats = EngineStats()
        self._results = ResultProcessor(self._sequences, block_manager, self._shares, self.stats, clock)
        self._in_flight: deque[ScheduledStep] = deque()
        self._needs_preemption = False
        self._awaits_results = False
        self._expired: list[RequestDelta] = []

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or a client is still to be told that one has expired."""
        return bool(self._sequences.requests) or bool(self._expired)

    @property
    def num_in_flight(self) -> int:
        """Number of steps whose output `update` has not applied yet."""
        return len(self._in_flight)

    @property
    def can_schedule_ahead(self) -> bool:
        """Whether another step may be planned beside those in flight.

        Not while one of them reads from disk, as none of its work is done if that fails, nor while a sequence needs
        blocks that only a preemption can free.
        """
        return not self._needs_preemption and not any(step.plan.reads_disk for step in self._in_flight)

    def add(self, request: EngineRequest) -> None:
        """Queue a request; its id must be new. Raises QueueFullError, or any exception of the constraint factory."""
        try:
            seq = self._sequences.add(request)
        except QueueFullError:
            self.stats.num_refused += 1
            raise
        self.stats.prompt_tokens += seq.num_prompt_tokens

    def is_known(self, request_id: str) -> bool:
        return request_id in self._sequences.requests

    def abort(self, request_ids: Iterable[str], choices: Iterable[tuple[str, int]] = ()) -> None:
        """End these requests, or single choices of them, without a delta; unknown ones may have finished already.

        A beam search has no choices before it is over, so it can only be ended as a whole.
        """
        for request_id in request_ids:
            if owner := self._sequences.requests.get(request_id):
                self._sequences.finish_request(owner)
        for request_id, choice_index in choices:
            owner = self._sequences.requests.get(request_id)
            if owner is not None and not owner.is_beam_search:
                owner.unwanted_choices.add(choice_index)
                self._sequences.finish_unwanted(owner)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, which is then in flight until `update`.

        None while steps are in flight and no sequence can continue without their results. Without steps in flight there
        is always a plan, even if it has no work.
        """
        self._needs_preemption = False
        self._awaits_results = bool(self._in_flight) and any(
            not seq.is_plain and seq.num_unknown_tokens and seq.needs_results for seq in self._sequences.running
        )
        self.expire_sessions()
        for owner in self._sequences.expired():
            cause = f"the request was not finished within its timeout of {owner.request.options.timeout_s:g} s"
            self._expired += self._results.fail_all(owner, cause, "DeadlineExceededError")
            self.stats.num_expired += 1
        plan = PlanBuilder(self._max_num_batched_tokens, **plan_options(self._speculation))
        behind: list[Sequence] = []
        is_room_left = self._schedule_streams(plan, behind)
        if plan.num_sequences:
            plan.budget = min(plan.budget, self._max_num_prefill_tokens)
        self._schedule_others(plan, behind, is_room_left)
        if self._in_flight and not plan.num_sequences:
            return None
        if self._speculation is not None:
            self._speculation.extend(plan, self._blocks)
        step = plan.finish(self._blocks.take_transfers())
        self._in_flight.append(step)
        return step

    def update(self, output: StepOutput) -> list[RequestDelta]:
        """Apply the output of the oldest step in flight; return deltas for the choices that have news."""
        step = self._in_flight.popleft()
        deltas, self._expired = self._expired, []
        self.stats.num_steps += 1
        if not output.can_write:
            self.stop_writing()
        if output.unreadable:
            forget_unreadable(step, output.unreadable, self._sequences, self._blocks, self.stats)
            return deltas
        return deltas + self._results.process(step, output)

    def refresh_stats(self) -> EngineStats:
        """Return the running totals, with the gauges as they are now."""
        self._sequences.count_into(self.stats)
        self._blocks.count_into(self.stats)
        self.stats.num_sessions = len(self._sessions)
        return self.stats

    def expire_sessions(self) -> float | None:
        """End the sessions whose time is over. Returns the seconds until the next one ends; None if there is none."""
        return self._sessions.expire(self._clock())

    def check_integrity(self) -> list[str]:
        """Return contradictions between block manager and sequences; empty if all is well."""
        return self._blocks.check_integrity(self._sequences.running)

    def save_cache(self) -> StepPlan:
        """Plan to write to disk whatever is cached and not there yet, before the engine ends."""
        self._blocks.save_to_disk()
        return StepPlan(transfers=self._blocks.take_transfers())

    def stop_writing(self) -> None:
        """Note that the disk has refused a block."""
        self._blocks.stop_writing()

    def publish_cache(self) -> StepPlan:
        """Plan to make what has been computed visible to other servers. No step may be in flight."""
        assert not self._in_flight, "the blocks of a step in flight are not complete"
        return StepPlan(transfers=self._blocks.take_transfers(), publishes=True)

    # Planning

    def _schedule_streams(self, plan: PlanBuilder, behind: list[Sequence]) -> bool:
        """Continue the sequences that miss one token; return whether all had room without a preemption.

        Adds those that miss more to `behind`, unless these are accepted draft tokens, which are computed once more.
        """
        is_room_left = True
        streams: list[Sequence] = []
        num_tokens = 0
        for seq in self._sequences.running:
            # Reading fields is several times faster than calling properties, and this is done for every token.
            num_missing = (
                len(seq.token_ids) + seq.num_unknown_tokens - seq.num_computed_tokens - seq.num_tokens_in_flight
            )
            if not num_missing or not self._may_continue(seq):
                continue
            if num_missing == 1 or seq.has_sampled:
                streams.append(seq)
                num_tokens += num_missing
            else:
                behind.append(seq)
        if num_tokens > plan.budget:
            streams.sort(key=self._shares.rank)
        for seq in streams:
            if seq.slot is None:
                continue
            start = seq.num_computed_tokens + seq.num_tokens_in_flight
            if seq.is_plain and seq.has_sampled and plan.budget and self._blocks.routine.is_covered(start):
                plan.add_stream(seq, start)
            else:
                is_room_left &= self._continue(seq, plan)
        return is_room_left

    def _schedule_others(self, plan: PlanBuilder, behind: list[Sequence], is_room_left: bool) -> None:
        """Continue sequences that miss several tokens and start waiting ones, in the order of their ranks."""
        rank = self._shares.rank
        behind.sort(key=rank)
        may_start = True
        while plan.budget > 0:
            head = self._sequences.waiting.head() if may_start else None
            behind = [seq for seq in behind if seq.slot is not None]
            if head is not None and (not behind or rank(head) < rank(behind[0])):
                # Where room is short, a new sequence may displace others but not take what a running one lacks.
                may_start = self._start(head, plan, is_room_left)
            elif behind:
                is_room_left &= self._continue(behind.pop(0), plan)
            else:
                break

    def _may_continue(self, seq: Sequence) -> bool:
        """Whether it may have work now.

        Sequences that need results sit out together; otherwise they would never share a step again.
        """
        if seq.is_plain:
            return not seq.num_unknown_tokens or len(seq.token_ids) + seq.num_unknown_tokens < seq.max_num_tokens
        return seq.can_continue and not (self._awaits_results and seq.needs_results)

    def _continue(self, seq: Sequence, plan: PlanBuilder) -> bool:
        """Schedule a running sequence; return whether it had tokens and blocks without a preemption."""
        num_tokens = self._chunk(seq, seq.num_scheduled_tokens, plan.budget)
        if num_tokens == 0:
            return False
        if seq.has_sampled and seq.num_unscheduled_tokens <= plan.budget:
            # Also if a snapshot comes between accepted draft tokens: the next step computes those behind it once more.
            num_tokens = seq.num_unscheduled_tokens
        if not seq.is_started:
            plan.start(seq)
        is_room_left = True
        while True:
            is_alone = len(self._sequences.running) == 1
            end = seq.num_scheduled_tokens + num_tokens
            new_block_ids = self._sessions.allocate(seq, end, is_alone=is_alone)
            if new_block_ids is not None:
                self._plan(seq, num_tokens, new_block_ids, plan)
                return is_room_left
            is_room_left = False
            if self._in_flight:
                self._needs_preemption = True
                plan.remove(seq)
                return False
            victim = self._sequences.victim()
            plan.remove(victim)
            self._sequences.preempt(victim)
            if victim is seq:
                return False

    def _start(self, seq: Sequence, plan: PlanBuilder, is_room_left: bool) -> bool:
        """Start the head of the waiting queue, if budget and blocks allow."""
        if not self._may_continue(seq):
            return False
        num_cached = self._blocks.find_prefix(seq)
        num_tokens = self._chunk(seq, num_cached, plan.budget)
        end = num_cached + num_tokens
        if num_tokens == 0 or not self._make_room(seq, num_cached, end, plan, is_room_left):
            return False
        if seq.owner.num_cached_tokens is None:
            note_prefix(seq, num_cached, self._blocks, self.stats)
        self._sequences.start(seq)
        self._blocks.adopt_prefix(seq, num_cached)
        plan.start(seq)
        new_block_ids = self._blocks.allocate(seq, end)
        assert new_block_ids is not None, "_make_room has found these blocks"
        self._plan(seq, num_tokens, new_block_ids, plan)
        return True

    def _plan(self, seq: Sequence, num_tokens: int, new_block_ids: list[list[int]], plan: PlanBuilder) -> None:
        num_stored = self._chunk(seq, seq.num_scheduled_tokens, num_tokens)
        plan.add(seq, num_tokens, new_block_ids, 0 if num_stored == num_tokens else num_stored)
        self._shares.charge_prompt(seq, seq.num_scheduled_tokens)
        if seq.drafting is not None:
            seq.drafting.index_tokens(seq.token_ids)

    def _make_room(self, seq: Sequence, num_cached: int, end: int, plan: PlanBuilder, is_room_left: bool) -> bool:
        """Whether there are a slot and blocks for a waiting sequence; takes them from others if it may."""

        def is_enough(victims: list[Sequence]) -> bool:
            has_slot = bool(victims) or (is_room_left and self._sequences.has_free_slot)
            is_alone = len(victims) == len(self._sequences.running)
            return has_slot and self._sessions.make_room(seq, num_cached, end, victims, is_alone=is_alone)

        victims = self._sequences.victims_for(seq, is_enough)
        if victims and self._in_flight:
            self._needs_preemption = True
            return False
        for victim in victims or ():
            plan.remove(victim)
            self._sequences.preempt(victim)
        return victims is not None

    def _chunk(self, seq: Sequence, start: int, budget: int) -> int:
        """Return how many tokens to compute from `start` on: all, or as many as budget and caches allow."""
        num_missing = seq.num_unknown_tokens + len(seq.token_ids) - start
        return self._blocks.chunks.length(start, num_missing, budget, self._whole.spans(seq.request))
