"""Dialect: one HTTP API over the core, with everything that all of them do in the same way."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Protocol, TypeVar

from msgspec import Struct, to_builtins
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick.generation import Generation
from pagewick.server.api.admission import Admission
from pagewick.server.api.decoding import decode_request
from pagewick.server.api.framing import DialectFraming, Framing
from pagewick.server.api.json_response import headers_naming, json_response
from pagewick.server.api.known_fields import KnownFields
from pagewick.server.api.served_models import ServedModels
from pagewick.server.api.sse import EventStream, run_while_connected
from pagewick.server.core.core import Core
from pagewick.server.core.request import ChatRequest
from pagewick.server.core.request_context import ADAPTER, RequestContext
from pagewick.server.errors import ERROR_ANSWER, ApiError
from pagewick.server.guard.body import read_body

_Body = TypeVar("_Body", bound=Struct)


class WholeResponse(Protocol):
    """A dialect's view of the Generations of a request, which come at once."""

    async def whole(self) -> Any:
        """Run the Generations, and return what is sent, as data that msgspec can encode."""
        ...


class GeneratedResponse(WholeResponse, Protocol):
    """One that may also be streamed. One of the two methods is called, once; it runs the Generations."""

    def chunks(self) -> AsyncGenerator[Any]:
        """Yield what is streamed, as the dialect's framing takes it."""
        ...


class Dialect:
    """One HTTP API. Dialects share the core, with its conversations, and the admission.

    A subclass has its own `framing` and `known_fields` and lists its routes. Their handlers `read` a body, turn it into
    a request for the core, and respond with the result. A handler that is left early, because the client left or
    because of an error, aborts the request in the engine.

    paths: with all below them, they are the dialect's alone: errors there have its form even if no route sees them.
    id_header: name of the header under which its clients look for the id of a request. streams_by_default: whether a
    request that does not say so gets a stream.
    """

    framing: ClassVar[DialectFraming]
    known_fields: ClassVar[KnownFields]
    paths: ClassVar[tuple[str, ...]] = ()
    id_header: ClassVar[str] = "x-request-id"
    streams_by_default: ClassVar[bool] = False

    def __init__(self, core: Core, admission: Admission) -> None:
        self.core = core
        self.settings = core.settings
        self.admission = admission
        self.models = ServedModels(core.settings)

    def routes(self) -> list[Route]:
        raise NotImplementedError

    @classmethod
    def unloading(cls, path: str, body: bytes) -> Response | None:
        """Return the response to a request that only asks to unload its model; None: it asks for something else.

        Only a server with several models calls it, and unloads the model.
        """
        return None

    def shown_model(self, name: str | None) -> str:
        """Return the model's name in the response to a request that asked for `name`."""
        return self.models.shown(name, self.core.engine.info)

    @property
    def reads_images(self) -> bool:
        return self.core.engine.info.image_token_id is not None

    @classmethod
    def owns(cls, path: str) -> bool:
        return any(path == own or path.startswith(f"{own}/") for own in cls.paths)

    @classmethod
    def error_answer(cls, error: ApiError, request_id: str) -> tuple[int, Any]:
        """Return the status and the body of a response that is nothing but an error."""
        return error.status, to_builtins(cls.framing.error_body(error))

    def framing_of(self, response: GeneratedResponse) -> Framing:
        """Return the framing of one stream."""
        return self.framing

    async def read(self, request: Request, kind: type[_Body], *, needs_engine: bool = True) -> tuple[_Body, list[str]]:
        """Return the body, and the names of fields that have no effect. From here on errors are in the dialect's form.

        kind: the struct that the body must fit; its field `model`, if it has one, must be a model that is served.
        needs_engine: refuse the request if the engine would, because too many wait.

        Raises ApiError, InvalidRequestError, QueueFullError.
        """
        request.scope[ERROR_ANSWER] = self.error_answer
        raw = await read_body(request, self.settings, reads_images=self.reads_images)
        body, ignored = decode_request(raw, kind, strict=self.settings.strict, known=self.known_fields)
        model, info = getattr(body, "model", None), self.core.engine.info
        self.models.check(model, info)
        request.scope[ADAPTER] = self.models.adapter(model, info)
        if needs_engine:
            self.admission.check_queue()
        return body, ignored

    async def answer_chat(
        self,
        request: Request,
        chat: ChatRequest,
        render: Callable[[Generation], GeneratedResponse],
        ignored: Sequence[str] = (),
    ) -> Response:
        """Start the chat, and respond at once or as a stream. Raises as `Core.recording` and `Core.start_chat` do."""
        context = RequestContext.of(request)
        with ExitStack() as held:
            recording = await self.core.recording(context, chat)
            if recording is not None:
                held.callback(recording.close)
            start = partial(self.core.start_chat, context, chat, recording)
            response = render(await self.admission.run(request, start))
            if chat.is_stream:
                return self.stream(response, ignored, on_end=held.pop_all().close)
            return await self.whole(request, response, ignored)

    async def whole(self, request: Request, response: WholeResponse, ignored: Sequence[str] = ()) -> Response:
        """Raises ClientDisconnect if the client leaves first."""
        return json_response(await run_while_connected(request, response.whole()), ignored)

    def stream(
        self, response: GeneratedResponse, ignored: Sequence[str] = (), on_end: Callable[[], None] | None = None
    ) -> EventStream:
        """on_end: called when all is over, whatever happened."""
        return EventStream(
            response.chunks(),
            self.framing_of(response),
            headers=headers_naming(ignored),
            keep_alive_s=self.settings.sse_keep_alive_interval,
            on_end=on_end,
        )
