"""Which MCP servers the operator has named, with --mcp-command or in the file of --mcp-config."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pagewick.errors import ConfigError
from pagewick.server.settings import ServerSettings

MAX_CONFIG_BYTES = 2**20
# Name of the server that --mcp-command starts.
COMMAND_NAME = "mcp"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,48}")
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)\}")
_EXAMPLE = '{"mcpServers": {"files": {"command": "npx", "args": ["..."]}, "web": {"url": "https://..."}}}'
_KINDS = {"command": ("stdio",), "url": ("http", "streamable-http", "streamable_http", "streamableHttp")}
_FIELDS = {"command": {"command", "args", "env", "cwd"}, "url": {"url", "headers"}}


@dataclass(frozen=True, slots=True)
class McpServer:
    """An MCP server: a program that talks over its standard input and output, or a URL of streamable HTTP.

    One of `command` and `url` is set. env: variables of the program beside the few that it inherits. cwd: its working
    directory; None: this process's. headers: of every HTTP request. Values of env and headers may be secrets.
    """

    name: str
    command: str | None = None
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def place(self) -> str:
        """Return the program, or the URL without a query and a password in it, for errors."""
        if self.command is not None:
            return self.command
        parts = urlsplit(self.url or "")
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def mcp_servers(settings: ServerSettings) -> tuple[McpServer, ...]:
    """Return the servers that the settings name. Raises ConfigError if the file cannot be read or is malformed."""
    found: list[McpServer] = []
    if settings.mcp_command is not None:
        args = tuple(settings.mcp_args.split(",")) if settings.mcp_args else ()
        found.append(McpServer(COMMAND_NAME, settings.mcp_command, args))
    if settings.mcp_config is not None:
        found += read_config(Path(settings.mcp_config))
    names = [server.name for server in found]
    if names.count(COMMAND_NAME) > 1:
        raise ConfigError(
            f"--mcp-config has a server {COMMAND_NAME!r}, which is the name of that of --mcp-command; give it another"
        )
    return tuple(found)


def read_config(file: Path) -> list[McpServer]:
    """Return the servers of a file, in its order. Raises ConfigError, which names the file and the entry."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"cannot read --mcp-config {file}: {error.strerror}; check the path") from None
    if len(raw) > MAX_CONFIG_BYTES:
        raise ConfigError(f"--mcp-config {file} has more than {MAX_CONFIG_BYTES} bytes; it should be a short JSON file")
    try:
        data = json.loads(raw, object_pairs_hook=_without_duplicates)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--mcp-config {file} is not JSON: {error}; it should be like {_EXAMPLE}") from None
    servers = data.get("mcpServers") if isinstance(data, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise ConfigError(f"--mcp-config {file} must be an object with servers in mcpServers, like {_EXAMPLE}")
    if others := sorted(data.keys() - {"mcpServers", "$schema"}):
        raise ConfigError(f"--mcp-config {file} has an unknown field {others[0]!r}; only mcpServers is known")
    found = []
    for name, entry in servers.items():
        try:
            server = _server(name, entry)
        except ConfigError as error:
            raise ConfigError(f"--mcp-config {file}, server {name[:64]!r}: {error}") from None
        if server is not None:
            found.append(server)
    return found


def _server(name: str, entry: Any) -> McpServer | None:
    """Return the server of an entry; None if it is disabled."""
    if not _NAME.fullmatch(name):
        raise ConfigError("a name must be 1 to 48 letters, digits and characters of _ and -")
    if not isinstance(entry, dict):
        raise ConfigError("it must be an object with a command or a url")
    if not isinstance(entry.get("disabled", False), bool):
        raise ConfigError("disabled must be true or false")
    kinds = [kind for kind in ("command", "url") if kind in entry]
    if len(kinds) != 1:
        raise ConfigError("it must have a command or a url" + (", not both" if kinds else ""))
    kind = kinds[0]
    if unknown := sorted(entry.keys() - _FIELDS[kind] - {"type", "disabled"}):
        raise ConfigError(
            f"{unknown[0][:64]!r} is not known; beside a {kind} there may be "
            f"{', '.join(sorted(_FIELDS[kind] - {kind}))}, type and disabled"
        )
    if entry.get("type", _KINDS[kind][0]) not in _KINDS[kind]:
        raise ConfigError(
            f"type {str(entry['type'])[:32]!r} is not supported beside a {kind}; it may be {' or '.join(_KINDS[kind])}"
        )
    if not isinstance(entry[kind], str) or not entry[kind] or "\0" in entry[kind]:
        raise ConfigError(f"{kind} must be a text that is not empty")
    if kind == "url" and (urlsplit(entry["url"]).scheme not in ("http", "https") or not urlsplit(entry["url"]).netloc):
        raise ConfigError("url must begin with http:// or https:// and name a host")
    args = entry.get("args", [])
    if not isinstance(args, list) or not all(isinstance(one, str) and "\0" not in one for one in args):
        raise ConfigError("args must be a list of texts")
    cwd = entry.get("cwd")
    if cwd is not None and not isinstance(cwd, str):
        raise ConfigError("cwd must be a directory")
    if entry.get("disabled"):
        return None
    return McpServer(
        name,
        entry.get("command"),
        tuple(args),
        _texts(entry.get("env", {}), "env"),
        cwd,
        entry.get("url"),
        _texts(entry.get("headers", {}), "headers"),
    )


def _texts(given: Any, name: str) -> dict[str, str]:
    """Return texts by name, with ${NAME} replaced by the environment's variable."""
    if not isinstance(given, dict) or not all(isinstance(one, str) and "\0" not in one for one in given.values()):
        raise ConfigError(f"{name} must be an object of texts")

    def value_of(match: re.Match[str]) -> str:
        if (value := os.environ.get(match[1])) is None:
            raise ConfigError(f"{name} has ${{{match[1]}}}, but the environment has no such variable; set it")
        return value

    return {key: _VARIABLE.sub(value_of, text) for key, text in given.items()}


def _without_duplicates(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"it has {key[:64]!r} twice")
        found[key] = value
    return found
