"""`pagewick serve`: its flags, its output, and the whole server as a process: responses, signals, a busy port."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from click.testing import CliRunner, Result

import pagewick.server.run
from pagewick.cli import cli
from pagewick.cli.example_requests import curl_line, python_snippet
from pagewick.cli.serve import announce
from pagewick.config import EngineConfig
from pagewick.engine.model_info import ModelInfo
from pagewick.errors import ConfigError
from pagewick.server.run import ReadyServer
from pagewick.server.settings import ServerSettings
from tests.scripted_engine import ScriptedEngine

ADDRESS = "http://127.0.0.1:9"


def serve(*arguments: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, ["serve", *arguments], env=environment, prog_name="pagewick")


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr(
        pagewick.server.run,
        "run_server",
        lambda config, settings, **options: calls.append({"config": config, "settings": settings, **options}),
    )
    return calls


def test_the_server_listens_on_loopback_by_default(ran: list[dict[str, Any]]) -> None:
    assert serve().exit_code == 0
    assert (
        serve("some/model", "--host", "0.0.0.0", "--port", "0", "--served-model-name", "it", "--tp", "2").exit_code == 0
    )
    for call in ran:
        assert call.pop("sampling") == {}
        del call["on_ready"]
    assert ran == [
        {"config": EngineConfig(), "settings": ServerSettings(served_model_name=("pagewick-demo",))},
        {
            "config": EngineConfig(model="some/model", tensor_parallel_size=2),
            "settings": ServerSettings(host="0.0.0.0", port=0, served_model_name=("it",)),
        },
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--w", "x"], {"served_model_name": ("x", "*")}),
        (["--m", "x"], {"served_model_name": ("x", "*")}),
        (["--weight-path", "x", "llama3"], {"served_model_name": ("x", "*"), "port": 2000}),
        (["--model-id", "x", "deep-seek", "--port", "5"], {"served_model_name": ("x", "*"), "port": 5}),
        (["--model", "x", "qwen2"], {"served_model_name": ("x", "*"), "port": 2000}),
        (["--w", "x", "--served-model-name", "y"], {"served_model_name": ("y",)}),
        (["x", "--served-model-name", "*"], {"served_model_name": ("x", "*")}),
        (["-m", "x", "--served-model-name", "y", "--alias", "*"], None),
        (["-m", "x", "--served-model-name", "y", "--served-model-name", "*"], {"served_model_name": ("y", "*")}),
        (["x", "--h", "0.0.0.0"], {"served_model_name": ("x",), "host": "0.0.0.0"}),
        (["x", "--h", "0.0.0.0:81"], {"served_model_name": ("x",), "host": "0.0.0.0", "port": 81}),
        (["x", "--h", "[::1]:81"], {"served_model_name": ("x",), "host": "::1", "port": 81}),
        (["x", "--h", "::1"], {"served_model_name": ("x",), "host": "::1"}),
        (["x", "--h", "a:b"], None),
        (["x", "--h", "a:81", "--p", "82"], None),
        (["x", "--thinking", "True"], {"served_model_name": ("x",), "thinking": True}),
        (["x", "--thinking=false", "--ui"], {"served_model_name": ("x",), "thinking": False}),
        (["--record_conversation", "true", "x"], {"served_model_name": ("x",), "record_conversation": True}),
        (["--log-requests", "FALSE", "x"], {"served_model_name": ("x",), "log_requests": False}),
        (["--strict", "x"], {"served_model_name": ("x",), "strict": True}),
        (["--multi-process", "true", "x"], {"served_model_name": ("x",)}),
        (["--strict=5", "x"], None),
    ],
)
def test_command_lines_of_candle_vllm_and_vllm_rs(
    ran: list[dict[str, Any]], arguments: list[str], expected: dict[str, Any] | None
) -> None:
    result = serve(*arguments)
    assert result.exit_code == (2 if expected is None else 0), result.output
    assert [call["settings"] for call in ran] == ([] if expected is None else [ServerSettings(**expected)])
    assert {call["config"].model for call in ran} <= {"x"}


def test_a_models_type_needs_a_model_before_it(ran: list[dict[str, Any]]) -> None:
    assert "note: llama3 changes nothing" in serve("--w", "x", "llama3").stderr
    serve("llama3")
    assert ran[1]["config"].model == "llama3"
    assert "the model is given twice" in serve("--w", "x", "y").stderr


def test_defaults_of_requests_are_flags(ran: list[dict[str, Any]], tmp_path: Path) -> None:
    flags = "--temp 0.5 --top-k 64 --top-p 0.9 --penalty 1.1 --repeat-last-n 64 --max-gen-tokens 99 --seed 3"
    assert serve("x", *flags.split(), "--frequency-penalty", "1").exit_code == 0
    values = {"temperature": 0.5, "top_k": 64, "top_p": 0.9, "repetition_penalty": 1.1, "repeat_last_n": 64}
    assert ran[0]["sampling"] == {**values, "max_tokens": 99, "frequency_penalty": 1}
    assert ran[0]["config"].seed == 3
    file = tmp_path / "config.toml"
    file.write_text("temperature = 0.25\n[serve]\nmax-tokens = 7\n")
    serve("--config", str(file), environment={"PAGEWICK_TOP_K": "5"})
    assert ran[1]["sampling"] == {"temperature": 0.25, "max_tokens": 7, "top_k": 5}
    assert "temperature must be a number" in serve("--temperature", "3").stderr


def test_a_name_that_no_request_could_have_is_refused() -> None:
    """A name that is not UTF-8 would make every list of models an error."""
    name = os.fsdecode(b"b\xffd")
    for model, names in (("./m", ("a", name)), (f"./{name}", ())):
        with pytest.raises(ConfigError, match=r"the name (\./)?b\?d is not UTF-8.*give a --served-model-name"):
            ServerSettings.for_model(model, served_model_name=names)


@pytest.mark.parametrize(
    ("environment", "port"),
    [({"PORT": "91"}, 91), ({"PORT": "91", "PAGEWICK_PORT": "92"}, 92), ({"PAGEWICK_HOST": "::1"}, 8000)],
)
def test_the_port_can_be_set_by_the_environment(
    ran: list[dict[str, Any]], environment: dict[str, str], port: int
) -> None:
    serve(environment=environment)
    assert ran[0]["settings"].port == port


@pytest.mark.parametrize(("others", "port"), [({}, 8000), ({"PORT": "91"}, 91)])
def test_the_address_of_a_kubernetes_service_is_not_a_port(
    ran: list[dict[str, Any]], others: dict[str, str], port: int
) -> None:
    """Kubernetes sets this variable in every pod if a Service is called pagewick."""
    result = serve(environment={"PAGEWICK_PORT": "tcp://10.0.0.1:8000", **others})
    assert result.exit_code == 0, result.output
    assert ran[0]["settings"].port == port
    assert result.stderr.count("PAGEWICK_PORT=tcp://10.0.0.1:8000 is ignored") == 1
    assert len(result.stderr.splitlines()) == 1


def test_a_wrong_port_in_the_environment_is_refused(ran: list[dict[str, Any]]) -> None:
    for variable, value in (("PAGEWICK_PORT", "http://x"), ("PAGEWICK_PORT", "many"), ("PORT", "tcp://10.0.0.1:8000")):
        result = serve(environment={variable: value})
        assert result.exit_code == 2
        assert variable in result.stderr
    assert ran == []


def test_ctrl_c_during_a_download_is_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(config: EngineConfig, settings: ServerSettings, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pagewick.server.run, "run_server", interrupted)
    assert serve().exit_code == 0


def test_an_impossible_address_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: EngineConfig, settings: ServerSettings, **options: Any) -> None:
        raise ConfigError("cannot listen")

    monkeypatch.setattr(pagewick.server.run, "run_server", refuse)
    assert (serve().exit_code, serve().stderr) == (1, "error: cannot listen\n")
    assert serve("--port", "70000").exit_code == 2


def info() -> ModelInfo:
    return ScriptedEngine(EngineConfig(), script=lambda request: [], vocab_size=9, eos_token_id=1).info


def test_commands_to_paste_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    server = ReadyServer(ADDRESS, info(), needs_key=False, has_chat_template=True)
    announce("m", server)
    printed = capsys.readouterr().out
    assert "ready on http://127.0.0.1:9\n" in printed
    assert curl_line("m", server) in printed
    assert python_snippet("m", server) in printed


@contextlib.contextmanager
def server_process(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run `python -m pagewick serve` in a process group of its own, which is always killed at the end."""
    command = [sys.executable, "-m", "pagewick", "serve", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Return the output of the process up to a line with `text`."""
    assert process.stdout is not None
    printed = ""
    while text not in printed:
        line = process.stdout.readline()
        assert line, f"the process ended: {printed}{process.stderr.read() if process.stderr else ''}"
        printed += line
    return printed


@pytest.mark.parametrize(
    ("has_key", "has_template", "num_processes"), [(True, True, 1), (True, False, 1), (False, False, 2)]
)
def test_the_printed_commands_work(
    tiny_model: Path, tmp_path: Path, has_key: bool, has_template: bool, num_processes: int
) -> None:
    model, key = tmp_path / "model", "a-key-that-nobody-prints"
    shutil.copytree(tiny_model, model)
    config = json.loads((model / "tokenizer_config.json").read_text(encoding="utf-8"))
    if not has_template:
        (model / "chat_template.jinja").unlink(missing_ok=True)
        config.pop("chat_template", None)
    (model / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    flags = ["--port", "0", "--max-tokens", "4", "--api-server-count", str(num_processes)]
    with server_process(str(model), *flags, *(["--api-key", key] if has_key else [])) as process:
        printed = read_until(process, "Ctrl-C stops the server.")
        curl = next(line for line in printed.splitlines() if line.startswith("curl "))
        program = printed[printed.index("import os" if has_key else "from openai") :].removesuffix(
            "Ctrl-C stops the server.\n"
        )
        assert key not in printed
        assert ("/v1/chat/completions" in curl) == ("chat.completions" in program) == has_template
        environment = {**os.environ, "PAGEWICK_API_KEY": key if has_key else ""}
        for command in (["bash", "-c", curl + " --fail-with-body"], [sys.executable, "-c", program]):
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
            assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_server_responds_and_stops_at_a_signal(tiny_model: Path, number: signal.Signals) -> None:
    with server_process(
        str(tiny_model), "--port", "0", "--served-model-name", "tiny", "--max-model-len", "64"
    ) as process:
        printed = read_until(process, "Ctrl-C stops the server.")
        address = printed.partition("ready on ")[2].partition("\n")[0]
        with openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60) as client:
            response = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=4
            )
        assert response.usage is not None
        assert response.usage.completion_tokens == 4
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(number)
        assert process.wait(timeout=60) == 0
        assert not [child for child in children if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_busy_port_is_an_error_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with server_process(str(tmp_path / "no-such-model"), "--port", str(port)) as process:
            _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith(f"error: cannot listen on 127.0.0.1:{port}")
    assert "--port" in errors
