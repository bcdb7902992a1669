"""The main job on real input: `pagewick serve` with the built-in model and the official client."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import psutil
import pytest

QUESTION = [{"role": "user", "content": "Which port does the server listen on by default?"}]
READY = re.compile(r"ready on (http://\S+)")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Yield the address of a server that runs as users start it. Ctrl-C must end it with status 0 and no child left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pagewick", "serve", "--port", "0", "--max-num-seqs", "16"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    with process.stdout as stdout:
        address = next(match[1] for line in stdout if (match := READY.search(line)))
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        yield address
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert not psutil.wait_procs(children, timeout=5)[1]


@pytest.fixture
def client(server: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0) as client:
        yield client


def gauges(server: str) -> dict[str, float]:
    lines = [line for line in httpx.get(f"{server}/metrics").text.splitlines() if not line.startswith("#")]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_the_response_is_right(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="pagewick-demo", messages=QUESTION, temperature=0)
    assert "8000" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_gives_the_same_response(client: openai.OpenAI) -> None:
    completions = client.chat.completions
    # Long enough for several events, although a busy server may send many tokens in one.
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 200, "extra_body": {"ignore_eos": True}}
    whole = completions.create(model="pagewick-demo", messages=QUESTION, **options)
    most_pieces = 0
    for _ in range(10):
        stream = completions.create(model="pagewick-demo", messages=QUESTION, stream=True, **options)
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
        assert "".join(pieces) == whole.choices[0].message.content
        most_pieces = max(most_pieces, sum(piece != "" for piece in pieces))
        if most_pieces > 5:
            break
    assert most_pieces > 5


def test_a_seed_repeats_a_sample(client: openai.OpenAI) -> None:
    def sample(seed: int) -> str:
        answer = client.completions.create(model="pagewick-demo", prompt="A", max_tokens=24, temperature=2, seed=seed)
        return answer.choices[0].text

    assert sample(7) == sample(7)
    assert len({sample(seed) for seed in range(5)}) > 1


async def _stream_one(client: openai.AsyncOpenAI, number: int) -> str | None:
    """Return the whole response; None for those of 50 clients that leave after the third chunk."""
    stream = await client.chat.completions.create(
        model="pagewick-demo",
        messages=[{"role": "user", "content": f"Count from {number} to {number + 9}."}],
        stream=True,
        extra_body={"ignore_eos": True},
        max_tokens=60,
    )
    text, num_chunks = "", 0
    async for chunk in stream:
        text += chunk.choices[0].delta.content or ""
        num_chunks += 1
        if number % 5 < 2 and num_chunks == 3:
            await stream.close()
            return None
    return text


async def _stream_many(address: str) -> list[str | None]:
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        return await asyncio.gather(*(_stream_one(client, number) for number in range(50)))


def test_fifty_streams_of_which_twenty_leave(server: str) -> None:
    answers = asyncio.run(_stream_many(server))
    assert sum(answer is None for answer in answers) == 20
    assert all(answers[number] for number in range(50) if number % 5 >= 2)
    deadline = time.monotonic() + 10
    while gauges(server)["vllm:num_requests_running"] and time.monotonic() < deadline:
        time.sleep(0.05)
    found = gauges(server)
    assert found["vllm:num_requests_running"] == found["vllm:num_requests_waiting"] == 0
    assert found["pagewick:kv_blocks_referenced"] == 0
    assert found["pagewick:kv_blocks_free"] + found["pagewick:kv_blocks_cached"] == found["pagewick:kv_blocks"]
