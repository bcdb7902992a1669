"""Checks that JSON has the shape of OpenAI's API, by the types of the official client.

These types are lenient: they allow keys to be absent that the API's specification requires, though with null as a
value. Those keys are listed here.
"""

from __future__ import annotations

import json
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Union

from openai.types import Completion, CompletionChoice, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk, ChatCompletionMessage
from openai.types.chat.chat_completion import Choice
from openai.types.chat.chat_completion_chunk import Choice as ChunkChoice
from openai.types.completion_choice import Logprobs
from openai.types.responses import (
    Response,
    ResponseFunctionCallArgumentsDoneEvent,
    ResponseStreamEvent,
    response_text_delta_event,
    response_text_done_event,
)
from pydantic import BaseModel

# Keys that the specification requires although they may be null.
NULLABLE: Mapping[type[BaseModel], frozenset[str]] = {
    Choice: frozenset({"logprobs"}),
    ChatCompletionMessage: frozenset({"content", "refusal"}),
    ChunkChoice: frozenset({"finish_reason"}),
    CompletionChoice: frozenset({"logprobs", "finish_reason"}),
}
# Keys beyond the specification, which are ours, vLLM's or llama.cpp's; docs/api.md explains each.
ADDITIONS: Mapping[type[BaseModel], frozenset[str]] = {
    Choice: frozenset({"stop_reason"}),
    ChunkChoice: frozenset({"stop_reason"}),
    CompletionChoice: frozenset({"stop_reason"}),
    ChatCompletionMessage: frozenset({"reasoning", "reasoning_content"}),
    # OpenAI's own API has these, too.
    Response: frozenset({"store"}),
    ResponseFunctionCallArgumentsDoneEvent: frozenset({"name"}),
    **{
        kind: frozenset({"bytes"})
        for event in (response_text_delta_event, response_text_done_event)
        for kind in (event.Logprob, event.LogprobTopLogprob)
    },
    Model: frozenset({"root", "parent", "max_model_len", "permission", "input_modalities"}),
}
# Where the API itself gives null and the client's type does not say so: the chunks of a completion, the first token of
# an echoed prompt.
NULL_VALUES: Mapping[type[BaseModel], frozenset[str]] = {
    CompletionChoice: frozenset({"finish_reason"}),
    Logprobs: frozenset({"token_logprobs[]", "top_logprobs[]"}),
}
# A response without tool calls has no such key: clients branch on its presence.
ABSENT: Mapping[type[BaseModel], frozenset[str]] = {
    ChatCompletionMessage: frozenset({"tool_calls", "function_call", "audio"}),
}


def check_chat(raw: str | bytes) -> None:
    _check(raw, ChatCompletion, ("usage",))


def check_chat_chunk(raw: str | bytes) -> None:
    _check(raw, ChatCompletionChunk)


def check_completion(raw: str | bytes) -> None:
    _check(raw, Completion)


def check_response(raw: str | bytes) -> None:
    _check(raw, Response, ("usage", "status"))


def check_response_event(raw: str | bytes) -> None:
    _refuse(list(_faults(strictly_parsed(raw), ResponseStreamEvent, "body")))


def check_model(value: object) -> None:
    _refuse(list(_faults(value, Model, "model")))


def strictly_parsed(raw: str | bytes) -> Any:
    """Return parsed JSON. Raises ValueError for NaN and Infinity, which only Python takes for JSON."""
    return json.loads(raw, parse_constant=_no_constant)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check(raw: str | bytes, kind: type[BaseModel], required: Sequence[str] = ()) -> None:
    value = strictly_parsed(raw)
    missing = [f"{name} is missing" for name in required if value.get(name) is None]
    _refuse(missing + list(_faults(value, kind, "body")))


def _refuse(faults: list[str]) -> None:
    assert not faults, "; ".join(faults)


def _faults(value: object, kind: Any, where: str) -> Iterator[str]:
    """Yields every difference between a JSON value and a type of the client."""
    origin = typing.get_origin(kind)
    if origin is Annotated:
        yield from _faults(value, typing.get_args(kind)[0], where)
    elif origin in (Union, types.UnionType):
        options = [option for option in typing.get_args(kind) if (option is type(None)) == (value is None)]
        found = [list(_faults(value, option, where)) for option in options]
        yield from min(found, key=len, default=[f"{where} is {value!r}"])
    elif origin is Literal:
        if value not in typing.get_args(kind):
            yield f"{where} is {value!r}"
    elif origin is list:
        yield from _faults_of_list(value, typing.get_args(kind)[0], where)
    elif origin is dict:
        yield from _faults_of_dict(value, typing.get_args(kind)[1], where)
    elif isinstance(kind, type) and issubclass(kind, BaseModel):
        yield from _faults_of_object(value, kind, where)
    elif kind is float:
        if not isinstance(value, int | float) or isinstance(value, bool):
            yield f"{where} is not a number: {value!r}"
    elif kind in (str, int, bool, type(None)):
        if type(value) is not kind:
            yield f"{where} is not of type {kind.__name__}: {value!r}"
    elif kind not in (object, Any):
        raise NotImplementedError(f"{where}: {kind}")


def _faults_of_list(value: object, kind: Any, where: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{where} is not a list: {value!r}"
        return
    for place, item in enumerate(value):
        yield from _faults(item, kind, f"{where}[{place}]")


def _faults_of_dict(value: object, kind: Any, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} is no object: {value!r}"
        return
    for name, item in value.items():
        yield from _faults(item, kind, f"{where}.{name}")


def _faults_of_object(value: object, kind: type[BaseModel], where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{where} is no object: {value!r}"
        return
    required = {name for name, field in kind.model_fields.items() if field.is_required()} | NULLABLE.get(kind, set())
    for name in sorted(required - value.keys()):
        yield f"{where}.{name} is missing"
    for name, item in value.items():
        if name in ABSENT.get(kind, ()):
            yield f"{where}.{name} should be left out"
        elif name not in kind.model_fields:
            if name not in ADDITIONS.get(kind, ()):
                yield f"{where}.{name} does not belong to the API"
        elif not (item is None and name in NULL_VALUES.get(kind, ())):
            if f"{name}[]" in NULL_VALUES.get(kind, ()) and isinstance(item, list):
                item = [one for one in item if one is not None]
            yield from _faults(item, kind.model_fields[name].annotation, f"{where}.{name}")
