"""An invented dialect with its own requests and errors, named events and no [DONE]."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any, ClassVar, TypeVar

import httpx
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagewick.async_llm import AsyncEngine
from pagewick.errors import InvalidRequestError
from pagewick.generation import Generation
from pagewick.outputs import PartDelta
from pagewick.server.api.dialect import Dialect
from pagewick.server.api.framing import EventFraming, NamedEvent
from pagewick.server.api.known_fields import KnownFields
from pagewick.server.api.openai import OpenAIApi
from pagewick.server.app import build_app
from pagewick.server.core.request import ChatRequest, Serving
from pagewick.server.errors import ApiError
from pagewick.server.settings import ServerSettings
from pagewick.text.chat_template import ChatTemplate
from tests.fake_engine import TOKENIZER, FakeClient
from tests.fake_parts import FakeFormat
from tests.tiny_text import QWEN_TEMPLATE

TALK = "/other/talk"

_Result = TypeVar("_Result")


class Line(Struct):
    who: str
    what: str


class TalkRequest(Struct, kw_only=True):
    lines: list[Line]
    at_most: int | None = None
    warmth: float | None = None
    gadgets: list[str] = []
    shape: str | None = None
    live: bool = False
    memory: str | None = None

    def __post_init__(self) -> None:
        if not self.lines:
            raise InvalidRequestError("say something", param="lines")

    def chat_request(self) -> ChatRequest:
        form = None if self.shape is None else {"grammar": self.shape}
        sampling = {"max_tokens": self.at_most, "temperature": self.warmth, "structured_outputs": form}
        return ChatRequest(
            is_stream=self.live,
            messages=[{"role": line.who, "content": line.what} for line in self.lines],
            sampling={name: value for name, value in sampling.items() if value is not None},
            names={"max_tokens": "at_most", "temperature": "warmth", "tools": "gadgets", "structured_outputs": "shape"},
            tools=[{"type": "function", "function": {"name": name, "parameters": {}}} for name in self.gadgets],
            serving=Serving(session_id=self.memory),
            records=self.memory is not None,
        )


class TalkAnswer:
    """Renders parts in order under the names of their kinds, which OpenAI's API cannot."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    async def chunks(self) -> AsyncGenerator[NamedEvent]:
        yield NamedEvent("begin", {"asked": len(self._generation.output.prompt_token_ids)})
        async with self._generation:
            async for delta in self._generation:
                for part in delta.parts:
                    yield NamedEvent("more", _written(part))
                if delta.finish_reason is not None:
                    yield NamedEvent("end", {"why": delta.finish_reason})

    async def whole(self) -> dict[str, Any]:
        async with self._generation:
            async for _ in self._generation:
                pass
        (choice,) = self._generation.output.outputs
        return {"parts": [_written(part) for part in choice.parts], "why": choice.finish_reason}


class OtherDialect(Dialect):
    framing = EventFraming(error_body=lambda error: {"oops": _words(error)}, error_name="oops")
    known_fields = KnownFields(unsupported={"magic": (False,)})

    def routes(self) -> list[Route]:
        return [Route(TALK, self.talk, methods=["POST"])]

    async def talk(self, request: Request) -> Response:
        body, ignored = await self.read(request, TalkRequest)
        return await self.answer_chat(request, body.chat_request(), TalkAnswer, ignored)


class Served:
    """A server with some dialects, by default this one and OpenAI's, over a model that writes parts in the fake format.

    has_own_format: in the format of its chat template instead, or in the one that tool_call_parser names.
    """

    dialects: ClassVar[tuple[type[Dialect], ...]] = (OpenAIApi, OtherDialect)

    def __init__(
        self,
        *,
        has_format: bool = True,
        has_own_format: bool = False,
        tool_call_parser: str | None = None,
        template: str = QWEN_TEMPLATE,
        **settings: Any,
    ) -> None:
        self.client = FakeClient()
        self.format = FakeFormat()
        self._parser = tool_call_parser
        self._template = template
        self._formats = None if has_own_format else [self.format] if has_format else []
        self._settings = ServerSettings(**{"served_model_name": ("org/fake-model",), **settings})

    def run(self, work: Callable[[httpx.AsyncClient], Awaitable[_Result]]) -> _Result:
        async def main() -> _Result:
            template = ChatTemplate({"default": self._template}, TOKENIZER)
            engine = AsyncEngine(
                self.client, TOKENIZER, template, part_formats=self._formats, tool_call_parser=self._parser
            )
            app = build_app(engine, self._settings, dialects=self.dialects)
            transport = httpx.ASGITransport(app, raise_app_exceptions=False)
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as http:
                return await work(http)

        return asyncio.run(main())

    def post(self, path: str, **fields: Any) -> httpx.Response:
        return self.run(lambda http: http.post(path, json=fields))

    def talk(self, **fields: Any) -> httpx.Response:
        return self.post(TALK, **{"lines": [{"who": "user", "what": "hi"}], **fields})

    def live(self, **fields: Any) -> list[tuple[str, Any]]:
        """The events of a stream, each with its name."""
        response = self.talk(live=True, **fields)
        assert response.headers["content-type"].startswith("text/event-stream")
        events = []
        for block in response.text.removesuffix("\n\n").split("\n\n"):
            name, data = block.split("\n")
            events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
        return events


def _written(part: PartDelta) -> dict[str, Any]:
    written: dict[str, Any] = {"kind": part.kind.value, "text": part.text}
    return written if part.call is None else {**written, "gadget": part.call.name, "number": part.call.index}


def _words(error: ApiError) -> dict[str, Any]:
    return {"what": error.message, "where": error.param, "sort": error.type}
