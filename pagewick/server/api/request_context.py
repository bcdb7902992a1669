"""What stands around a request: whose it is, what it is called, and with whom it shares."""

from __future__ import annotations

import hashlib
import uuid
from dataclasses import dataclass

import msgspec
from starlette.requests import Request

from pagewick.engine.messages import RequestOptions
from pagewick.server.api.request_fields import ServingFields
from pagewick.server.settings import ServerSettings
from pagewick.text.request_stream import check_options


@dataclass(frozen=True, slots=True)
class RequestContext:
    """request_id: also in the answer's x-request-id and in the log. key: of whom, "" if nobody is told from others."""

    request_id: str
    key: str

    @classmethod
    def of(cls, request: Request) -> RequestContext:
        return cls(request.scope.get("pagewick.request_id") or uuid.uuid4().hex, request.scope.get("pagewick.key", ""))

    def engine_id(self) -> str:
        """A name for the engine. Clients may send the same request id at the same time; this is never the same."""
        return f"{self.request_id}-{uuid.uuid4().hex[:12]}"

    def options(self, body: ServingFields, settings: ServerSettings) -> RequestOptions:
        """How the request is served. What is a client's own is kept apart from that of other keys.

        Raises InvalidRequestError for a value out of range.
        """
        wanted = body.options()
        check_options(wanted)
        salt, session_id = wanted.cache_salt, wanted.session_id
        if body.cache_prompt is False:
            salt = uuid.uuid4().hex
        elif self.key and settings.prefix_cache_scope == "key":
            salt = _within(self.key, salt or "")
        if self.key and session_id is not None:
            session_id = _within(self.key, session_id)
        return msgspec.structs.replace(wanted, fairness_key=self.key, cache_salt=salt, session_id=session_id)


def _within(key: str, name: str) -> str:
    """The name among those of one key; as long as any other, and no other key has it."""
    return hashlib.sha256(f"{len(key)}:{key}{name}".encode()).hexdigest()
