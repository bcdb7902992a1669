"""The official client in its four modes, sync and async, streamed and not, so that one test covers all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import openai
from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.conformance.described import watch
from tests.conformance.servers import DEADLINE_S, MODEL

Fields = dict[str, Any]


@dataclass
class Call:
    """A tool call of a choice."""

    id: str
    name: str
    arguments: str


@dataclass
class Choice:
    """One choice of a response, streamed or not. logprobs: those of the chunks, in order."""

    text: str = ""
    reasoning: str = ""
    finish_reason: str | None = None
    logprobs: list[Any] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)


@dataclass
class Response:
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Any

    @property
    def text(self) -> str:
        (choice,) = self.choices
        return choice.text

    @property
    def finish_reason(self) -> str | None:
        (choice,) = self.choices
        return choice.finish_reason


def wait_for(runner: asyncio.Runner | None, method: Callable[..., Any], *arguments: Any, **fields: Any) -> Any:
    """Call a method of a client, and wait for its result if the client is async, which a runner says."""
    if runner is None:
        return method(*arguments, **fields)

    async def call() -> Any:
        result = method(*arguments, **fields)
        return await result if isinstance(result, Awaitable) else result

    return runner.run(call())


class Caller:
    """The official client, sync or async; its exceptions pass through."""

    def __init__(self, url: str, runner: asyncio.Runner | None, *, key: str = "none", max_retries: int = 0) -> None:
        """runner: runs the async client; None makes a sync one."""
        self._runner = runner
        is_async = runner is not None
        # The client's own kind, but without certificates, which take long to read.
        http = (DefaultAsyncHttpxClient if is_async else DefaultHttpxClient)(verify=False)
        watch(http)
        kind: Callable[..., Any] = AsyncOpenAI if is_async else OpenAI
        self.client = kind(
            base_url=f"{url}/v1", api_key=key, max_retries=max_retries, timeout=DEADLINE_S, http_client=http
        )

    def close(self) -> None:
        self._wait(self.client.close)

    def chat(self, **fields: Any) -> ChatCompletion:
        response: ChatCompletion = self._wait(self.client.chat.completions.create, **_with_defaults(fields))
        return response

    def chat_chunks(self, **fields: Any) -> list[ChatCompletionChunk]:
        return self._collect(self.client.chat.completions.create, {"stream": True, **_with_defaults(fields)})

    def completion(self, **fields: Any) -> Any:
        return self._wait(self.client.completions.create, **{"model": MODEL, **fields})

    def embeddings(self, **fields: Any) -> Any:
        return self._wait(self.client.embeddings.create, **{"model": MODEL, **fields})

    def completion_chunks(self, **fields: Any) -> list[Any]:
        return self._collect(self.client.completions.create, {"model": MODEL, "stream": True, **fields})

    def parsed(self, **fields: Any) -> Any:
        """Return a completion whose content and arguments the client has made into pydantic models."""
        return self._wait(self.client.chat.completions.parse, **_with_defaults(fields))

    def accumulated(self, **fields: Any) -> Any:
        """Return the completion that the client itself assembles from a stream; raises LengthFinishReasonError."""
        manager = self.client.chat.completions.stream(**_with_defaults(fields))
        if self._runner is None:
            with manager as stream:
                return stream.get_final_completion()

        async def read() -> Any:
            async with manager as stream:
                return await stream.get_final_completion()

        return self._runner.run(read())

    def events(self, manager: Any) -> list[Any]:
        """Return the events of the client's stream helper."""
        if self._runner is None:
            with manager as stream:
                return list(stream)

        async def read() -> list[Any]:
            async with manager as stream:
                return [event async for event in stream]

        return self._runner.run(read())

    def begin(self, **fields: Any) -> Any:
        """Return a stream whose first chunk has been read."""
        stream = self._wait(self.client.chat.completions.create, **{"stream": True, **_with_defaults(fields)})
        self._wait(anext if self._runner else next, stream)
        return stream

    def rest_of(self, stream: Any) -> list[Any]:
        if self._runner is None:
            return list(stream)

        async def read() -> list[Any]:
            return [chunk async for chunk in stream]

        return self._runner.run(read())

    def leave(self, stream: Any) -> None:
        self._wait(stream.close)

    def request(self, method: str, path: str, body: Any = None) -> Any:
        """Send a request for which the client has no method."""
        return self._wait(
            getattr(self.client, method), path, cast_to=object, **({} if body is None else {"body": body})
        )

    def call(self, name: str, *arguments: Any, **fields: Any) -> Any:
        """Return the result of a method of the client, such as responses.create."""
        return self._wait(attrgetter(name)(self.client), *arguments, **fields)

    def collected(self, name: str, **fields: Any) -> list[Any]:
        """Return everything that a streaming method of the client yields."""
        return self._collect(attrgetter(name)(self.client), fields)

    def models(self) -> list[Any]:
        return list(self._wait(self.client.models.list).data) if self._runner is None else self._async_models()

    def model(self, name: str) -> Any:
        return self._wait(self.client.models.retrieve, name)

    def _async_models(self) -> list[Any]:
        assert self._runner is not None

        async def read() -> list[Any]:
            return [model async for model in self.client.models.list()]

        return self._runner.run(read())

    def _wait(self, method: Callable[..., Any], *arguments: Any, **fields: Any) -> Any:
        return wait_for(self._runner, method, *arguments, **fields)

    def _collect(self, method: Callable[..., Any], fields: Fields) -> list[Any]:
        if self._runner is None:
            return list(method(**fields))

        async def read() -> list[Any]:
            return [chunk async for chunk in await method(**fields)]

        return self._runner.run(read())


