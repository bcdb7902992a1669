"""Roster: every request there is, and where each of its sequences stands: waiting, or running in a slot of the runner.

A beam that has its candidates and was preempted is neither: it waits for the other beams.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable

from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.cache.session_store import SessionStore
from pagewick.engine.messages import EngineRequest, EngineStats
from pagewick.engine.scheduling.fair_queue import FairQueue, FairShares, Rank
from pagewick.engine.scheduling.guesses import Speculation
from pagewick.engine.scheduling.queue_limits import QueueLimits
from pagewick.engine.sequence import Request, Sequence, TokenConstraint

ConstraintFactory = Callable[[object], TokenConstraint]


class Roster:
    """Moves sequences between its lists, and keeps slots, blocks, shares and sessions in step with that."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        limits: QueueLimits,
        session_ttl_s: float,
        speculation: Speculation | None,
        constraint_factory: ConstraintFactory | None,
        clock: Callable[[], float],
    ) -> None:
        self._blocks = blocks
        self._limits = limits
        self._speculation = speculation
        self._constraint_factory = constraint_factory
        self._clock = clock
        self._shares = FairShares()
        self._num_arrivals = 0
        self.requests: dict[str, Request] = {}
        self.waiting = FairQueue(self._shares)
        self.running: list[Sequence] = []
        self.sessions = SessionStore(blocks, session_ttl_s)
        self.free_slots = list(reversed(range(max_num_seqs)))
        self.num_preemptions = 0

    def add(self, request: EngineRequest) -> Sequence:
        """Queue a request; its first sequence. Raises QueueFullError, or what the constraint factory raises."""
        now, options = self._clock(), request.options
        if self._limits.are_set:  # without, thousands of prompts may be added at once, and each would count the others
            newcomers = {
                seq.owner: seq.num_prompt_tokens for seq in self.waiting if seq.owner.num_cached_tokens is None
            }
            self._limits.check(len(newcomers), sum(newcomers.values()), len(request.prompt_token_ids), now)
        deadline = None if options.timeout_s is None else now + options.timeout_s
        owner = Request(request, self._num_arrivals, now, deadline)
        seq = self.new_sequence(owner, request.prompt_token_ids)
        if not request.params.use_beam_search:
            owner.num_unspawned = request.params.n - 1
        self._num_arrivals += 1
        self.requests[request.request_id] = owner
        self._shares.join(options.fairness_key)
        self.waiting.add(seq)
        return seq

    def new_sequence(self, owner: Request, token_ids: Iterable[int]) -> Sequence:
        """One more sequence of a request, which is nowhere yet."""
        seq = Sequence(owner, owner.num_sequences, list(token_ids))
        owner.num_sequences += 1
        if owner.request.constraint is not None:
            assert self._constraint_factory is not None, "admission refuses constraints that nobody can make"
            seq.constraint = self._constraint_factory(owner.request.constraint)
        if self._speculation is not None:
            self._speculation.start(seq)
        owner.sequences.append(seq)
        return seq

    def rank(self, seq: Sequence) -> Rank:
        """Whoever has the lowest is next."""
        return self._shares.rank(seq)

    def charge_prompt(self, seq: Sequence, end: int) -> None:
        """Its fairness key is served the prompt's tokens up to position `end`; each is charged once.

        When they are planned, not when they are computed: or else all that is free in a step would go to one key.
        """
        owner = seq.owner
        before = owner.num_charged_tokens
        if before >= seq.num_prompt_tokens:
            return
        owner.num_charged_tokens = max(before, min(end, seq.num_prompt_tokens))
        self._shares.charge(seq.fairness_key, owner.num_charged_tokens - before, 0)

    def charge_output(self, seq: Sequence, num_tokens: int) -> None:
        """Its fairness key was served so many tokens of output."""
        self._shares.charge(seq.fairness_key, 0, num_tokens)

    def occupy(self, seq: Sequence) -> None:
        """Give a sequence that is nowhere a slot; there must be one."""
        if seq.owner.started_at is None:
            seq.owner.started_at = self._clock()
        insort(self.running, seq, key=lambda seq: seq.order)
        seq.slot = self.free_slots.pop()
        seq.is_started = False

    def preempt(self, seq: Sequence) -> None:
        """Take a running sequence's slot and blocks; it waits until it gets others."""
        self._release(seq)
        self.num_preemptions += 1
        if seq.owner.beams is None or seq.owner.beams.beam_of(seq).candidates is None:
            self.waiting.add(seq)

    def victim(self) -> Sequence:
        """The running sequence that has to give way when there is no room."""
        return _last(self.running, Counter(seq.fairness_key for seq in self.running))

    def victims_for(self, seq: Sequence, is_enough: Callable[[list[Sequence]], bool]) -> list[Sequence] | None:
        """The running sequences whose place a waiting one may take so that it is enough; None if it never is."""
        num_running = Counter(other.fairness_key for other in self.running)
        victims: list[Sequence] = []
        while not is_enough(victims):
            candidates = [
                other for other in self.running if other not in victims and _may_displace(seq, other, num_running)
            ]
            if not candidates:
                return None
            victims.append(_last(candidates, num_running))
            num_running[victims[-1].fairness_key] -= 1
        return victims

    def remove(self, seq: Sequence, *, keeps_session: bool = True) -> None:
        """The sequence is over; with the last one, so is its request. keeps_session: if its request has one."""
        seq.is_finished = True
        owner = seq.owner
        owner.sequences.remove(seq)
        if seq.slot is not None:
            if keeps_session:
                self.sessions.keep(seq, self._clock())
            self._release(seq)
        else:
            if seq in self.waiting:
                self.waiting.remove(seq)
            self._blocks.free(seq)
        if not owner.sequences and not owner.num_unspawned:
            del self.requests[owner.request.request_id]
            self._shares.leave(owner.request.options.fairness_key)
            self._limits.note_finished(self._clock())

    def end(self, owner: Request) -> None:
        """All of a request is over."""
        owner.num_unspawned = 0
        for seq in list(owner.sequences):
            self.remove(seq)

    def end_unwanted(self, owner: Request) -> None:
        """Remove the choices that were stopped; but if others are still to come from the prompt, that goes on first."""
        unwanted = owner.unwanted_choices
        if unwanted and unwanted.issuperset(range(owner.request.params.n)):
            self.end(owner)
        elif unwanted and not owner.num_unspawned:
            for seq in [seq for seq in owner.sequences if seq.choice_index in unwanted]:
                self.remove(seq)

    def count_into(self, stats: EngineStats) -> None:
        """Set the gauges of requests, and the number of preemptions so far."""
        stats.num_requests_running = len(self.running)
        stats.num_requests_waiting = len(self.waiting)
        stats.num_waiting_tokens = self.waiting.num_tokens
        arrivals = (seq.owner.arrived_at for seq in self.waiting)
        stats.oldest_wait_s = max(0.0, self._clock() - min(arrivals)) if len(self.waiting) else 0.0
        stats.num_sessions = len(self.sessions)
        stats.num_preemptions = self.num_preemptions

    def _release(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self.running.remove(seq)
        self.free_slots.append(seq.slot)
        seq.slot = None
        seq.is_started = seq.has_sampled = False
        seq.num_tokens_in_flight = seq.num_unknown_tokens = 0
        self._blocks.free(seq)


def _last(sequences: Iterable[Sequence], num_running: Counter[str]) -> Sequence:
    """A beam that waits for others, if there is one, for it may be waiting for what it holds itself; else of the lowest
    priority, of the key that has the most, the one that came last.
    """
    return max(
        sequences,
        key=lambda seq: (seq.num_missing_tokens == 0, seq.priority, num_running[seq.fairness_key], seq.order),
    )


def _may_displace(seq: Sequence, other: Sequence, num_running: Counter[str]) -> bool:
    """A lower priority gives way, and a key that has more than twice as many running sequences and one: so two keys
    never push each other out in turn, and small differences are left to the shares, which level them without lost
    work. A beam that waits for others gives way too: they may wait behind `seq`.
    """
    if other.num_missing_tokens == 0:
        return True
    if other.priority != seq.priority:
        return other.priority > seq.priority
    return num_running[other.fairness_key] > 2 * num_running[seq.fairness_key] + 1
