"""Times of requests, and summaries of many of them. All times are in seconds."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(slots=True)
class RequestTiming:
    """Times of one request. first: until the first text (or token), None if none came. total: until its end.

    gaps: between one piece of the response and the next. num_prompt_tokens, num_output_tokens: None if the server does
    not count them. error: a short description of why it failed; the other fields then describe the time before.
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

    def add_piece(self, time: float) -> None:
        """Record a piece of the response that came `time` seconds after the start."""
        if self.first is None:
            self.first = time
        else:
            self.gaps.append(time - self.total)
        self.total = time


@dataclass(frozen=True, slots=True)
class Distribution:
    """Mean and percentiles of some times; percentiles are interpolated between the nearest two, as in numpy."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Distribution | None:
        """Summarize times; return None if there are none."""
        if not values:
            return None
        at_least_two = values if len(values) > 1 else [*values, *values]
        percentiles = statistics.quantiles(at_least_two, n=100, method="inclusive")
        return cls(statistics.fmean(values), percentiles[49], percentiles[89], percentiles[98])


@dataclass(frozen=True, slots=True)
class Summary:
    """Results of a run of many requests. Distributions are None where there was nothing to measure.

    Token rates are None if the server does not count its tokens. errors: kind -> how many requests failed with it;
    these are in no distribution and no rate.
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
        """Summarize requests. duration: from the start of the first one to the end of the last one."""
        good = [one for one in timings if one.error is None]
        num_prompt = _total([one.num_prompt_tokens for one in good])
        num_output = _total([one.num_output_tokens for one in good])
        num_tokens = _total([num_prompt, num_output])
        per_token = [value for one in good if (value := one.time_per_output_token) is not None]
        return cls(
            duration=duration,
            num_finished=len(good),
            errors=dict(Counter(one.error for one in timings if one.error is not None)),
            num_prompt_tokens=num_prompt,
            num_output_tokens=num_output,
            requests_per_second=len(good) / duration,
            output_tokens_per_second=None if num_output is None else num_output / duration,
            total_tokens_per_second=None if num_tokens is None else num_tokens / duration,
            time_to_first_token=Distribution.of([one.first for one in good if one.first is not None]),
            time_per_output_token=Distribution.of(per_token),
            gap_between_pieces=Distribution.of([gap for one in good for gap in one.gaps]),
            end_to_end=Distribution.of([one.total for one in good]),
        )

    def number(self, path: Sequence[str]) -> float | None:
        """Return the number at a path of fields; None if there was nothing to measure."""
        value: Any = self
        for name in path:
            value = None if value is None else getattr(value, name)
        return None if value is None else float(value)


@dataclass(frozen=True, slots=True)
class Metric:
    """A number by which runs are compared: a rate per second or a time. path: its place in a Summary."""

    name: str
    path: tuple[str, ...]
    is_rate: bool = False


METRICS = (
    Metric("output tokens", ("output_tokens_per_second",), is_rate=True),
    Metric("requests", ("requests_per_second",), is_rate=True),
    Metric("first token, p50", ("time_to_first_token", "p50")),
    Metric("first token, p99", ("time_to_first_token", "p99")),
    Metric("per output token, p50", ("time_per_output_token", "p50")),
    Metric("gap between pieces, p99", ("gap_between_pieces", "p99")),
    Metric("whole request, p50", ("end_to_end", "p50")),
)


@dataclass(frozen=True, slots=True)
class Spread:
    """Several values of one number: their median, the lowest and the highest."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Runs:
    """The measured rounds of one engine or server, without the first one, which only warms up."""

    label: str
    rounds: list[Summary] = field(default_factory=list)

    def spread(self, *path: str) -> Spread | None:
        """Return the spread of a number of the rounds' Summaries; None if a round lacks it."""
        values = [value for one in self.rounds if (value := one.number(path)) is not None]
        return Spread.of(values) if values and len(values) == len(self.rounds) else None

    @property
    def errors(self) -> dict[str, int]:
        """Errors of all rounds together."""
        return dict(sum((Counter(one.errors) for one in self.rounds), Counter()))

    def metrics(self) -> dict[str, Any]:
        """Return METRICS by their names, as plain data."""
        spreads = {metric.name: self.spread(*metric.path) for metric in METRICS}
        return {name: None if spread is None else asdict(spread) for name, spread in spreads.items()}

    def as_dict(self) -> dict[str, Any]:
        rounds = [asdict(one) for one in self.rounds]
        return {"label": self.label, "metrics": self.metrics(), "errors": self.errors, "rounds": rounds}


def paired_ratios(first: Sequence[Summary], second: Sequence[Summary], metric: Metric) -> Spread | None:
    """Return the spread of the ratios first / second of rounds that ran one after the other; None if one lacks it."""
    ratios = []
    for one, other in zip(first, second, strict=True):
        mine, theirs = one.number(metric.path), other.number(metric.path)
        if mine is None or not theirs:
            return None
        ratios.append(mine / theirs)
    return Spread.of(ratios)


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None