@dataclass
class Way:
    """One of the four ways to get a response."""

    caller: Caller
    is_streamed: bool

    def chat(self, **fields: Any) -> Response:
        if not self.is_streamed:
            return _of_chat(self.caller.chat(**fields))
        fields.setdefault("stream_options", {"include_usage": True})
        return _of_chunks(self.caller.chat_chunks(**fields))

    def completion(self, **fields: Any) -> Response:
        if not self.is_streamed:
            return _of_completions([self.caller.completion(**fields)])
        fields.setdefault("stream_options", {"include_usage": True})
        return _of_completions(self.caller.completion_chunks(**fields))


def user(text: str) -> Fields:
    return {"role": "user", "content": text}


END = 2  # The built-in model's <|im_end|>.


def forcing(token_ids: list[int]) -> Fields:
    """Return fields that make the model generate exactly these tokens, all different, in this order.

    Each token has a bias that the repetition penalty takes away once the token is used: the penalty comes after the
    bias and takes nine tenths of a logit (docs/sampling.md).
    """
    assert len(set(token_ids)) == len(token_ids) <= 10
    biases = {str(token_id): 100.0 - 70.0 * place / len(token_ids) for place, token_id in enumerate(token_ids)}
    return {
        "temperature": 0,
        "max_tokens": len(token_ids),
        "logit_bias": biases,
        "extra_body": {"repetition_penalty": 10, "repeat_last_n": len(token_ids)},
    }


def error_of(failure: openai.APIStatusError) -> Fields:
    """Return the body's error object, after a check of its shape."""
    error = failure.body
    assert isinstance(error, dict) and sorted(error) == ["code", "message", "param", "type"], error
    assert isinstance(error["message"], str) and error["message"]
    assert isinstance(error["type"], str) and error["type"]
    assert error["param"] is None or isinstance(error["param"], str)
    assert error["code"] is None or isinstance(error["code"], str)
    assert failure.request_id
    return error


def _with_defaults(fields: Fields) -> Fields:
    return {"model": MODEL, "messages": [user("Hi")], **fields}


def _of_chat(response: ChatCompletion) -> Response:
    assert [choice.index for choice in response.choices] == list(range(len(response.choices)))
    choices = [
        Choice(
            choice.message.content or "",
            getattr(choice.message, "reasoning_content", None) or "",
            choice.finish_reason,
            list(choice.logprobs.content or []) if choice.logprobs else [],
            [Call(one.id, one.function.name, one.function.arguments) for one in choice.message.tool_calls or []],
        )
        for choice in response.choices
    ]
    return Response(response.id, response.created, response.model, choices, response.usage)


def _of_chunks(chunks: list[ChatCompletionChunk]) -> Response:
    choices: dict[int, Choice] = {}
    for chunk in chunks:
        for one in chunk.choices:
            choice = choices.setdefault(one.index, Choice())
            choice.text += one.delta.content or ""
            choice.reasoning += getattr(one.delta, "reasoning_content", None) or ""
            choice.finish_reason = one.finish_reason or choice.finish_reason
            choice.logprobs += (one.logprobs.content or []) if one.logprobs else []
            for call in one.delta.tool_calls or []:
                _add_call(choice.calls, call)
    return _response(chunks, choices)


def _add_call(calls: list[Call], piece: Any) -> None:
    """Add a piece of a call; only the first one has an id, a type and a name."""
    if piece.index == len(calls):
        assert piece.type == "function"
        calls.append(Call(piece.id, piece.function.name, piece.function.arguments))
        return
    assert piece.index == len(calls) - 1
    assert (piece.id, piece.type, piece.function.name) == (None, None, None)
    calls[-1].arguments += piece.function.arguments


def _of_completions(parts: list[Any]) -> Response:
    """Join one completion, or its chunks, which have the same shape."""
    choices: dict[int, Choice] = {}
    for part in parts:
        for one in part.choices:
            choice = choices.setdefault(one.index, Choice())
            choice.text += one.text
            choice.finish_reason = one.finish_reason or choice.finish_reason
            if one.logprobs is not None:
                choice.logprobs.append(one.logprobs)
    return _response(parts, choices)


def _response(parts: list[Any], choices: dict[int, Choice]) -> Response:
    assert sorted(choices) == list(range(len(choices)))
    usage = next((part.usage for part in parts if part.usage is not None), None)
    first = parts[0]
    return Response(first.id, first.created, first.model, [choices[index] for index in sorted(choices)], usage)
