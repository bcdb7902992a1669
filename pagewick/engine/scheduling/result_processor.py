"""ResultProcessor: turns a step's results into new tokens, finished and forked sequences, and deltas for clients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from pagewick.engine.batch import NOT_NUMBERS, SlotResult, SlotWork, StepOutput, StreamResults
from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.messages import EngineStats, RequestDelta, TokenLogprobs
from pagewick.engine.scheduling import beam_search
from pagewick.engine.scheduling.failures import Failure, constraint_failure, result_failure
from pagewick.engine.scheduling.fair_queue import FairShares
from pagewick.engine.scheduling.plan_builder import ScheduledStep
from pagewick.engine.scheduling.sequence_manager import SequenceManager
from pagewick.engine.sequence import Beam, Request, Sequence, TokenConstraint
from pagewick.engine.speculation.drafting import Drafting


@dataclass(frozen=True, slots=True)
class ResultProcessor:
    """Has no state of its own: it changes sequences through the SequenceManager and blocks through the BlockManager."""

    sequences: SequenceManager
    blocks: BlockManager
    shares: FairShares
    stats: EngineStats
    clock: Callable[[], float]

    def process(self, step: ScheduledStep, output: StepOutput) -> list[RequestDelta]:
        """Apply a step's results; return deltas for the choices that have news."""
        deltas = self._process_streams(step, output.streams)
        num_tokens = len(deltas)
        details = output.streams.details
        rare = [(step.streams[place], step.plan.streams.work(place), details[place]) for place in sorted(details)]
        for seq, work, result in [*rare, *zip(step.work, step.work.values(), output.results, strict=True)]:
            if seq.is_finished:
                continue
            unwanted = seq.owner.unwanted_choices
            num_prompt_tokens = min(work.start + work.num_tokens, seq.num_prompt_tokens) - work.start
            num_tokens += max(0, num_prompt_tokens) + bool(result.candidates)
            for delta in self._process(seq, work, result):
                num_tokens += 0 if result.candidates else len(delta.token_ids)
                if delta.choice_index not in unwanted:
                    deltas.append(delta)
            if unwanted:
                self.sequences.finish_unwanted(seq.owner)
        self.stats.count_iteration(num_tokens)
        return deltas

    def fail_all(self, owner: Request, error: str, kind: str) -> list[RequestDelta]:
        """End a request with an error for every choice that is not finished."""
        return self._with_times(owner, self._fail_all(owner, Failure(error, kind)))

    def _process_streams(self, step: ScheduledStep, results: StreamResults) -> list[RequestDelta]:
        """Apply the tokens of the streams without details: what `_process` does, in one pass.

        A stream has reported its request's prompt in an earlier step, and its request has no choice left to create.
        """
        deltas: list[RequestDelta] = []
        ended: list[Sequence] = []
        num_served: Counter[str] = Counter()
        now, details, mark_computed = self.clock(), results.details, self.blocks.mark_next_computed
        for place, (seq, token_id) in enumerate(zip(step.streams, results.token_ids, strict=True)):
            if seq.is_finished or place in details:
                continue
            owner = seq.owner
            assert owner.prefilled_at is not None, "a stream has sampled before"
            seq.num_tokens_in_flight -= 1
            seq.num_unknown_tokens -= 1
            mark_computed(seq)
            seq.token_ids.append(token_id)
            num_served[seq.fairness_key] += 1
            delta = RequestDelta(
                request_id=owner.request.request_id,
                choice_index=seq.choice_index,
                token_ids=[token_id],
                num_cached_tokens=owner.num_cached_tokens or 0,
                decode_s=now - owner.prefilled_at,
            )
            deltas.append(delta)
            if token_id in owner.stop_token_ids and seq.num_output_tokens > seq.params.min_tokens:
                delta.finish_reason, delta.stop_token_id = "stop", token_id
            elif len(seq.token_ids) == seq.max_num_tokens:
                delta.finish_reason = "length"
            else:
                continue
            ended.append(seq)
        self.stats.generation_tokens += len(deltas)
        for key, number in num_served.items():
            self.shares.charge(key, 0, number)
        for seq in ended:
            self.sequences.finish(seq)
        return deltas

    def _process(self, seq: Sequence, work: SlotWork, result: SlotResult) -> list[RequestDelta]:
        # Without sampling nothing else notices that logits are not numbers.
        if result.prompt_logprobs and any(math.isnan(one.logprob) for one in result.prompt_logprobs):
            result = SlotResult(error=NOT_NUMBERS, is_poisoned=True)
        seq.num_tokens_in_flight -= work.num_tokens
        seq.num_unknown_tokens -= work.is_sampled
        process = self._process_candidates if seq.owner.is_beam_search else self._process_tokens
        return self._with_times(seq.owner, process(seq, work, result))

    def _process_tokens(self, seq: Sequence, work: SlotWork, result: SlotResult) -> list[RequestDelta]:
        owner = seq.owner
        delta, failure = self._extend(seq, result)
        if seq.drafting is not None:
            self._note_acceptance(seq.drafting, work.num_draft_tokens, result, delta)
        # The error came after these tokens, and one of them may have ended the sequence.
        error = result_failure(result) if delta.finish_reason is None else None
        if delta.token_ids or error is None:
            num_accepted = max(0, len(delta.token_ids) - 1)
            num_computed = work.num_tokens - work.num_draft_tokens + num_accepted
            self.blocks.mark_computed(seq, work.num_stored or num_computed)
            delta.prompt_logprobs = _unreported(seq, result.prompt_logprobs or [])
        deltas = [delta]
        is_prompt_done = seq.is_prompt_only and seq.num_missing_tokens == 0
        if delta.token_ids or is_prompt_done:
            self._note_prefilled(owner)
            delta.prefix_miss, owner.prefix_miss = owner.prefix_miss, None
            if is_prompt_done:
                # The request wants only its prompt computed, so the other choices end, too.
                deltas += [_new_delta(owner, index) for index in _unspawned_choices(owner)]
                owner.num_unspawned = 0
                for one in deltas:
                    one.finish_reason, one.embedding = "length", result.embedding
            elif owner.num_unspawned:
                deltas += self._spawn_choices(seq)
        if error is not None:
            self._discard_poisoned(seq, result)
        failure = failure or error
        if failure is not None:
            deltas += self._fail(seq, failure)
        elif delta.finish_reason is not None:
            self.sequences.finish(seq)
        return deltas if delta.token_ids or delta.prompt_logprobs or delta.finish_reason else deltas[1:]

    def _extend(self, seq: Sequence, result: SlotResult) -> tuple[RequestDelta, Failure | None]:
        """Append new tokens to the sequence, up to the one that ends it; also return why its constraint fails."""
        owner, failure = seq.owner, None
        delta = _new_delta(owner, seq.choice_index)
        if not result.token_ids:
            return delta, None
        num_output_tokens = seq.num_output_tokens
        for token_id in result.token_ids:
            seq.token_ids.append(token_id)
            delta.token_ids.append(token_id)
            num_output_tokens += 1
            if token_id in owner.stop_token_ids and num_output_tokens > seq.params.min_tokens:
                delta.finish_reason, delta.stop_token_id = "stop", token_id
                break
            if seq.constraint is not None:
                failure, is_complete = _accept(seq.constraint, token_id)
                if is_complete:
                    delta.finish_reason = "stop"
                    break
            if num_output_tokens == owner.max_output_tokens:
                # A constraint that fails only now has nothing left to restrict: the tokens were all allowed.
                delta.finish_reason, failure = "length", None
                break
            if failure is not None:
                break
        seq.has_sampled = True
        seq.mirostat_mu = result.mirostat_mu
        if result.logprobs is not None:
            delta.logprobs = result.logprobs[: len(delta.token_ids)]
        self.stats.generation_tokens += len(delta.token_ids)
        self.shares.charge(seq.fairness_key, 0, len(delta.token_ids))
        return delta, failure

    def _note_acceptance(
        self, drafting: Drafting, num_draft_tokens: int, result: SlotResult, delta: RequestDelta
    ) -> None:
        if result.token_ids:
            drafting.control.observe(num_draft_tokens, len(result.token_ids) - 1)
            drafting.token_ids = result.draft_token_ids
            # Draft tokens after the token that ended the sequence were right, but the client does not get them.
            num_used = min(len(result.token_ids) - 1, len(delta.token_ids))
            drafting.num_draft_tokens += num_draft_tokens
            drafting.num_accepted_tokens += num_used
            self.stats.num_draft_tokens += num_draft_tokens
            self.stats.num_accepted_tokens += num_used
        delta.num_draft_tokens = drafting.num_draft_tokens
        delta.num_accepted_tokens = drafting.num_accepted_tokens

    def _spawn_choices(self, leader: Sequence) -> list[RequestDelta]:
        """Create the other choices, which share the computed prompt except for its last token; return failures."""
        owner, failures = leader.owner, []
        while owner.num_unspawned:
            owner.num_unspawned -= 1
            choice_index = owner.num_sequences
            try:
                self.sequences.fork(leader, owner.request.prompt_token_ids, leader.num_prompt_tokens - 1)
            except Exception as error:  # raised by the constraint factory
                failures.append(_failed_delta(owner, choice_index, constraint_failure(error)))
        return failures

    def _fail(self, seq: Sequence, failure: Failure) -> list[RequestDelta]:
        """End a sequence with an error, and its request if other choices depend on it."""
        if seq.owner.is_beam_search or seq.owner.num_unspawned:
            return self._fail_all(seq.owner, failure)
        self.sequences.finish(seq)
        return [_failed_delta(seq.owner, seq.choice_index, failure)]

    def _fail_all(self, owner: Request, failure: Failure) -> list[RequestDelta]:
        if owner.is_beam_search:
            choices = [*range(owner.request.params.n)]
        else:
            choices = [*(seq.choice_index for seq in owner.sequences), *_unspawned_choices(owner)]
        self.sequences.finish_request(owner)
        return [_failed_delta(owner, index, failure) for index in choices if index not in owner.unwanted_choices]

    def _discard_poisoned(self, seq: Sequence, result: SlotResult) -> None:
        """Keep wrong contents from serving other requests. After an error of another kind they are right."""
        if result.is_poisoned:
            self.blocks.discard(seq)

    # Times

    def _note_prefilled(self, owner: Request) -> None:
        if owner.prefilled_at is None:
            owner.prefilled_at = self.clock()

    def _with_times(self, owner: Request, deltas: list[RequestDelta]) -> list[RequestDelta]:
        """Report in a request's first delta how long it waited, and in later ones how long prompt and tokens took."""
        if owner.prefilled_at is not None:
            for delta in deltas:
                if delta.token_ids:
                    delta.decode_s = self.clock() - owner.prefilled_at
        if deltas and not owner.has_reported_queue_time:
            owner.has_reported_queue_time = True
            started_at = self.clock() if owner.started_at is None else owner.started_at
            deltas[0].queue_s = started_at - owner.arrived_at
        if not owner.has_reported_prefill_time and owner.started_at is not None:
            first = next((delta for delta in deltas if delta.token_ids or delta.finish_reason), None)
            if first is not None:
                owner.has_reported_prefill_time = True
                prefilled_at = self.clock() if owner.prefilled_at is None else owner.prefilled_at
                first.prefill_s = prefilled_at - owner.started_at
        return deltas

    # Beams

    def _process_candidates(self, seq: Sequence, work: SlotWork, result: SlotResult) -> list[RequestDelta]:
        """Note the candidates of one beam; once all beams have theirs, continue the search."""
        owner = seq.owner
        if failure := result_failure(result):
            self._discard_poisoned(seq, result)
            return self._fail(seq, failure)
        self.blocks.mark_computed(seq, work.num_tokens)
        deltas = []
        if prompt_logprobs := _unreported(seq, result.prompt_logprobs or []):
            deltas.append(_new_delta(owner, 0))
            deltas[0].prompt_logprobs = prompt_logprobs
        if not result.candidates:
            return deltas
        self._note_prefilled(owner)
        next(beam for beam in owner.beams if beam.seq is seq).candidates = result.candidates
        if any(beam.candidates is None for beam in owner.beams):
            return deltas
        if continuations := beam_search.advance(owner):
            self._continue_beams(owner, continuations)
            return deltas
        self.sequences.finish_request(owner)
        found = beam_search.deltas(owner)
        if found:
            found[0].prefix_miss = owner.prefix_miss
        self.stats.generation_tokens += sum(len(delta.token_ids) for delta in found)
        num_beams = owner.request.params.n
        message = f"only {len(found)} of {num_beams} beams found a continuation: too few tokens are allowed"
        unfound = Failure(message, "InvalidRequestError")
        missing = range(len(found), num_beams)
        return [*deltas, *found, *(_failed_delta(owner, index, unfound) for index in missing)]

    def _continue_beams(self, owner: Request, continuations: list[beam_search.Continuation]) -> None:
        """Replace the beams: a parent continues as its first child, and is forked for the others."""
        parents = [continuation.parent for continuation in continuations]
        for beam in owner.beams:
            if beam.seq not in parents:
                self.sequences.finish(beam.seq, keeps_session=False)
        # All forks come first, while their parents have no new token yet.
        is_fork = [one.parent in parents[:place] for place, one in enumerate(continuations)]
        seqs = [
            self.sequences.fork(one.parent, [*one.parent.token_ids, one.token_id], one.parent.num_computed_tokens)
            if forks
            else one.parent
            for forks, one in zip(is_fork, continuations, strict=True)
        ]
        for forks, seq, one in zip(is_fork, seqs, continuations, strict=True):
            self.shares.charge(seq.fairness_key, 0, 1)
            if not forks:
                seq.token_ids.append(one.token_id)
                self.sequences.resume(seq)
        owner.beams = [
            Beam(seq, one.cumulative_logprob, one.logprobs) for seq, one in zip(seqs, continuations, strict=True)
        ]


