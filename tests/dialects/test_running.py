"""Lines and programs of the documents run: with the built-in model, and all of them if PAGEWICK_DEEP is 1."""

from __future__ import annotations

import contextlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.architecture.source import ROOT
from tests.dialects.documents import DEEP, Line, Snippet, read_lines, read_snippets
from tests.weights.conftest import HubServer, running_hub

# A line that names a second GPU cannot run on any machine.
# Nor does the built-in model have a format of checkpoints.
LINES = [line for line in read_lines() if (line.real or DEEP) and "device" not in line.expect and line.packed is None]
SNIPPETS = read_snippets()
QUESTION = "How do I change the port?\n"


def lines_of(*commands: str) -> Any:
    chosen = [line for line in LINES if line.expect["command"] in commands]
    return pytest.mark.parametrize("line", chosen, ids=lambda line: f"{line.document}: {line.printed[-60:]}")


def snippets_of(*kinds: str) -> Any:
    chosen = [snippet for snippet in SNIPPETS if snippet.kind in kinds]
    return pytest.mark.parametrize("snippet", chosen, ids=lambda snippet: f"{snippet.document}: {snippet.kind}")


def command_of(words: list[str]) -> list[str]:
    """Return the command with this Python, and with any free port: other tests may run a server, too.

    The context is as long as the cache of these tests.
    """
    words = [sys.executable, "-m", *words] if words[0] == "pagewick" else [sys.executable, *words[1:]]
    if "--port" in words:
        words[words.index("--port") + 1] = "0"
    if "--max-model-len" in words:
        words[words.index("--max-model-len") + 1] = "1024"
    return words


ENVIRONMENT = {**os.environ, "PAGEWICK_NUM_THREADS": "1", "PAGEWICK_KV_CACHE_MEMORY": "64MiB", "PAGEWICK_PORT": "0"}


@dataclass(frozen=True)
class StandIns:
    """The models that lines get in place of theirs. environment: variables of a hub that has the GGUF files."""

    model: Path
    gguf: Path
    environment: dict[str, str]

    def command(self, line: Line) -> list[str]:
        return command_of(line.words(self.model, self.gguf))


@pytest.fixture(scope="module")
def models(demo_model_dir: Path, gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandIns]:
    """The built-in model in both formats."""
    with running_hub(HubServer()) as state:
        for model, file in filter(None, (line.published for line in LINES)):
            state.add(model, {file: gguf.read_bytes()})
        home = str(tmp_path_factory.mktemp("hf"))
        variables = {"HF_ENDPOINT": state.endpoint, "HF_HOME": home, "XDG_CACHE_HOME": home}
        yield StandIns(demo_model_dir, gguf, {**ENVIRONMENT, **variables})


@contextlib.contextmanager
def served(line: Line, models: StandIns) -> Iterator[str]:
    """Run the server of a line, and yield its address."""
    command = models.command(line)
    environment = {**models.environment, **line.environment}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            seen = ""
            while (found := re.search(r"ready on (http://[\d.]+:\d+)", seen)) is None:
                text = process.stdout.readline()
                assert text, f"the server ended: {seen}"
                seen += text
            yield found[1]
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def address(models: StandIns) -> Iterator[str]:
    """The server of the first line of the first document."""
    with served(LINES[0], models) as found:
        yield found


