"""Which of the tools that the server runs itself a chat is offered, beside the client's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pagewick.errors import InvalidRequestError
from pagewick.server.core.request import ChatRequest
from pagewick.server.core.tool_rounds import ServerTools
from pagewick.text.tool_calls.checks import MAX_TOOLS

_SWITCH = "set server_tools to false to do without the tools of the server"


def with_server_tools(
    chat: ChatRequest, wanted: bool | Sequence[str] | None, tools: ServerTools | None
) -> tuple[ChatRequest, frozenset[str]]:
    """Return the request with the server's tools behind its own, and the names of those.

    wanted: the request's field server_tools. Raises InvalidRequestError for names that the server does not have, or
    that both have, and for requests that cannot have rounds.
    """
    chosen = _chosen(wanted, () if tools is None else tools.definitions)
    if tools is None or not chosen or chat.tool_choice.mode == "none":
        return chat, frozenset()
    if (chat.sampling.get("n") or 1) > 1:
        raise InvalidRequestError(f"n must be 1 with the tools of the server; {_SWITCH}", param="n")
    if chat.records:
        message = f"record_conversation cannot be combined with the tools of the server; {_SWITCH}"
        raise InvalidRequestError(message, param="record_conversation")
    names = frozenset(_name(tool) for tool in chosen)
    for place, tool in enumerate(chat.tools):
        function = tool.get("function")
        if isinstance(function, Mapping) and function.get("name") in names:
            where = f"tools[{place}].function.name"
            message = f"{where} {function['name']!r} is the name of a tool of the server; give it another, or {_SWITCH}"
            raise InvalidRequestError(message, param=where)
    if len(chat.tools) + len(chosen) > MAX_TOOLS:
        message = (
            f"there are {len(chat.tools)} tools and {len(chosen)} of the server's, but a model is offered {MAX_TOOLS} "
            "at most; name those of the server's in server_tools that are needed"
        )
        raise InvalidRequestError(message, param="tools")
    return replace(chat, tools=[*chat.tools, *chosen]), names


def _chosen(wanted: bool | Sequence[str] | None, offered: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    if wanted is False or wanted == []:
        return ()
    if not offered and wanted is not None:
        message = "this server has no tools of its own; leave server_tools out, or start it with --mcp-config"
        raise InvalidRequestError(message, param="server_tools")
    if wanted is None or wanted is True:
        return offered
    known = [_name(tool) for tool in offered]
    if unknown := [name for name in wanted if name not in known]:
        message = f"server_tools names {unknown[0][:80]!r}, which is none of: {', '.join(known)[:1000]}"
        raise InvalidRequestError(message, param="server_tools")
    return [tool for tool in offered if _name(tool) in wanted]


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])
