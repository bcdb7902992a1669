"""ResponsesAnswer: a Generation as a response of the Responses API, or as the events of one."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

import msgspec
from msgspec import to_builtins
from msgspec.structs import replace

from pagewick.generation import Generation, Listener
from pagewick.outputs import CompletionOutput
from pagewick.server.api.framing import EventFraming, Following, NamedEvent
from pagewick.server.api.responses_api.items import OutputItems
from pagewick.server.api.responses_api.objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseEvent,
    ResponseFailure,
    ResponseObject,
    ResponseStatus,
    ResponseUsage,
)
from pagewick.server.errors import ApiError, ErrorDetail
from pagewick.text.output_stream import ChoiceDelta

EVENTS = EventFraming(error_body=attrgetter("body"))

# Keeps a finished response; called before the client has the whole of it.
Keep = Callable[[ResponseObject], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class ResponsesAnswer:
    """A GeneratedResponse. head: the response as it begins. keep: None if the response is not kept."""

    generation: Generation
    head: ResponseObject
    items: OutputItems
    wants_logprobs: bool
    keep: Keep | None

    async def whole(self) -> ResponseObject:
        async with self.generation as generation:
            # Log-probabilities belong to the text at hand; everything else is made at once, at the end.
            await generation.pass_to(Listener(self._note if self.wants_logprobs else _pass_over))
        if not self.wants_logprobs:
            choice = self._choice
            self.items.feed(ChoiceDelta(0, parts=choice.parts, finish_reason=choice.finish_reason))
        return await self._finish()

    async def chunks(self) -> AsyncGenerator[Following | ResponseEvent]:
        """Yield the events. The first ones come with the first token, so that an earlier error has its own status."""
        is_first = True

        def events_of(delta: ChoiceDelta) -> list[ResponseEvent]:
            nonlocal is_first
            opening: list[ResponseEvent] = []
            if is_first:
                is_first = False
                opening = [self._of_response(kind, self.head) for kind in ("created", "in_progress")]
            return opening + self.items.feed(delta)

        async with self.generation:
            yield Following(self.generation, events_of)
        response = await self._finish()
        yield self._of_response(response.status, response)

    def failure(self, error: ApiError) -> list[ResponseEvent]:
        """Return the events that end a stream after an error."""
        code: Literal["server_error", "rate_limit_exceeded", "invalid_prompt"] = "server_error"
        if error.status < 500:
            code = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
        response = self._ended("failed", error=ResponseFailure(code, error.message))
        detail = ErrorDetail(error.message, error.type, error.param, error.code)
        # OpenAI's clients raise an exception for the field `error`, and others know the event by its type.
        told = self.items.event("error", code=error.code, message=error.message, param=error.param, error=detail)
        failed = self._of_response("failed", response)
        failed.sequence_number, told.sequence_number = told.sequence_number, failed.sequence_number
        return [failed, told]

    def _note(self, delta: ChoiceDelta) -> None:
        self.items.feed(delta)

    @property
    def _choice(self) -> CompletionOutput:
        (choice,) = self.generation.output.outputs
        return choice

    async def _finish(self) -> ResponseObject:
        """Return the whole response, after it has been kept."""
        match self._choice.finish_reason:
            case "stop":
                response = self._ended("completed", completed_at=int(time.time()))
            case "length":
                response = self._ended("incomplete", incomplete_details=IncompleteDetails("max_output_tokens"))
            case _:
                return self._ended("cancelled")
        if self.keep is not None:
            await self.keep(response)
        return response

    def _ended(self, status: ResponseStatus, **fields: Any) -> ResponseObject:
        return replace(self.head, status=status, output=self.items.so_far(), usage=self._usage(), **fields)

    def _usage(self) -> ResponseUsage:
        output = self.generation.output
        num_input, num_output = len(output.prompt_token_ids), self.generation.stream.num_output_tokens
        return ResponseUsage(
            input_tokens=num_input,
            input_tokens_details=InputTokensDetails(output.num_cached_tokens),
            output_tokens=num_output,
            output_tokens_details=OutputTokensDetails(self._choice.num_reasoning_tokens),
            total_tokens=num_input + num_output,
        )

    def _of_response(self, word: str, response: ResponseObject) -> ResponseEvent:
        return self.items.event(f"response.{word}", response=response)


@dataclass(frozen=True, slots=True)
class AnswerFraming:
    """The Framing of one stream: its events have names, and an error ends it with events of its own."""

    answer: ResponsesAnswer
    end: bytes = b""
    media_type: str = EVENTS.media_type
    ping: bytes = EVENTS.ping

    def frame(self, chunk: ResponseEvent) -> bytes:
        return EVENTS.frame(NamedEvent(chunk.type, chunk))

    def error(self, error: ApiError) -> bytes:
        return b"".join(map(self.frame, self.answer.failure(error)))

    def error_body(self, error: ApiError) -> Any:
        return error.body


class Stored(msgspec.Struct):
    """A response as it is kept, with all items that came before it, those of earlier responses included."""

    response: msgspec.Raw
    input: list[dict[str, Any]]

    @classmethod
    def of(cls, response: ResponseObject, items: list[dict[str, Any]]) -> Stored:
        return cls(msgspec.Raw(msgspec.json.encode(response)), items)

    @property
    def output(self) -> list[dict[str, Any]]:
        return msgspec.json.decode(self.response, type=_Output).output

    def encoded(self) -> bytes:
        return msgspec.json.encode(self)


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]


def stored_of(body: bytes) -> Stored:
    return msgspec.json.decode(body, type=Stored)


def item_ids(items: list[Any]) -> list[str]:
    return [item["id"] for item in to_builtins(items)]


def _pass_over(delta: ChoiceDelta) -> None:
    pass
