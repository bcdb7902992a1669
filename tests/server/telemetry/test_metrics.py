"""The metrics that vLLM's dashboards use, their values, and that no label comes from a request."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from msgspec import structs
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import EngineStats
from pagewick.server.telemetry.engine_metrics import report_throughput, throughput_line
from pagewick.server.telemetry.http_metrics import HttpMetrics
from pagewick.server.telemetry.metrics import FINISH_REASONS, FinishedRequest, Metrics
from tests.fake_engine import FakeClient

MODEL = "org/fake-model"
INFO = FakeClient().info
GAUGES = {
    "num_requests_running", "num_requests_waiting", "num_waiting_tokens", "oldest_wait_s", "num_blocks",
    "num_free_blocks", "num_cached_blocks", "num_referenced_blocks", "num_session_blocks", "num_host_blocks",
    "num_disk_blocks", "num_leaked_blocks", "num_sessions",
}  # fmt: skip
# As vLLM's documentation of its metrics lists them, as far as they have a meaning here.
VLLM_NAMES = {
    "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "prefix_cache_queries_total",
    "prefix_cache_hits_total", "num_preemptions_total", "prompt_tokens_total", "generation_tokens_total",
    "iteration_tokens_total_bucket", "iteration_tokens_total_sum", "iteration_tokens_total_count", "cache_config_info",
    "request_success_total", "engine_healthy", "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
}  # fmt: skip
VLLM_HISTOGRAMS = {
    "request_prompt_tokens", "request_generation_tokens", "request_max_num_generation_tokens", "request_params_n",
    "request_params_max_tokens", "time_to_first_token_seconds", "inter_token_latency_seconds",
    "time_per_output_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds",
}  # fmt: skip


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


@pytest.fixture
def metrics(client: FakeClient) -> Metrics:
    return Metrics(MODEL, client.info, lambda: client.stats)


def samples_of(metrics: Metrics) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return samples by name and labels. Each of ours must have the label model_name, which is left out."""
    found = {}
    for family in text_string_to_metric_families(metrics.render().decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            if sample.name.startswith(("vllm:", "pagewick:")):
                assert labels.pop("model_name") == MODEL
            key = (sample.name, tuple(sorted(labels.items())))
            assert key not in found, "a series is there twice"
            found[key] = sample.value
    return found


def scrape(metrics: Metrics) -> dict[str, float]:
    """Return samples by name and label values, without those of the process and without buckets."""
    return {
        " ".join([name, *(value for _, value in labels)]): number
        for (name, labels), number in samples_of(metrics).items()
        if not name.startswith(("process_", "python_")) and not name.endswith(("_bucket", "_created"))
    }


def test_the_names_are_vllms(metrics: Metrics) -> None:
    names = {name for name, _ in samples_of(metrics)}
    wanted = {f"vllm:{name}" for name in VLLM_NAMES}
    wanted |= {f"vllm:{name}_{part}" for name in VLLM_HISTOGRAMS for part in ("bucket", "sum", "count")}
    assert wanted - names - {"vllm:request_success_total"} == set() and "vllm:request_success_total" in names
    assert {"process_resident_memory_bytes", "python_info", "python_gc_collections_total"} <= names


def test_engine_counts(metrics: Metrics) -> None:
    samples = scrape(metrics)
    assert samples["vllm:num_requests_running"] == samples["vllm:num_requests_waiting"] == 0
    assert samples["vllm:kv_cache_usage_perc"] == 0.05
    assert samples["pagewick:kv_blocks_referenced"] == 5 and samples["pagewick:kv_blocks_free"] == 40
    assert samples["vllm:prompt_tokens_total"] == 7
    assert samples["vllm:cache_config_info 16 100"] == 1


def test_every_count_of_the_engine_is_shown(metrics: Metrics, client: FakeClient) -> None:
    """Every field of EngineStats changes some sample, and no counter has a field that can fall."""
    before, stats = scrape(metrics), client.stats
    for field in structs.fields(EngineStats):
        if field.name == "iteration_token_counts":
            continue
        client.stats = structs.replace(stats, **{field.name: 1_000_003})
        changed = {name for name, value in scrape(metrics).items() if value != before.get(name)}
        assert changed, field.name
        is_count = all(name.endswith(("_total", "_total_sum")) for name in changed)
        assert is_count == (field.name not in GAUGES), field.name


def test_the_tokens_of_steps_are_a_histogram(metrics: Metrics, client: FakeClient) -> None:
    for num_tokens in (1, 2, 8, 9, 16384, 20000):
        client.stats.count_iteration(num_tokens)
    samples = samples_of(metrics)
    name = "vllm:iteration_tokens_total"
    assert samples[f"{name}_count", ()] == 6 and samples[f"{name}_sum", ()] == 36404
    cumulated = {"1.0": 1, "8.0": 3, "16.0": 4, "8192.0": 4, "16384.0": 5, "+Inf": 6}
    assert {bound: samples[f"{name}_bucket", (("le", bound),)] for bound in cumulated} == cumulated


def test_the_engines_health_is_shown(client: FakeClient) -> None:
    health = EngineHealth("restarting", num_restarts=3)
    metrics = Metrics(MODEL, client.info, lambda: client.stats, lambda: health)
    assert scrape(metrics)["vllm:engine_healthy 0"] == 0 and scrape(metrics)["pagewick:engine_restarts_total"] == 3
    health = EngineHealth("ready", num_restarts=4)
    assert scrape(metrics)["vllm:engine_healthy 0"] == 1 and scrape(metrics)["pagewick:engine_restarts_total"] == 4


def test_a_finished_request_is_in_every_histogram_once(metrics: Metrics) -> None:
    request = FinishedRequest(
        "length", 34, 2, max_tokens=100, num_generation_tokens=150, max_num_generation_tokens=100, e2e_s=4.5,
        queue_s=0.5, prefill_s=0.75, decode_s=1.98,
    )  # fmt: skip
    metrics.accept()
    metrics.finish(request)
    samples = scrape(metrics)
    wanted = {
        "request_prompt_tokens": 34, "request_generation_tokens": 150, "request_max_num_generation_tokens": 100,
        "request_params_n": 2, "request_params_max_tokens": 100, "e2e_request_latency_seconds": 4.5,
        "request_queue_time_seconds": 0.5, "request_prefill_time_seconds": 0.75, "request_decode_time_seconds": 1.98,
        "request_inference_time_seconds": 2.73, "request_time_per_output_token_seconds": 0.02,
    }  # fmt: skip
    for name, value in wanted.items():
        assert samples[f"vllm:{name}_sum"] == pytest.approx(value), name
        assert samples[f"vllm:{name}_count"] == 1, name
    assert samples["vllm:request_success_total length"] == samples["pagewick:requests_accepted_total"] == 1


def test_one_that_never_began_has_no_times_of_computing(metrics: Metrics) -> None:
    metrics.finish(FinishedRequest("abort", 5, 1, e2e_s=1.0, queue_s=1.0))
    samples = scrape(metrics)
    for name in ("request_prefill_time", "request_decode_time", "request_inference_time"):
        assert samples[f"vllm:{name}_seconds_count"] == 0
    assert samples["vllm:request_queue_time_seconds_count"] == samples["vllm:e2e_request_latency_seconds_count"] == 1


def test_a_prompt_alone_has_only_prefill(metrics: Metrics) -> None:
    metrics.finish(FinishedRequest("length", 5, 1, max_tokens=0, prefill_s=2.0))
    samples = scrape(metrics)
    assert samples["vllm:request_prefill_time_seconds_sum"] == 2.0
    assert samples["vllm:request_time_per_output_token_seconds_count"] == 0


def test_the_old_name_shows_the_same_latencies(metrics: Metrics) -> None:
    for seconds in (0.001, 0.03, 100):
        metrics.inter_token.observe(seconds)
    samples = samples_of(metrics)
    new, old = "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"
    shown = {(name.replace(new, old), labels): value for (name, labels), value in samples.items() if new in name}
    assert len(shown) > 20
    assert {key: value for key, value in samples.items() if key[0].startswith(old)} == shown


# HTTP


async def answer(request: Request) -> Response:
    if "code" in request.query_params:
        error = {"message": "x", "code": request.query_params["code"]}
        return JSONResponse({"error": error}, int(request.query_params["status"]))
    return PlainTextResponse("ok")


async def stream(request: Request) -> Response:
    async def parts() -> Any:
        yield b"a"
        yield b"b"

    return StreamingResponse(parts())


async def left(request: Request) -> Response:
    raise asyncio.CancelledError


async def unanswered(request: Request) -> Response:
    class Nothing(Response):
        async def __call__(self, *_: object) -> None:
            pass

    return Nothing()


async def broken(request: Request) -> Response:
    raise HTTPException(503) if "expected" in request.query_params else ValueError("a bug")


class Refusals:
    """A stand-in for RequestLog."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []

    def refused(self, *seen: Any) -> None:
        self.seen.append(seen)


@pytest.fixture
def refusals() -> Refusals:
    return Refusals()


@pytest.fixture
def http(metrics: Metrics, refusals: Refusals) -> Iterator[Any]:
    app = Starlette(
        routes=[
            Route("/v1/chat/completions", answer, methods=["POST"]),
            Route("/v1/models/{id:path}", answer, methods=["GET"]),
            Route("/health/ready", answer),
            Route("/stream", stream),
            Route("/broken", broken),
            Route("/left", left),
            Route("/unanswered", unanswered),
        ]
    )
    watched = HttpMetrics(app, metrics, refusals)  # type: ignore[arg-type]

    async def send(method: str, path: str) -> int:
        transport = httpx.ASGITransport(watched, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as sender:
            return (await sender.request(method, path)).status_code

    yield lambda method, path: asyncio.run(send(method, path))


def test_http_requests_are_counted_by_route(http: Any, metrics: Metrics) -> None:
    for method, path in (
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/chat/completions?x=1"),
        ("GET", "/v1/chat/completions"),
        ("GET", "/v1/models/a/b"),
        ("GET", "/v1/models/c"),
        ("GET", "/stream"),
        ("GET", "/broken"),
        ("GET", "/nothing"),
    ):
        http(method, path)
    counts = {key: value for key, value in scrape(metrics).items() if key.startswith("http_requests_total")}
    assert counts == {
        "http_requests_total /v1/chat/completions POST 200": 2,
        "http_requests_total /v1/chat/completions GET 405": 1,
        "http_requests_total /v1/models/{id:path} GET 200": 2,
        "http_requests_total /stream GET 200": 1,
        "http_requests_total /broken GET 500": 1,
        "http_requests_total none GET 404": 1,
    }
    assert scrape(metrics)["http_request_duration_seconds_count /v1/models/{id:path} GET"] == 2


def test_labels_do_not_grow_with_requests(http: Any, metrics: Metrics) -> None:
    def send(number: int) -> None:
        http("POST", f"/v1/chat/completions?status=400&code=made-up-{number}")
        http("GET", f"/v1/models/model-{number}")
        http("GET", f"/path-{number}")
        http(f"METHOD{number}", f"/path-{number}")

    send(0)
    before = samples_of(metrics).keys()
    for number in range(1, 50):
        send(number)
    assert samples_of(metrics).keys() == before


@pytest.mark.parametrize(
    ("status", "code", "reason"),
    [
        (400, "", "invalid_request"), (400, "context_length_exceeded", "context_length"),
        (429, "queue_full", "queue_full"),
        (429, "", "rate_limit"), (401, "invalid_api_key", "unauthorized"), (403, "", "forbidden"),
        (404, "model_not_found", "not_found"), (413, "", "too_large"), (418, "", "invalid_request"),
        (500, "", "internal"), (502, "", "internal"), (503, "engine_dead", "engine"), (503, "draining", "draining"),
        (503, "", "unavailable"), (504, "deadline_exceeded", "deadline"),
    ],
)  # fmt: skip
def test_refusals_are_counted_by_reason(
    http: Any, metrics: Metrics, refusals: Refusals, status: int, code: str, reason: str
) -> None:
    assert http("POST", f"/v1/chat/completions?status={status}&code={code}") == status
    counts = {name: value for name, value in scrape(metrics).items() if "requests_refused" in name and value}
    assert counts == {f"pagewick:requests_refused_total {reason}": 1}
    assert refusals.seen == [("-", "POST", "/v1/chat/completions", status, code or reason)]


def test_an_error_without_a_body_of_ours_is_refused_too(http: Any, metrics: Metrics, refusals: Refusals) -> None:
    assert http("GET", "/broken?expected=1") == 503
    assert refusals.seen == [("-", "GET", "/broken", 503, "unavailable")]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/stream"),
        ("GET", "/health/ready?status=503&code=restarting"),
        ("POST", "/v1/chat/completions?status=499&code="),
    ],
)
def test_responses_probes_and_disconnects_do_not_count_as_refused(
    http: Any, metrics: Metrics, refusals: Refusals, method: str, path: str
) -> None:
    http(method, path)
    assert refusals.seen == []
    assert not any(value for name, value in scrape(metrics).items() if "requests_refused" in name)


def test_a_request_that_is_cancelled_is_no_error_of_ours(http: Any, metrics: Metrics, refusals: Refusals) -> None:
    with pytest.raises(asyncio.CancelledError):
        http("GET", "/left")
    assert scrape(metrics)["http_requests_total /left GET 499"] == 1 and refusals.seen == []


def test_a_stream_whose_client_left_before_it_began_is_no_error_of_ours(
    http: Any, metrics: Metrics, refusals: Refusals
) -> None:
    with pytest.raises(AssertionError):  # the client's: it waits for an answer
        http("GET", "/unanswered")
    assert scrape(metrics)["http_requests_total /unanswered GET 499"] == 1 and refusals.seen == []


# Throughput


def test_the_line_says_it_in_vllms_words() -> None:
    stats = EngineStats(
        prompt_tokens=1500, generation_tokens=700, num_requests_running=3, num_requests_waiting=2, num_blocks=50,
        num_referenced_blocks=25, prefix_cache_queries=8, prefix_cache_hits=1,
    )  # fmt: skip
    line = throughput_line((500, 200), stats, 10.0, structs.replace(INFO, device="cuda:0"))
    assert line == (
        "Avg prompt throughput: 100.0 tokens/s, Avg generation throughput: 50.0 tokens/s, Running: 3 reqs, "
        "Waiting: 2 reqs, GPU KV cache usage: 25.0%, Prefix cache hit rate: 12.5%"
    )
    assert throughput_line((500, 200), stats, 10.0, INFO) == line.replace("GPU ", "")


def test_the_line_says_how_many_experts_were_at_hand() -> None:
    line = throughput_line((0, 0), EngineStats(num_expert_hits=3, num_expert_copies=1), 10.0, INFO)
    assert line.endswith("Prefix cache hit rate: 0.0%, Expert hit rate: 75.0%")


def test_an_engine_that_was_started_anew_counts_from_nothing() -> None:
    line = throughput_line((5000, 200), EngineStats(prompt_tokens=30, generation_tokens=20), 10.0, INFO)
    assert "prompt throughput: 3.0 tokens/s, Avg generation throughput: 2.0 tokens/s" in line


def test_nothing_is_said_while_nothing_happens(caplog: pytest.LogCaptureFixture) -> None:
    stats = EngineStats(prompt_tokens=9)
    lines = []

    async def run() -> None:
        nonlocal stats
        reporting = asyncio.create_task(report_throughput(lambda: stats, INFO, 0.01))
        await asyncio.sleep(0.05)
        lines.append(len(caplog.messages))
        stats = EngineStats(prompt_tokens=9, num_requests_waiting=1)
        while len(caplog.messages) < 2:
            await asyncio.sleep(0.01)
        stats = EngineStats(prompt_tokens=19)
        while "Running: 0 reqs, Waiting: 0 reqs" not in caplog.messages[-1]:
            await asyncio.sleep(0.01)
        lines.append(len(caplog.messages))
        await asyncio.sleep(0.05)
        lines.append(len(caplog.messages))
        reporting.cancel()

    with caplog.at_level("INFO", logger="pagewick"):
        asyncio.run(asyncio.wait_for(run(), 60))
    assert lines[0] == 0 and lines[2] == lines[1] > 2


def test_reasons_are_those_that_requests_can_have() -> None:
    from typing import get_args

    from pagewick.outputs import FinishReason

    assert set(FINISH_REASONS) == set(get_args(FinishReason))
