"""SequenceManager: the life of every sequence: it waits, runs in a slot, may be preempted, and finishes."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.cache.session_store import SessionStore
from pagewick.engine.images import num_image_bytes
from pagewick.engine.messages import EngineRequest, EngineStats
from pagewick.engine.scheduling.draft_tokens import Speculation
from pagewick.engine.scheduling.fair_queue import FairQueue, FairShares
from pagewick.engine.scheduling.lazy_heap import LazyHeap
from pagewick.engine.scheduling.queue_limits import QueueLimits
from pagewick.engine.sequence import Beam, Request, Sequence, TokenConstraint

ConstraintFactory = Callable[[object], TokenConstraint]


@dataclass(frozen=True, slots=True)
class StopConditions:
    """The model's part of what ends a sequence; requests add their own."""

    eos_token_ids: frozenset[int]
    max_model_len: int

    def stop_token_ids(self, request: EngineRequest) -> frozenset[int]:
        """Return the tokens that end a sequence of this request."""
        eos_token_ids = frozenset() if request.params.ignore_eos else self.eos_token_ids
        return eos_token_ids.union(request.params.stop_token_ids)

    def max_output_tokens(self, request: EngineRequest) -> int:
        """Return the number of output tokens after which a sequence of this request ends."""
        longest = self.max_model_len - len(request.prompt_token_ids)
        return longest if request.params.max_tokens is None else min(longest, request.params.max_tokens)


