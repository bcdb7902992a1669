"""Servers as users start them: `pagewick serve` with the built-in model, each in a process of its own."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import psutil

from tests.conformance.described import watch

MODEL = "pagewick-demo"
SECOND_NAME = "org/pagewick-demo"
DEADLINE_S = 60.0

_READY = re.compile(r"ready on (http://\S+)")


class Server:
    """One `pagewick serve`. log: the file for its stderr. key: the API key that `http` sends; "" for none."""

    def __init__(self, log: Path, *flags: str, key: str = "") -> None:
        self.log = log
        self.key = key
        # One thread: so small a model gains nothing from more, and there are several servers.
        command = [sys.executable, "-m", "pagewick", "serve", "--port", "0", "--num-threads", "1", *flags]
        with log.open("w", encoding="utf-8") as stderr:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
        self.url = ""

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        self.url = next(match[1] for line in self.process.stdout if (match := _READY.search(line)))
        self.http = self.new_http({"authorization": f"Bearer {self.key}"} if self.key else {})
        self.anonymous = self.new_http({})

    def stop(self) -> None:
        """Send SIGINT, as Ctrl-C does, and check that the server ends with status 0."""
        assert self.process.stdout is not None
        with self.process, self.process.stdout:
            if hasattr(self, "http"):
                self.http.close()
                self.anonymous.close()
            if self.process.poll() is None:
                self.process.send_signal(signal.SIGINT)
                assert self.process.wait(DEADLINE_S) == 0

    def new_http(self, headers: dict[str, str]) -> httpx.Client:
        # There is no TLS; to read certificates would take as long as many requests.
        client = httpx.Client(base_url=self.url, headers=headers, timeout=DEADLINE_S, verify=False)
        watch(client)
        return client

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    def engine(self) -> psutil.Process:
        """Return the process that has the model; another one may check grammars."""
        children = psutil.Process(self.process.pid).children()
        (engine,) = (child for child in children if "pagewick.engine_process" in child.cmdline())
        return engine

    def metric(self, name: str) -> float:
        """Return the sum of a metric's series."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{re.escape(name)}[ {{]", line))

    def num_tokens(self, messages: Sequence[Mapping[str, object]]) -> int:
        count = self.http.post("/tokenize", json={"messages": list(messages)}).json()["count"]
        assert isinstance(count, int)
        return count

    def tokens(self, text: str) -> list[int]:
        """Return the token ids of a text, without any that a template or the model adds."""
        body = {"prompt": text, "add_special_tokens": False}
        return [int(token_id) for token_id in self.http.post("/tokenize", json=body).json()["tokens"]]


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, "waited in vain for a condition"
        time.sleep(0.02)
