#!/usr/bin/env -S bash -c 'exec "${0%/*}/run_all.sh" instructor'
"""Instructor: responses as Pydantic models, in each of its modes for OpenAI's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

import instructor
import openai
from checks import (
    API,
    KEY,
    MODEL,
    QUESTION,
    TWO_CALLS,
    add,
    asked,
    check,
    check_one_tool,
    check_raises,
    check_two_tools,
    finish,
    get_weather,
)
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel


class Answer(BaseModel):
    """The port that a server listens on."""

    port: int
    is_open: bool


class get_weather_tool(BaseModel):
    """Get the weather of a city."""

    city: str

    def run(self) -> Any:
        return get_weather(self.city)


class add_tool(BaseModel):
    """Add two numbers."""

    a: int
    b: int

    def run(self) -> Any:
        return add(self.a, self.b)


get_weather_tool.__name__, add_tool.__name__ = "get_weather", "add"
Mode = instructor.Mode
MODES = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.FUNCTIONS)


def client(mode: instructor.Mode = Mode.TOOLS, key: str = KEY) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=API, api_key=key, max_retries=0), mode=mode)


def ask(made: instructor.Instructor, wanted: Any = Answer, **fields: Any) -> Any:
    fields = {"model": MODEL, "messages": asked(QUESTION), "temperature": 0, "max_tokens": 100, **fields}
    return made.chat.completions.create(response_model=wanted, max_retries=1, **fields)


def check_structured_output() -> None:
    for mode in MODES:
        seen = ask(client(mode))
        check(f"a model, by {mode.name}", isinstance(seen, Answer), seen)
    partial = list(
        client().chat.completions.create_partial(
            response_model=Answer, model=MODEL, messages=asked(QUESTION), temperature=0, max_tokens=100
        )
    )
    check("a model, streamed", len(partial) > 2 and partial[-1].port is not None, partial)
    seen, whole = client().chat.completions.create_with_completion(
        response_model=Answer, model=MODEL, messages=asked(QUESTION), max_tokens=100
    )
    check("a model, and the whole response", isinstance(seen, Answer) and whole.usage.total_tokens > 0, whole)

    async def ask_async() -> Any:
        made = instructor.from_openai(openai.AsyncOpenAI(base_url=API, api_key=KEY), mode=Mode.JSON_SCHEMA)
        return await ask(made)

    check("a model, async", isinstance(asyncio.run(ask_async()), Answer))
    text = ask(client(), None).choices[0].message.content
    check("no model", "8000" in text, text)


def converse(question: str, **fields: Any) -> str:
    """Have a question answered with the tools: run those that are called, and send their results."""
    messages: list[Any] = asked(question)
    made = client(Mode.PARALLEL_TOOLS)
    called = ask(made, Iterable[get_weather_tool | add_tool], messages=messages, **fields)
    calls = []
    for place, call in enumerate(called):
        name = type(call).__name__
        result = json.dumps(call.run())
        calls.append({"id": f"call_{place}", "type": "function",
                      "function": {"name": name, "arguments": call.model_dump_json()}})  # fmt: skip
        messages.append({"role": "tool", "tool_call_id": f"call_{place}", "name": name, "content": result})
    messages.insert(1, {"role": "assistant", "content": None, "tool_calls": calls})
    return str(ask(client(), None, messages=messages).choices[0].message.content)


def check_errors() -> None:
    def wrong(**fields: Any) -> Any:
        return lambda: ask(client(key=fields.pop("key", KEY)), **fields)

    check_raises("an unknown model", InstructorRetryException, wrong(model="none"), "does not exist")
    check_raises("a wrong key", InstructorRetryException, wrong(key="another-key"), "401")


check_structured_output()
check_one_tool("parallel tools", converse)
check_two_tools("parallel tools", lambda question: converse(question, extra_body=TWO_CALLS))
check_errors()
finish()
