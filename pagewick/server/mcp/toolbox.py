"""Toolbox: the tools of all MCP servers of this server."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pagewick.errors import ConfigError, InvalidRequestError
from pagewick.log import get_logger, printable
from pagewick.server.core.tool_rounds import ToolFailure
from pagewick.server.mcp.config import McpServer
from pagewick.server.mcp.results import text_of_result
from pagewick.server.settings import ServerSettings
from pagewick.text.tool_calls.checks import MAX_TOOLS, checked_offer

if TYPE_CHECKING:
    from pagewick.server.mcp.connection import Connection

_UNFIT = re.compile(r"[^a-zA-Z0-9_.-]")
MAX_NAME_CHARS = 128

_logger = get_logger(__name__)


class Toolbox:
    """A ServerTools over MCP servers. A tool keeps its name unless tools of two servers have it: SERVER__TOOL then."""

    def __init__(self, servers: Sequence[McpServer], settings: ServerSettings) -> None:
        """Raises ConfigError if the library `mcp` is not installed."""
        try:
            from pagewick.server.mcp.connection import Connection
        except ImportError as error:
            raise ConfigError(
                f"--mcp-command and --mcp-config need the package mcp ({error}); install it with: pip install "
                "'pagewick[mcp]'"
            ) from None
        self.definitions: Sequence[Mapping[str, Any]] = ()
        self.max_rounds = settings.mcp_max_rounds
        self.timeout_s = settings.mcp_timeout
        self._max_chars = settings.mcp_max_result
        self._connections = [Connection(server) for server in servers]
        self._tools: dict[str, tuple[Connection, str]] = {}  # by the name that the model sees

    async def start(self) -> None:
        """Start all servers at the same time, and list their tools.

        Raises ConfigError if one does not start, or its tools cannot be offered to a model.
        """
        tasks = [asyncio.create_task(connection.start()) for connection in self._connections]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        self._name_tools()
        counts = ", ".join(f"{one.server.name} ({len(one.tools)} tools)" for one in self._connections)
        _logger.info("MCP servers: %s", counts)

    async def close(self) -> None:
        """End all servers."""
        await asyncio.gather(*(connection.close() for connection in self._connections))

    async def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> str:
        """Return the result as a text, which is cut at the limit. Raises ToolFailure."""
        connection, own_name = self._tools[name]
        result = await connection.call(own_name, arguments, timeout_s)
        text = self._cut(text_of_result(result))
        if result.is_error:
            raise ToolFailure(text or "the tool failed without a reason")
        return text

    def _cut(self, text: str) -> str:
        if len(text) <= self._max_chars:
            return text
        limit = self._max_chars
        return f"{text[:limit]}\n[The result was cut here: these are {limit} of {len(text)} characters.]"

    def _name_tools(self) -> None:
        counts = Counter(tool.name for one in self._connections for tool in one.tools)
        definitions = []
        for connection in self._connections:
            for tool in connection.tools:
                shown = tool.name if counts[tool.name] == 1 else f"{connection.server.name}__{tool.name}"
                shown = _UNFIT.sub("_", shown)[:MAX_NAME_CHARS]
                where = f"the MCP server {connection.server.name!r} has a tool {printable(tool.name)[:128]!r}"
                if shown in self._tools:
                    raise ConfigError(f"{where}, and the model would see another one under the same name {shown!r}")
                function = {"name": shown, "parameters": tool.input_schema}
                if tool.description:
                    function["description"] = tool.description
                definition = {"type": "function", "function": function}
                try:
                    checked_offer([definition])
                except InvalidRequestError as error:
                    message = str(error).replace("tools[0].function.", "its ")
                    raise ConfigError(f"{where} that no model can be offered: {printable(message)[:300]}") from None
                self._tools[shown] = connection, tool.name
                definitions.append(definition)
        if not definitions:
            raise ConfigError("the MCP servers have no tools; leave out --mcp-command and --mcp-config")
        if len(definitions) > MAX_TOOLS:
            raise ConfigError(
                f"the MCP servers have {len(definitions)} tools together; a model is offered {MAX_TOOLS} at most, so "
                "leave out some servers"
            )
        self.definitions = definitions
