"""A real MCP server. Without arguments it talks over standard input and output, with a port over streamable HTTP."""

from __future__ import annotations

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("tests", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return f"the sum is {a + b}"


@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    try:
        await asyncio.sleep(seconds)
    except asyncio.CancelledError:
        print("the wait was cancelled", file=sys.stderr, flush=True)
        raise
    return "waited"


@server.tool()
def repeat(text: str, times: int) -> str:
    """Repeat a text."""
    return text * times


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ToolError(reason)


@server.tool()
def variables() -> str:
    """Return the names of the environment's variables, and the value of GREETING."""
    return " ".join(sorted(os.environ)) + " | " + os.environ.get("GREETING", "")


@server.tool()
def pid() -> str:
    """Return the id of this process."""
    return str(os.getpid())


@server.tool()
def die() -> str:
    """End the process in the middle of the call."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