def _new_delta(owner: Request, choice_index: int) -> RequestDelta:
    return RequestDelta(
        request_id=owner.request.request_id,
        choice_index=choice_index,
        num_cached_tokens=owner.num_cached_tokens or 0,
    )


def _failed_delta(owner: Request, choice_index: int, failure: Failure) -> RequestDelta:
    delta = _new_delta(owner, choice_index)
    delta.finish_reason, delta.error, delta.error_kind = "error", failure.message, failure.kind
    return delta


def _unspawned_choices(owner: Request) -> range:
    return range(owner.request.params.n - owner.num_unspawned, owner.request.params.n)


def _accept(constraint: TokenConstraint, token_id: int) -> tuple[Failure | None, bool]:
    """Pass a token to a constraint; return why it fails, and whether nothing may follow."""
    try:
        constraint.accept(token_id)
        return None, constraint.is_complete
    except Exception as error:  # a constraint may be foreign code, and must not end the engine
        return constraint_failure(error), False


def _unreported(seq: Sequence, prompt_logprobs: list[TokenLogprobs]) -> list[TokenLogprobs] | None:
    """Return those that were not sent already, before a preemption."""
    if not prompt_logprobs:
        return None
    end = min(seq.num_computed_tokens, seq.num_prompt_tokens - 1)
    num_new = max(0, end - seq.owner.num_reported_logprobs)
    seq.owner.num_reported_logprobs = max(end, seq.owner.num_reported_logprobs)
    return prompt_logprobs[-num_new:] if num_new else None