class SequenceManager:
    """Owns the unfinished requests, the waiting queue, the running sequences and the slots.

    A running sequence has a slot and blocks, a waiting one has neither. A beam that has its candidates and was
    preempted is in neither list: it waits for the other beams. Other classes read `requests`, `waiting` and `running`;
    only this one changes them.
    """

    def __init__(
        self,
        blocks: BlockManager,
        sessions: SessionStore,
        shares: FairShares,
        *,
        max_num_seqs: int,
        stop_conditions: StopConditions,
        limits: QueueLimits,
        speculation: Speculation | None,
        constraint_factory: ConstraintFactory | None,
        clock: Callable[[], float],
    ) -> None:
        self._blocks = blocks
        self._sessions = sessions
        self._shares = shares
        self._stop_conditions = stop_conditions
        self._limits = limits
        self._speculation = speculation
        self._constraint_factory = constraint_factory
        self._clock = clock
        self._num_arrivals = 0
        self._image_bytes = 0
        self._num_preemptions = 0
        self._free_slots = list(reversed(range(max_num_seqs)))
        self._by_deadline: LazyHeap[Request] = LazyHeap()
        self.requests: dict[str, Request] = {}
        self.waiting = FairQueue(shares)
        self.running: list[Sequence] = []

    @property
    def has_free_slot(self) -> bool:
        return bool(self._free_slots)

    def add(self, request: EngineRequest) -> Sequence:
        """Queue a request and return its first sequence.

        Raises QueueFullError, or any exception of the constraint factory.
        """
        now, options = self._clock(), request.options
        waiting = self.waiting
        self._limits.check(waiting.num_newcomers, waiting.num_newcomer_tokens, len(request.prompt_token_ids), now)
        self._limits.check_images(self._image_bytes, num_image_bytes(request), waiting.num_newcomers, now)
        owner = Request(
            request,
            arrival=self._num_arrivals,
            arrived_at=now,
            deadline=None if options.timeout_s is None else now + options.timeout_s,
            stop_token_ids=self._stop_conditions.stop_token_ids(request),
            max_output_tokens=self._stop_conditions.max_output_tokens(request),
        )
        seq = self._new_sequence(owner, request.prompt_token_ids)
        if owner.is_beam_search:
            owner.beams = [Beam(seq)]
        else:
            owner.num_unspawned = request.params.n - 1
        self._num_arrivals += 1
        self.requests[request.request_id] = owner
        self._image_bytes += num_image_bytes(request)
        if owner.deadline is not None:
            self._by_deadline.add(owner, (owner.deadline, owner.arrival))
        self._shares.join(options.fairness_key)
        self.waiting.add(seq)
        return seq

    def fork(self, parent: Sequence, token_ids: Iterable[int], num_shared: int) -> Sequence:
        """Create one more sequence of the parent's request, which takes over `num_shared` computed tokens.

        It runs at once if there are a slot and blocks; else it waits and computes all its tokens. Raises any exception
        of the constraint factory.
        """
        child = self._new_sequence(parent.owner, token_ids)
        may_share = parent.slot is not None and self.has_free_slot and num_shared > 0
        if may_share and self._blocks.fork(parent, child, num_shared):
            self.start(child)
        else:
            self.waiting.add(child)
        return child

    def start(self, seq: Sequence) -> None:
        """Give a sequence, waiting or just created, a slot; there must be a free one."""
        if seq in self.waiting:
            self.waiting.remove(seq)
        if seq.owner.started_at is None:
            seq.owner.started_at = self._clock()
        insort(self.running, seq, key=lambda seq: seq.order)
        seq.slot = self._free_slots.pop()
        seq.is_started = False

    def preempt(self, seq: Sequence) -> None:
        """Take slot and blocks from a running sequence; it waits until it gets others."""
        has_candidates = seq.num_missing_tokens == 0
        self._release(seq)
        self._num_preemptions += 1
        if not has_candidates:
            self.waiting.add(seq)

    def resume(self, seq: Sequence) -> None:
        """Let a beam that has got its next token continue, or wait if it was preempted while it had none."""
        if seq.slot is None:
            self.waiting.add(seq)

    def finish(self, seq: Sequence, *, keeps_session: bool = True) -> None:
        """End a sequence, and with the last one its request. keeps_session: if the request has one."""
        seq.is_finished = True
        owner = seq.owner
        owner.sequences.remove(seq)
        if seq.slot is not None:
            if keeps_session:
                self._sessions.keep(seq, self._clock())
            self._release(seq)
        else:
            if seq in self.waiting:
                self.waiting.remove(seq)
            self._blocks.free(seq)
        if not owner.sequences and not owner.num_unspawned:
            del self.requests[owner.request.request_id]
            self._image_bytes -= num_image_bytes(owner.request)
            if owner in self._by_deadline:
                self._by_deadline.remove(owner)
            self._shares.leave(owner.request.options.fairness_key)
            self._limits.note_finished(self._clock())

    def finish_request(self, owner: Request) -> None:
        """End all sequences of a request, and those that would have been created."""
        owner.num_unspawned = 0
        for seq in list(owner.sequences):
            self.finish(seq)

    def finish_unwanted(self, owner: Request) -> None:
        """End the choices that the client has stopped. While others need the prompt, the first one computes it."""
        unwanted = owner.unwanted_choices
        if unwanted and unwanted.issuperset(range(owner.request.params.n)):
            self.finish_request(owner)
        elif unwanted and not owner.num_unspawned:
            for seq in [seq for seq in owner.sequences if seq.choice_index in unwanted]:
                self.finish(seq)

    def expired(self) -> list[Request]:
        """Return the requests whose deadline has passed, the earliest first. The caller ends them."""
        now, found = self._clock(), []
        while (owner := self._by_deadline.first()) is not None and owner.deadline is not None and owner.deadline <= now:
            self._by_deadline.remove(owner)
            found.append(owner)
        return found

    def victim(self) -> Sequence:
        """Return the running sequence to preempt when blocks run out."""
        return _last(self.running, Counter(seq.fairness_key for seq in self.running))

    def victims_for(self, seq: Sequence, is_enough: Callable[[list[Sequence]], bool]) -> list[Sequence] | None:
        """Return enough running sequences whose place a waiting one may take; None if there are too few."""
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

    def count_into(self, stats: EngineStats) -> None:
        """Set the gauges of requests, and the number of preemptions so far."""
        stats.num_requests_running = len(self.running)
        stats.num_requests_waiting = len(self.waiting)
        stats.num_waiting_tokens = self.waiting.num_tokens
        oldest = self.waiting.oldest
        stats.oldest_wait_s = 0.0 if oldest is None else max(0.0, self._clock() - oldest.owner.arrived_at)
        stats.num_preemptions = self._num_preemptions

    def _new_sequence(self, owner: Request, token_ids: Iterable[int]) -> Sequence:
        seq = Sequence(owner, owner.num_sequences, list(token_ids))
        owner.num_sequences += 1
        if owner.request.constraint is not None:
            assert self._constraint_factory is not None, "admission refuses constraints without a factory"
            seq.constraint = self._constraint_factory(owner.request.constraint)
        if self._speculation is not None:
            self._speculation.start(seq)
        is_alone = seq.drafting is None and seq.constraint is None
        seq.is_plain = is_alone and not owner.is_beam_search and not seq.is_prompt_only
        owner.sequences.append(seq)
        return seq

    def _release(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self.running.remove(seq)
        self._free_slots.append(seq.slot)
        seq.slot = None
        seq.is_started = seq.has_sampled = False
        seq.num_tokens_in_flight = seq.num_unknown_tokens = 0
        self._blocks.free(seq)


def _last(sequences: Iterable[Sequence], num_running: Counter[str]) -> Sequence:
    """Return the sequence to preempt first.

    A beam that waits for the others comes first, because they may need the blocks that it holds. Then come the lowest
    priority, the fairness key with the most running sequences, and the latest arrival.
    """
    return max(
        sequences,
        key=lambda seq: (seq.num_missing_tokens == 0, seq.priority, num_running[seq.fairness_key], seq.order),
    )


def _may_displace(seq: Sequence, other: Sequence, num_running: Counter[str]) -> bool:
    """Whether a waiting sequence may take the place of a running one.

    It may if the other has a lower priority, or if the other's key has more than twice as many running sequences plus
    one. With that margin two keys never displace each other in turn, and the shares level small differences without
    lost work. It may also displace a beam that waits for other beams, because these may wait behind `seq`.
    """
    if other.num_missing_tokens == 0:
        return True
    if other.priority != seq.priority:
        return other.priority > seq.priority
    return num_running[other.fairness_key] > 2 * num_running[seq.fairness_key] + 1
