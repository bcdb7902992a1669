"""Operation: what the API's description (server/openapi.py) says about a route beyond its path and docstring."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from msgspec import Struct

from pagewick.server.api.known_fields import KnownFields
from pagewick.server.errors import ErrorResponse

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class Operation(Struct, frozen=True, kw_only=True):
    """tag: the group of routes. request, response: structs of the two bodies; a response may also be a media type.

    chunk: struct of an event's data, or several, for responses that may be streams. streams: the media type of streams.
    known: further fields that a request may have. errors: the statuses of errors, beside those that every route may
    have. error: struct of their bodies.
    """

    tag: str = "Other"
    request: type[Struct] | None = None
    response: type[Struct] | str = ""
    chunk: type[Struct] | tuple[type[Struct], ...] = ()
    streams: str = "text/event-stream"
    known: KnownFields | None = None
    errors: tuple[int, ...] = ()
    error: type[Struct] = ErrorResponse

    @property
    def chunks(self) -> tuple[type[Struct], ...]:
        return self.chunk if isinstance(self.chunk, tuple) else (self.chunk,)


def describes(operation: Operation) -> Callable[[_Handler], _Handler]:
    """Return a decorator that attaches an operation to a route's handler."""

    def attach(handler: _Handler) -> _Handler:
        handler.operation = operation  # type: ignore[attr-defined]
        return handler

    return attach


def handler_and_operation(endpoint: Callable[..., Any]) -> tuple[Callable[..., Any], Operation | None]:
    """Return the function behind a route's endpoint, and its operation, if it has one."""
    while isinstance(endpoint, partial):
        endpoint = endpoint.func
    return endpoint, getattr(endpoint, "operation", None)
