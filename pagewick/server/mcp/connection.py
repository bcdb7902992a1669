"""Connection: the session with one MCP server, which is started again whenever it ends."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import TracebackType
from typing import Any, Self

import httpx2
from mcp import Client, Implementation, MCPError, StdioServerParameters, Tool, stdio_client
from mcp.client import Transport
from mcp.client.streamable_http import streamable_http_client
from mcp_types import CONNECTION_CLOSED, CallToolResult

from pagewick import __version__
from pagewick.errors import ConfigError
from pagewick.log import get_logger, printable
from pagewick.server.core.tool_rounds import ToolFailure
from pagewick.server.mcp.config import McpServer

# How long a server may take to start and to list its tools. npx and uvx download programs first.
START_TIMEOUT_S = 60.0
# A server that ends is started again after this time, which doubles each time, up to the longest one; a server that has
# lived for STEADY_S begins anew.
FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S = 0.5, 60.0, 60.0
CLOSE_TIMEOUT_S = 8.0
# A server that lists its tools on more pages does not end.
MAX_PAGES = 64
# The library says this when a server with a URL has forgotten the session.
_NO_SESSION = "Session terminated"
_ENDED = "the tool's server ended before it gave a result"
# A server may hold the stream of a response open while a tool runs; Connection.call has the limit for that.
_HTTP_TIMEOUT = httpx2.Timeout(30.0, read=None)

_logger = get_logger(__name__)
# The library logs all that it cannot read, which may be results. This module's records say enough.
logging.getLogger("mcp").setLevel(logging.CRITICAL)


class Connection:
    """Runs one MCP server, or the session with one that has a URL. tools: those that it listed at the start."""

    def __init__(self, server: McpServer, start_timeout_s: float = START_TIMEOUT_S) -> None:
        self.server = server
        self.tools: Sequence[Tool] = ()
        self._start_timeout_s = start_timeout_s
        self._has_started = False
        self._client: Client | None = None
        self._ended = asyncio.Event()  # of the present session
        self._closing = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return once the server has listed its tools. Raises ConfigError if it does not."""
        started: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._running = asyncio.create_task(self._run(started))
        await started

    async def close(self) -> None:
        """End the session, and the program. Calls that still run fail."""
        self._closing.set()
        if self._running is None:
            return
        if not self._has_started:
            self._running.cancel()
        done, _ = await asyncio.wait({self._running}, timeout=CLOSE_TIMEOUT_S)
        if not done:
            self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> CallToolResult:
        """Raises ToolFailure, whose message is for the model, if there is no result."""
        client = self._client
        if client is None:
            raise ToolFailure("the tool's server has ended and is being started again; try again later")
        try:
            async with asyncio.timeout(timeout_s):
                return await client.call_tool(name, dict(arguments))
        except TimeoutError:
            raise ToolFailure(f"the tool gave no result within {timeout_s:g} s") from None
        except MCPError as error:
            if error.code == CONNECTION_CLOSED or str(error) == _NO_SESSION:
                self._ended.set()
                raise ToolFailure(_ENDED) from None
            raise ToolFailure(str(error)) from None
        # Whatever a server sends: only this call fails.
        except Exception as error:
            if client is not self._client:
                raise ToolFailure(_ENDED) from None
            raise ToolFailure(f"the tool's server sent a wrong result: {_reason(error)}") from None

    async def _run(self, started: asyncio.Future[None]) -> None:
        """Hold a session open, one after another, until `close`."""
        loop = asyncio.get_running_loop()
        pause_s = FIRST_PAUSE_S
        name = self.server.name
        while not self._closing.is_set():
            began = loop.time()
            reason = "it ended"
            try:
                await self._hold_session(started)
            # Whatever a server does, it must not end this task, which starts it again.
            except Exception as error:
                reason = _reason(error)
            if not started.done():
                started.set_exception(ConfigError(self._start_message(reason)))
                return
            if self._closing.is_set():
                return
            if loop.time() - began >= STEADY_S:
                pause_s = FIRST_PAUSE_S
            _logger.warning("MCP server %s: %s; it is started again in %g s", name, printable(reason), pause_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._closing.wait(), pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _hold_session(self, started: asyncio.Future[None]) -> None:
        """Return when the session has ended, or is to be closed."""
        ended = self._ended = asyncio.Event()
        info = Implementation(name="pagewick", version=__version__)
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(self._start_timeout_s):
                    made = Client(_Watched(_transport(self.server), ended), client_info=info, cache=None)
                    client = await held.enter_async_context(made)
                    tools = await _all_tools(client)
            except TimeoutError:
                raise TimeoutError(f"it did not list its tools within {self._start_timeout_s:g} s") from None
            self._take_tools(tools, is_first=not started.done())
            self._client, self._has_started = client, True
            try:
                if not started.done():
                    started.set_result(None)
                waits = [asyncio.ensure_future(event.wait()) for event in (ended, self._closing)]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                self._client = None
                for wait in waits:
                    wait.cancel()

    def _take_tools(self, tools: Sequence[Tool], *, is_first: bool) -> None:
        name = self.server.name
        if is_first:
            self.tools = tools
            return
        _logger.info("MCP server %s runs again", name)
        if [one.model_dump() for one in tools] != [one.model_dump() for one in self.tools]:
            _logger.warning("MCP server %s has other tools than at the start; restart to offer these", name)

    def _start_message(self, reason: str) -> str:
        what = "the program" if self.server.command is not None else "the URL"
        return (
            f"the MCP server {self.server.name!r} ({printable(self.server.place)[:200]}) did not start: "
            f"{printable(reason)[:300]}; check {what}, or run it alone to see what it says"
        )


class _Watched:
    """A Transport, and a ReadStream of messages, that set an event when the messages end."""

    def __init__(self, transport: Transport, ended: asyncio.Event) -> None:
        self._transport = transport
        self._ended = ended

    async def __aenter__(self) -> Any:
        read, write = await self._transport.__aenter__()
        return _WatchedStream(read, self._ended), write

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        return await self._transport.__aexit__(kind, error, trace)


class _WatchedStream:
    def __init__(self, stream: Any, ended: asyncio.Event) -> None:
        self._stream = stream
        self._ended = ended

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    async def __aenter__(self) -> Self:
        await self._stream.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        self._ended.set()
        left: bool | None = await self._stream.__aexit__(kind, error, trace)
        return left

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        return await self._stream.__anext__()


def _transport(server: McpServer) -> Transport:
    return _stdio(server) if server.command is not None else _http(server)


@asynccontextmanager
async def _stdio(server: McpServer) -> AsyncGenerator[Any]:
    """Run the program. It inherits no more of the environment than HOME, LOGNAME, PATH, SHELL, TERM and USER."""
    assert server.command is not None, "an MCP server without a program"
    parameters = StdioServerParameters(
        command=server.command, args=list(server.args), env=dict(server.env), cwd=server.cwd
    )
    if sys.__stderr__ is not None:
        async with stdio_client(parameters, errlog=sys.__stderr__) as streams:
            yield streams
        return
    with open(os.devnull, "w") as nowhere:
        async with stdio_client(parameters, errlog=nowhere) as streams:
            yield streams


@asynccontextmanager
async def _http(server: McpServer) -> AsyncGenerator[Any]:
    assert server.url is not None, "an MCP server without an address"
    async with (
        httpx2.AsyncClient(headers=dict(server.headers), timeout=_HTTP_TIMEOUT) as http,
        streamable_http_client(server.url, http_client=http) as streams,
    ):
        yield streams


async def _all_tools(client: Client) -> list[Tool]:
    page = await client.list_tools()
    tools = list(page.tools)
    for _ in range(MAX_PAGES):
        if page.next_cursor is None:
            return tools
        page = await client.list_tools(cursor=page.next_cursor)
        tools += page.tools
    raise ValueError(f"it lists its tools on more than {MAX_PAGES} pages")


def _reason(error: BaseException) -> str:
    """Return the first error of a group, in words."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__
