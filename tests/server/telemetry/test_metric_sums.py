"""Metrics of several processes become those of one server."""

from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.parser import text_string_to_metric_families

from pagewick.server.telemetry.metric_sums import Family, families_of, rendered, summed, totals
from pagewick.server.telemetry.metrics import FinishedRequest, Metrics
from tests.fake_engine import FakeClient, fake_engine


def report(num_requests: dict[str, int], seconds: list[float], num_open: int) -> list[Family]:
    """Return what a process reports, as it arrives on the other end of a connection."""
    registry = CollectorRegistry()
    counter = Counter("app:requests", "Requests.", ["status"], registry=registry)
    for status, number in num_requests.items():
        counter.labels(status).inc(number)
    histogram = Histogram("app:seconds", "Seconds.", buckets=(1, 2), registry=registry)
    for one in seconds:
        histogram.observe(one)
    Gauge("process_open_fds", "Files.", registry=registry).set(num_open)
    Gauge("process_max_fds", "Limit of files.", registry=registry).set(1024)
    Gauge("process_start_time_seconds", "Start.", registry=registry).set(100 + num_open)
    return msgspec.msgpack.decode(msgspec.msgpack.encode(families_of(registry)), type=list[Family])


def samples_of(families: list[Family]) -> dict[str, float]:
    """Return the samples, as Prometheus reads them, without the times at which they were created."""
    return {
        "".join([sample.name, *sample.labels.values()]): sample.value
        for family in text_string_to_metric_families(rendered(families).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


ONE = report({"200": 3, "404": 1}, [0.5, 1.5], 7)
OTHER = report({"200": 4, "503": 2}, [1.5, 9.0, 9.0], 5)


def test_counters_histograms_and_sizes_are_added_up() -> None:
    assert samples_of(summed([ONE, OTHER])) == {
        "app:requests_total200": 7,
        "app:requests_total404": 1,
        "app:requests_total503": 2,
        "app:seconds_bucket1.0": 1,
        "app:seconds_bucket2.0": 3,
        "app:seconds_bucket+Inf": 5,
        "app:seconds_count": 5,
        "app:seconds_sum": 21.5,
        "process_open_fds": 12,
        "process_max_fds": 1024,
        "process_start_time_seconds": 105,
    }


def test_only_counts_of_a_process_that_is_over_stay() -> None:
    kept = samples_of(summed([totals(ONE), OTHER]))
    assert kept["app:requests_total200"] == 7 and kept["app:seconds_sum"] == 21.5
    assert (kept["process_open_fds"], kept["process_start_time_seconds"]) == (5, 105)


def test_counts_of_several_generations_stay() -> None:
    past = totals(summed([totals(ONE), totals(OTHER)]))
    assert samples_of(summed([past, ONE]))["app:requests_total200"] == 10


def test_created_is_when_the_first_process_began() -> None:
    created = [value for one in summed([ONE, OTHER]) for name, _, value in one.samples if name == "app:seconds_created"]
    assert created == [min(value for one in ONE for name, _, value in one.samples if name == "app:seconds_created")]


def test_requests_of_a_process_that_is_over_have_ended() -> None:
    """Requests that were accepted and never ended would count as running for ever, since a counter never falls."""
    registry = CollectorRegistry()
    metrics = Metrics("m", fake_engine(FakeClient()).info, registry=registry)
    for _ in range(5):
        metrics.accept()
    metrics.finish(FinishedRequest("stop", num_prompt_tokens=1, n=1))
    metrics.finish(FinishedRequest("error", num_prompt_tokens=1, n=1))
    before = families_of(registry)
    after = samples_of(summed([totals(before), before]))
    assert samples_of(before)["pagewick:requests_accepted_totalm"] == 5
    assert (after["vllm:request_success_totalerrorm"], after["vllm:request_success_totalstopm"]) == (4 + 1, 2)
    past = samples_of(totals(before))
    ended = sum(value for name, value in past.items() if name.startswith("vllm:request_success_total"))
    assert ended == past["pagewick:requests_accepted_totalm"] == 5
    assert past["vllm:request_prompt_tokens_countm"] == 2
    assert samples_of(totals(totals(before))) == past
