"""The measurements of every engine, the rates computed from them, and the limits of these rates."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from benchmarks.limits import MachineLimits, StoredWeights, end_to_end_limit, kv_bytes_per_token, limit
from pagewick.cli.benchmarking.scenarios import Scenario, Timing
from pagewick.cli.random_model import Shape

LONG_CONTEXT = 8192
LONG_OUTPUT = 64


class Face(StrEnum):
    """The interface at which an engine is measured: its library, in a process of its own, or its HTTP server."""

    LIBRARY = "library"
    HTTP = "HTTP"


class Figure(StrEnum):
    """A rate, in tokens per second.

    Prefill: prompt tokens, until the first token. Decode: output tokens of all streams after that. End to end: output
    tokens of all streams, from the first request to the last token.
    """

    PREFILL = "prefill"
    DECODE = "decode"
    END_TO_END = "end to end"

    def rate(self, scenario: Scenario, timing: Timing) -> float:
        if self is Figure.PREFILL:
            return scenario.num_prompt_tokens * scenario.num_streams / timing.first_token_seconds
        if self is Figure.DECODE:
            return timing.num_tokens_later / (timing.total_seconds - timing.first_token_seconds)
        return scenario.num_output_tokens * scenario.num_streams / timing.total_seconds

    def limit(
        self, scenario: Scenario, shape: Shape, machine: MachineLimits, weights: StoredWeights | None = None
    ) -> float:
        if self is Figure.PREFILL:
            return limit(Scenario(scenario.name, scenario.num_prompt_tokens, 1), shape, machine, weights)
        if self is Figure.DECODE:
            return limit(scenario, shape, machine, weights)
        return end_to_end_limit(scenario, shape, machine, weights)


@dataclass(frozen=True, slots=True)
class Measurement:
    """One scenario, and the figures that a run of it gives."""

    scenario: Scenario
    figures: tuple[Figure, ...]

    @property
    def name(self) -> str:
        return self.scenario.name

    def row_name(self, figure: Figure) -> str:
        return self.name if len(self.figures) == 1 else f"{self.name}, {figure}"


DECODE = Measurement(Scenario("decode 128 + 128", 128, 128), (Figure.DECODE,))
PREFILL = Measurement(Scenario("prefill 512", 512, 1), (Figure.PREFILL,))
LONG = Measurement(
    Scenario(f"context {LONG_CONTEXT:,}", LONG_CONTEXT, LONG_OUTPUT),
    (Figure.PREFILL, Figure.DECODE),
)
MEASUREMENTS = (
    DECODE,
    PREFILL,
    Measurement(Scenario("prefill 2,048", 2048, 1), (Figure.PREFILL,)),
    LONG,
    Measurement(Scenario("16 streams, 64 + 64", 64, 64, 16), (Figure.END_TO_END,)),
    Measurement(Scenario("32 streams, 64 + 64", 64, 64, 32), (Figure.END_TO_END,)),
)
MAX_STREAMS = max(measurement.scenario.num_streams for measurement in MEASUREMENTS)
# Some servers count one token more than requested.
MAX_LEN = max(measurement.scenario.max_len for measurement in MEASUREMENTS) + 192


def kv_read_rate(short: float, long: float, shape: Shape) -> float:
    """Return the bytes per second at which a decode reads keys and values, from its rates at two context lengths.

    Both contexts read the same weights, so the longer one's additional time is that of its additional keys and values.
    """
    positions = [one.scenario.num_prompt_tokens + one.scenario.num_output_tokens / 2 for one in (DECODE, LONG)]
    return (positions[1] - positions[0]) * kv_bytes_per_token(shape) / (1 / long - 1 / short)
