"""The `pagewick` command itself: help without expensive imports, typing mistakes, short errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

import pagewick
from pagewick import cli as cli_package
from pagewick.cli import COMMANDS, OTHER_NAMES, LazyGroup, cli
from pagewick.cli.arguments import EngineCommand
from pagewick.errors import ConfigError, ModelNotFoundError
from tests.permissions import forbidden


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), prog_name="pagewick")


def test_help_lists_every_command_and_loads_none() -> None:
    code = (
        "import sys\n"
        "from pagewick.cli import cli\n"
        "try: cli(['--help'])\n"
        "except SystemExit as end: status = end.code\n"
        "loaded = {'torch', 'rich', 'numpy', 'pagewick.cli.serve', 'pagewick.llm'} & set(sys.modules)\n"
        "sys.exit(f'{status} {loaded}' if status or loaded else 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    for name, line in COMMANDS.items():
        assert name in result.stdout
        assert line in result.stdout
    assert "PAGEWICK_MAX_MODEL_LEN" in result.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_shows_its_help_without_torch(name: str) -> None:
    code = (
        "import sys\n"
        "from pagewick.cli import cli\n"
        f"try: cli(['{name}', '--help'], prog_name='pagewick')\n"
        "except SystemExit as end: status = end.code\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else status)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"Usage: pagewick {name} ")
    command = cli.get_command(click.Context(cli), name)
    assert ("[default: pagewick-demo]" in result.stdout) is isinstance(command, EngineCommand)
    assert ("--max-num-batched-tokens" in result.stdout) is isinstance(command, EngineCommand)


@pytest.mark.parametrize(
    "command",
    ["complete -p x", "chat", "quantize pagewick-demo -o x.gguf", "convert pagewick-demo x --to gptq", "doctor"],
)
def test_ctrl_c_during_the_imports_is_not_lost(command: str, tmp_path: Path) -> None:
    """torch clears every error of an import of numpy that it makes itself, a KeyboardInterrupt, too."""
    code = (
        "import sys\n"
        "from pagewick.cli import cli\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch': sys.exit(3)\n"
        "        if name == 'numpy': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"cli({command.split()}, prog_name='pagewick')"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, input="hi\n", capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr.strip()) == (1, "Aborted!")


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        ("complete -p - <&-", 2, "nothing to complete"),
        ("chat --url http://127.0.0.1:1/v1 <&- >&-", 1, "cannot connect"),
        ("--version >&-", 0, ""),
        ("--help >/dev/full", 1, "error: cannot write the output: No space left on device"),
    ],
)
def test_streams_may_be_closed_or_full(arguments: str, status: int, words: str) -> None:
    command = f"exec {sys.executable} -m pagewick {arguments}"
    result = subprocess.run(["/bin/sh", "-c", command], stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == status
    assert words in result.stderr and "Traceback" not in result.stderr


def test_closed_streams_hold_the_numbers_of_no_other_file(tmp_path: Path) -> None:
    code = "from pagewick.cli import open_standard_streams as f; f(); assert open('x', 'w').fileno() > 2"
    command = f'exec {sys.executable} -c "{code}" <&- >&-'
    result = subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, stderr=subprocess.PIPE, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


def test_the_version_is_that_of_the_package() -> None:
    assert run("--version").output == f"pagewick, version {pagewick.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["srve"], "did you mean serve?"),
        (["models", "rm", "a/b"], "No such command 'rm'; did you mean remove?"),
        (["models", "lst"], "No such command 'lst'; did you mean list?"),
        (["models", "xyz"], "the commands are list, pull, remove, path, supported."),
        (["complet"], "did you mean complete?"),
        (["xyz"], "the commands are serve, chat"),
        (["bench", "--max-modell-len", "3"], "--max-model-len"),
        (["chat", "--temprature", "0"], "--temperature"),
        (["complete", "--max_tokns", "3"], "--max-tokens"),
        (["chat", "--port", "3"], "No such option --port; it is a flag of pagewick serve."),
        (["serve", "--xyzzy"], "No such option --xyzzy."),
        (["pull", "a/b"], "use: pagewick models pull MODEL"),
        (["Qwen/Qwen3-0.6B"], "pagewick serve Qwen/Qwen3-0.6B"),
        (["--server", "--port", "3"], "pagewick serve --server ..."),
        (["--w", "model", "--i"], "pagewick chat --w ..."),
        (["serve", "--quant", "aqlm"], "--quantization aqlm: such checkpoints cannot be loaded yet"),
    ],
)
def test_a_typing_mistake_gets_a_hint(arguments: list[str], hint: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert hint in result.output
    assert len(result.output.splitlines()) <= 6


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["convert", "pagewick-demo", "m"], "Missing option '--to'. Choose from: gptq, awq, marlin, gguf"),
        (["completion"], "Missing argument '{bash|zsh|fish}'. Choose from: bash, zsh, fish"),
        (["models", "pull"], "Missing argument 'MODEL'."),
    ],
)
def test_what_is_missing_is_named_in_one_line(arguments: list[str], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1] == f"Error: {words}" and len(result.stderr.splitlines()) <= 6


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception]]:
    """A group whose every command raises the error in the list."""
    errors: list[Exception] = []

    def fail() -> None:
        raise errors[0]

    command = click.Command("serve", callback=fail)
    monkeypatch.setattr(LazyGroup, "get_command", lambda self, ctx, name: command)
    yield errors


def test_an_error_is_a_message_and_status_1(failing: list[Exception]) -> None:
    failing.append(ModelNotFoundError("there is no directory x\n  check the path"))
    result = run("serve")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "error: there is no directory x\n  check the path\n"


def test_an_error_has_at_most_six_lines(failing: list[Exception]) -> None:
    failing.append(ConfigError("\n".join(map(str, range(20)))))
    failing[0].add_note("a note")
    assert run("serve").stderr.splitlines() == ["error: 0", "1", "2", "3", "4", "..."]


def test_notes_are_shown(failing: list[Exception]) -> None:
    failing.append(ConfigError("too long"))
    failing[0].add_note("(prompt 2 of 3)")
    assert run("serve").stderr == "error: too long\n(prompt 2 of 3)\n"


@pytest.mark.parametrize(("value", "is_shown"), [("1", True), ("0", False), ("", False)])
def test_debug_shows_the_traceback(
    failing: list[Exception], monkeypatch: pytest.MonkeyPatch, value: str, is_shown: bool
) -> None:
    monkeypatch.setenv("PAGEWICK_DEBUG", value)
    failing.append(ConfigError("wrong"))
    result = run("serve")
    assert ("Traceback" in result.stderr) is is_shown
    assert result.stderr.endswith("error: wrong\n")


def test_unexpected_exceptions_are_not_hidden(failing: list[Exception]) -> None:
    failing.append(ZeroDivisionError("ours"))
    assert isinstance(run("serve").exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (PermissionError(13, "Permission denied", "/x/y"), "cannot use /x/y: Permission denied\n  check the path"),
        (FileNotFoundError(2, "No such file or directory", b"/x/\xff"), "cannot use /x/\ufffd: No such file"),
        (OSError(28, "No space left on device", "/x"), "cannot use /x: No space left on device\n  free space"),
    ],
)
def test_a_path_that_the_system_refuses_is_an_error_and_no_traceback(
    failing: list[Exception], error: OSError, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing.append(error)
    result = run("serve")
    assert result.exit_code == 1 and result.stderr.startswith(f"error: {message}")
    assert len(result.stderr.splitlines()) == 2
    monkeypatch.setenv("PAGEWICK_DEBUG", "1")
    assert f"{type(error).__name__}: [Errno" in run("serve").stderr


def test_errors_of_the_system_without_a_path_are_not_hidden(failing: list[Exception]) -> None:
    failing.append(OSError(5, "Input/output error"))
    assert run("serve").exception is failing[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ["models", "list"],
        ["models", "path", "someone/model"],
        ["quantize", "{place}/model"],
        ["quantize", "pagewick-demo", "-o", "{place}/m.gguf"],
        ["bench", "--shape", "qwen3-tiny"],
    ],
)
def test_a_directory_that_may_not_be_entered(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "another's"
    place.mkdir()
    monkeypatch.setenv("HF_HOME", str(place / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(place))
    with forbidden(place, 0):
        result = run(*(argument.format(place=place) for argument in arguments))
    assert result.exit_code == 1 and f"error: cannot use {place}" in result.stderr, result.output
    assert "Permission denied" in result.stderr


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_commands_have_other_names(name: str) -> None:
    assert run(name, "--help").stdout == run(OTHER_NAMES[name], "--help").stdout
    assert name not in COMMANDS


def test_commands_are_modules() -> None:
    for name in COMMANDS:
        command = LazyGroup().get_command(click.Context(cli), name)
        assert isinstance(command, click.Command)
        assert command.help
    assert cli_package.cli.name == "cli"


def test_a_full_disk_behind_stdout_is_an_error_and_no_traceback() -> None:
    with open("/dev/full", "wb") as full:
        run = [sys.executable, "-m", "pagewick", "models", "list"]
        done = subprocess.run(run, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (
        1,
        "error: cannot write the output: No space left on device; free space and start again\n",
    )
