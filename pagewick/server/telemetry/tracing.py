"""Traces: a span for every finished request, sent to an OpenTelemetry collector (OTLP over HTTP).

Names follow OpenTelemetry's conventions for generative AI; those of times are vLLM's. No span holds a user's text.
Needs pagewick[otel], which is imported when a Tracing is made and not before.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from pagewick.errors import ConfigError
from pagewick.server.settings import ServerSettings
from pagewick.server.telemetry.metrics import FinishedRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context

EXPORT_TIMEOUT_S = 10.0
# How long a server that ends waits until the last spans are sent.
CLOSE_TIMEOUT_S = 2.0
_TRACES_PATH = "/v1/traces"
_COMPLETIONS = frozenset({"completion", "completions", "infill"})

# The headers that say to which trace the HTTP request of this task belongs.
_incoming: ContextVar[Mapping[str, str] | None] = ContextVar("incoming", default=None)


class IncomingTraces:
    """Middleware that makes the W3C trace context of a request known where the request is handled."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        parents = headers.getlist("traceparent")
        carrier = {}
        if len(parents) == 1:  # W3C: several count as none
            carrier = {"traceparent": parents[0], "tracestate": ",".join(headers.getlist("tracestate"))}
        token = _incoming.set(carrier)
        try:
            await self._app(scope, receive, send)
        finally:
            _incoming.reset(token)


class Tracing:
    """Sends spans in the background. Spans that cannot be sent are lost, and no request ever waits for them.

    Reads OpenTelemetry's own variables, such as OTEL_SERVICE_NAME, OTEL_EXPORTER_OTLP_HEADERS and OTEL_TRACES_SAMPLER.
    Raises ConfigError for an endpoint that is not an HTTP address, or if OpenTelemetry is not installed.
    """

    def __init__(self, settings: ServerSettings) -> None:
        endpoint = _traces_url(settings.otlp_endpoint or "")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"--otlp-endpoint needs OpenTelemetry ({error}); install it with: pip install 'pagewick[otel]'"
            ) from None
        # The environment comes last, so that it overrides the name.
        resource = Resource({SERVICE_NAME: "pagewick"}).merge(OTELResourceDetector().detect())
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("pagewick")
        self._model_name = settings.model_name
        self._server: dict[str, str | int] = {"server.address": settings.uds or settings.host}
        if settings.port and settings.uds is None:
            self._server["server.port"] = settings.port

    def current_context(self) -> Context | None:
        """Return the trace to which the HTTP request under way belongs; None if it names none."""
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = _incoming.get()
        return TraceContextTextMapPropagator().extract(carrier) if carrier else None

    def record(
        self, request_id: str, route: str, request: FinishedRequest, began_ns: int, context: Context | None
    ) -> None:
        """Send a span from began_ns (since the epoch) to now for a request that is over."""
        from opentelemetry.context import Context
        from opentelemetry.trace import SpanKind, Status, StatusCode

        operation = "text_completion" if route in _COMPLETIONS else "chat"
        span = self._tracer.start_span(
            f"{operation} {self._model_name}",
            context=Context() if context is None else context,
            kind=SpanKind.SERVER,
            start_time=began_ns,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.request.id": request_id,
                **self._server,
                **_attributes(request, self._model_name),
            },
        )
        if request.reason == "error":
            span.set_attribute("error.type", "_OTHER")
            span.set_status(Status(StatusCode.ERROR))
        span.end(end_time=began_ns + int(request.e2e_s * 1e9))

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Send the spans that are left. timeout_s: upper limit for that."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(timeout_s)
        if sending.is_alive():
            # This ends attempts to reach a collector that does not answer.
            self._exporter.shutdown()  # type: ignore[no-untyped-call]


def _attributes(request: FinishedRequest, model_name: str) -> dict[str, str | int | float | list[str]]:
    found: dict[str, str | int | float | list[str]] = {
        "gen_ai.provider.name": "pagewick",
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.response.finish_reasons": list(request.finish_reasons),
        "gen_ai.usage.input_tokens": request.num_prompt_tokens,
        "gen_ai.usage.output_tokens": request.num_generation_tokens,
        "gen_ai.usage.cache_read.input_tokens": request.num_cached_tokens,
        "gen_ai.latency.e2e": request.e2e_s,
        "gen_ai.latency.time_in_queue": request.queue_s,
    }
    if request.n != 1:
        found["gen_ai.request.choice.count"] = request.n
    if request.max_tokens is not None:
        found["gen_ai.request.max_tokens"] = request.max_tokens
    if request.first_token_s is not None:
        found["gen_ai.latency.time_to_first_token"] = request.first_token_s
    if request.has_begun:
        found["gen_ai.latency.time_in_model_prefill"] = request.prefill_s
        found["gen_ai.latency.time_in_model_decode"] = request.decode_s
    return found


def _traces_url(endpoint: str) -> str:
    """Return a collector's address, with OTLP's path if it has none."""
    try:
        parts = urlsplit(endpoint)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--otlp-endpoint must be an address like http://127.0.0.1:4318; got {endpoint!r}")
    return endpoint if parts.path.strip("/") else endpoint.rstrip("/") + _TRACES_PATH
