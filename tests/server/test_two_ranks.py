"""`pagewick serve --tensor-parallel-size 2`: one more process, which ends with the server."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import psutil

READY = re.compile(r"ready on (http://\S+)")
QUESTION = {"messages": [{"role": "user", "content": "What is the default port?"}], "temperature": 0, "max_tokens": 40}


@contextmanager
def two_ranks() -> Iterator[tuple[subprocess.Popen[str], str, list[psutil.Process]]]:
    """A server, its address and all its child processes."""
    command = [sys.executable, "-m", "pagewick", "serve", "--port", "0", "--tensor-parallel-size", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as stdout:
        address = next(match[1] for line in stdout if (match := READY.search(line)))
        yield process, address, psutil.Process(process.pid).children(recursive=True)
    process.kill()
    process.wait()


def rank_one(children: list[psutil.Process]) -> psutil.Process:
    return next(child for child in children if "pagewick.engine.worker" in child.cmdline())


def test_ctrl_c_leaves_no_rank() -> None:
    with two_ranks() as (process, address, children):
        answer = httpx.post(f"{address}/v1/chat/completions", json=QUESTION, timeout=60).json()
        assert "8000" in answer["choices"][0]["message"]["content"]
        assert rank_one(children).is_running()
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert not psutil.wait_procs(children, timeout=5)[1]


def test_a_lost_rank_is_an_error_and_not_a_hang() -> None:
    with two_ranks() as (process, address, children):
        rank_one(children).kill()
        answer = httpx.post(f"{address}/v1/chat/completions", json=QUESTION, timeout=60)
        assert answer.status_code >= 500
        assert answer.json()["error"]["message"]
        deadline = time.monotonic() + 20
        while httpx.get(f"{address}/health").status_code != 503 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert httpx.get(f"{address}/health").status_code == 503
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
        assert not psutil.wait_procs(children, timeout=5)[1]
