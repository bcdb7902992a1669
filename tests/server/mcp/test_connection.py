"""Sessions with a real MCP server: over its standard input and output, and over HTTP."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest

from pagewick.errors import ConfigError
from pagewick.server.core.tool_rounds import ToolFailure
from pagewick.server.mcp import connection
from pagewick.server.mcp.config import McpServer
from pagewick.server.mcp.connection import Connection
from pagewick.server.mcp.toolbox import Toolbox
from pagewick.server.settings import ServerSettings

PROGRAM = str(Path(__file__).with_name("tool_server.py"))
PLAIN = str(Path(__file__).with_name("plain_server.py"))
STDIO = McpServer("tests", sys.executable, (PROGRAM,), {"GREETING": "hello"})

_Result = TypeVar("_Result")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FIRST_PAUSE_S", 0.01)


@asynccontextmanager
async def opened(*servers: McpServer, **settings: Any) -> AsyncGenerator[Toolbox]:
    toolbox = Toolbox(servers, ServerSettings(served_model_name=("m",), mcp_command="x", **settings))
    try:
        await toolbox.start()
        yield toolbox
    finally:
        await toolbox.close()


def run(work: Callable[[Toolbox], Awaitable[_Result]], *servers: McpServer, **settings: Any) -> _Result:
    async def main() -> _Result:
        async with opened(*(servers or (STDIO,)), **settings) as toolbox:
            return await work(toolbox)

    return asyncio.run(main())


def plain(name: str, *tools: str) -> McpServer:
    return McpServer(name, sys.executable, ("-S", PLAIN, *tools))


async def again(toolbox: Toolbox, name: str, **arguments: Any) -> str:
    """Call a tool until its server runs."""
    deadline = time.monotonic() + 30
    while True:
        try:
            return await toolbox.call(name, arguments, 20)
        except ToolFailure as failure:
            assert "being started again" in str(failure) or "ended" in str(failure), failure
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)


def test_a_program_lists_its_tools_runs_them_and_ends_with_the_session(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PAGEWICK_SECRET", "12345")

    async def work(toolbox: Toolbox) -> int:
        names = [tool["function"]["name"] for tool in toolbox.definitions]
        assert names == ["add", "wait", "repeat", "fail", "variables", "pid", "die"]
        function = toolbox.definitions[0]["function"]
        assert function["description"] == "Add two numbers."
        assert function["parameters"]["properties"].keys() == {"a", "b"}
        assert await toolbox.call("add", {"a": 2, "b": 40}, 20) == "the sum is 42"
        # All at the same time.
        sums = await asyncio.gather(*(toolbox.call("add", {"a": 1, "b": i}, 20) for i in range(20)))
        assert sums == [f"the sum is {1 + i}" for i in range(20)]
        with pytest.raises(ToolFailure, match="a good reason"):
            await toolbox.call("fail", {"reason": "a good reason"}, 20)
        with pytest.raises(ToolFailure, match="validation error"):
            await toolbox.call("add", {"a": "x"}, 20)
        names_of_variables, greeting = (await toolbox.call("variables", {}, 20)).split(" | ")
        allowed = {"GREETING", "HOME", "LC_CTYPE", "LOGNAME", "PATH", "SHELL", "TERM", "USER"}
        assert greeting == "hello" and set(names_of_variables.split()) <= allowed
        with pytest.raises(ToolFailure, match=r"no result within 0\.3 s"):
            await toolbox.call("wait", {"seconds": 60}, 0.3)
        # The program learns that nobody waits.
        deadline = time.monotonic() + 30
        while "the wait was cancelled" not in capfd.readouterr().err:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.05)
        cut = await toolbox.call("repeat", {"text": "é", "times": 1_000_000}, 60)
        assert cut == "é" * 500 + "\n[The result was cut here: these are 500 of 1000000 characters.]"
        with pytest.raises(ToolFailure) as failure:
            await toolbox.call("fail", {"reason": "z" * 100_000}, 20)
        assert len(str(failure.value)) < 600
        return int(await toolbox.call("pid", {}, 20))

    pid = run(work, mcp_max_result=500)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_server_that_dies_gives_an_error_and_starts_again() -> None:
    async def work(toolbox: Toolbox) -> None:
        first = await toolbox.call("pid", {}, 20)
        waiting = asyncio.create_task(toolbox.call("hold", {}, 60))
        await asyncio.sleep(0)
        with pytest.raises(ToolFailure, match="ended before it gave a result"):
            await toolbox.call("die", {}, 20)
        with pytest.raises(ToolFailure, match="ended before it gave a result"):
            await waiting
        second = await again(toolbox, "pid")
        assert second != first
        # Also if it dies while nobody calls.
        os.kill(int(second), 9)
        while (third := await again(toolbox, "pid")) == second:
            await asyncio.sleep(0.01)
        assert third not in (first, second)

    run(work, plain("tests", "pid", "hold", "die"))


def test_tools_of_one_name_get_their_servers_name() -> None:
    async def work(toolbox: Toolbox) -> None:
        names = [tool["function"]["name"] for tool in toolbox.definitions]
        assert names == ["one__pid", "look", "two__pid", "see_it"]
        pids = {await toolbox.call(name, {}, 20) for name in names}
        assert len(pids) == 2

    run(work, plain("one", "pid", "look"), plain("two", "pid", "see it"))


def test_a_model_must_tell_all_tools_apart() -> None:
    with pytest.raises(ConfigError, match="has a tool 'a_b', and the model would see another one"):
        run(None, plain("odd", "a/b", "a_b"))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"have 129 tools together; a model is offered 128 at most"):
        run(None, *(plain(f"s{i}", *(f"tool-{i}-{k}" for k in range(43))) for i in range(3)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (McpServer("files", "/nowhere/program"), r"'files' \(/nowhere/program\) did not start: No such file"),
        (McpServer("files", sys.executable, ("-c", "raise SystemExit(1)")), "did not start: Connection closed"),
        (McpServer("files", sys.executable, ("-c", "print('hello')")), "did not start: Connection closed"),
        (McpServer("web", url="http://127.0.0.1:9/mcp?key=secret"), r"\(http://127.0.0.1:9/mcp\) did not start: "),
    ],
)
def test_a_server_that_does_not_start_is_named(server: McpServer, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as error:
        run(None, server)  # type: ignore[arg-type]
    assert "secret" not in str(error.value)


def test_a_silent_server_does_not_hold_up_the_start_for_ever() -> None:
    async def main() -> None:
        silent = Connection(McpServer("s", sys.executable, ("-c", "import sys; sys.stdin.read()")), start_timeout_s=0.3)
        try:
            with pytest.raises(ConfigError, match=r"did not list its tools within 0\.3 s"):
                await silent.start()
        finally:
            await silent.close()

    asyncio.run(main())


@pytest.fixture
def port() -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    yield number


@asynccontextmanager
async def http_server(port: int) -> AsyncGenerator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, PROGRAM, str(port)], stderr=subprocess.DEVNULL) as process:
        try:
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    break
                except OSError:
                    assert process.poll() is None
                    await asyncio.sleep(0.05)
            yield process
        finally:
            process.kill()


def test_a_server_with_a_url_may_end_and_come_back(port: int) -> None:
    async def main() -> None:
        web = McpServer("web", url=f"http://127.0.0.1:{port}/mcp", headers={"x-a": "b"})
        async with http_server(port) as first, opened(web) as toolbox:
            assert await toolbox.call("add", {"a": 2, "b": 3}, 20) == "the sum is 5"
            with pytest.raises(ToolFailure, match=r"no result within 0\.2 s"):
                await toolbox.call("wait", {"seconds": 30}, 0.2)
            first.kill()
            first.wait()
            with pytest.raises(ToolFailure):
                await toolbox.call("add", {"a": 2, "b": 3}, 20)
            async with http_server(port):
                assert await again(toolbox, "add", a=1, b=2) == "the sum is 3"

    asyncio.run(main())
