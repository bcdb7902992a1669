"""Whole engines for tests: requests, what they were answered, and what happened on the way."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewick.config import EngineConfig
from pagewick.engine.batch import StepPlan, Tier
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest, RequestDelta, RequestOptions, TokenLogprobs
from pagewick.sampling_params import SamplingParams

_OPTIONS = frozenset(RequestOptions.__struct_fields__)
_OWN = frozenset({"bad_word_ids", "dry_breaker_ids", "constraint", "extra_keys", "images", "adapter"})


def request(prompt_token_ids: Sequence[int], request_id: str = "a", *, seed: int = 1, **given: Any) -> EngineRequest:
    """`given`: fields of RequestOptions, of EngineRequest, and for all else of SamplingParams."""
    own = {name: given.pop(name) for name in _OWN & given.keys()}
    options = RequestOptions(**{name: given.pop(name) for name in _OPTIONS & given.keys()})
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=list(prompt_token_ids),
        params=SamplingParams(**given),
        seed=seed,
        options=options,
        **own,
    )


@dataclass
class Answer:
    """All that one choice of a request was told, as far as it must not depend on how it was served."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_token_id: int | None = None
    cumulative_logprob: float | None = None
    error: str | None = None

    def append(self, delta: RequestDelta) -> None:
        assert self.finish_reason is None, "a delta came after the end"
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs or []
        self.prompt_logprobs += delta.prompt_logprobs or []
        self.finish_reason, self.stop_token_id = delta.finish_reason, delta.stop_token_id
        self.cumulative_logprob, self.error = delta.cumulative_logprob, delta.error


Answers = dict[tuple[str, int], Answer]


def answers_of(deltas: Iterable[RequestDelta]) -> Answers:
    """By request id and choice."""
    answers: Answers = {}
    for delta in deltas:
        answers.setdefault((delta.request_id, delta.choice_index), Answer()).append(delta)
    return answers


def start(model: Path | str, **options: Any) -> Engine:
    """An engine on one CPU thread; engine options are those of EngineConfig and Engine."""
    own = {name: options.pop(name) for name in ("drafter", "constraint_factory", "grammars") if name in options}
    defaults: dict[str, Any] = {"device": "cpu", "num_threads": 1, "block_size": 16}
    return Engine(EngineConfig(model=str(model), **{**defaults, **options}), **own)


@contextmanager
def running(model: Path | str, **options: Any) -> Iterator[Engine]:
    """An engine that is closed at the end; if nothing went wrong, its books must be right and nothing be held."""
    engine = start(model, **options)
    try:
        yield engine
        if not engine.has_work:
            assert_idle(engine)
    finally:
        engine.close()


def assert_idle(engine: Engine) -> None:
    assert engine.check_integrity() == []
    assert not engine.has_work
    stats = engine.stats()
    assert stats.num_referenced_blocks == 0
    assert (stats.num_requests_running, stats.num_requests_waiting) == (0, 0)
    assert stats.num_leaked_blocks == 0


def serve(
    engine: Engine,
    wanted: Sequence[EngineRequest],
    *,
    arrivals: Sequence[int] | None = None,
    before_step: Callable[[int], None] = lambda number: None,
    max_steps: int = 5000,
) -> Answers:
    """Serve requests to the end, each added before the step of its number (default: 0)."""
    return answers_of(deltas_of(engine, wanted, arrivals=arrivals, before_step=before_step, max_steps=max_steps))


def deltas_of(
    engine: Engine,
    wanted: Sequence[EngineRequest],
    *,
    arrivals: Sequence[int] | None = None,
    before_step: Callable[[int], None] = lambda number: None,
    max_steps: int = 5000,
) -> list[RequestDelta]:
    to_come = sorted(zip(arrivals or [0] * len(wanted), range(len(wanted)), strict=True), reverse=True)
    deltas: list[RequestDelta] = []
    number = 0
    while to_come or engine.has_work:
        assert number < max_steps, "the engine does not come to an end"
        while to_come and to_come[-1][0] <= number:
            engine.add(wanted[to_come.pop()[1]])
        before_step(number)
        if engine.has_work:
            deltas += engine.step()
        number += 1
    return deltas


def assert_same(found: Mapping[tuple[str, int], Answer], expected: Mapping[tuple[str, int], Answer]) -> None:
    """Every choice that is expected was answered the same, to the last bit."""
    for choice, answer in expected.items():
        assert found[choice] == answer, choice


def record_plans(engine: Engine) -> list[StepPlan]:
    """A list that will hold the plan of every step from now on."""
    plans: list[StepPlan] = []
    submit = engine._ranks.submit

    def recorded(plan: StepPlan) -> Any:
        plans.append(plan)
        return submit(plan)

    engine._ranks.submit = recorded  # type: ignore[method-assign]
    return plans


def count_transfers(plans: Iterable[StepPlan]) -> Counter[tuple[Tier, Tier]]:
    """How many blocks went from which tier to which."""
    return Counter(
        (Tier(transfer.source_tier), Tier(transfer.destination_tier)) for plan in plans for transfer in plan.transfers
    )
