"""A runner without a model: it checks every plan against what it knows of the requests, and makes tokens up.

In place of keys and values it stores what they would depend on, a digest of the prefix, and checks that all that a
token looks back at is there and is of its own prefix. Device, host memory and disk hold such blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.batch import (
    Candidate,
    SlotResult,
    SlotSampling,
    SlotStart,
    SlotWork,
    StepOutput,
    StepPlan,
    Tier,
    Transfer,
)
from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.messages import TokenLogprobs
from pagewick.engine.scheduling.draft_tokens import Speculation
from pagewick.engine.sequence import Sequence as TokenSequence
from tests.engine.all_works import output_of, works_of
from tests.engine.jobs import Choice, Job, chain, constraint_mask, continued, made_up_logprobs, made_up_mu, ranking

GARBAGE = -1


@dataclass
class Slot:
    """digests: of every prefix that the slot knows of. num_computed_tokens: None until the first work.

    last_sampled: the position of the token sampled last. longest: the furthest that its block tables had to reach.
    """

    job: Job
    choice: Choice | None
    start: SlotStart
    tables: list[list[int]]
    digests: list[int]
    num_computed_tokens: int | None = None
    last_sampled: int | None = None
    longest: int = 0


@dataclass
class Disk:
    """Contents by group and key; what is damaged is there and cannot be read. It outlives a runner."""

    blocks: dict[tuple[int, bytes], list[int]] = field(default_factory=dict)
    damaged: set[tuple[int, bytes]] = field(default_factory=set)


@dataclass(frozen=True)
class Oracle(Speculation):
    """Draft tokens that are right with probability `share`, from the scheduler's side or from the runner's."""

    jobs: dict[int, Job] = field(default_factory=dict)
    share: float = 0.7
    random: Random = field(default_factory=lambda: Random(0))

    def start(self, seq: TokenSequence) -> None:
        super().start(seq)
        if seq.drafting is not None and not self.uses_draft_model:
            seq.drafting.index = _Foresight(self, self.jobs[seq.request.seed], seq.choice_index)  # type: ignore[assignment]

    def propose(self, job: Job, choice_index: int, num_tokens: int, number: int) -> list[int]:
        draws = [self.random.random() for _ in range(number)]
        return job.draft_tokens(choice_index, num_tokens, self.random.randrange(number + 1), draws, self.share)


@dataclass
class _Foresight:
    """In the place of an NgramIndex."""

    oracle: Oracle
    job: Job
    choice_index: int
    token_ids: list[int] = field(default_factory=list)

    def extend(self, token_ids: Sequence[int]) -> None:
        self.token_ids += token_ids

    def propose(self, number: int) -> list[int]:
        assert self.token_ids == self.job.choices[self.choice_index].token_ids[: len(self.token_ids)]
        return self.oracle.propose(self.job, self.choice_index, len(self.token_ids), number)


class SimulatedRunner:
    """Does what a plan says and asserts that it makes sense. Seeds identify requests.

    blocks: the manager that made the plan, to see which blocks others hold or may look for. tally: what happened.
    """

    def __init__(
        self, blocks: BlockManager, num_host_blocks: Sequence[int], disk: Disk, *, max_num_seqs: int, budget: int,
        jobs: dict[int, Job], speculation: Oracle | None = None, tally: Counter[str] | None = None,
    ) -> None:  # fmt: skip
        self.blocks = blocks
        self.specs = blocks.groups
        self.has_states = any(spec.has_snapshots for spec in self.specs)
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.jobs = jobs
        self.disk = disk
        self.can_write = True
        self._saved: dict[tuple[int, bytes], None] = {}  # to disk, the newest last
        self.tally = Counter[str]() if tally is None else tally
        self._speculation = speculation
        self._random = Random(len(jobs))
        self.slots: dict[int, Slot] = {}
        # The content of each place of each block: one per token, or one per block of snapshots.
        sizes = [1 if spec.has_snapshots else spec.block_size for spec in self.specs]
        self.device = [
            [[GARBAGE] * size for _ in range(pool.num_blocks)] for size, pool in zip(sizes, blocks.pools, strict=True)
        ]
        self.host = [
            [[GARBAGE] * size for _ in range(number)] for size, number in zip(sizes, num_host_blocks, strict=True)
        ]

    def submit(self, plan: StepPlan) -> StepOutput:
        """Run the step to its end: what it gives does not depend on masks, which check_masks looks at."""
        unreadable = self.transfer(plan.transfers)
        if unreadable:
            # It is not defined whether the runner applies such a plan.
            if self._random.random() < 0.5:
                self._apply(plan)
            self.tally["unreadable"] += 1
            return StepOutput([], unreadable, self.can_write)
        works = works_of(plan, len(self.specs))
        slots = [work.slot for work in works]
        assert len(set(slots)) == len(slots) and all(0 <= slot < self.max_num_seqs for slot in slots)
        assert {start.slot for start in plan.starts} <= set(slots), "a slot is started and given nothing to do"
        assert sum(work.num_tokens for work in works) <= self.budget
        if self._speculation is not None:
            num_logits = sum(work.is_sampled + work.num_draft_tokens for work in works)
            assert num_logits <= self._speculation.max_num_logits
        self._apply(plan)
        for work in works:
            self._check(work)
        for work in works:
            self._look_back(work, work.start)
        self._check_writes(works)
        for work in works:
            self._write(work)
        for work in works:
            self._look_back(work, work.start + work.num_tokens)
        output = output_of(plan, [self._answer(work) for work in works])
        output.can_write = self.can_write
        return output

    def check_masks(self, plan: StepPlan, is_over: Sequence[bool], masks: Sequence[Sequence[bytes | None]]) -> None:
        """Each mask is that of the tokens before it, unless the choice is over by then, or its constraint fails."""
        waiting = [work for work in plan.work if work.awaits_mask]
        for work, was_over, (mask,) in zip(waiting, is_over, masks, strict=True):
            job = self.slots[work.slot].job
            num_output = work.start + work.num_tokens - job.num_prompt_tokens
            constraint = job.request.constraint
            assert isinstance(constraint, dict)
            fails = constraint.get("fails_in_mask") == num_output
            assert mask == (None if fails else constraint_mask(num_output)) or (was_over and mask is None)

    def transfer(self, transfers: Sequence[Transfer]) -> list[bytes]:
        """One after the other; keys that could not be read."""
        unreadable: dict[bytes, None] = {}
        for one in transfers:
            source, destination = Tier(one.source_tier), Tier(one.destination_tier)
            self.tally[f"{source.name} to {destination.name}"] += 1
            place = (one.group, one.key)
            if source == destination == Tier.DISK:
                assert self.disk.blocks.pop(place, None) is not None or place in self.disk.damaged
                self.disk.damaged.discard(place)
                continue
            if source == Tier.DISK:
                if place in self.disk.damaged:
                    unreadable[one.key] = None
                    self.disk.blocks.pop(place, None)  # as DiskStore does
                    content = [GARBAGE] * len(self.device[one.group][0])
                else:
                    content = self.disk.blocks[place]
            else:
                content = self._memory(source)[one.group][one.source]
            if destination == Tier.DISK:
                assert place not in self.disk.blocks, "written twice"
                self._write_to_disk(place, content)
            else:
                assert one.destination >= 0
                self._memory(destination)[one.group][one.destination] = list(content)
        return list(unreadable)

    def refuse(self, num_lost: int) -> None:
        """Write nothing more to disk; the blocks written last, which waited to be written, are lost, too."""
        self.can_write = False
        lost = [*self._saved][max(0, len(self._saved) - num_lost) :]
        for place in lost:
            if self.disk.blocks.pop(place, None) is not None:
                self.disk.damaged.add(place)
        self.tally["blocks refused"] += 1

    def _write_to_disk(self, place: tuple[int, bytes], content: Sequence[int]) -> None:
        if self.can_write:
            self.disk.blocks[place] = list(content)
            self.disk.damaged.discard(place)
            self._saved.pop(place, None)
            self._saved[place] = None
        else:
            self.disk.damaged.add(place)

    def _memory(self, tier: Tier) -> list[list[list[int]]]:
        return self.device if tier == Tier.DEVICE else self.host

    def _apply(self, plan: StepPlan) -> None:
        for start in plan.starts:
            self._start(start)
        for work in works_of(plan, len(self.specs)):
            for spec, table, new in zip(self.specs, self.slots[work.slot].tables, work.new_block_ids, strict=True):
                if spec.has_snapshots:
                    before, after = new
                    assert (before == -1) == (work.start == 0) and after != -1
                    table.clear()
                else:
                    assert -1 not in new
                table += new

    def _start(self, start: SlotStart) -> None:
        job, sampling = self.jobs[start.sampling.seed], start.sampling
        params, request = job.request.params, job.request
        ends = sorted(job.ends)
        assert sampling == SlotSampling(
            params, request.seed, sampling.choice_index, job.num_prompt_tokens, ends, request.bad_word_ids,
            request.dry_breaker_ids,
        )  # fmt: skip
        keeps_history = self._speculation is not None and self._speculation.uses_draft_model
        assert bool(start.token_ids) == (keeps_history or params.needs_history)
        choice = None if job.is_beam_search else job.choices[sampling.choice_index]
        digests = job.prompt_digests if choice is None else choice.digests
        if choice is not None:
            num_known = job.num_prompt_tokens + choice.num_sampled
            assert start.token_ids in ([], choice.token_ids[:num_known])
            has_mu = params.mirostat and choice.num_sampled
            assert start.mirostat_mu == (made_up_mu(choice.digests[num_known]) if has_mu else None)
        tables = [list(table) for table in start.block_tables]
        self.slots[start.slot] = Slot(job, choice, start, tables, list(digests))

    def _check(self, work: SlotWork) -> None:
        """Whether it is the slot's turn with these tokens, and its tables reach as far as they must."""
        slot, job = self.slots[work.slot], self.slots[work.slot].job
        end = work.start + work.num_tokens
        true_end = end - work.num_draft_tokens
        assert slot.num_computed_tokens in (None, work.start), f"{work} is not what {slot} is to do"
        assert work.start < true_end and (work.is_sampled or not work.num_draft_tokens)
        if work.num_stored:
            # Then the next step begins there; it must not be planned before the results are known.
            assert self.has_states and work.is_sampled and work.num_stored <= true_end - work.start
        assert work.num_stored or not (self.has_states and work.num_draft_tokens), "a state of draft tokens is stored"
        if slot.choice is None:
            self._follow_beam(slot, work)
        else:
            num_known = job.num_prompt_tokens + slot.choice.num_sampled
            # The choice is over, which the scheduler could not know yet: whatever is computed is for nobody.
            slot.digests += [GARBAGE] * (end + 1 - len(slot.digests))
            is_end = true_end == num_known
            assert true_end <= num_known and work.is_sampled == (is_end and job.max_output_tokens > 0)
            if work.token_ids is None:
                assert work.num_tokens == 1 and slot.last_sampled == work.start, "the slot did not sample this token"
            else:
                assert work.token_ids[: true_end - work.start] == slot.choice.token_ids[work.start : true_end]
                assert len(work.token_ids) == work.num_tokens
        is_cut = end < job.num_prompt_tokens or job.max_output_tokens > 0
        assert work.is_sampled or not is_cut or end % self.blocks.chunks.alignment == 0, (
            "a chunk ends where the caches cannot resume"
        )
        wants_targets = job.request.params.prompt_logprobs is not None and slot.start.sampling.choice_index == 0
        assert work.prompt_targets == (job.prompt[work.start + 1 : end + 1] if wants_targets else [])
        assert work.awaits_mask == (job.request.constraint is not None and work.is_sampled)
        for spec, table, begun in zip(self.specs, slot.tables, slot.start.block_tables, strict=True):
            slot.longest = max(slot.longest, end)
            if spec.has_snapshots:
                continue
            assert spec.num_blocks(end) <= len(table) <= max(len(begun), spec.num_blocks(slot.longest))
        slot.num_computed_tokens = end

    def _follow_beam(self, slot: Slot, work: SlotWork) -> None:
        """Learn a beam's tokens from the plans alone, and check that they continue the content of its blocks."""
        assert work.token_ids is not None and len(work.token_ids) == work.num_tokens and not work.num_draft_tokens
        if slot.num_computed_tokens is None and slot.start.token_ids:
            slot.digests = chain(slot.job.request, slot.start.token_ids)
        elif len(slot.digests) <= work.start and slot.num_computed_tokens is None:
            slot.digests += self._digests_of_beam(slot, work.start)
        del slot.digests[work.start + 1 :]
        slot.digests = continued(slot.job.request, slot.digests, work.token_ids)
        known = slot.job.prompt_digests
        assert slot.digests[: len(known)] == known[: len(slot.digests)], "a beam has left its prompt"

    def _digests_of_beam(self, slot: Slot, num_tokens: int) -> list[int]:
        """Read a fork's digests from its blocks, because the plan does not say its tokens."""
        for spec, table, memory in zip(self.specs, slot.tables, self.device, strict=True):
            if spec.lookback is None:
                places = range(slot.job.num_prompt_tokens, num_tokens)
                return [memory[table[place // spec.block_size]][place % spec.block_size] for place in places]
        found = [GARBAGE] * (num_tokens - slot.job.num_prompt_tokens)
        for spec, table, memory in zip(self.specs, slot.tables, self.device, strict=True):
            if spec.has_snapshots:
                (found[-1],) = memory[table[0]]
                continue
            for place in range(max(slot.job.num_prompt_tokens, first_needed(spec, num_tokens)), num_tokens):
                block = memory[table[place // spec.block_size]]
                found[place - num_tokens] = block[place % spec.block_size]
        return found

    def _look_back(self, work: SlotWork, num_tokens: int) -> None:
        """Check that what stands in memory up to `num_tokens` is what the work's tokens need."""
        slot = self.slots[work.slot]
        digests = self._digests(slot, work)
        for spec, table, memory in zip(self.specs, slot.tables, self.device, strict=True):
            if spec.has_snapshots:
                at = min(num_tokens, stored_at(work))
                if at:
                    assert memory[table[0 if at == work.start else 1]] == [digests[at]], "not the state of this prefix"
                continue
            place = first_needed(spec, work.start)
            while place < num_tokens:
                index, first = divmod(place, spec.block_size)
                last = min(spec.block_size, first + num_tokens - place)
                assert table[index] != -1, "a block that is looked back at has been let go"
                found = memory[table[index]][first:last]
                assert found == digests[place + 1 : place + 1 + last - first], f"{spec.kind}: not of this prefix"
                place += last - first

    def _digests(self, slot: Slot, work: SlotWork) -> list[int]:
        """Return the digests of the prefixes up to the work's end, draft tokens included."""
        if not work.num_draft_tokens:
            return slot.digests
        assert work.token_ids is not None
        digests = slot.digests[: work.start + work.num_tokens - work.num_draft_tokens + 1]
        for token_id in work.token_ids[-work.num_draft_tokens :]:
            digests.append(hash((digests[-1], token_id)))
        return digests

    def _written(self, work: SlotWork) -> list[tuple[int, int, int]]:
        """(group, block, position) of everything that the work writes."""
        slot, end, stored = self.slots[work.slot], work.start + work.num_tokens, stored_at(work)
        return [
            (group, slot.tables[group][1 if spec.has_snapshots else place // spec.block_size], place)
            for group, spec in enumerate(self.specs)
            for place in (range(stored - 1, stored) if spec.has_snapshots else range(work.start, end))
        ]

    def _check_writes(self, works: Sequence[SlotWork]) -> None:
        writer_of: dict[tuple[int, int], int] = {}
        for work in works:
            for group, block_id, _ in self._written(work):
                pool = self.blocks.pools[group]
                assert 0 <= block_id < pool.num_open and pool.num_holders(block_id) <= 1, "a shared block is written"
                assert block_id not in pool._hash_of, "a block that serves others is written"
                assert writer_of.setdefault((group, block_id), work.slot) == work.slot

    def _write(self, work: SlotWork) -> None:
        digests = self._digests(self.slots[work.slot], work)
        for group, block_id, place in self._written(work):
            block = self.device[group][block_id]
            block[place % len(block)] = digests[place + 1]

    def _answer(self, work: SlotWork) -> SlotResult:
        slot, result = self.slots[work.slot], SlotResult()
        job, index = slot.job, slot.start.sampling.choice_index
        if work.prompt_targets:
            result.prompt_logprobs = [
                made_up_logprobs(job.prompt_digests[work.start + place + 2], token_id)
                for place, token_id in enumerate(work.prompt_targets)
            ]
        if work.is_sampled and slot.choice is None:
            self._answer_beam(work, slot, result)
        elif work.is_sampled and slot.choice is not None:
            self._sample(work, slot, slot.choice, result)
            if work.num_wanted_drafts and result.error is None:
                num_tokens = job.num_prompt_tokens + slot.choice.num_sampled
                if num_tokens < len(slot.choice.digests):
                    assert self._speculation is not None
                    result.draft_token_ids = self._speculation.propose(job, index, num_tokens, work.num_wanted_drafts)
        return result

    def _answer_beam(self, work: SlotWork, slot: Slot, result: SlotResult) -> None:
        job, sampling, end = slot.job, slot.start.sampling, work.start + work.num_tokens
        if job.fails is not None and end - job.num_prompt_tokens == job.fails[1]:
            result.error, result.is_poisoned = "made up", True
            return
        best = ranking(slot.digests[end])
        if end - job.num_prompt_tokens < sampling.params.min_tokens and job.request.seed % 2:
            best = [pair for pair in best if pair[0] not in sampling.stop_token_ids]
        best = best[: max(2, 1 + len(sampling.stop_token_ids)) * sampling.params.n]
        num_top = sampling.params.logprobs
        result.candidates = [
            Candidate(
                token_id, score, None if num_top is None else TokenLogprobs(token_id, score, rank, best[:num_top])
            )
            for rank, (token_id, score) in enumerate(best, start=1)
        ]

    def _sample(self, work: SlotWork, slot: Slot, choice: Choice, result: SlotResult) -> None:
        """The token after the last one and, as far as the draft tokens are right, those after them."""
        job, index = slot.job, slot.start.sampling.choice_index
        draft_tokens = (work.token_ids or [])[work.num_tokens - work.num_draft_tokens :]
        true_end = work.start + work.num_tokens - work.num_draft_tokens
        digest, logprobs = slot.digests[true_end], []
        for place in range(len(draft_tokens) + 1):
            num_output = true_end + place - job.num_prompt_tokens
            if job.fails in ((index, num_output), (0, 0)):
                result.error, result.is_poisoned = "made up", True
                break
            token_id = job.next_token(digest, index, num_output)
            digest = hash((digest, token_id))
            result.token_ids.append(token_id)
            logprobs.append(made_up_logprobs(digest, token_id))
            if place < len(draft_tokens) and draft_tokens[place] != token_id:
                break
        num_given = len(result.token_ids)
        if slot.start.sampling.params.logprobs is not None:
            result.logprobs = logprobs
        if slot.start.sampling.params.mirostat and num_given:
            result.mirostat_mu = made_up_mu(digest)
        if num_given:
            self.tally["draft tokens accepted"] += num_given - 1
            self.tally["draft tokens rejected"] += work.num_draft_tokens - (num_given - 1)
            slot.last_sampled = true_end + num_given - 1
            slot.num_computed_tokens = stored_at(work) if work.num_stored else slot.last_sampled
            self.tally["draft tokens computed again"] += slot.last_sampled - slot.num_computed_tokens
            choice.num_sampled += num_given
        elif result.error:
            # The next step may be scheduled before anybody knows.
            slot.last_sampled = true_end
            choice.num_sampled += 1


def stored_at(work: SlotWork) -> int:
    """Return the number of tokens whose state the work stores."""
    return work.start + (work.num_stored or work.num_tokens)


def first_needed(spec: CacheSpec, num_tokens: int) -> int:
    """Return the first token whose keys the token after `num_tokens` of them looks back at."""
    if spec.lookback is None:
        return 0
    if spec.is_chunked:
        return num_tokens // (spec.lookback + 1) * (spec.lookback + 1)
    return max(0, num_tokens - spec.lookback)
