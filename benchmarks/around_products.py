"""Measures the part of a decode step around its matrix products, for benchmarks/step_overhead.py.

A step of one stream is recorded (pagewick/engine/graph/recorded.py), and its operations can be repeated one kind at a
time: they read the same memory, and compute the same again. In each round a step of the engine, its recorded
operations, and the operations of each kind are timed by the clock right after each other. What the operations leave of
the step is the engine's own time, as far as the step does not run ahead meanwhile. The repeated operations keep the
next step from running ahead, so a round begins with a step that is not timed. Parts are medians of the rounds' parts,
since a shared machine changes from second to second. Small operations are shown faster than they are in a step, because
they find their numbers in caches that products have not overwritten.
"""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from pagewick.cli.benchmarking.scenarios import Scenario
from pagewick.engine.messages import EngineRequest
from pagewick.kernels import cpu
from pagewick.kernels.cpu.structs import OPERATIONS
from pagewick.sampling_params import SamplingParams

PRODUCTS: Final = ("linear", "quantized_linear", "grouped_linear", "fused_moe")
NUM_PROMPT_TOKENS: Final = 128
# A size is recorded when it comes for the second time, and the first replay touches memory for the first time.
WARM_UP_STEPS: Final = 6


@dataclass(slots=True)
class StepTimes:
    """Seconds in each round: of an engine's step, of its recorded operations, and of those of each kind."""

    step: list[float] = field(default_factory=list)
    recorded: list[float] = field(default_factory=list)
    kinds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, step: float, recorded: float, kinds: Mapping[str, float]) -> None:
        self.step.append(step)
        self.recorded.append(recorded)
        for name, seconds in kinds.items():
            self.kinds.setdefault(name, []).append(seconds)

    def part(self, seconds: list[float]) -> float:
        """Return the median part of a step."""
        return statistics.median(one / step for one, step in zip(seconds, self.step, strict=True))

    @property
    def products(self) -> list[float]:
        found = [seconds for name, seconds in self.kinds.items() if name in PRODUCTS]
        return [sum(of_round) for of_round in zip(*found, strict=True)]

    def row(self) -> str:
        """Return the step in microseconds, and the parts: around products, of these the engine's, and other kinds."""
        engine = [step - recorded for step, recorded in zip(self.step, self.recorded, strict=True)]
        others = {name: self.part(seconds) for name, seconds in self.kinds.items() if name not in PRODUCTS}
        shown = sorted(others.items(), key=lambda pair: -pair[1])
        return (
            f"{statistics.median(self.step) * 1e6:12,.0f}{1 - self.part(self.products):18.1%}{self.part(engine):10.1%}"
            f"    {', '.join(f'{name} {part:.1%}' for name, part in shown)}"
        )


HEADING: Final = f"{'step, us':>12}{'around products':>18}{'engine':>10}    other operations"


def kinds_of(calls: Any, names: Mapping[int, str]) -> dict[str, Any]:
    """Return the calls of each kind of operation, as arrays of the type of `calls`. names: by an operation's number."""
    found: dict[str, list[Any]] = {}
    for call in calls:
        found.setdefault(names[call.operation], []).append(call)
    return {name: (calls._type_ * len(group))(*group) for name, group in found.items()}


def measure_around_products(engine: Any, num_rounds: int) -> StepTimes:
    """Decode one stream greedily; `engine` is an Engine with native kernels and a model whose steps are recorded."""
    native = cpu.library()
    assert native is not None, "there are no recorded steps without it"
    params = SamplingParams(temperature=0.0, max_tokens=WARM_UP_STEPS + 2 * num_rounds + 2, ignore_eos=True)
    (prompt,) = Scenario("stream", NUM_PROMPT_TOKENS, 1).prompts(engine.info.vocab_size, 0)
    engine.add(EngineRequest(request_id="stream", prompt_token_ids=prompt, params=params, seed=0))
    for _ in range(WARM_UP_STEPS):
        engine.step()
    *_, recorded = engine._ranks.runner._forward._recorded.values()
    every = recorded.step._array
    kinds = kinds_of(every, {native.operation(name): name for name in OPERATIONS})

    def replay(calls: Any) -> Callable[[], object]:
        return lambda: native.replay(ctypes.addressof(calls), len(calls))

    times = StepTimes()
    for _ in range(num_rounds):
        engine.step()
        step = _seconds(engine.step)
        native.stop_ahead()
        times.add(step, _seconds(replay(every)), {n: _seconds(replay(c)) for n, c in kinds.items()})
    while engine.has_work:
        engine.step()
    return times


def _seconds(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
