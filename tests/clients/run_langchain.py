#!/usr/bin/env -S bash -c 'exec "${0%/*}/run_all.sh" langchain'
"""LangChain: ChatOpenAI and OpenAI of langchain-openai."""

from __future__ import annotations

import asyncio
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
    asked,
    check,
    check_equal,
    check_raises,
    finish,
    plainly,
    post,
    text_of,
)
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI, OpenAI


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

    check_equal("async", asyncio.run(both()), (text_of(wanted), text_of(wanted)))


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


check_responses()
check_logprobs()
check_streams()
check_errors()
check_text_completion()
finish()
