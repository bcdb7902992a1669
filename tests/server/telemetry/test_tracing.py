"""Spans as a collector receives them: a stand-in on a local socket decodes OTLP with the official definitions."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from pagewick.errors import ConfigError
from pagewick.sampling_params import SamplingParams
from pagewick.server.settings import ServerSettings
from pagewick.server.telemetry.metrics import Metrics
from pagewick.server.telemetry.request_log import Observation, RequestLog
from pagewick.server.telemetry.tracing import IncomingTraces, Tracing
from tests.fake_engine import NAN_ROW, FakeClient, fake_engine, spell

MODEL = "org/fake-model"
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SECRET = "my secret prompt"


class Collector:
    """status: the status of its responses."""

    def __init__(self) -> None:
        self.exports: list[tuple[str, ExportTraceServiceRequest]] = []
        self.status = 200
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.headers["content-type"] == "application/x-protobuf"
                collector.exports.append((self.path, ExportTraceServiceRequest.FromString(body)))
                self.send_response(collector.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self._thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self._thread.join()
        self.server.server_close()

    @property
    def spans(self) -> list[Any]:
        resources = [resource for _, export in self.exports for resource in export.resource_spans]
        return [span for resource in resources for scope in resource.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


def plain(attributes: Any) -> dict[str, Any]:
    def value_of(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [value_of(one) for one in found.values] if kind == "array_value" else found

    return {attribute.key: value_of(attribute.value) for attribute in attributes}


def serve(
    settings: ServerSettings, client: FakeClient, headers: list[tuple[str, str]], route: str = "chat", **params: Any
) -> Tracing:
    """Serve one request through middleware, log and engine, which must succeed whatever the collector does."""
    tracing = Tracing(settings)
    log = RequestLog(settings, Metrics(MODEL, client.info, lambda: client.stats), tracing)

    async def answer(request: Request) -> Response:
        engine, sampling = fake_engine(client), SamplingParams(**params)
        seen = Observation(log, "r1", route, 16, False, sampling.n, max_tokens=sampling.max_tokens, prompt=SECRET)
        generation = engine.request(spell(SECRET), sampling, request_id="r1", on_delta=seen.on_delta)
        seen.generation = generation
        async with generation:
            async for _ in generation:
                pass
        return PlainTextResponse(generation.output.outputs[0].text)

    async def run() -> None:
        app = IncomingTraces(Starlette(routes=[Route("/", answer, methods=["POST"])]))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as sender:
            response = await sender.post("/", headers=headers)
            assert client.failure is not None or response.text.startswith("Hello ")

    asyncio.run(run())
    return tracing


def settings_for(endpoint: str, **changes: Any) -> ServerSettings:
    return ServerSettings(served_model_name=(MODEL,), otlp_endpoint=endpoint, port=8123, **changes)


@pytest.fixture
def client() -> FakeClient:
    return FakeClient()


def test_a_span_says_what_a_request_was(collector: Collector, client: FakeClient) -> None:
    client.extras = {"num_cached_tokens": 12, "queue_s": 0.25, "prefill_s": 0.5}
    before = time.time_ns()
    serve(settings_for(collector.url), client, [("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01")]).close(30)
    after = time.time_ns()
    ((path, export),) = collector.exports
    assert path == "/v1/traces"
    resource = plain(export.resource_spans[0].resource.attributes)
    assert resource["service.name"] == "pagewick"
    (span,) = collector.spans
    assert (span.name, span.kind) == (f"chat {MODEL}", 2)  # of a server
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, PARENT_ID)
    assert before <= span.start_time_unix_nano <= span.end_time_unix_nano <= after
    found = plain(span.attributes)
    times = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    assert found == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pagewick",
        "gen_ai.request.id": "r1",
        "gen_ai.request.model": MODEL,
        "gen_ai.response.model": MODEL,
        "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 16,
        "gen_ai.usage.output_tokens": 12,
        "gen_ai.usage.cache_read.input_tokens": 12,
        "server.address": "127.0.0.1",
        "server.port": 8123,
    }
    assert times.pop("gen_ai.latency.time_in_queue") == 0.25
    assert times.pop("gen_ai.latency.time_in_model_prefill") == 0.5
    assert times.keys() == {
        "gen_ai.latency.e2e", "gen_ai.latency.time_to_first_token", "gen_ai.latency.time_in_model_decode"
    }  # fmt: skip
    assert 0 < times["gen_ai.latency.time_to_first_token"] <= times["gen_ai.latency.e2e"]


def test_no_span_says_what_was_said(collector: Collector, client: FakeClient) -> None:
    serve(settings_for(collector.url, log_prompts=True), client, []).close(30)
    raw = b"".join(export.SerializeToString() for _, export in collector.exports)
    assert b"chat org" in raw and b"secret" not in raw and b"Hello" not in raw


def test_completions_and_choices_have_other_attributes(collector: Collector, client: FakeClient) -> None:
    serve(settings_for(collector.url), client, [], "completion", n=2, max_tokens=9).close(30)
    (span,) = collector.spans
    found = plain(span.attributes)
    assert span.name == f"text_completion {MODEL}" == f"{found['gen_ai.operation.name']} {MODEL}"
    assert found["gen_ai.request.choice.count"] == 2 and found["gen_ai.request.max_tokens"] == 9
    assert found["gen_ai.response.finish_reasons"] == ["length", "length"]


def test_errors_are_marked(collector: Collector, client: FakeClient) -> None:
    client.failure, client.pause_at = NAN_ROW, 2
    serve(settings_for(collector.url), client, []).close(30)
    (span,) = collector.spans
    assert span.status.code == 2 and plain(span.attributes)["error.type"] == "_OTHER"


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("traceparent", "00-zz-1-01")],
        [("traceparent", "\x7f" * 3000)],
        [("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01"), ("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-01")],
    ],
)
def test_without_a_good_parent_a_trace_begins(
    collector: Collector, client: FakeClient, headers: list[tuple[str, str]]
) -> None:
    serve(settings_for(collector.url), client, headers).close(30)
    (span,) = collector.spans
    assert span.trace_id.hex() != TRACE_ID and span.parent_span_id == b""


def test_a_parent_that_is_not_sampled_gets_no_spans(collector: Collector, client: FakeClient) -> None:
    serve(settings_for(collector.url), client, [("traceparent", f"00-{TRACE_ID}-{PARENT_ID}-00")]).close(30)
    assert collector.spans == []


def test_the_environment_names_the_service(
    collector: Collector, client: FakeClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    serve(settings_for(f"{collector.url}/custom/path"), client, []).close(30)
    ((path, export),) = collector.exports
    resource = plain(export.resource_spans[0].resource.attributes)
    assert resource["service.name"] == "mine" and resource["deployment.environment.name"] == "test"
    assert path == "/custom/path"


def test_a_collector_that_is_not_there_disturbs_nobody(client: FakeClient) -> None:
    tracing = serve(settings_for("http://127.0.0.1:1"), client, [])
    began = time.monotonic()
    tracing.close(0.1)
    assert time.monotonic() - began < 20  # the exporter alone would try for as long as 30 seconds


def test_a_collector_that_fails_disturbs_nobody(collector: Collector, client: FakeClient) -> None:
    collector.status = 400
    serve(settings_for(collector.url), client, []).close(30)
    assert len(collector.exports) == 1


@pytest.mark.parametrize(
    "endpoint", ["localhost:4318", "grpc://host:4317", "http://", "", "http://[::1", "file:///tmp/x"]
)
def test_an_invalid_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="--otlp-endpoint must be an address like"):
        Tracing(settings_for(endpoint))


def test_without_opentelemetry_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'pagewick\[otel\]'"):
        Tracing(settings_for("http://127.0.0.1:4318"))


def test_opentelemetry_is_not_imported_before_it_is_wanted() -> None:
    code = (
        "import sys, pagewick.server.telemetry.tracing, pagewick.server.telemetry.request_log; "
        "print('opentelemetry' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout.strip() == "False"
