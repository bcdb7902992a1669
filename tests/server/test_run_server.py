"""The server as a process: it announces its address, and signals end it in order."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from pagewick.config import EngineConfig
from pagewick.errors import ConfigError, EngineDeadError
from pagewick.server import run
from pagewick.server.listening import listening
from pagewick.server.run import read_template
from pagewick.server.settings import ServerSettings
from tests.tiny_text import QWEN_TEMPLATE, byte_level_backend, write_model_directory

ROOT = Path(__file__).parents[2]


@contextmanager
def serve(tmp_path: Path, port: int = 0, *more: str, template: str = QWEN_TEMPLATE) -> Iterator[subprocess.Popen[str]]:
    path = write_model_directory(tmp_path, byte_level_backend(), chat_template=template)
    command = [sys.executable, "-m", "tests.server.serve_fake", str(path), str(port), *more]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def read_address(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    address, architecture = process.stdout.readline().split()
    assert architecture == "Fake"
    return address


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_with_exit_code_0(tmp_path: Path, number: signal.Signals) -> None:
    with serve(tmp_path) as process:
        address = read_address(process)
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = httpx.post(f"{address}/v1/chat/completions", json=body).json()
        assert answer["choices"][0]["message"]["content"] == "Hello 😀!"
        assert answer["model"] == str(tmp_path)
        process.send_signal(number)
        output, errors = process.communicate(timeout=30)
        assert (process.returncode, output.split("\n"), errors) == (0, ["engine closed", "returned", ""], "")


def test_thinking_without_effect_is_logged_at_the_start(tmp_path: Path) -> None:
    with serve(tmp_path, 0, "thinking", template="{{ messages[0].content }}") as process:
        read_address(process)
        process.send_signal(signal.SIGTERM)
        assert "--thinking has no effect" in process.communicate(timeout=30)[1]


@pytest.mark.parametrize("num_signals", [1, 2])
def test_a_request_in_flight_gets_an_error(tmp_path: Path, num_signals: int) -> None:
    with serve(tmp_path, 0, "pause") as process:
        address = read_address(process)
        body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
        with httpx.stream("POST", f"{address}/v1/chat/completions", json=body, timeout=30) as response:
            lines = (line for line in response.iter_lines() if line.startswith("data: "))
            next(lines)
            for _ in range(num_signals):
                process.send_signal(signal.SIGTERM)
            rest = list(lines)
        assert "shutting down" in json.loads(rest[-1].removeprefix("data: "))["error"]["message"]
        output, errors = process.communicate(timeout=30)
        assert (process.returncode, output.split()[-1], errors) == (0, "returned", "")


def test_a_port_in_use_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with serve(tmp_path, port) as process:
            output, errors = process.communicate(timeout=30)
    assert process.returncode == 1 and output == ""
    assert f"cannot listen on 127.0.0.1:{port}" in errors and "choose another port with --port" in errors


@pytest.mark.parametrize("host", ["a" * 64 + ".example", "a..example", "."])
def test_a_host_that_no_name_can_be_is_named(host: str) -> None:
    with pytest.raises(ConfigError) as caught, listening(ServerSettings(host=host)):
        pass
    assert str(caught.value).startswith(f"cannot listen on {host}:8000 (") and "--host" in str(caught.value)


@pytest.mark.parametrize(("given", "expected"), [(None, 1024), (7, 7)])
def test_a_server_limits_its_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: int | None, expected: int
) -> None:
    configs = []

    class Server:
        def __init__(self, config: EngineConfig, *_: object, **more: object) -> None:
            configs.append(config)

        async def run(self) -> None:
            pass

    monkeypatch.setattr(run, "_Server", Server)
    path = write_model_directory(tmp_path, byte_level_backend())
    run.run_server(EngineConfig(model=str(path), max_waiting_requests=given), ServerSettings.for_model(port=0))
    assert [config.max_waiting_requests for config in configs] == [expected]


def test_the_last_traces_are_sent_also_if_the_server_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []

    class Traces:
        def __init__(self, settings: ServerSettings) -> None:
            pass

        def close(self) -> None:
            closed.append(self)

    class Server:
        def __init__(self, *_: object, **more: object) -> None:
            pass

        async def run(self) -> None:
            raise EngineDeadError("it ended")

    monkeypatch.setattr(run, "Tracing", Traces)
    monkeypatch.setattr(run, "_Server", Server)
    path = write_model_directory(tmp_path, byte_level_backend())
    settings = ServerSettings.for_model(port=0, otlp_endpoint="http://localhost:4318")
    with pytest.raises(EngineDeadError):
        run.run_server(EngineConfig(model=str(path)), settings)
    assert len(closed) == 1


def test_a_byte_order_mark_is_no_part_of_a_chat_template(tmp_path: Path) -> None:
    (tmp_path / "template.jinja").write_text("\ufeff{{ messages }}", encoding="utf-8")
    assert read_template(tmp_path / "template.jinja") == "{{ messages }}"
