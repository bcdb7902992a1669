"""Send many chat requests at the same time to an OpenAI-compatible server and print its tokens per second.

pagewick serve --port 2000 --max-num-seqs 16
python3 examples/benchmark.py --batch 16 --max_tokens 1024

It needs only openai. `pagewick bench --url http://localhost:2000/v1` measures more: latencies, several rounds,
and several servers.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import openai

QUESTIONS = (
    "Explain how a compiler works.",
    "Please talk about the history of Rome in 100 words.",
    "Which rivers cross Germany?",
    "How do vaccines work?",
    "Write a poem about the sea.",
    "What is the difference between a process and a thread?",
    "How does a refrigerator cool?",
    "Name five famous paintings and their painters.",
)


async def respond(client: openai.AsyncOpenAI, model: str, question: str, max_tokens: int) -> tuple[str, int]:
    """Stream one response; return its text and its number of tokens."""
    stream = await client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=max_tokens,
        stream=True,
        stream_options={"include_usage": True},
    )
    text, num_tokens = "", 0
    async for chunk in stream:
        if chunk.choices:
            text += chunk.choices[0].delta.content or ""
        if chunk.usage is not None:
            num_tokens = chunk.usage.completion_tokens
    return text, num_tokens


async def benchmark(url: str, batch: int, max_tokens: int) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="EMPTY") as client:
        model = (await client.models.list()).data[0].id
        questions = [QUESTIONS[index % len(QUESTIONS)] for index in range(batch)]
        start = time.perf_counter()
        responses = await asyncio.gather(*(respond(client, model, one, max_tokens) for one in questions))
        seconds = time.perf_counter() - start
    for index, (question, (text, _)) in enumerate(zip(questions, responses, strict=True)):
        print(f"\n> {index}: {question}\n\n{text}")
    num_tokens = sum(count for _, count in responses)
    print(f"\n{num_tokens} tokens of {batch} responses in {seconds:.2f} s: {num_tokens / seconds:.1f} tokens/s")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure an OpenAI-compatible server.")
    parser.add_argument("--url", default="http://localhost:2000/v1/", help="base URL of the server")
    parser.add_argument("--batch", type=int, default=16, help="requests at the same time")
    parser.add_argument("--max_tokens", "--max-tokens", type=int, default=1024, help="longest response")
    arguments = parser.parse_args()
    try:
        asyncio.run(benchmark(arguments.url, arguments.batch, arguments.max_tokens))
    except openai.APIConnectionError:
        sys.exit(f"error: no server answers at {arguments.url}; start one, or give its --url")
    except openai.APIError as error:
        sys.exit(f"error: {error.message}")


if __name__ == "__main__":
    main()
