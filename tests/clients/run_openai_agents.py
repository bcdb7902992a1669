#!/usr/bin/env -S bash -c 'exec "${0%/*}/run_all.sh" openai_agents'
"""OpenAI's Agents SDK, with its model for chat completions."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
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
    check_raises,
    check_two_tools,
    finish,
    get_weather,
    plainly,
    ran,
    text_of,
)
from pydantic import BaseModel


class Answer(BaseModel):
    """The port that a server listens on."""

    port: int
    is_open: bool


def agent(name: str = MODEL, key: str = KEY, settings: Any = None, **fields: Any) -> Agent[Any]:
    client = openai.AsyncOpenAI(base_url=API, api_key=key, max_retries=0)
    made = ModelSettings(**{"temperature": 0, "max_tokens": 100, **(settings or {})})
    return Agent("Clerk", model=OpenAIChatCompletionsModel(name, client), model_settings=made, **fields)


async def streamed(made: Agent[Any], question: str) -> tuple[Any, int]:
    """Return an agent's output, and the number of events."""
    running = Runner.run_streamed(made, question)
    events = [event async for event in running.stream_events()]
    return running.final_output, len(events)


def run(made: Agent[Any], question: Any) -> Any:
    return RUNNER.run(Runner.run(made, question))


def check_responses() -> None:
    wanted = plainly(asked(QUESTION))
    result = run(agent(), QUESTION)
    check_equal("chat", result.final_output, text_of(wanted))
    usage = result.context_wrapper.usage
    check_equal("usage", [usage.input_tokens, usage.output_tokens],
                [wanted["usage"]["prompt_tokens"], wanted["usage"]["completion_tokens"]])  # fmt: skip
    with_system = text_of(plainly([{"role": "system", "content": SYSTEM}, *asked(QUESTION)]))
    check_equal("instructions", run(agent(instructions=SYSTEM), QUESTION).final_output, with_system)
    later = run(agent(), [*result.to_input_list(), *asked("What is Pagewick?")]).final_output
    check("several turns", isinstance(later, str) and later != "", later)
    text, num_events = RUNNER.run(streamed(agent(), QUESTION))
    check_equal("stream", text, text_of(wanted))
    check("a stream comes in pieces", num_events > 5, num_events)
    # Fields of OpenAI's platform that have no meaning here.
    more = {"store": True, "metadata": {"purpose": "test"}, "include_usage": True, "parallel_tool_calls": False}
    check_equal("fields of OpenAI's platform", run(agent(settings=more), QUESTION).final_output, text_of(wanted))


def converse(question: str, *, is_streamed: bool = False, settings: Any = None) -> str:
    """Let an agent answer a question with the tools."""
    made = agent(settings=settings, tools=[function_tool(add), function_tool(get_weather)])
    return str(RUNNER.run(streamed(made, question))[0] if is_streamed else run(made, question).final_output)


def check_tools() -> None:
    for is_streamed in (False, True):
        what = "an agent, streamed" if is_streamed else "an agent"
        check_one_tool(what, partial(converse, is_streamed=is_streamed))
        check_two_tools(what, partial(converse, is_streamed=is_streamed, settings={"extra_body": TWO_CALLS}))
    for choice in ("required", "add"):
        ran.clear()
        text = converse("Hi", settings={"tool_choice": choice, "parallel_tool_calls": False})
        check(f"tool_choice {choice}", ran and text and (choice == "required" or ran[0][0] == "add"), (ran, text))
    clerk = agent(handoff_description="Knows the weather.", tools=[function_tool(get_weather)])
    clerk.name = "Weather clerk"
    result = run(agent(handoffs=[clerk], settings={"tool_choice": "required", "parallel_tool_calls": False}), WEATHER)
    check_equal("an agent that hands over to another", result.last_agent.name, clerk.name)


def check_structured_output() -> None:
    seen = run(agent(output_type=Answer), QUESTION).final_output
    check("structured output", isinstance(seen, Answer), seen)
    seen, _ = RUNNER.run(streamed(agent(output_type=Answer), QUESTION))
    check("structured output, streamed", isinstance(seen, Answer), seen)
    ran.clear()
    tool = function_tool(get_weather, is_enabled=lambda *_: not ran)
    seen = run(agent(output_type=Answer, tools=[tool]), WEATHER).final_output
    check_equal("a call before structured output", ran, [("get_weather", {"city": "Rome"})])
    check("structured output behind a call", isinstance(seen, Answer), seen)


def check_errors() -> None:
    check_raises("an unknown model", openai.NotFoundError, lambda: run(agent("none"), QUESTION), "does not exist")
    check_raises("a wrong key", openai.AuthenticationError, lambda: run(agent(key="another-key"), QUESTION))


set_tracing_disabled(True)
# Connections belong to one event loop.
RUNNER = asyncio.Runner()
check_responses()
check_tools()
check_structured_output()
check_errors()
RUNNER.close()
finish()