def ask(snippet: Snippet, address: str) -> dict[str, Any]:
    script = snippet.printed.replace("http://127.0.0.1:2000", address)
    done = subprocess.run(["bash", "-c", f"{script} -sS"], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    response: dict[str, Any] = json.loads(done.stdout)
    return response


@snippets_of("curl")
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_curl_gets_a_response(snippet: Snippet, address: str) -> None:
    response = ask(snippet, address)
    (choice,) = response["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"].strip()
    assert choice["finish_reason"] in ("stop", "length")
    assert response["object"] == "chat.completion" and 0 < response["usage"]["completion_tokens"] <= 128


@snippets_of("openai")
def test_the_openai_package_gets_a_response(
    snippet: Snippet, address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("api_key", "base_url"):
        monkeypatch.setattr(openai, name, None)
    # The package's own client stays as it is: its parts keep the one that they have seen first.
    exec(compile(snippet.printed.replace("http://localhost:2000", address), "snippet", "exec"), {})
    assert capsys.readouterr().out.strip()


@snippets_of("benchmark")
@pytest.mark.skipif(not DEEP, reason="16 responses of up to 1,024 tokens")
def test_the_benchmark_gets_all_responses(snippet: Snippet, address: str) -> None:
    program = f"""
import asyncio
from typing import List
from openai import AsyncOpenAI, Stream
from openai.types.chat import ChatCompletionChunk

client = AsyncOpenAI(api_key="EMPTY", base_url="{address}/v1/")

async def chat_completion(model, max_tokens, prompt):
    messages = [{{"role": "user", "content": prompt}}]
    return await client.chat.completions.create(model=model, messages=messages, max_tokens=max_tokens, stream=True)

async def stream_response(index, stream):
    return index, "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

{snippet.printed}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    assert [f"Response {index}:" in done.stdout for index in range(16)] == [True] * 16


@snippets_of("hostfile")
def test_the_hostfile_is_an_example(snippet: Snippet) -> None:
    assert (ROOT / "examples" / "hostfile").read_text().strip() == snippet.printed.strip()


@snippets_of("vllm_rs")
def test_the_python_interface_runs_a_program(
    snippet: Snippet, gguf: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The document has lost the indentation of its loop, and leaves open what a session is called."""
    program = snippet.printed.replace("from vllm_rs ", "from pagewick.vllm_rs ").replace("xxx", '"a"')
    program = program.replace("/path/Qwen3-8B-Q2_K.gguf", str(gguf))
    loop = program[program.index("# item.datatype") :]
    program = program.replace(loop, textwrap.indent(loop, "    "))
    monkeypatch.setenv("PAGEWICK_NUM_THREADS", "1")
    names: dict[str, Any] = {}
    exec(compile(program, "snippet", "exec"), names)
    assert len(names["outputs"]) == 2
    assert all(0 < output.decoded_length <= 256 for output in names["outputs"])
    assert capsys.readouterr().out.count("GenerationOutput(seq_id=") == 2
    assert names["item"].datatype == "DONE" and names["prompt_length"] > 3
    names["engine"]._llm.close()


def run_example(script: str, arguments: list[str], stdin: str = "") -> str:
    """Run an example as a program; return what it prints."""
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def example_of(line: Line, address: str) -> tuple[str, list[str]]:
    """Return the script and its arguments, with the port of the test's server."""
    _, script, *arguments = line.words(Path(), Path())
    given = ["--url", f"{address}/v1/"] if "benchmark" in script else ["--port", address.rpartition(":")[2]]
    return script, [*arguments, *given]


@lines_of("example")
def test_a_line_of_an_example_runs(line: Line, address: str) -> None:
    script, arguments = example_of(line, address)
    shown = run_example(script, arguments, stdin=QUESTION * 2)
    assert "tokens/s" in shown if "benchmark" in script else "--port" in shown


@lines_of("complete")
def test_a_line_completes_its_prompts(line: Line, models: StandIns) -> None:
    command = models.command(line)
    done = subprocess.run(command, env=models.environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    prompts = line.expect.get("prompts", "").split("|")
    if "batch" in line.expect:
        assert "8 requests" in done.stdout
    elif len(prompts) > 1:
        assert [f"> {prompt.strip()}" in done.stdout for prompt in prompts] == [True] * len(prompts)
    else:
        assert done.stdout.strip()


@lines_of("chat")
def test_a_line_starts_a_chat(line: Line, models: StandIns) -> None:
    command = models.command(line)
    done = subprocess.run(
        command, input=QUESTION, env=models.environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--port" in done.stdout


@lines_of("serve")
@pytest.mark.skipif(not DEEP, reason="the first line's server serves the snippets")
def test_a_line_serves_what_curl_asks(line: Line, models: StandIns) -> None:
    with served(line, models) as found:
        for snippet in SNIPPETS:
            if snippet.kind == "curl":
                assert ask(snippet, found)["choices"]


@pytest.mark.parametrize(
    ("script", "arguments", "stdin", "expected"),
    [
        ("openai_client", [], "", "\n"),
        ("benchmark", ["--batch", "3", "--max_tokens", "8"], "", "tokens of 3 responses"),
        ("chat", ["--thinking", "True", "--top-k", "1", "--system-prompt", "x"], QUESTION, "--port"),
        ("chat", ["--live", "--max-tokens", "200"], QUESTION * 2, "--port"),
    ],
)
def test_an_example_runs(
    script: str,
    arguments: list[str],
    stdin: str,
    expected: str,
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    (tmp_path / "stdin").write_text(stdin)
    given = ["--port", address.rpartition(":")[2]] if script == "chat" else ["--url", f"{address}/v1/"]
    monkeypatch.setattr(sys, "argv", [script, *arguments, *given])
    with (tmp_path / "stdin").open() as lines:
        monkeypatch.setattr(sys, "stdin", lines)
        try:
            runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")
        except SystemExit as end:
            assert end.code == 0
    assert expected in capsys.readouterr().out


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("openai_client", ["--url", "http://127.0.0.1:1/v1"]),
        ("benchmark", ["--url", "http://127.0.0.1:1/v1"]),
        ("chat", ["--host", "127.0.0.1", "--port", "1"]),
    ],
)
def test_an_example_without_its_server_says_so_in_a_line(
    script: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script, *flags])
    with pytest.raises(SystemExit, match=r"^error: no server answers at (http://)?127\.0\.0\.1:1.*; start one, or"):
        runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")


@pytest.mark.parametrize(("script", "flags"), [("openai_client", ["--max-tokens"]), ("benchmark", ["--max_tokens"])])
def test_an_example_shows_the_servers_error_in_a_line(
    script: str, flags: list[str], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [script, "--url", f"{address}/v1/", *flags, "-1"])
    with pytest.raises(SystemExit, match=r"^error: Error code: 400 - max_tokens must be an integer"):
        runpy.run_path(str(ROOT / "examples" / f"{script}.py"), run_name="__main__")


def test_mpirun_gets_the_hostfile_and_its_first_machine(tmp_path: Path) -> None:
    (tmp_path / "mpirun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "mpirun").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "NP": "4"}
    command = [str(ROOT / "examples" / "mpirun.sh"), "eth7", "--model", "some/model"]
    shown = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True).stdout
    assert shown.startswith(f"-np 4 -hostfile {ROOT}/examples/hostfile -x RUST_LOG=info -x MASTER_ADDR=192.168.1.100 ")
    assert "btl_tcp_if_include eth7" in shown
    assert shown.endswith("python3 -m pagewick serve --tensor-parallel-size 4 --model some/model\n")
