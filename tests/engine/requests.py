"""Requests, cache layouts, and a scheduler with a simulated runner, for tests of the engine's parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

from pagewick.attention.cache_spec import CacheSpec
from pagewick.engine.batch import StepMasks, StepOutput, StepPlan
from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.cache.tiers import DiskTier, HostTier
from pagewick.engine.messages import EngineRequest, RequestDelta, RequestOptions
from pagewick.engine.scheduling.queue_limits import QueueLimits
from pagewick.engine.scheduling.scheduler import DEFAULT_SESSION_TTL_S, Scheduler
from pagewick.engine.sequence import Request
from pagewick.engine.sequence import Sequence as TokenSequence
from pagewick.engine.step_loop import StepLoop
from pagewick.engine.whole_parts import NO_PARTS, WholeParts
from pagewick.sampling_params import SamplingParams
from tests.engine.jobs import EOS_TOKEN_IDS, Expected, Job, MadeUpConstraint
from tests.engine.simulation import Disk, Oracle, SimulatedRunner

_OPTIONS = set(RequestOptions.__struct_fields__)
_FIELDS = {"bad_word_ids", "dry_breaker_ids", "opening_ids", "constraint", "extra_keys", "images"}


def request(prompt_token_ids: Sequence[int], request_id: str = "a", *, seed: int = 1, **values: Any) -> EngineRequest:
    """values: of RequestOptions, EngineRequest and SamplingParams."""
    options = {name: values.pop(name) for name in _OPTIONS & values.keys()}
    fields = {name: values.pop(name) for name in _FIELDS & values.keys()}
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        params=SamplingParams(**values),
        seed=seed,
        options=RequestOptions(**options),
        **fields,
    )


def sequence(
    prompt_token_ids: Iterable[int], *, arrival: int = 0, choice_index: int = 0, **values: Any
) -> TokenSequence:
    """One that nobody schedules. values: of `request`."""
    made = request(list(prompt_token_ids), **values)
    owner = Request(made, arrival, 0.0, None, frozenset(), 0)
    seq = TokenSequence(owner, choice_index, list(made.prompt_token_ids))
    owner.sequences.append(seq)
    return seq


def full_spec(block_size: int = 4) -> CacheSpec:
    return CacheSpec(kind="full", block_size=block_size, block_bytes=block_size)


def window_spec(lookback: int, block_size: int = 4, *, is_chunked: bool = False) -> CacheSpec:
    return CacheSpec(
        kind="window", block_size=block_size, block_bytes=block_size, lookback=lookback, is_chunked=is_chunked
    )


def recurrent_spec(block_size: int = 4, chunk_alignment: int = 1) -> CacheSpec:
    return CacheSpec(
        kind="recurrent",
        block_size=block_size,
        block_bytes=block_size,
        lookback=1,
        chunk_alignment=chunk_alignment,
        prefix_reuse="snapshots",
    )


def oracle(
    share: float = 0.7, *, num_tokens: int = 3, is_draft: bool = False, max_batch: int = 8, max_num_seqs: int = 8
) -> Oracle:
    """Return a drafter whose draft tokens are right with probability `share`."""
    max_num_logits = max_num_seqs * (1 + num_tokens)
    return Oracle(num_tokens, is_draft, 1, 1, max_batch, max_num_logits, jobs={}, share=share, random=Random(1))


class SimulatedStep:
    """A Handle of what the simulated runner has run."""

    def __init__(self, simulation: Simulation, plan: StepPlan, output: StepOutput) -> None:
        self.awaits_masks = not output.unreadable and any(work.awaits_mask for work in plan.work)
        self._simulation, self._plan, self._output = simulation, plan, output
        step = simulation.scheduler._in_flight[-1]
        self._waiting = [seq for seq, work in step.work.items() if work.awaits_mask]

    def sample(self, masks: StepMasks) -> None:
        assert self.awaits_masks
        self.awaits_masks = False
        is_over = [seq.is_finished for seq in self._waiting]
        self._simulation.runner.check_masks(self._plan, is_over, masks.masks)

    def result(self) -> StepOutput:
        assert not self.awaits_masks, "sample comes first"
        simulation = self._simulation
        simulation.has_lost_steps |= bool(self._output.unreadable)
        if simulation.between is not None:
            simulation.between()
            simulation.between = None
        return self._output


class Simulation:
    """A scheduler, a simulated runner and a clock; each delta is checked against what its request gives alone.

    host, disk_capacity: blocks per group; none if empty. grow: see BlockPool, for every group. depth: of the StepLoop.
    """

    def __init__(
        self,
        specs: Sequence[CacheSpec] = (),
        num_blocks: Sequence[int] = (16,),
        *,
        max_num_seqs: int = 8,
        budget: int = 64,
        max_num_prefill_tokens: int | None = None,
        whole: WholeParts = NO_PARTS,
        max_model_len: int = 64,
        enable_prefix_caching: bool = True,
        host: Sequence[int] = (),
        disk_capacity: Sequence[int] = (),
        grow: Callable[[int], int] | None = None,
        speculation: Oracle | None = None,
        limits: Callable[[], QueueLimits] = QueueLimits,
        session_ttl_s: float = DEFAULT_SESSION_TTL_S,
        depth: int = 1,
    ) -> None:
        self.specs = specs or [full_spec()]
        self.num_blocks = num_blocks
        self.max_num_seqs = max_num_seqs
        self.budget = budget
        self.max_num_prefill_tokens = max_num_prefill_tokens
        self.whole = whole
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.host = host
        self.disk_capacity = list(disk_capacity)
        self.grow = grow
        self.speculation = speculation
        self.limits = limits
        self.session_ttl_s = session_ttl_s
        self.depth = depth
        self.between: Callable[[], None] | None = None
        self.now = 0.0
        self.disk = Disk()
        self.tally = Counter[str]()
        self.live: dict[str, Expected] = {}
        self.jobs: dict[int, Job] = speculation.jobs if speculation is not None else {}
        self.plan = StepPlan()
        self.num_idle_steps = 0
        self.restart()

    def restart(self) -> None:
        """As the process does: what is on disk is there again, and nothing else."""
        assert not self.live
        self.num_on_disk_at_start = len(self.disk.blocks)
        self.has_lost_steps = False  # because of unreadable blocks; the blocks for what they were to compute stay
        groups = range(len(self.specs))
        keys = [[key for other, key in self.disk.blocks if other == group] for group in groups]
        tiers = [DiskTier(keys[group], self.disk_capacity[group]) for group in groups] if self.disk_capacity else ()
        self.blocks = BlockManager(
            self.specs,
            self.num_blocks,
            hash_key=b"key",
            enable_prefix_caching=self.enable_prefix_caching,
            grow=[self.grow] * len(self.specs) if self.grow else None,
            host=[HostTier(number) for number in self.host],
            disk=tiers,
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.budget,
            max_num_prefill_tokens=self.max_num_prefill_tokens,
            whole=self.whole,
            max_model_len=self.max_model_len,
            eos_token_ids=EOS_TOKEN_IDS,
            speculation=self.speculation,
            limits=self.limits(),
            session_ttl_s=self.session_ttl_s,
            constraint_factory=MadeUpConstraint,
            clock=lambda: self.now,
        )
        self.runner = SimulatedRunner(
            self.blocks,
            self.host or [0] * len(self.specs),
            self.disk,
            max_num_seqs=self.max_num_seqs,
            budget=self.budget,
            jobs=self.jobs,
            speculation=self.speculation,
            tally=self.tally,
        )
        self.loop = StepLoop(self.scheduler, self, self.depth)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or self.loop.has_steps

    def submit(self, plan: StepPlan) -> SimulatedStep:
        self.plan = plan
        self.tally["steps ahead"] += self.scheduler.num_in_flight > 1
        return SimulatedStep(self, plan, self.runner.submit(plan))

    def add(self, prompt_token_ids: Sequence[int], *, fails: tuple[int, int] | None = None, **values: Any) -> Job:
        """Values of `request`; the model's end-of-sequence tokens are ignored unless said otherwise."""
        seed = len(self.jobs) + 1
        values = {"ignore_eos": True, "temperature": 0.0, "request_id": f"r{seed}", **values}
        job = Job(request(prompt_token_ids, seed=seed, **values), self.max_model_len, fails)
        self.jobs[seed] = job
        request_id = job.request.request_id
        assert not self.scheduler.is_known(request_id)
        self.scheduler.add(job.request)
        assert self.scheduler.is_known(request_id)
        timeout = job.request.options.timeout_s
        self.live[request_id] = Expected(job, None if timeout is None else self.now + timeout, added_at=self.now)
        return job

    def abort(self, request_ids: Iterable[str] = (), choices: Iterable[tuple[str, int]] = ()) -> None:
        request_ids, choices = list(request_ids), list(choices)
        self.scheduler.abort(request_ids, choices)
        for request_id in request_ids:
            self.live.pop(request_id, None)
        for request_id, choice_index in choices:
            if request_id in self.live and not self.live[request_id].job.is_beam_search:
                self.live[request_id].unwanted.add(choice_index)
        self._check_live()

    def step(self, between: Callable[[], None] | None = None) -> list[RequestDelta]:
        """One step; between: what happens while it is being computed."""
        assert self.scheduler.has_work >= bool(self.live)
        self.between = between
        deltas = self.loop.advance()
        for delta in deltas:
            expected = self.live.get(delta.request_id)
            if expected is None or delta.choice_index in expected.unwanted:
                # It had failed when it was aborted, in the same step.
                assert between is not None and delta.error is not None
            else:
                expected.take(delta, self.now)
        self._check_live()
        is_idle = bool(self.live) and not self.plan.has_work and not deltas
        self.num_idle_steps = self.num_idle_steps + 1 if is_idle else 0
        assert self.num_idle_steps < 2, "two steps without work, while somebody waits"
        self.tally["steps"] += self.plan.has_work
        assert self.scheduler.check_integrity() == []
        return deltas

    def run(self, limit: int = 1000) -> dict[str, list[RequestDelta]]:
        """Step until nothing is left; the deltas by request id."""
        found: dict[str, list[RequestDelta]] = {}
        while self.scheduler.has_work:
            assert limit > 0, "the scheduler does not come to an end"
            limit -= 1
            for delta in self.step():
                found.setdefault(delta.request_id, []).append(delta)
        assert not self.live
        return found

    @property
    def max_draft_tokens(self) -> int:
        """Those that may be behind the computed tokens of a sequence: with states, also those of the step before."""
        if self.speculation is None:
            return 0
        return (1 + any(spec.has_snapshots for spec in self.specs)) * self.speculation.num_tokens

    @property
    def running(self) -> list[TokenSequence]:
        return self.scheduler._sequences.running

    @property
    def waiting(self) -> list[TokenSequence]:
        return list(self.scheduler._sequences.waiting)

    @property
    def num_preemptions(self) -> int:
        return self.scheduler.refresh_stats().num_preemptions

    def _check_live(self) -> None:
        """The scheduler forgets a request at once when its last choice is over, and not before."""
        known = self.scheduler._sequences.requests.keys()
        for request_id in [request_id for request_id, expected in self.live.items() if expected.is_over]:
            assert request_id not in known, self.live[request_id]
            del self.live[request_id]
        assert known <= self.live.keys(), "a request that nobody knows of"
        # Requests that expire or fail while a step is planned are reported after it.
        assert self.scheduler._expired or known == self.live.keys(), "a request is forgotten"


def token_ids_of(deltas: Sequence[RequestDelta], choice_index: int | None = None) -> list[int]:
    """Return the tokens of all deltas, or of those of one choice."""
    wanted = [delta for delta in deltas if choice_index in (None, delta.choice_index)]
    return [token_id for delta in wanted for token_id in delta.token_ids]
