"""Which MCP servers a command line and a file name, and the errors about those that they name wrongly."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewick.errors import ConfigError
from pagewick.server.mcp.config import McpServer, mcp_servers
from pagewick.server.mcp.toolbox import Toolbox
from pagewick.server.settings import ServerSettings


def servers_of(directory: Path, content: Any, **settings: Any) -> tuple[McpServer, ...]:
    file = directory / "mcp.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return mcp_servers(ServerSettings(served_model_name=("m",), mcp_config=str(file), **settings))


def test_a_file_and_a_command_name_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", "12345")
    entries = {
        "files": {"command": "npx", "args": ["-y", "files", "/data"], "env": {"A": "x${TOKEN}y$Z"}, "cwd": "/tmp"},
        "web": {"type": "http", "url": "https://user:pw@example.org/mcp?q=1", "headers": {"authorization": "${TOKEN}"}},
        "off": {"command": "x", "disabled": True},
        "on": {"type": "stdio", "command": "x", "disabled": False},
    }
    command, files, web, on = servers_of(
        tmp_path, {"mcpServers": entries}, mcp_command="uvx", mcp_args="time,--local-timezone=Europe/Rome"
    )
    assert command == McpServer("mcp", "uvx", ("time", "--local-timezone=Europe/Rome"))
    assert files == McpServer("files", "npx", ("-y", "files", "/data"), {"A": "x12345y$Z"}, "/tmp")
    assert web.headers == {"authorization": "12345"} and web.place == "https://example.org/mcp"
    assert on.args == () and "12345" not in repr((files, web))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON: "),
        ("[" * 100_000, "is not JSON: "),
        ("\ud800".encode("utf-8", "surrogatepass").decode("latin-1"), "is not JSON: "),
        ([], "must be an object with servers in mcpServers, like "),
        ({"mcpServers": {}}, "must be an object with servers in mcpServers, like "),
        ({"mcpServers": {"a": {"command": "x"}}, "inputs": []}, "has an unknown field 'inputs'"),
        ('{"mcpServers": {"a": {"command": "x"}, "a": {"command": "y"}}}', "it has 'a' twice"),
        ({"mcpServers": {"a b": {"command": "x"}}}, "server 'a b': a name must be 1 to 48 letters"),
        ({"mcpServers": {"a": "x"}}, "it must be an object with a command or a url"),
        ({"mcpServers": {"a": {"args": []}}}, "it must have a command or a url"),
        ({"mcpServers": {"a": {"command": "x", "url": "http://x"}}}, "it must have a command or a url, not both"),
        (
            {"mcpServers": {"a": {"command": "x", "arg": []}}},
            "'arg' is not known; beside a command there may be args, ",
        ),
        (
            {"mcpServers": {"a": {"url": "http://x", "env": {}}}},
            "'env' is not known; beside a url there may be headers",
        ),
        ({"mcpServers": {"a": {"command": "x", "args": "y"}}}, "args must be a list of texts"),
        ({"mcpServers": {"a": {"command": "x\0y"}}}, "command must be a text that is not empty"),
        ({"mcpServers": {"a": {"command": ""}}}, "command must be a text that is not empty"),
        ({"mcpServers": {"a": {"command": "x", "env": {"A": 1}}}}, "env must be an object of texts"),
        ({"mcpServers": {"a": {"command": "x", "env": {"A": "${NO_SUCH}"}}}}, "the environment has no such variable"),
        ({"mcpServers": {"a": {"command": "x", "cwd": 3}}}, "cwd must be a directory"),
        ({"mcpServers": {"a": {"command": "x", "disabled": "yes"}}}, "disabled must be true or false"),
        ({"mcpServers": {"a": {"url": "file:///x"}}}, "url must begin with http:// or https:// and name a host"),
        ({"mcpServers": {"a": {"url": "http://x", "type": "sse"}}}, "type 'sse' is not supported beside a url"),
        (" " * (2**20 + 1), "has more than 1048576 bytes"),
    ],
)
def test_a_malformed_file_is_refused(tmp_path: Path, content: Any, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        servers_of(tmp_path, content)
    assert message in str(error.value) and "mcp.json" in str(error.value)


def test_a_file_that_is_not_there_and_a_name_that_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory; check the path"):
        mcp_servers(ServerSettings(served_model_name=("m",), mcp_config=str(tmp_path / "none.json")))
    with pytest.raises(ConfigError, match="which is the name of that of --mcp-command"):
        servers_of(tmp_path, {"mcpServers": {"mcp": {"command": "x"}}}, mcp_command="y")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mcp_args": "x"}, "--mcp-args has the arguments of --mcp-command; give that, too"),
        ({"mcp_command": ""}, "must not be empty"),
        ({"mcp_config": ""}, "must not be empty"),
        ({"mcp_command": "x", "mcp_timeout": 0.0}, "--mcp-timeout must be above 0"),
        ({"mcp_command": "x", "mcp_max_rounds": 0}, "--mcp-max-rounds must be above 0"),
        ({"mcp_command": "x", "api_server_count": 2}, "--mcp-command is for a server with one model"),
        ({"mcp_config": "x", "models_dir": "/models"}, "--mcp-config is for a server with one model"),
        (
            {"mcp_config": "x", "record_conversation": True},
            "--mcp-config cannot be combined with --record-conversation",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ServerSettings(served_model_name=("m",), **settings)


def test_the_library_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "pagewick.server.mcp.connection", raising=False)
    monkeypatch.setitem(sys.modules, "mcp", None)
    settings = ServerSettings(served_model_name=("m",), mcp_command="x")
    with pytest.raises(ConfigError, match=r"install it with: pip install 'pagewick\[mcp\]'"):
        Toolbox(mcp_servers(settings), settings)
