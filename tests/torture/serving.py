"""A server as users start it, in a process of its own, observed through its metrics, its log and /proc."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil

MODEL = "pagewick-demo"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The longest context of the built-in model, and how many of its sequences run at a time unless a flag says otherwise.
CONTEXT, MAX_NUM_SEQS = 2048, 32
# Long enough for everything that does not hang.
DEADLINE_S = 90.0

_READY = re.compile(r"ready on http://([\d.]+):(\d+)")
_SAMPLE = re.compile(r"(?P<name>[\w:]+)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_FINISHED = re.compile(
    r"request (?P<id>\S+) (?:chat|completion)(?: stream)? (?P<reason>\w+): (?P<prompt>\d+) prompt tokens "
    r"\(\d+ cached\), (?P<generated>\d+) generated"
)
_REFUSED = re.compile(r"request (?P<id>\S+) (?P<method>\w+) (?P<handler>\S+) refused: (?P<status>\d+) (?P<code>\S+)")


@dataclass(frozen=True)
class Finished:
    """The line of the server's log about the end of a request that its engine was given."""

    reason: str
    num_prompt_tokens: int
    num_generated: int


class Metrics(dict[str, float]):
    """The samples of /metrics by name and labels, without the label of the model's name."""

    def by(self, name: str, label: str) -> Counter[str]:
        """Return the samples of a metric by the value of one label, summed over the other labels."""
        found: Counter[str] = Counter()
        for key, value in self.items():
            if key.startswith(name + "{") and (match := re.search(rf'\b{label}="([^"]*)"', key)):
                found[match[1]] += int(value)
        return found

    @property
    def is_idle(self) -> bool:
        return not self["vllm:num_requests_running"] and not self["vllm:num_requests_waiting"]

    @property
    def accepted(self) -> int:
        return int(self["pagewick:requests_accepted_total"])

    @property
    def finished(self) -> Counter[str]:
        return self.by("vllm:request_success_total", "finished_reason")

    @property
    def statuses(self) -> Counter[str]:
        """HTTP requests by status, without requests of metrics and probes."""
        watched = ("/metrics", "/health")
        return Metrics(
            {key: one for key, one in self.items() if not any(f'handler="{path}' in key for path in watched)}
        ).by("http_requests_total", "status")


