"""Rounds of measurements: engines are compared within a round, and each round measures the machine as well."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import click
import psutil

from benchmarks.contestants import Contestant, Field, Runner, open_runners
from benchmarks.machine import MachineRates, busy_part
from benchmarks.measurements import MAX_STREAMS, MEASUREMENTS, Face, Measurement
from pagewick.cli.benchmarking.scenarios import Scenario
from pagewick.errors import ConfigError

QUIET_S = 2.0
# Pause before each measurement: the previous engine's threads may still spin for a while, as OpenMP's do for 0.2 s.
SETTLE_S = 1.0
# These runs start threads, compile code that is needed for the first time and touch cache pages; they are not counted.
WARM_UP = (Scenario("warm-up", 512, 8), Scenario("warm-up", 64, 16, MAX_STREAMS))
WARM_UP_SEED = 1_000_000
# Memory of an engine besides its weights: K/V cache, libraries, buffers.
BYTES_BESIDE_WEIGHTS = 2 * 2**30

MeasureMachine = Callable[[], MachineRates]
Runners = dict[tuple[str, Face], Runner]


class Round:
    """Rates of one round by measurement, face, figure and engine, and the machine's rates at the same time."""

    def __init__(self, index: int, measurements: Sequence[Measurement], measure_machine: MeasureMachine) -> None:
        self._index, self._measurements, self._measure_machine = index, measurements, measure_machine
        self._busy = busy_part(QUIET_S)
        self._machine: list[MachineRates] = []
        self._rates: dict[tuple[str, str, str], dict[str, float]] = {}

    def run(self, contestants: Sequence[Contestant], runners: Runners) -> None:
        """Run each measurement at each face on all engines that can; in each round another engine is the first."""
        self._machine.append(self._measure_machine())
        for number, measurement in enumerate(self._measurements):
            for face in Face:
                able = [one.key for one in contestants if one.can_run(measurement.scenario, face)]
                turn = self._index % max(len(able), 1)
                for key in able[turn:] + able[:turn]:
                    self._run_one(key, runners[key, face], measurement, face, number)
        self._machine.append(self._measure_machine())

    def as_data(self) -> dict[str, Any]:
        rates = [
            {"measurement": name, "face": face, "figure": figure, "rates": found}
            for (name, face, figure), found in self._rates.items()
        ]
        return {"busy_before": self._busy, "machine": asdict(median_rates(self._machine)), "rates": rates}

    def _run_one(self, key: str, runner: Runner, measurement: Measurement, face: Face, number: int) -> None:
        time.sleep(SETTLE_S)
        timing = runner.run(measurement.scenario, self._index * len(MEASUREMENTS) + number)
        shown = []
        for figure in measurement.figures:
            rate = figure.rate(measurement.scenario, timing)
            self._rates.setdefault((measurement.name, face, figure), {})[key] = rate
            shown.append(f"{figure} {rate:,.1f}")
        click.echo(f"round {self._index + 1}: {measurement.name}, {face}, {key}: {', '.join(shown)} tokens/s", err=True)


def run_rounds(
    contestants: Sequence[Contestant],
    field: Field,
    measurements: Sequence[Measurement],
    *,
    repeats: int,
    measure_machine: MeasureMachine,
    in_turn: bool,
) -> Iterator[dict[str, Any]]:
    """Yields the data of `repeats` rounds, each when it is complete. in_turn: only one engine is loaded at a time.

    Raises ConfigError if all engines together do not fit into memory.
    """
    if in_turn:
        for index in range(repeats):
            one_round = Round(index, measurements, measure_machine)
            turn = index % max(len(contestants), 1)
            for one in [*contestants[turn:], *contestants[:turn]]:
                with open_runners([one], field) as runners:
                    warm_up(contestants, runners)
                    one_round.run([one], runners)
            yield one_round.as_data()
        return
    check_memory(contestants, field)
    with open_runners(contestants, field) as runners:
        warm_up(contestants, runners)
        for index in range(repeats):
            one_round = Round(index, measurements, measure_machine)
            one_round.run(contestants, runners)
            yield one_round.as_data()


def warm_up(contestants: Iterable[Contestant], runners: Runners) -> None:
    for contestant in contestants:
        for (key, face), runner in runners.items():
            for number, scenario in enumerate(WARM_UP):
                if key == contestant.key and contestant.can_run(scenario, face):
                    runner.run(scenario, WARM_UP_SEED + number)


def check_memory(contestants: Sequence[Contestant], field: Field) -> None:
    """Raise ConfigError, with the sizes, if not all engines fit into memory at once."""
    libraries = [one.is_kept for one in contestants if one.library is not None]
    # Those that are not kept are loaded one at a time.
    num_loaded = sum(libraries) + (not all(libraries)) + sum(one.server is not None for one in contestants)
    needed = num_loaded * (field.weights.all + BYTES_BESIDE_WEIGHTS)
    available = psutil.virtual_memory().available
    if needed > available:
        raise ConfigError(
            f"{num_loaded} loaded engines need about {needed / 1e9:.0f} GB, and {available / 1e9:.0f} GB are free; "
            "--in-turn loads only one at a time"
        )


def median_rates(rates: Sequence[MachineRates]) -> MachineRates:
    """Return the median of each rate by itself; rates that this processor does not have stay None."""

    def median(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    return MachineRates(
        read=statistics.median(one.read for one in rates),
        fp32=statistics.median(one.fp32 for one in rates),
        bf16_dot=median(one.bf16_dot for one in rates),
        bf16_tile=median(one.bf16_tile for one in rates),
        int8_dot=median(one.int8_dot for one in rates),
        int8_tile=median(one.int8_tile for one in rates),
    )
