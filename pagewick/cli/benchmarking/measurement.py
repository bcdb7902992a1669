"""Times of requests, and what is said of many of them. All times are in seconds."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class RequestTiming:
    """One request. first: until the first text (or token), None if none came. total: until its end.

    gaps: between one piece of the answer and the next. num_prompt_tokens, num_output_tokens: None if the server does
    not say. error: a short word for why it failed; what else is known is of the time before.
    """

    first: float | None = None
    total: float = 0.0
    gaps: list[float] = field(default_factory=list)
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    error: str | None = None

    @property
    def time_per_output_token(self) -> float | None:
        """The mean time from one token to the next; None for less than two tokens."""
        if self.first is None or self.num_output_tokens is None or self.num_output_tokens < 2:
            return None
        return (self.total - self.first) / (self.num_output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of some times; p50 to p99 are interpolated between the nearest two, as numpy does."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """None for no values."""
        if not values:
            return None
        return cls(statistics.fmean(values), *(percentile(values, one) for one in PERCENTILES))


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear interpolation at (n - 1) * percent / 100 of the sorted values. Raises ValueError for none."""
    if not values:
        raise ValueError("no values have no percentile")
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run of many requests gave. Distributions are None where there was nothing to measure.

    Token rates are None if the server does not count its tokens. errors: kind -> how many; they are in no distribution
    and no rate.
    """

    duration: float
    num_finished: int
    errors: dict[str, int]
    num_prompt_tokens: int | None
    num_output_tokens: int | None
    requests_per_second: float
    output_tokens_per_second: float | None
    total_tokens_per_second: float | None
    time_to_first_token: Distribution | None
    time_per_output_token: Distribution | None
    gap_between_pieces: Distribution | None
    end_to_end: Distribution | None

    @classmethod
    def of(cls, timings: Sequence[RequestTiming], duration: float) -> Summary:
        """duration: from the start of the first request to the end of the last one."""
        good = [one for one in timings if one.error is None]
        num_prompt, num_output = (
            _total([one.num_prompt_tokens for one in good]),
            _total([one.num_output_tokens for one in good]),
        )
        per_token = [value for one in good if (value := one.time_per_output_token) is not None]
        return cls(
            duration=duration,
            num_finished=len(good),
            errors=dict(Counter(one.error for one in timings if one.error is not None)),
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            requests_per_second=len(good) / duration,
            output_tokens_per_second=None if num_output is None else num_output / duration,
            total_tokens_per_second=(
                None if num_output is None or num_prompt is None else (num_prompt + num_output) / duration
            ),
            time_to_first_token=Distribution.of([one.first for one in good if one.first is not None]),
            time_per_output_token=Distribution.of(per_token),
            gap_between_pieces=Distribution.of([gap for one in good for gap in one.gaps]),
            end_to_end=Distribution.of([one.total for one in good]),
        )


@dataclass(frozen=True, slots=True)
class Metric:
    """A number by which runs are compared. path: where a Summary has it."""

    name: str
    unit: str
    path: tuple[str, ...]
    is_higher_better: bool

    def of(self, summary: Summary) -> float | None:
        return _number_at(summary, self.path)


METRICS = (
    Metric("output tokens", "per s", ("output_tokens_per_second",), True),
    Metric("requests", "per s", ("requests_per_second",), True),
    Metric("first token, p50", "s", ("time_to_first_token", "p50"), False),
    Metric("first token, p99", "s", ("time_to_first_token", "p99"), False),
    Metric("per output token, p50", "s", ("time_per_output_token", "p50"), False),
    Metric("gap between pieces, p99", "s", ("gap_between_pieces", "p99"), False),
    Metric("whole request, p50", "s", ("end_to_end", "p50"), False),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Several values of one number: their median, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread | None:
        return cls(statistics.median(values), min(values), max(values)) if values else None


@dataclass(frozen=True, slots=True)
class Runs:
    """The rounds of one thing that is measured, without the first one, which only warms up."""

    label: str
    rounds: list[Summary] = field(default_factory=list)

    def spread(self, *path: str) -> Spread | None:
        """Of the number at this place of a Summary; None if a round has no such number."""
        values = [_number_at(one, path) for one in self.rounds]
        known = [value for value in values if value is not None]
        return Spread.of(known) if len(known) == len(values) else None

    @property
    def errors(self) -> dict[str, int]:
        """Of all rounds together."""
        return dict(sum((Counter(one.errors) for one in self.rounds), Counter()))

    def metrics(self) -> dict[str, Any]:
        """METRICS by their names, as plain data."""
        spreads = {metric.name: self.spread(*metric.path) for metric in METRICS}
        return {name: None if spread is None else asdict(spread) for name, spread in spreads.items()}

    def as_dict(self) -> dict[str, Any]:
        return {
            "label": self.label,
            "metrics": self.metrics(),
            "errors": self.errors,
            "rounds": [asdict(one) for one in self.rounds],
        }


def paired_ratios(first: Sequence[Summary], second: Sequence[Summary], metric: Metric) -> Spread | None:
    """The ratio first / second of each round, whose runs were neighbours. None if a round has no such number."""
    ratios = []
    for one, other in zip(first, second, strict=True):
        mine, theirs = metric.of(one), metric.of(other)
        if mine is None or not theirs:
            return None
        ratios.append(mine / theirs)
    return Spread.of(ratios)


def _number_at(summary: Summary, path: Sequence[str]) -> float | None:
    value: Any = summary
    for name in path:
        value = None if value is None else getattr(value, name)
    return None if value is None else float(value)


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
