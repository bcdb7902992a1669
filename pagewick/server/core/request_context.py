"""RequestContext: the id of a request, its API key, and what it shares with requests of other keys."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from pagewick.engine.messages import RequestOptions
from pagewick.errors import InvalidRequestError
from pagewick.server.core.request import Serving
from pagewick.server.errors import REQUEST_ID
from pagewick.server.settings import ServerSettings

# Key in a request's scope: the LoRA adapter that its body names as the model.
ADAPTER = "pagewick.adapter"


@dataclass(frozen=True, slots=True)
class RequestContext:
    """request_id: also in the response's x-request-id and in the log. key: id of the API key; "" if there are none.

    adapter: name of the LoRA adapter; "" if there is none.
    """

    request_id: str
    key: str
    adapter: str = ""

    @classmethod
    def of(cls, request: Request) -> RequestContext:
        scope = request.scope
        return cls(scope.get(REQUEST_ID) or uuid.uuid4().hex, scope.get("pagewick.key", ""), scope.get(ADAPTER, ""))

    def engine_id(self) -> str:
        """Return an id for the engine, which is unique even if clients send the same request id at the same time."""
        return f"{self.request_id}-{uuid.uuid4().hex[:12]}"

    def isolate(self, options: RequestOptions, serving: Serving, settings: ServerSettings) -> RequestOptions:
        """Return checked options whose salt and session are kept apart from those of other keys."""
        salt, session_id = options.cache_salt, options.session_id
        if not serving.shares_prefix:
            salt = uuid.uuid4().hex
        elif self.key and settings.prefix_cache_scope == "key":
            salt = _within(self.key, salt or "")
        if self.key and session_id is not None:
            session_id = _within(self.key, session_id)
        return msgspec.structs.replace(options, fairness_key=self.key, cache_salt=salt, session_id=session_id)


def options_of(serving: Serving) -> RequestOptions:
    """Raises InvalidRequestError for a priority below 0, with which a client could overtake all others."""
    if serving.priority is not None and serving.priority < 0:
        message = (
            f"priority must be 0 or more over HTTP, where 0 is the most urgent and higher numbers give way; "
            f"got {serving.priority}"
        )
        raise InvalidRequestError(message, param="priority")
    return RequestOptions(
        priority=serving.priority or 0,
        cache_salt=serving.cache_salt,
        session_id=serving.session_id,
        timeout_s=serving.timeout_s,
        is_prefill=serving.is_prefill,
    )


def _within(key: str, name: str) -> str:
    """Return a name of fixed length that only this key and this name give."""
    return hashlib.sha256(f"{len(key)}:{key}{name}".encode()).hexdigest()
