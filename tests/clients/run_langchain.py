#!/usr/bin/env -S bash -c 'exec "${0%/*}/run_all.sh" langchain'
"""LangChain: ChatOpenAI and OpenAI of langchain-openai, and the agents of langchain."""

from __future__ import annotations

import asyncio
from functools import partial
from itertools import product
from typing import Any

import langchain_openai.chat_models.base as errors
from checks import (
    API,
    KEY,
    MODEL,
    PROMPT,
    QUESTION,
    SYSTEM,
    TOO_LONG,
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
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_core.messages import AIMessage, AIMessageChunk, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

# Models share connections, which belong to one event loop.
RUNNER = asyncio.Runner()


class Answer(BaseModel):
    """The port that a server listens on."""

    port: int
    is_open: bool


def chat_model(**fields: Any) -> ChatOpenAI:
    return ChatOpenAI(**{"model": MODEL, "base_url": API, "api_key": KEY, "temperature": 0, "max_retries": 0, **fields})


def check_responses() -> None:
    wanted = plainly(asked(QUESTION))
    response = chat_model().invoke(QUESTION)
    check("the response knows its port", "8000" in response.content, response)
    check_equal("chat", response.content, text_of(wanted))
    check_equal("finish reason", response.response_metadata["finish_reason"], "stop")
    check_equal("model name", response.response_metadata["model_name"], MODEL)
    usage = response.usage_metadata
    check_equal("usage", [usage["input_tokens"], usage["output_tokens"]],
                [wanted["usage"]["prompt_tokens"], wanted["usage"]["completion_tokens"]])  # fmt: skip

    chain = ChatPromptTemplate([("system", "{role}"), ("user", "{question}")]) | chat_model() | StrOutputParser()
    with_system = [{"role": "system", "content": SYSTEM}, *asked(QUESTION)]
    check_equal("a chain with a system message", chain.invoke({"role": SYSTEM, "question": QUESTION}),
                text_of(plainly(with_system)))  # fmt: skip
    response = chat_model().invoke([SystemMessage(SYSTEM), HumanMessage(QUESTION)])
    check_equal("tokens of a system message", response.usage_metadata["input_tokens"],
                plainly(with_system)["usage"]["prompt_tokens"])  # fmt: skip
    turns = [
        AIMessage(turn["content"]) if turn["role"] == "assistant" else HumanMessage(turn["content"]) for turn in TURNS
    ]
    response, wanted = chat_model().invoke(turns), plainly(TURNS)
    check_equal("several turns", [response.content, response.usage_metadata["input_tokens"]],
                [text_of(wanted), wanted["usage"]["prompt_tokens"]])  # fmt: skip
    history = [HumanMessage("What is Pagewick?")]
    history += [chat_model().invoke(history), HumanMessage(QUESTION)]
    check("its own response as a part of the next question", bool(chat_model().invoke(history).content))

    whole = chat_model().invoke(QUESTION).content
    check_equal("stop", chat_model(stop=["8000"]).invoke(QUESTION).content, whole.partition("8000")[0])
    short = chat_model(max_tokens=3).invoke(QUESTION)
    check_equal(
        "max_tokens", [short.usage_metadata["output_tokens"], short.response_metadata["finish_reason"]], [3, "length"]
    )
    check_equal(
        "top_k through extra_body", chat_model(temperature=1, extra_body={"top_k": 1}).invoke(QUESTION).content, whole
    )
    check_equal("batch", [response.content for response in chat_model().batch([QUESTION] * 3)], [whole] * 3)
    drawn = [chat_model(temperature=1, seed=5).invoke(QUESTION).content for _ in range(2)]
    check_equal("seed", *drawn)


def check_logprobs() -> None:
    response = chat_model(logprobs=True, top_logprobs=2, max_tokens=5).invoke(QUESTION)
    seen = response.response_metadata["logprobs"]["content"]
    wanted = plainly(asked(QUESTION), logprobs=True, top_logprobs=2, max_tokens=5)["choices"][0]["logprobs"]["content"]
    check_equal("logprobs", [token["token"] for token in seen], [token["token"] for token in wanted])
    gaps = [abs(one["logprob"] - other["logprob"]) for one, other in zip(seen, wanted, strict=True)]
    check("log-probabilities are the same", max(gaps) < 1e-4, gaps)
    check("the likeliest was taken", all(token["top_logprobs"][0]["token"] == token["token"] for token in seen), seen)


def check_streams() -> None:
    wanted = plainly(asked(QUESTION))
    chunks = list(chat_model(stream_usage=True).stream(QUESTION))
    check("a stream comes in pieces", len(chunks) > 5, chunks)
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    check_equal("stream", whole.content, text_of(wanted))
    check_equal("usage of a stream", whole.usage_metadata["total_tokens"], wanted["usage"]["total_tokens"])

    async def both() -> tuple[str, str]:
        response = await chat_model().ainvoke(QUESTION)
        return response.content, "".join([chunk.content async for chunk in chat_model().astream(QUESTION)])

    check_equal("async", RUNNER.run(both()), (text_of(wanted), text_of(wanted)))


def check_errors() -> None:
    def ask(text: str = QUESTION, **fields: Any) -> Any:
        return lambda: chat_model(**fields).invoke(text)

    check_raises("an unknown model", errors.OpenAIModelNotFoundError, ask(model="none"), "does not exist")
    check_raises("a wrong key", errors.OpenAIAuthenticationError, ask(api_key="another-key"))
    too_long = errors.OpenAIContextOverflowError
    check_raises("a prompt too long", too_long, ask(TOO_LONG), "2048 tokens")
    check_raises("a prompt too long, streamed", too_long, lambda: list(chat_model().stream(TOO_LONG)), "2048 tokens")
    check_raises("a response too long", too_long, ask(max_tokens=5000), "max_tokens")
    check_raises("a value out of range", errors.OpenAIInvalidRequestError, ask(temperature=-1), "temperature")


def check_text_completion() -> None:
    model = OpenAI(model=MODEL, base_url=API, api_key=KEY, temperature=0, max_tokens=6, max_retries=0)
    wanted = post("/completions", prompt=PROMPT, max_tokens=6, temperature=0)["choices"][0]["text"]
    check_equal("text completion", model.invoke(PROMPT), wanted)
    check_equal("text completion, streamed", "".join(model.stream(PROMPT)), wanted)
    prompts = [PROMPT, "The server listens on"]
    both = post("/completions", prompt=prompts, max_tokens=6, temperature=0)["choices"]
    responses = model.generate(prompts).generations
    check_equal("several prompts", [choices[0].text for choices in responses], [choice["text"] for choice in both])


def converse(question: str, *, is_streamed: bool = False, **fields: Any) -> str:
    """Let LangChain's agent answer a question with the tools."""
    agent = create_agent(chat_model(max_tokens=100, **fields), tools=[get_weather, add])
    state = {"messages": asked(question)}
    if not is_streamed:
        return str(agent.invoke(state)["messages"][-1].content)
    pieces = [piece for piece, _ in agent.stream(state, stream_mode="messages") if isinstance(piece, AIMessageChunk)]
    last = pieces[-1].id
    return "".join(piece.content for piece in pieces if piece.id == last)


def check_tools() -> None:
    for is_streamed in (False, True):
        what = "an agent, streamed" if is_streamed else "an agent"
        check_one_tool(what, partial(converse, is_streamed=is_streamed))
        check_two_tools(what, partial(converse, is_streamed=is_streamed, extra_body=TWO_CALLS))

    async def converse_async(question: str) -> str:
        agent = create_agent(chat_model(max_tokens=100, extra_body=TWO_CALLS), tools=[get_weather, add])
        return str((await agent.ainvoke({"messages": asked(question)}))["messages"][-1].content)

    check_two_tools("an agent, async", lambda question: RUNNER.run(converse_async(question)))

    for choice, wanted in (("required", {"get_weather", "add"}), ("any", {"get_weather", "add"}), ("add", {"add"})):
        bound = chat_model(max_tokens=100).bind_tools([get_weather, add], tool_choice=choice, parallel_tool_calls=False)
        calls = bound.invoke("Hi").tool_calls
        check(f"tool_choice {choice}", len(calls) == 1 and calls[0]["name"] in wanted, calls)
    response = chat_model().bind_tools([get_weather, add], tool_choice="none").invoke(WEATHER)
    check("tool_choice none", response.content and not response.tool_calls, response)
    bound = chat_model(max_tokens=100).bind_tools([get_weather, add], strict=True)
    whole, *chunks = bound.stream(WEATHER)
    for chunk in chunks:
        whole += chunk
    check_equal("a streamed call", [(call["name"], call["args"]) for call in whole.tool_calls],
                [("get_weather", {"city": "Rome"})])  # fmt: skip


def check_structured_output() -> None:
    for method, strict in product(("json_schema", "function_calling"), (None, True, False)):
        seen = chat_model(max_tokens=100).with_structured_output(Answer, method=method, strict=strict).invoke(QUESTION)
        check(f"structured output by {method}, strict: {strict}", isinstance(seen, Answer), seen)
    plain = chat_model(max_tokens=100).with_structured_output(Answer.model_json_schema() | {"title": "Answer"})
    check("structured output by a schema", Answer.model_validate(plain.invoke(QUESTION)))
    last = list(chat_model(max_tokens=100).with_structured_output(Answer).stream(QUESTION))[-1]
    check("structured output, streamed", isinstance(last, Answer), last)
    for strategy in (ToolStrategy(Answer), ProviderStrategy(Answer)):
        agent = create_agent(chat_model(max_tokens=100), response_format=strategy)
        seen = agent.invoke({"messages": asked(QUESTION)})["structured_response"]
        check(f"an agent's structured output by {type(strategy).__name__}", isinstance(seen, Answer), seen)


check_responses()
check_logprobs()
check_streams()
check_errors()
check_text_completion()
check_tools()
check_structured_output()
RUNNER.close()
finish()
