"""A real server with the built-in model and a real MCP server, as the official client sees them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from pagewick.config import EngineConfig
from pagewick.errors import ConfigError
from pagewick.server.run import run_server
from pagewick.server.settings import ServerSettings

READY = re.compile(r"ready on (http://\S+)")
PROGRAM = str(Path(__file__).parent / "mcp" / "plain_server.py")
ASK: list[Any] = [{"role": "user", "content": "What time is it?"}]
# The model writes a call only if it must.
CALL: dict[str, Any] = {"model": "pagewick", "messages": ASK, "max_tokens": 60, "temperature": 0}
FORCED = {"type": "function", "function": {"name": "clock"}}


def command(config: Path) -> list[str]:
    return [sys.executable, "-m", "pagewick", "serve", "--port", "0", "--served-model-name", "pagewick",
            "--mcp-config", str(config)]  # fmt: skip


def write_config(directory: Path, **server: Any) -> Path:
    config = directory / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"time": server}}))
    return config


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    config = write_config(tmp_path_factory.mktemp("mcp"), command=sys.executable, args=["-S", PROGRAM, "clock", "die"])
    process = subprocess.Popen(command(config), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout as stdout:
        address = next(match[1] for line in stdout if (match := READY.search(line)))
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=60) as client:
            result = client.chat.completions.create(**CALL, tool_choice=FORCED)
            (run,) = result.choices[0].message.server_tool_calls  # type: ignore[attr-defined]
            yield client
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0
    # The program has ended with the server.
    with pytest.raises(ProcessLookupError):
        os.kill(int(run["result"]), 0)


def test_a_forced_call_runs_and_the_model_goes_on(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**CALL, tool_choice=FORCED)
    (choice,) = whole.choices
    (run,) = choice.message.server_tool_calls  # type: ignore[attr-defined]
    assert run["name"] == "clock" and not run["is_error"] and int(run["result"]) > 0
    assert choice.message.tool_calls is None and choice.message.content and choice.finish_reason in ("stop", "length")
    with client.chat.completions.stream(**CALL, tool_choice=FORCED) as stream:
        final = stream.get_final_completion().choices[0]
    assert final.message.content == choice.message.content and final.finish_reason == choice.finish_reason
    (streamed,) = final.message.server_tool_calls  # type: ignore[attr-defined]
    assert {**streamed, "id": ""} == {**run, "id": ""}


def test_a_conversation_goes_on_with_the_calls_in_it(client: openai.OpenAI) -> None:
    message = client.chat.completions.create(**CALL, tool_choice=FORCED).choices[0].message
    messages = [*ASK, message, {"role": "user", "content": "And now?"}]
    extra = {"server_tools": False}
    going_on = client.chat.completions.create(**{**CALL, "messages": messages}, extra_body=extra)
    assert going_on.usage is not None
    bare = [*ASK, {"role": "assistant", "content": message.content}, messages[-1]]
    without = client.chat.completions.create(**{**CALL, "messages": bare}, extra_body=extra)
    assert without.usage is not None and going_on.usage.prompt_tokens > without.usage.prompt_tokens


def test_a_program_that_dies_in_a_call_costs_only_the_result(client: openai.OpenAI) -> None:
    die = {"type": "function", "function": {"name": "die"}}
    (choice,) = client.chat.completions.create(**CALL, tool_choice=die).choices
    (run,) = choice.message.server_tool_calls  # type: ignore[attr-defined]
    assert run["is_error"] and "ended before it gave a result" in run["result"] and choice.message.content


def test_a_program_that_does_not_start_ends_the_server(tmp_path: Path) -> None:
    config = write_config(tmp_path, command="/nowhere/program")
    settings = ServerSettings.for_model(port=0, mcp_config=str(config))
    with pytest.raises(ConfigError, match=r"'time' \(/nowhere/program\) did not start: No such file or directory"):
        run_server(EngineConfig(), settings)
