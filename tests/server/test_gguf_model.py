"""`pagewick serve model.gguf`, asked by OpenAI's client, and restarted after its engine has died."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import psutil

from tests.weights.gguf.demo import write_demo

READY = re.compile(r"ready on (http://\S+)")
MESSAGES = [{"role": "user", "content": "What is the default port?"}]


def ask(address: str) -> str:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none") as client:
        (model,) = client.models.list().data
        stream = client.chat.completions.create(
            model=model.id, messages=MESSAGES, temperature=0, max_tokens=60, stream=True
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)


def test_a_gguf_file_is_served(tmp_path: Path) -> None:
    path = write_demo(tmp_path / "demo-Q8_0.gguf")
    command = [
        sys.executable,
        "-m",
        "pagewick",
        "serve",
        str(path),
        "--port",
        "0",
        "--kv-cache-disk",
        str(tmp_path / "kv"),
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as stdout:
        address = next(match[1] for line in stdout if (match := READY.search(line)))
        first = ask(address)
        assert "8000" in first
        (engine,) = [child for child in psutil.Process(process.pid).children() if "engine" in " ".join(child.cmdline())]
        engine.kill()
        deadline = time.monotonic() + 60
        while httpx.get(f"{address}/health/ready").status_code != 200 and time.monotonic() < deadline:
            time.sleep(0.1)
        assert ask(address) == first
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
