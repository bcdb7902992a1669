"""Which sequences get how many tokens in this step, who starts, and who has to give way.

The rule: let every sequence's computed tokens catch up with its tokens, within the token budget and the blocks there
are. Sequences that miss a single token come first, so that a long prompt never holds up a running stream; then those
that miss more and those that wait, by priority, by what their fairness key was served so far, and by arrival. What is
left of the budget goes to guesses.

When blocks run out, sessions end, then someone gives its blocks back and computes them again later: a beam that waits
for others, or of the lowest priority, of the key with the most running sequences, the last to have come. So the first
to have come always goes on. Who waits may take the place of a lower priority, or of a key that has far more running.

Several steps may be in flight: `schedule` then plans the next one before the results of the last are known. A sequence
whose next plan depends on those results sits out (Sequence.can_continue). Nobody is preempted while steps are in
flight: where that would be needed, no further step is scheduled until they are done.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from pagewick.engine.batch import StepOutput, StepPlan
from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.messages import EngineRequest, EngineStats, RequestDelta
from pagewick.engine.scheduling.beam_search import BeamSearch
from pagewick.engine.scheduling.deadlines import Deadlines
from pagewick.engine.scheduling.guesses import Speculation
from pagewick.engine.scheduling.plan_builder import PlanBuilder, ScheduledStep
from pagewick.engine.scheduling.queue_limits import QueueLimits
from pagewick.engine.scheduling.results import Endings, Results
from pagewick.engine.scheduling.room import Room
from pagewick.engine.scheduling.roster import ConstraintFactory, Roster
from pagewick.engine.sequence import Sequence
from pagewick.errors import QueueFullError

DEFAULT_SESSION_TTL_S = 600.0


class Scheduler:
    """schedule() plans a step and update() takes in the output of the oldest one in flight; add and abort come between.

    max_num_prefill_tokens: of the budget, what prompts may have in a step that serves running streams, too.
    speculation: how to guess, if at all. limits: of the queue. session_ttl_s: how long a session outlives its last
    request. constraint_factory: makes the constraint of every choice of a request that has one. clock: seconds.
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
        speculation: Speculation | None = None,
        limits: QueueLimits | None = None,
        session_ttl_s: float = DEFAULT_SESSION_TTL_S,
        constraint_factory: ConstraintFactory | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._blocks = block_manager
        self._max_num_batched_tokens = max_num_batched_tokens
        # With less than the smallest chunk, prompts would starve beside streams.
        limit = max_num_prefill_tokens or max_num_batched_tokens
        self._max_num_prefill_tokens = max(limit, block_manager.chunk_alignment)
        self._max_model_len = max_model_len
        self._endings = Endings(frozenset(eos_token_ids), max_model_len)
        self._speculation = speculation
        self._keeps_history = speculation is not None and speculation.uses_draft_model
        self._clock = clock
        self._roster = Roster(
            block_manager,
            max_num_seqs=max_num_seqs,
            limits=limits or QueueLimits(),
            session_ttl_s=session_ttl_s,
            speculation=speculation,
            constraint_factory=constraint_factory,
            clock=clock,
        )
        self._room = Room(self._roster, block_manager)
        self.stats = EngineStats()
        self._results = Results(self._roster, block_manager, self._endings, self.stats, clock)
        self._in_flight: deque[ScheduledStep] = deque()
        self._needs_room = False
        self._awaits_results = False
        self._deadlines = Deadlines(self._roster.requests)
        self._ended: list[RequestDelta] = []

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished, or somebody is still to be told how one ended."""
        return bool(self._roster.requests) or bool(self._ended)

    @property
    def num_in_flight(self) -> int:
        """Steps whose output `update` has not taken in."""
        return len(self._in_flight)

    @property
    def can_schedule_ahead(self) -> bool:
        """Whether another step may be planned beside those in flight.

        False while a step in flight reads from disk, because it may fail and then none of its work is done; and while
        a sequence needs blocks that only a preemption can free.
        """
        return not self._needs_room and not any(step.plan.reads_disk for step in self._in_flight)

    def add(self, request: EngineRequest) -> None:
        """Queue a request; its id must be new. Raises QueueFullError, or what the constraint factory raises."""
        try:
            seq = self._roster.add(request)
        except QueueFullError:
            self.stats.num_refused += 1
            raise
        owner = seq.owner
        self._endings.apply_to(owner)
        if request.params.use_beam_search:
            owner.beams = BeamSearch(owner, seq, owner.stop_token_ids, owner.max_output_tokens)
        self._deadlines.add(owner)
        self.stats.prompt_tokens += seq.num_prompt_tokens

    def is_known(self, request_id: str) -> bool:
        return request_id in self._roster.requests

    def abort(self, request_ids: Iterable[str], choices: Iterable[tuple[str, int]] = ()) -> None:
        """Forget these requests, or single choices of them; what has finished already is no mistake.

        A beam search has no choices before it is over, so it can only be forgotten as a whole.
        """
        for request_id in request_ids:
            if owner := self._roster.requests.get(request_id):
                self._roster.end(owner)
        for request_id, choice_index in choices:
            owner = self._roster.requests.get(request_id)
            if owner is not None and owner.beams is None:
                owner.unwanted_choices.add(choice_index)
                self._roster.end_unwanted(owner)

    def schedule(self) -> ScheduledStep | None:
        """Plan the next step, which is then in flight until `update`.

        None while steps are in flight and no sequence can go on without their results. Without steps in flight there
        is always a plan, even if it has no work.
        """
        self._needs_room = False
        self._awaits_results = bool(self._in_flight) and any(
            seq.num_unknown_tokens and seq.needs_results for seq in self._roster.running
        )
        self._expire()
        plan = PlanBuilder(self._max_num_batched_tokens, keeps_history=self._keeps_history)
        is_room_left = True
        streams = [seq for seq in self._roster.running if seq.num_unscheduled_tokens == 1 and self._may_continue(seq)]
        if len(streams) > plan.budget:
            streams.sort(key=self._roster.rank)
        for seq in streams:
            if seq.slot is not None:
                is_room_left &= self._continue(seq, plan)
        if plan.sequences:
            plan.budget = min(plan.budget, self._max_num_prefill_tokens)
        self._catch_up(plan, is_room_left)
        if self._in_flight and not plan.sequences:
            return None
        if self._speculation is not None:
            self._speculation.extend(plan, self._blocks, self._max_model_len)
        step = plan.finish(self._blocks.take_transfers())
        self._in_flight.append(step)
        return step

    def update(self, output: StepOutput) -> list[RequestDelta]:
        """Take in what the oldest step in flight gave; deltas for the choices that have news."""
        step = self._in_flight.popleft()
        deltas, self._ended = self._ended, []
        self.stats.num_steps += 1
        if not output.can_write:
            self._blocks.stop_writing()
        if output.unreadable:
            self._start_over(step, output.unreadable)
            return deltas
        num_tokens = 0
        for (seq, work), result in zip(step.work.items(), output.results, strict=True):
            if seq.is_finished:
                continue
            unwanted = seq.owner.unwanted_choices
            num_prompt_tokens = min(work.start + work.num_tokens, seq.num_prompt_tokens) - work.start
            num_tokens += max(0, num_prompt_tokens) + bool(result.candidates)
            for delta in self._results.take_in(seq, work, result):
                num_tokens += 0 if result.candidates else len(delta.token_ids)
                if delta.choice_index not in unwanted:
                    deltas.append(delta)
            if unwanted:
                self._roster.end_unwanted(seq.owner)
        self.stats.count_iteration(num_tokens)
        return deltas

    def refresh_stats(self) -> EngineStats:
        """The running totals, with the gauges as they are now."""
        stats, roster = self.stats, self._roster
        roster.count_into(stats)
        self._blocks.count_into(stats)
        return stats

    def check_integrity(self) -> list[str]:
        """Contradictions in the books; empty if all is well."""
        return self._blocks.check_integrity(self._roster.running)

    def save_cache(self) -> StepPlan:
        """What has to be written to disk before the engine ends."""
        self._blocks.save_to_disk()
        return StepPlan(transfers=self._blocks.take_transfers())

    def _catch_up(self, plan: PlanBuilder, is_room_left: bool) -> None:
        """Go on with those that miss several tokens and start those that wait, whoever is next."""
        rank = self._roster.rank
        behind = [seq for seq in self._roster.running if seq.num_unscheduled_tokens > 1 and self._may_continue(seq)]
        behind.sort(key=rank)
        may_start = True
        while plan.budget > 0:
            head = self._roster.waiting.head() if may_start else None
            behind = [seq for seq in behind if seq.slot is not None]
            if head is not None and (not behind or rank(head) < rank(behind[0])):
                # Who comes new while there is no room may take others' places only, not what a running one lacks.
                may_start = self._start(head, plan, is_room_left)
            elif behind:
                is_room_left &= self._continue(behind.pop(0), plan)
            else:
                break

    def _may_continue(self, seq: Sequence) -> bool:
        """Whether it may have work now. Those that need results sit out together, or they would never share a step."""
        return seq.can_continue and not (self._awaits_results and seq.needs_results)

    def _continue(self, seq: Sequence, plan: PlanBuilder) -> bool:
        """Schedule a running sequence; whether there were tokens and blocks for it without preempting anyone."""
        num_tokens = self._chunk(seq, seq.num_scheduled_tokens, plan.budget)
        if num_tokens == 0:
            return False
        if not seq.is_started:
            plan.start(seq, sorted(seq.owner.stop_token_ids))
        is_room_left = True
        while (new_block_ids := self._room.allocate(seq, seq.num_scheduled_tokens + num_tokens)) is None:
            if self._in_flight:
                self._needs_room = True
                plan.remove(seq)
                return False
            victim = self._roster.victim()
            self._preempt(victim, plan)
            is_room_left = False
            if victim is seq:
                return False
        self._plan(seq, num_tokens, new_block_ids, plan)
        return is_room_left

    def _start(self, seq: Sequence, plan: PlanBuilder, is_room_left: bool) -> bool:
        """Give the first of those that wait a slot and what it needs, if budget and blocks allow."""
        if not self._may_continue(seq):
            return False
        num_cached = self._blocks.find_prefix(seq)
        num_tokens = self._chunk(seq, num_cached, plan.budget)
        end = num_cached + num_tokens
        if num_tokens == 0 or not self._make_room(seq, num_cached, end, plan, is_room_left):
            return False
        if seq.owner.num_cached_tokens is None:
            self._note_prefix(seq, num_cached)
        self._roster.waiting.remove(seq)
        self._roster.occupy(seq)
        self._blocks.adopt_prefix(seq, num_cached)
        plan.start(seq, sorted(seq.owner.stop_token_ids))
        new_block_ids = self._blocks.allocate(seq, end)
        assert new_block_ids is not None, "_make_room has just said so"
        self._plan(seq, num_tokens, new_block_ids, plan)
        return True

    def _plan(self, seq: Sequence, num_tokens: int, new_block_ids: list[list[int]], plan: PlanBuilder) -> None:
        plan.add(seq, num_tokens, new_block_ids)
        self._roster.charge_prompt(seq, seq.num_scheduled_tokens)
        if seq.guesses is not None:
            seq.guesses.catch_up(seq)

    def _make_room(self, seq: Sequence, num_cached: int, end: int, plan: PlanBuilder, is_room_left: bool) -> bool:
        """Whether there are a slot and blocks for a waiting sequence; takes them from others if it has the right to."""

        def is_enough(victims: list[Sequence]) -> bool:
            has_slot = bool(victims) or (is_room_left and bool(self._roster.free_slots))
            return has_slot and self._room.is_there(seq, num_cached, end, victims)

        victims = self._roster.victims_for(seq, is_enough)
        if victims and self._in_flight:
            self._needs_room = True
            return False
        for victim in victims or ():
            self._preempt(victim, plan)
        return victims is not None

    def _chunk(self, seq: Sequence, start: int, budget: int) -> int:
        """Tokens to compute from `start` on: all that are missing, or as many as budget and cache alignment allow."""
        num_missing = len(seq.token_ids) + seq.num_unknown_tokens - start
        if num_missing <= budget:
            return num_missing
        alignment = self._blocks.chunk_alignment
        return max(0, (start + budget) // alignment * alignment - start)

    def _note_prefix(self, seq: Sequence, num_cached: int) -> None:
        seq.owner.num_cached_tokens = num_cached
        if seq.may_use_prefix_cache:
            seq.owner.prefix_miss = self._blocks.explain_miss(seq, num_cached)
            self.stats.prefix_cache_queries += seq.num_prompt_tokens
            self.stats.prefix_cache_hits += num_cached

    def _forget_prefix(self, seq: Sequence) -> None:
        """A hit that was noted turned out to be none, before anybody was told."""
        owner = seq.owner
        if seq.choice_index == 0 and seq.num_output_tokens == 0 and seq.may_use_prefix_cache:
            self.stats.prefix_cache_queries -= seq.num_prompt_tokens
            self.stats.prefix_cache_hits -= owner.num_cached_tokens or 0
            owner.num_cached_tokens = None

    def _preempt(self, seq: Sequence, plan: PlanBuilder) -> None:
        plan.remove(seq)
        self._roster.preempt(seq)

    def _expire(self) -> None:
        """End the requests and the sessions whose time is over."""
        now = self._clock()
        self._roster.sessions.expire(now)
        for owner in self._deadlines.take_expired(now):
            message = f"the request was not finished within its timeout of {owner.request.options.timeout_s:g} s"
            self._ended += self._results.fail_all(owner, message, "DeadlineExceededError")
            self.stats.num_expired += 1

    def _start_over(self, step: ScheduledStep, unreadable: list[bytes]) -> None:
        """Blocks could not be read from disk: forget them, and let those that were to start with them start again.

        Nothing of the plan was done. The others go on where they are, but the runner is told of them anew.
        """
        for seq, work in step.work.items():
            if seq.is_finished:
                continue
            seq.num_tokens_in_flight -= work.num_tokens
            seq.num_unknown_tokens -= work.is_sampled
            seq.is_started = seq.has_sampled = False
            if self._blocks.holds_any(seq, unreadable):
                self._forget_prefix(seq)
                self._roster.preempt(seq)
        for key in unreadable:
            for group in range(len(self._blocks.groups)):
                self._blocks.forget(group, key)
