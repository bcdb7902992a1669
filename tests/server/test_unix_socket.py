"""A server on a Unix socket: clients, processes, who may connect, and what stands in the way of the file."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from pagewick.cli import cli
from pagewick.cli.server_address import ServerAddress
from pagewick.errors import ConfigError
from pagewick.server.listening import address_of, listening
from pagewick.server.settings import ServerSettings

QUESTION = {"messages": [{"role": "user", "content": "What is Pagewick?"}], "max_tokens": 8}


@contextlib.contextmanager
def serving(path: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "pagewick", "serve", "--uds", str(path), *more]
    with (path.parent / "log").open("w") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def client_of(path: Path) -> httpx.Client:
    return httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://localhost", timeout=60)


def until_ready(path: Path, client: httpx.Client, process: subprocess.Popen[str]) -> None:
    for _ in range(600):
        # A socket that refuses a connection would be left open by the client's package.
        if path.exists() and client.get("/health/ready").status_code == 200:
            return
        assert process.poll() is None
        time.sleep(0.1)
    raise AssertionError("the server is not ready")


def printed_until(process: subprocess.Popen[str], last: str) -> str:
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith(last):
            return "".join(lines)
    raise AssertionError(lines)


def test_it_serves_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a socket"
    with serving(path, "--api-server-count", "2") as process, client_of(path) as client:
        until_ready(path, client, process)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        text = client.post("/v1/chat/completions", json=QUESTION).json()["choices"][0]["message"]["content"]
        assert text
        # A page in a browser could only get here through a proxy that forwards its name.
        assert client.get("/v1/models", headers={"host": "evil.example"}).status_code == 403

        printed = printed_until(process, "Ctrl-C")
        assert f"Pagewick is ready on unix:{path}\n" in printed
        command = shlex.split(next(line for line in printed.splitlines() if line.startswith("curl ")))
        assert command[:4] == ["curl", "--unix-socket", str(path), "http://localhost/v1/chat/completions"]
        assert client.post("/v1/chat/completions", json=json.loads(command[-1])).status_code == 200
        names: dict[str, Any] = {}
        exec(printed[printed.index("import httpx") : printed.index("\n\nCtrl-C")], names)
        names["client"].close()
        assert "inference" in capsys.readouterr().out

        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    assert not path.exists()


def test_the_command_line_talks_to_it(tmp_path: Path) -> None:
    path = tmp_path / "pagewick.sock"
    with serving(path) as process, client_of(path) as client:
        until_ready(path, client, process)
        url = f"unix://{path}"
        talk = CliRunner().invoke(cli, ["chat", "--url", url, "--max-tokens", "4"], input="Hello\n")
        assert talk.exit_code == 0 and talk.stdout.strip(), talk.output
        options = [
            "--concurrency",
            "1",
            "--input-len",
            "8",
            "--output-len",
            "4",
            "--num-prompts",
            "2",
            "--repeats",
            "1",
            "--json",
        ]
        measured = CliRunner().invoke(cli, ["bench", "--url", url, *options])
        assert measured.exit_code == 0, measured.output
        (measured_server,) = json.loads(measured.stdout)["servers"]
        assert measured_server["url"] == f"unix:{path}" and not measured_server["errors"]

        with serving(path) as second:
            assert second.wait(60) == 1
        assert client.get("/health").status_code == 200
    # That server was killed, and has left its file.
    assert path.exists()
    refused = CliRunner().invoke(cli, ["chat", "--url", url], input="Hello\n")
    assert f"cannot connect to unix:{path}: Connection refused" in refused.output


def test_an_abandoned_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "pagewick.sock"
    with socket.socket(socket.AF_UNIX) as gone:
        gone.bind(str(path))
    with listening(ServerSettings(uds=str(path))) as listener:
        assert address_of(listener) == f"unix:{path}"
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        with pytest.raises(ConfigError, match="another server listens there"), listening(ServerSettings(uds=str(path))):
            pass
        assert path.exists()
    assert not path.exists()


def test_what_has_taken_its_place_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "pagewick.sock"
    with listening(ServerSettings(uds=str(path))):
        path.unlink()
        path.write_text("mine")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("kind", ["file", "directory", "link", "no directory", "long"])
def test_a_path_that_cannot_be_a_socket_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "pagewick.sock"
    if kind == "file":
        path.write_text("kept")
    elif kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "no directory":
        path = tmp_path / "none" / "pagewick.sock"
    else:
        path = tmp_path / ("long" * 60)
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(ConfigError) as caught, listening(ServerSettings(uds=str(path))):
        pass
    assert str(caught.value).startswith(f"cannot listen on the Unix socket {path} (")
    assert str(caught.value).endswith("; choose another with --uds")
    assert sorted(os.listdir(tmp_path)) == before and (kind != "file" or path.read_text() == "kept")


@pytest.mark.parametrize("host", ["unix:/run/pagewick.sock", "unix:///run/pagewick.sock", "/run/pagewick.sock"])
def test_a_host_may_be_a_socket(host: str) -> None:
    settings = ServerSettings(host=host)
    assert (settings.uds, settings.host) == ("/run/pagewick.sock", "127.0.0.1")


@pytest.mark.parametrize(("host", "path"), [("0.0.0.0", "/run/x.sock"), ("127.0.0.1", ""), ("unix:", None)])
def test_contradictions_are_refused(host: str, path: str | None) -> None:
    with pytest.raises(ConfigError, match="leave --host out"):
        ServerSettings(host=host, uds=path)


def test_an_address_without_a_path_is_refused() -> None:
    with pytest.raises(ConfigError, match="write unix:PATH"):
        ServerAddress.parse("unix://")
