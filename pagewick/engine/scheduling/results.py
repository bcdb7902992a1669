"""What a step's results mean: new tokens, sequences that end or fork, and what each user is told."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from pagewick.engine.batch import SlotResult, SlotWork
from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.messages import EngineStats, RequestDelta, TokenLogprobs
from pagewick.engine.scheduling.beam_search import Beam, BeamSearch, Continuation
from pagewick.engine.scheduling.guesses import Guesses
from pagewick.engine.scheduling.roster import Roster
from pagewick.engine.sequence import Request, Sequence


@dataclass(frozen=True, slots=True)
class Endings:
    """What ends a sequence besides its request."""

    eos_token_ids: frozenset[int]
    max_model_len: int

    def apply_to(self, owner: Request) -> None:
        """Note what ends the sequences of a request that is new."""
        params = owner.request.params
        eos = frozenset() if params.ignore_eos else self.eos_token_ids
        owner.stop_token_ids = eos.union(params.stop_token_ids)
        room = self.max_model_len - len(owner.request.prompt_token_ids)
        owner.max_output_tokens = room if params.max_tokens is None else min(room, params.max_tokens)


class Results:
    """Takes in the results of scheduled sequences and leaves roster and blocks as they follow from them."""

    def __init__(
        self,
        roster: Roster,
        blocks: BlockManager,
        endings: Endings,
        stats: EngineStats,
        clock: Callable[[], float],
    ) -> None:
        self._roster = roster
        self._blocks = blocks
        self._endings = endings
        self._stats = stats
        self._clock = clock

    def take_in(self, seq: Sequence, work: SlotWork, result: SlotResult) -> list[RequestDelta]:
        """What one sequence's work gave; deltas for whoever has news."""
        _check_prompt_logprobs(result)
        deltas = self._take_in(seq, work, result)
        return deltas if seq.owner.is_prefill_told else self._timed(seq.owner, deltas)

    def _take_in(self, seq: Sequence, work: SlotWork, result: SlotResult) -> list[RequestDelta]:
        owner, num_scheduled, num_drafts = seq.owner, work.num_tokens, work.num_draft_tokens
        seq.num_tokens_in_flight -= num_scheduled
        seq.num_unknown_tokens -= work.is_sampled
        if owner.beams is not None:
            return self._take_in_candidates(seq, result, num_scheduled, owner.beams)
        delta = self._extend(seq, result)
        if seq.guesses is not None:
            self._note_guesses(seq.guesses, result, num_drafts, delta)
        error = result.error if delta.finish_reason is None else None
        deltas = [delta]
        if delta.token_ids or error is None:
            self._blocks.mark_computed(seq, num_scheduled - num_drafts + max(0, len(delta.token_ids) - 1))
            if result.prompt_logprobs:
                delta.prompt_logprobs = _unreported(seq, result.prompt_logprobs)
        is_over = seq.is_prompt_only and seq.num_missing_tokens == 0
        if delta.token_ids or is_over:
            self._note_prefilled(owner)
            delta.prefix_miss, owner.prefix_miss = owner.prefix_miss, None
            if is_over:
                deltas += _end_empty(owner, delta)
            elif owner.num_unspawned:
                deltas += self._spawn_choices(seq)
        if error is not None:
            self._discard_poisoned(seq, result)
        error = error or _constrain(seq, delta)
        if error is not None:
            deltas += self._fail(seq, error)
        elif delta.finish_reason is not None:
            self._roster.remove(seq)
        return deltas if delta.token_ids or delta.prompt_logprobs or delta.finish_reason else deltas[1:]

    def _discard_poisoned(self, seq: Sequence, result: SlotResult) -> None:
        """What was computed wrong must not serve others; but what was only not allowed to go on is as good as ever."""
        if result.is_poisoned:
            self._blocks.discard(seq)

    def fail_all(self, owner: Request, error: str, kind: str = "EngineError") -> list[RequestDelta]:
        """End a request with an error for every choice that is not finished."""
        return self._timed(owner, self._fail_all(owner, error, kind))

    def _fail(self, seq: Sequence, error: str) -> list[RequestDelta]:
        if seq.owner.beams is not None or seq.owner.num_unspawned:
            return self._fail_all(seq.owner, error, "EngineError")
        self._roster.remove(seq)
        return [_failure(seq.owner, seq.choice_index, error, "EngineError")]

    def _fail_all(self, owner: Request, error: str, kind: str) -> list[RequestDelta]:
        num_choices = owner.request.params.n
        if owner.beams is not None:
            choices = [*range(num_choices)]
        else:
            choices = [seq.choice_index for seq in owner.sequences]
            choices += range(num_choices - owner.num_unspawned, num_choices)
        self._roster.end(owner)
        return [_failure(owner, index, error, kind) for index in choices if index not in owner.unwanted_choices]

    def _note_prefilled(self, owner: Request) -> None:
        if owner.prefilled_at is None:
            owner.prefilled_at = self._clock()

    def _timed(self, owner: Request, deltas: list[RequestDelta]) -> list[RequestDelta]:
        """Let a request's first delta say how long it waited, and the first with news how long its prompt took."""
        if deltas and not owner.is_queue_told:
            owner.is_queue_told = True
            started_at = self._clock() if owner.started_at is None else owner.started_at
            deltas[0].queue_s = started_at - owner.arrived_at
        if not owner.is_prefill_told and owner.started_at is not None:
            first = next((delta for delta in deltas if delta.token_ids or delta.finish_reason), None)
            if first is not None:
                owner.is_prefill_told = True
                prefilled_at = self._clock() if owner.prefilled_at is None else owner.prefilled_at
                first.prefill_s = prefilled_at - owner.started_at
        return deltas

    def _extend(self, seq: Sequence, result: SlotResult) -> RequestDelta:
        """Give the sequence its new tokens, up to the one that ends it."""
        owner = seq.owner
        delta = _new_delta(owner, seq.choice_index)
        if not result.token_ids:
            return delta
        num_output_tokens = seq.num_output_tokens
        for token_id in result.token_ids:
            seq.token_ids.append(token_id)
            delta.token_ids.append(token_id)
            num_output_tokens += 1
            if token_id in owner.stop_token_ids and num_output_tokens > seq.params.min_tokens:
                delta.finish_reason, delta.stop_token_id = "stop", token_id
                break
            if num_output_tokens == owner.max_output_tokens:
                delta.finish_reason = "length"
                break
        seq.has_sampled = True
        seq.mirostat_mu = result.mirostat_mu
        if result.logprobs is not None:
            delta.logprobs = result.logprobs[: len(delta.token_ids)]
        self._stats.generation_tokens += len(delta.token_ids)
        self._roster.charge_output(seq, len(delta.token_ids))
        return delta

    def _note_guesses(self, guesses: Guesses, result: SlotResult, num_drafts: int, delta: RequestDelta) -> None:
        if result.token_ids:
            # Those behind the token that ended the sequence were right, but nobody got them.
            num_used = min(len(result.token_ids) - 1, len(delta.token_ids))
            guesses.observe(num_drafts, len(result.token_ids) - 1)
            guesses.token_ids = result.draft_token_ids
            guesses.num_draft_tokens += num_drafts
            guesses.num_accepted_tokens += num_used
            self._stats.num_draft_tokens += num_drafts
            self._stats.num_accepted_tokens += num_used
        delta.num_draft_tokens = guesses.num_draft_tokens
        delta.num_accepted_tokens = guesses.num_accepted_tokens

    def _spawn_choices(self, leader: Sequence) -> list[RequestDelta]:
        """The prompt has been computed: let the other choices begin with its blocks, all but its last token's work."""
        owner, num_shared = leader.owner, leader.num_prompt_tokens - 1
        failures = []
        while owner.num_unspawned:
            owner.num_unspawned -= 1
            choice_index = owner.num_sequences
            try:
                child = self._roster.new_sequence(owner, owner.request.prompt_token_ids)
            except Exception as error:  # of the constraint factory
                failures.append(_failure(owner, choice_index, blame_constraint(error), "EngineError"))
            else:
                self._place_fork(leader, child, num_shared)
        return failures

    def _place_fork(self, parent: Sequence, child: Sequence, num_shared: int) -> None:
        """Let a sequence run on a parent's blocks if there is room now; else it waits like any other."""
        has_blocks = parent.slot is not None and bool(self._roster.free_slots) and num_shared > 0
        if has_blocks and self._blocks.fork(parent, child, num_shared):
            self._roster.occupy(child)
        else:
            self._roster.waiting.add(child)

    # Beams

    def _take_in_candidates(
        self, seq: Sequence, result: SlotResult, num_scheduled: int, beams: BeamSearch
    ) -> list[RequestDelta]:
        """One beam knows its candidates; when all do, the search goes on."""
        owner = seq.owner
        if result.error is not None:
            self._discard_poisoned(seq, result)
            return self._fail(seq, result.error)
        self._blocks.mark_computed(seq, num_scheduled)
        deltas = []
        if prompt_logprobs := _unreported(seq, result.prompt_logprobs or []):
            deltas.append(_new_delta(owner, 0))
            deltas[0].prompt_logprobs = prompt_logprobs
        if not result.candidates:
            return deltas
        self._note_prefilled(owner)
        beams.beam_of(seq).candidates = result.candidates
        if not beams.is_ready:
            return deltas
        following = beams.advance()
        if beams.is_over:
            self._roster.end(owner)
            found = beams.deltas()
            if found:
                found[0].prefix_miss = owner.prefix_miss
            self._stats.generation_tokens += sum(len(delta.token_ids) for delta in found)
            num_beams = owner.request.params.n
            message = f"only {len(found)} of {num_beams} beams found a continuation: too few tokens are allowed"
            missing = range(len(found), num_beams)
            deltas += [*found, *(_failure(owner, index, message, "InvalidRequestError") for index in missing)]
        else:
            beams.beams = self._grow(beams, following)
        return deltas

    def _grow(self, search: BeamSearch, following: list[Continuation]) -> list[Beam]:
        """The next beams: a parent goes on as its first child, and forks for the others."""
        parents = {continuation.parent for continuation in following}
        for beam in search.beams:
            if beam.seq not in parents:
                self._roster.remove(beam.seq, keeps_session=False)
        forks = [
            self._fork_beam(one) if one.parent in [other.parent for other in following[:place]] else None
            for place, one in enumerate(following)
        ]
        grown = []
        for continuation, fork in zip(following, forks, strict=True):
            seq = fork or continuation.parent
            if fork is None:
                self._append(seq, continuation.token_id)
            grown.append(Beam(seq, continuation.cumulative_logprob, continuation.logprobs))
        return grown

    def _append(self, seq: Sequence, token_id: int) -> None:
        seq.token_ids.append(token_id)
        self._roster.charge_output(seq, 1)
        if seq.slot is None:  # preempted while it waited for the other beams
            self._roster.waiting.add(seq)

    def _fork_beam(self, continuation: Continuation) -> Sequence:
        """Called while the parent still is what it was."""
        parent = continuation.parent
        child = self._roster.new_sequence(parent.owner, [*parent.token_ids, continuation.token_id])
        self._roster.charge_output(child, 1)
        self._place_fork(parent, child, parent.num_computed_tokens)
        return child