class Server:
    """One `pagewick serve`.

    directory: for its log and its temporary files. module: run in place of `pagewick`, with the same arguments.
    """

    def __init__(self, directory: Path, *flags: str, module: str = "pagewick") -> None:
        self.log_path = directory / "log"
        self.temporary = directory / "tmp"
        self.temporary.mkdir()
        self._num_read = 0
        self._records: list[dict[str, Any]] = []
        command = [sys.executable, "-m", module, "serve", "--port", "0", "--log-format", "json", *flags]
        environment = {**os.environ, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"}
        with self.log_path.open("w", encoding="utf-8") as log:
            self.process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment, start_new_session=True
            )
        self.pid = self.process.pid
        self.address = ("", 0)

    def wait_until_ready(self) -> None:
        assert self.process.stdout is not None
        limit = threading.Timer(DEADLINE_S, self.process.kill)
        limit.start()
        found = next((match for line in self.process.stdout if (match := _READY.search(line))), None)
        limit.cancel()
        assert found is not None, self.log_path.read_text(encoding="utf-8")[-2000:]
        self.address = (found[1], int(found[2]))
        self._reader = threading.Thread(target=self.process.stdout.read)
        self._reader.start()
        self.http = httpx.Client(base_url=self.url, timeout=DEADLINE_S)

    @property
    def url(self) -> str:
        return f"http://{self.address[0]}:{self.address[1]}"

    def stop(self) -> None:
        """Send SIGTERM, and check that the server ends with status 0 and leaves no process and no file behind."""
        children = self.children()
        try:
            self.process.send_signal(signal.SIGTERM)
            assert self.process.wait(DEADLINE_S) == 0
            assert psutil.wait_procs(children, timeout=5)[1] == []
            assert list(self.temporary.iterdir()) == []
        finally:
            self.let_go()

    def let_go(self) -> None:
        """Kill the processes that are still there, and close our ends of pipes and connections."""
        for one in self.children():
            one.kill()
        self.process.kill()
        self.process.wait()
        if hasattr(self, "http"):
            self.http.close()
            self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()

    def children(self) -> list[psutil.Process]:
        """Return the processes that the server has started."""
        try:
            return psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def engine(self) -> psutil.Process:
        """Return the process that has the model."""
        (engine,) = self._children_running("pagewick.engine_process")
        return engine

    def api_processes(self) -> list[psutil.Process]:
        """Return the processes that answer requests, if there are several."""
        return self._children_running("pagewick.server.hub.api_process")

    def _children_running(self, module: str) -> list[psutil.Process]:
        return [one for one in self.children() if one.ppid() == self.pid and module in one.cmdline()]

    def metrics(self) -> Metrics:
        response = self.http.get("/metrics")
        assert response.status_code == 200
        metrics = Metrics()
        for line in response.text.splitlines():
            if not line.startswith("#") and (match := _SAMPLE.fullmatch(line)):
                labels = [
                    one for one in (match["labels"] or "").split(",") if one and not one.startswith("model_name=")
                ]
                metrics[match["name"] + ("{" + ",".join(labels) + "}" if labels else "")] = float(match["value"])
        return metrics

    def wait_until_idle(self) -> Metrics:
        """Return the metrics once no request runs or waits and all accepted requests have finished."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            found = self.metrics()
            if found.is_idle and found.accepted == found.finished.total():
                return found
            assert time.monotonic() < deadline, f"not idle: {found.accepted} accepted, {found.finished}"
            time.sleep(0.05)

    def until(self, condition: Callable[[], bool]) -> float:
        """Wait until the condition holds; return how many seconds that took."""
        begun = time.monotonic()
        while not condition():
            assert time.monotonic() - begun < DEADLINE_S, "waited in vain for a condition"
            time.sleep(0.05)
        return time.monotonic() - begun

    def records(self) -> list[dict[str, Any]]:
        """Return all records logged so far. Fails if a line is not JSON, such as a traceback of the interpreter."""
        with self.log_path.open("rb") as log:
            log.seek(self._num_read)
            for line in log:
                if not line.endswith(b"\n"):
                    break
                self._num_read += len(line)
                self._records.append(json.loads(line))
        return self._records

    def requests_in_log(self, prefix: str = "") -> tuple[dict[str, list[Finished]], dict[str, list[int]]]:
        """Return two dictionaries by request id: how requests finished, and the statuses that refused them."""
        finished: dict[str, list[Finished]] = {}
        refused: dict[str, list[int]] = {}
        for record in self.records():
            if not str(record.get("request_id", "")).startswith(prefix):
                continue
            if match := _FINISHED.match(record["message"]):
                one = Finished(match["reason"], int(match["prompt"]), int(match["generated"]))
                finished.setdefault(match["id"], []).append(one)
            elif match := _REFUSED.match(record["message"]):
                refused.setdefault(match["id"], []).append(int(match["status"]))
        return finished, refused

    def troubles(self) -> list[str]:
        """Return the messages above INFO, with their tracebacks."""
        found = [one for one in self.records() if one["level"] not in ("DEBUG", "INFO")]
        return [one["message"] + one.get("exc", "") for one in found]


@dataclass(frozen=True)
class Resources:
    """The resources of a process. memory: bytes of anonymous memory, swapped out or not, since file pages are free."""

    memory: int
    num_fds: int
    num_threads: int

    @classmethod
    def of(cls, pid: int) -> Resources:
        status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
        kib = {line.partition(":")[0]: line.split()[1] for line in status.splitlines() if len(line.split()) > 1}
        return cls(
            1024 * (int(kib["RssAnon"]) + int(kib["VmSwap"])), len(os.listdir(f"/proc/{pid}/fd")), int(kib["Threads"])
        )
