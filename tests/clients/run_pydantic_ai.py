#!/usr/bin/env -S bash -c 'exec "${0%/*}/run_all.sh" pydantic_ai'
"""Pydantic AI: agents with OpenAIChatModel."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from checks import (
    API,
    KEY,
    MODEL,
    QUESTION,
    SYSTEM,
    TWO_CALLS,
    WEATHER,
    add,
    asked,
    check,
    check_equal,
    check_one_tool,
    check_two_tools,
    finish,
    get_weather,
    plainly,
    ran,
    text_of,
)
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, RunContext, Tool, ToolOutput
from pydantic_ai.exceptions import ModelAuthenticationError, ModelNotFoundError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.tools import ToolDefinition


class Answer(BaseModel):
    """The port that a server listens on."""

    port: int
    is_open: bool


def agent(name: str = MODEL, key: str = KEY, settings: Any = None, **fields: Any) -> Agent[Any, Any]:
    model = OpenAIChatModel(name, provider=OpenAIProvider(base_url=API, api_key=key))
    return Agent(model, model_settings={"temperature": 0, "max_tokens": 100, **(settings or {})}, **fields)


async def check_responses() -> None:
    wanted = plainly(asked(QUESTION))
    result = await agent().run(QUESTION)
    check_equal("chat", result.output, text_of(wanted))
    check_equal("usage", [result.usage.input_tokens, result.usage.output_tokens],
                [wanted["usage"]["prompt_tokens"], wanted["usage"]["completion_tokens"]])  # fmt: skip
    with_system = text_of(plainly([{"role": "system", "content": SYSTEM}, *asked(QUESTION)]))
    check_equal("instructions", (await agent(instructions=SYSTEM).run(QUESTION)).output, with_system)
    check_equal("system prompt", (await agent(system_prompt=SYSTEM).run(QUESTION)).output, with_system)
    later = await agent().run("What is Pagewick?", message_history=result.all_messages())
    check("several turns", isinstance(later.output, str) and later.output != "", later)
    async with agent().run_stream(QUESTION) as stream:
        pieces = [piece async for piece in stream.stream_text(delta=True, debounce_by=None)]
    check("a stream comes in pieces", len(pieces) > 5, pieces)
    check_equal("stream", "".join(pieces), text_of(wanted))


def converse(question: str, *, is_streamed: bool = False, settings: Any = None) -> str:
    """Let an agent answer a question with the tools."""

    async def run() -> str:
        made = agent(tools=[get_weather, add], settings=settings)
        if not is_streamed:
            return str((await made.run(question)).output)
        async with made.run_stream(question) as stream:
            return str(await stream.get_output())

    return RUNNER.run(run())


def check_tools() -> None:
    for is_streamed in (False, True):
        what = "an agent, streamed" if is_streamed else "an agent"
        check_one_tool(what, partial(converse, is_streamed=is_streamed))
        check_two_tools(what, partial(converse, is_streamed=is_streamed, settings={"extra_body": TWO_CALLS}))


def only_first(context: RunContext[Any], tool: ToolDefinition) -> ToolDefinition | None:
    """Offer a tool in the first request of a run only."""
    return tool if context.run_step == 1 else None


async def check_structured_output() -> None:
    kinds = {
        "a tool": Answer, "a strict tool": ToolOutput(Answer, strict=True), "the response format": NativeOutput(Answer),
        "the response format, not strict": NativeOutput(Answer, strict=False),
    }  # fmt: skip
    for name, kind in kinds.items():
        seen = (await agent(output_type=kind).run(QUESTION)).output
        check(f"structured output by {name}", isinstance(seen, Answer), seen)
    async with agent(output_type=NativeOutput(Answer)).run_stream(QUESTION) as stream:
        check("structured output, streamed", isinstance(await stream.get_output(), Answer))
    seen = (await agent(output_type=[Answer, str]).run(QUESTION)).output
    check("a text or structured output", isinstance(seen, str), seen)
    ran.clear()
    tools = [Tool(get_weather, prepare=only_first)]
    seen = (await agent(output_type=NativeOutput(Answer), tools=tools).run(WEATHER)).output
    check_equal("a call before structured output", ran, [("get_weather", {"city": "Rome"})])
    check("structured output behind a call", isinstance(seen, Answer), seen)


def check_fails(what: str, kind: type[Exception], made: Agent[Any, Any], words: str) -> None:
    """Check for an exception of a kind, which has a private subclass for errors over HTTP."""
    try:
        seen: object = RUNNER.run(made.run(QUESTION))
    except kind as error:
        seen = error
    check(f"{what}: {kind.__name__}", isinstance(seen, kind) and words in str(seen), seen)


# Agents share connections, which belong to one event loop.
RUNNER = asyncio.Runner()
RUNNER.run(check_responses())
check_tools()
RUNNER.run(check_structured_output())
check_fails("an unknown model", ModelNotFoundError, agent("none"), "does not exist")
check_fails("a wrong key", ModelAuthenticationError, agent(key="another-key"), "401")
RUNNER.close()
finish()
