#!/usr/bin/env -S bash -c 'exec "${0%/*}/run_all.sh" litellm'
"""LiteLLM, as a library: its providers hosted_vllm/ and openai/."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

import litellm
from checks import (
    API,
    KEY,
    MODEL,
    PROMPT,
    QUESTION,
    SYSTEM,
    TOO_LONG,
    TOOLS,
    TURNS,
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
    post,
    text_of,
)
from pydantic import BaseModel


class Answer(BaseModel):
    """The port that a server listens on."""

    port: int
    is_open: bool


def complete(provider: str, messages: Any, call: Any = litellm.completion, **fields: Any) -> Any:
    fields = {"model": f"{provider}/{MODEL}", "api_base": API, "api_key": KEY, "temperature": 0, **fields}
    return call(messages=messages, max_retries=0, **fields)


def content(response: Any) -> str:
    return str(response.choices[0].message.content)


def check_responses(provider: str) -> None:
    wanted = plainly(asked(QUESTION))
    response = complete(provider, asked(QUESTION))
    check("the response knows its port", "8000" in content(response), response)
    check_equal("chat", content(response), text_of(wanted))
    check_equal("finish reason", response.choices[0].finish_reason, "stop")
    check_equal("usage", [response.usage.prompt_tokens, response.usage.completion_tokens, response.usage.total_tokens],
                [wanted["usage"][name] for name in ("prompt_tokens", "completion_tokens", "total_tokens")])  # fmt: skip

    with_system = [{"role": "system", "content": SYSTEM}, *asked(QUESTION)]
    response, wanted = complete(provider, with_system), plainly(with_system)
    check_equal("system message", [content(response), response.usage.prompt_tokens],
                [text_of(wanted), wanted["usage"]["prompt_tokens"]])  # fmt: skip
    response, wanted = complete(provider, TURNS), plainly(TURNS)
    check_equal("several turns", [content(response), response.usage.prompt_tokens],
                [text_of(wanted), wanted["usage"]["prompt_tokens"]])  # fmt: skip

    whole = content(complete(provider, asked(QUESTION)))
    check_equal("stop", content(complete(provider, asked(QUESTION), stop=["8000"])), whole.partition("8000")[0])
    for name in ("max_tokens", "max_completion_tokens"):
        response = complete(provider, asked(QUESTION), **{name: 3})
        check_equal(name, [response.usage.completion_tokens, response.choices[0].finish_reason], [3, "length"])
    responses = complete(provider, asked(QUESTION), n=2, temperature=1, seed=1).choices
    check_equal("n", [choice.index for choice in responses], [0, 1])
    same = (
        complete(provider, asked(QUESTION), temperature=1, seed=5),
        complete(provider, asked(QUESTION), temperature=1, seed=5),
    )
    check_equal("seed", content(same[0]), content(same[1]))


def check_logprobs(provider: str) -> None:
    response = complete(provider, asked(QUESTION), logprobs=True, top_logprobs=2, max_tokens=5)
    wanted = plainly(asked(QUESTION), logprobs=True, top_logprobs=2, max_tokens=5)["choices"][0]["logprobs"]
    seen = response.choices[0].logprobs.content
    check_equal("logprobs", [token.token for token in seen], [token["token"] for token in wanted["content"]])
    gaps = [abs(one.logprob - other["logprob"]) for one, other in zip(seen, wanted["content"], strict=True)]
    check("log-probabilities are the same", max(gaps) < 1e-4, gaps)
    check("the likeliest was taken", all(token.top_logprobs[0].token == token.token for token in seen), seen)


def check_streams(provider: str) -> None:
    chunks = list(complete(provider, asked(QUESTION), stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    wanted = plainly(asked(QUESTION))
    check("a stream comes in pieces", len(chunks) > 5, chunks)
    check_equal("stream", text, text_of(wanted))
    check_equal("usage of a stream", [chunk.usage.total_tokens for chunk in chunks if getattr(chunk, "usage", None)],
                [wanted["usage"]["total_tokens"]])  # fmt: skip
    rebuilt = litellm.stream_chunk_builder(chunks, messages=asked(QUESTION))
    check_equal("a stream put together again", content(rebuilt), text)

    async def both() -> tuple[str, str]:
        response = await complete(provider, asked(QUESTION), litellm.acompletion)
        stream = await complete(provider, asked(QUESTION), litellm.acompletion, stream=True)
        pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
        return content(response), "".join(pieces)

    check_equal("async", asyncio.run(both()), (text, text))


def check_errors(provider: str) -> None:
    def wrong(**fields: Any) -> Any:
        return lambda: complete(provider, fields.pop("messages", asked(QUESTION)), **fields)

    check_raises("an unknown model", litellm.NotFoundError, wrong(model=f"{provider}/none"), "does not exist")
    check_raises("a wrong key", litellm.AuthenticationError, wrong(api_key="another-key"))
    too_long = litellm.ContextWindowExceededError
    check_raises("a prompt too long", too_long, wrong(messages=asked(TOO_LONG)), "2048 tokens")
    check_raises("a prompt too long, streamed", too_long, wrong(messages=asked(TOO_LONG), stream=True), "2048 tokens")
    check_raises("a response too long", too_long, wrong(max_tokens=5000), "max_tokens")
    check_raises("a value out of range", litellm.BadRequestError, wrong(temperature=-1), "temperature")


def converse(provider: str, question: str, *, is_streamed: bool = False, **fields: Any) -> str:
    """Have a question answered with the tools: run those that are called, and send their results."""
    messages: list[Any] = asked(question)
    fields |= {"tools": TOOLS, "max_tokens": 100, "stream": is_streamed}
    for _ in range(3):
        response = complete(provider, messages, **fields)
        if is_streamed:
            response = litellm.stream_chunk_builder(list(response), messages=messages)
        message = response.choices[0].message
        if not message.tool_calls:
            return str(message.content)
        messages.append(message)
        for call in message.tool_calls:
            run = {"get_weather": get_weather, "add": add}[call.function.name]
            result = json.dumps(run(**json.loads(call.function.arguments)))
            messages.append({"role": "tool", "tool_call_id": call.id, "name": call.function.name, "content": result})
    return ""


def check_tools(provider: str) -> None:
    for is_streamed in (False, True):
        what = "tools, streamed" if is_streamed else "tools"
        check_one_tool(what, partial(converse, provider, is_streamed=is_streamed))
        check_two_tools(what, partial(converse, provider, is_streamed=is_streamed, extra_body=TWO_CALLS))
    named = {"type": "function", "function": {"name": "add"}}
    fields = {"tools": TOOLS, "max_tokens": 100, "parallel_tool_calls": False}
    for choice in ("required", named):
        response = complete(provider, asked("Hi"), tool_choice=choice, **fields).choices[0]
        names = [call.function.name for call in response.message.tool_calls]
        check_equal(f"tool_choice {choice}", [response.finish_reason, len(names)], ["tool_calls", 1])
        check(f"the tool of tool_choice {choice}", choice == "required" or names == ["add"], names)


def check_structured_output(provider: str) -> None:
    response = complete(provider, asked(QUESTION), response_format=Answer, max_tokens=100)
    check("a pydantic model", isinstance(Answer.model_validate_json(content(response)), Answer), response)
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": Answer.model_json_schema()}}
    pieces = [chunk.choices[0].delta.content or "" for chunk in
              complete(provider, asked(QUESTION), response_format=schema, max_tokens=100, stream=True)]  # fmt: skip
    check_equal("a schema, streamed", "".join(pieces), content(response))
    response = complete(provider, asked(WEATHER), response_format=Answer, tools=TOOLS, max_tokens=100)
    check("a schema beside tools", bool(response.choices[0].message.tool_calls), response)


def check_text_completion() -> None:
    call = partial(
        litellm.text_completion, model=f"text-completion-openai/{MODEL}", api_base=API, api_key=KEY, temperature=0
    )
    response, wanted = (
        call(prompt=PROMPT, max_tokens=6),
        post("/completions", prompt=PROMPT, max_tokens=6, temperature=0),
    )
    check_equal("text completion", response.choices[0].text, wanted["choices"][0]["text"])
    pieces = [chunk.choices[0].text or "" for chunk in call(prompt=PROMPT, max_tokens=6, stream=True)]
    check_equal("text completion, streamed", "".join(pieces), response.choices[0].text)


litellm.suppress_debug_info = True
for provider in ("hosted_vllm", "openai"):
    print(f" {provider}/{MODEL}")
    check_responses(provider)
    check_logprobs(provider)
    check_streams(provider)
    check_tools(provider)
    check_structured_output(provider)
    check_errors(provider)
print(" text-completion-openai")
check_text_completion()
finish()
