"""Messages between the hub and an API process, over a socket pair that no other process can reach.

The frames, and Add, Abort, Failed and Outputs, are those of pagewick.engine.messages. The hub sends one Setup, which
the API process answers with Loaded or Failed, then one Serve, which it answers with Serving.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from pagewick.config import EngineConfig
from pagewick.engine.health import EngineHealth
from pagewick.engine.messages import Abort, Add, EngineStats, Failed, Outputs
from pagewick.engine.model_info import ModelInfo
from pagewick.server.settings import ServerSettings

Message = dict[str, Any]


class Setup(msgspec.Struct, tag=True):
    """Everything that an API process needs to begin.

    number: differs from that of every other API process of this server, those that are over included. settings: without
    API keys; keys: their digests and ids. answers_early: whether to tell clients that the model is loading, because no
    other process does.
    """

    number: int
    config: EngineConfig
    settings: ServerSettings
    sampling: dict[str, Any]
    chat_template: str | None
    keys: list[tuple[bytes, str]]
    answers_early: bool


class Serve(msgspec.Struct, tag=True):
    """The engine is there."""

    info: ModelInfo
    stats: EngineStats
    health: EngineHealth


class State(msgspec.Struct, tag=True):
    """The engine's health has changed, or another engine has replaced it."""

    info: ModelInfo
    health: EngineHealth


class Loss(msgspec.Struct):
    """A request that ended with an exception; `kind` names its class in pagewick.errors."""

    request_id: str
    kind: str
    message: str
    retry_after_s: int = 0


class Losses(msgspec.Struct, tag=True):
    losses: list[Loss]


class Keys(msgspec.Struct, tag=True):
    """The API keys have changed."""

    keys: list[tuple[bytes, str]]


class Drain(msgspec.Struct, tag=True):
    """Refuse new requests, and send Idle when none is in flight."""


class Close(msgspec.Struct, tag=True):
    """End the requests in flight, and end."""


class WantReport(msgspec.Struct, tag=True):
    """Send a Report."""


class Refusal(msgspec.Struct):
    """An error of a request. status: that of an ApiError; 0: it is an InvalidRequestError."""

    message: str
    status: int = 0
    param: str | None = None
    code: str | None = None


class Answer(msgspec.Struct, tag=True):
    """The answer to the question with this ticket: a value or an error."""

    ticket: int
    value: msgspec.Raw = msgspec.Raw(b"\xc0")  # null
    error: Refusal | None = None


class Loaded(msgspec.Struct, tag=True):
    """The tokenizer is loaded, and the chat template if there is one."""

    has_chat_template: bool


class Serving(msgspec.Struct, tag=True):
    """Requests are served."""


class Idle(msgspec.Struct, tag=True):
    """No request is in flight, and none will be."""


class Begin(msgspec.Struct, tag=True):
    """Question: begin a request of a recorded session. Its Answer has all messages of the conversation."""

    ticket: int
    owner: str
    session_id: str
    new: list[Message]
    is_continuation: bool


class Keep(msgspec.Struct, tag=True):
    """End the request that began with this ticket; see Recording.keep."""

    ticket: int
    messages: list[Message] | None


class Read(msgspec.Struct, tag=True):
    """Question: the messages of a recorded session."""

    ticket: int
    owner: str
    session_id: str


class Forget(msgspec.Struct, tag=True):
    """Question: forget a recorded session. Its Answer says whether there was one."""

    ticket: int
    owner: str
    session_id: str


class KeepResponse(msgspec.Struct, tag=True):
    """Question: keep a response; see StoredResponses.keep. Its Answer says that it is kept."""

    ticket: int
    owner: str
    response_id: str
    body: bytes
    item_ids: list[str]


class FindResponse(msgspec.Struct, tag=True):
    """Question: a kept response, by its id or, with by_item, by that of an item."""

    ticket: int
    owner: str
    name: str
    by_item: bool = False


class ForgetResponse(msgspec.Struct, tag=True):
    """Question: forget a kept response. Its Answer says whether there was one."""

    ticket: int
    owner: str
    response_id: str


class AskReports(msgspec.Struct, tag=True):
    """Question: the reports of all processes of the server, each a list of Families."""

    ticket: int


class Report(msgspec.Struct, tag=True):
    """The Families of an API process' metrics."""

    families: msgspec.Raw


OfResponses = KeepResponse | FindResponse | ForgetResponse
Question = Begin | Read | Forget | AskReports | OfResponses
FromHub = Setup | Serve | State | Outputs | Losses | Keys | Drain | Close | WantReport | Answer
OfSessions = Begin | Keep | Read | Forget
FromApi = Loaded | Failed | Serving | Idle | Add | Abort | OfSessions | OfResponses | AskReports | Report

decode_from_hub: Callable[[bytes], FromHub] = msgspec.msgpack.Decoder(FromHub).decode
decode_from_api: Callable[[bytes], FromApi] = msgspec.msgpack.Decoder(FromApi).decode
_encoder = msgspec.msgpack.Encoder()


def raw(value: Any) -> msgspec.Raw:
    """Return a value as it stands in a message."""
    return msgspec.Raw(_encoder.encode(value))
