"""An MCP server without the library, which starts at once and knows the protocol of 2025-06-18 only.

Arguments: the names of its tools. pid returns the id of the process, die ends it, hold never answers.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def result_of(method: str, params: dict[str, Any]) -> dict[str, Any] | None:
    if method == "initialize":
        version, info = "2025-06-18", {"name": "plain", "version": "1"}
        return {"protocolVersion": version, "capabilities": {"tools": {}}, "serverInfo": info}
    if method == "tools/list":
        # A page for each tool.
        place = int(params.get("cursor") or 0)
        page: dict[str, Any] = {"tools": [{"name": sys.argv[1 + place], "inputSchema": {"type": "object"}}]}
        return page if place + 2 == len(sys.argv) else {**page, "nextCursor": str(place + 1)}
    if method == "tools/call":
        if params["name"] == "die":
            os._exit(3)
        if params["name"] == "hold":
            return None
        return {"content": [{"type": "text", "text": str(os.getpid())}]}
    return None


for line in sys.stdin:
    request = json.loads(line)
    if "id" not in request:
        continue
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
    result = result_of(request["method"], request.get("params", {}))
    if result is not None:
        answer["result"] = result
    elif request["method"] == "tools/call":
        continue
    else:
        answer["error"] = {"code": -32601, "message": "no such method"}
    print(json.dumps(answer), flush=True)
