"""Metrics of several processes as one: counters and histograms are added up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from pagewick.server.telemetry.metrics import ACCEPTED, FINISHED, REASON

# Families whose values never fall, so that the counts of a process that is over still belong to the sums.
_TOTALS = ("counter", "histogram")
# Samples that say the same of each process. The others are added up, unless they are points in time.
_EQUAL = ("process_max_fds", "python_info")
_TIMES = ("_created", "_start_time_seconds")

Labels = dict[str, str]


class Family(msgspec.Struct, array_like=True):
    """A metric and its samples: name, labels and value."""

    name: str
    text: str
    kind: str
    samples: list[tuple[str, Labels, float]]


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Return the present values of a process' metrics."""
    return [
        Family(one.name, one.documentation, one.type, [(s.name, s.labels, float(s.value)) for s in one.samples])
        for one in registry.collect()
    ]


def totals(families: Iterable[Family]) -> list[Family]:
    """Return what still counts when the process is over. Requests that it has not finished have ended with an error."""
    kept = [one for one in families if one.kind in _TOTALS]
    num_lost = _total(kept, ACCEPTED) - _total(kept, FINISHED)
    if num_lost <= 0:
        return kept
    return [_with_errors(one, num_lost) if one.name == FINISHED else one for one in kept]


def _total(families: Iterable[Family], counter: str) -> float:
    samples = (sample for one in families if one.name == counter for sample in one.samples)
    return sum(value for name, _, value in samples if name == f"{counter}_total")


def _with_errors(finished: Family, number: float) -> Family:
    samples = [
        (name, labels, value + number * (name == f"{FINISHED}_total" and labels.get(REASON) == "error"))
        for name, labels, value in finished.samples
    ]
    return Family(finished.name, finished.text, finished.kind, samples)


def summed(reports: Iterable[Iterable[Family]]) -> list[Family]:
    """Return the metrics of all processes together. A process may lack families and samples that others have."""
    found: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    for family in (family for report in reports for family in report):
        found.setdefault(family.name, family)
        samples = values.setdefault(family.name, {})
        for name, labels, value in family.samples:
            key = (name, tuple(labels.items()))
            samples[key] = _together(name, samples[key], value) if key in samples else value
    return [
        Family(name, one.text, one.kind, [(key[0], dict(key[1]), value) for key, value in values[name].items()])
        for name, one in found.items()
    ]


def _together(name: str, one: float, other: float) -> float:
    if name in _EQUAL:
        return one
    return min(one, other) if name.endswith(_TIMES) else one + other


def rendered(families: Iterable[Family]) -> bytes:
    """Return metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.text, family.kind)
            for name, labels, value in family.samples:
                metric.add_sample(name, labels, value)
            yield metric