def _new_delta(owner: Request, choice_index: int) -> RequestDelta:
    return RequestDelta(
        request_id=owner.request.request_id,
        choice_index=choice_index,
        num_cached_tokens=owner.num_cached_tokens or 0,
    )


def _failure(owner: Request, choice_index: int, error: str, kind: str) -> RequestDelta:
    delta = _new_delta(owner, choice_index)
    delta.finish_reason, delta.error, delta.error_kind = "error", error, kind
    return delta


def _end_empty(owner: Request, delta: RequestDelta) -> list[RequestDelta]:
    """All that was asked for has been computed: this choice ends, and those that were to come from it."""
    num_choices = owner.request.params.n
    others = [_new_delta(owner, index) for index in range(num_choices - owner.num_unspawned, num_choices)]
    owner.num_unspawned = 0
    for one in (delta, *others):
        one.finish_reason = "length"
    return others


def _check_prompt_logprobs(result: SlotResult) -> None:
    """What is no number is no answer: where nothing is sampled, nobody else would notice."""
    if result.prompt_logprobs and any(math.isnan(one.logprob) for one in result.prompt_logprobs):
        result.token_ids, result.candidates, result.prompt_logprobs = [], [], None
        result.error, result.is_poisoned = "the model computed logits that are not numbers for this request", True


def _constrain(seq: Sequence, delta: RequestDelta) -> str | None:
    """Tell the constraint of new tokens; what is wrong with it, if something is."""
    if seq.constraint is None or delta.finish_reason is not None:
        return None
    try:
        for token_id in delta.token_ids:
            seq.constraint.accept(token_id)
    except Exception as error:  # it is somebody else's code, and must not take the engine with it
        return blame_constraint(error)
    return None


def blame_constraint(error: Exception) -> str:
    """What a user is told of a constraint that failed."""
    return f"the constraint of this request failed: {error}"


def _unreported(seq: Sequence, prompt_logprobs: list[TokenLogprobs]) -> list[TokenLogprobs] | None:
    """Those that were not given out already, before a preemption."""
    if not prompt_logprobs:
        return None
    end = min(seq.num_computed_tokens, seq.num_prompt_tokens - 1)
    num_new = max(0, end - seq.owner.num_reported_logprobs)
    seq.owner.num_reported_logprobs = max(end, seq.owner.num_reported_logprobs)
    return prompt_logprobs[-num_new:] if num_new else None
