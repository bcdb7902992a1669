"""--config: flags as TOML keys, for all commands or for one; the command line and the environment override them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

import pagewick.server.run
from pagewick.cli import COMMANDS, cli
from pagewick.cli.arguments import Command
from pagewick.cli.flags import long_name
from pagewick.config import EngineConfig
from pagewick.server.settings import ServerSettings
from tests.architecture.source import ROOT

CONFIG = """
model = "some/model"
max-model-len = 512
kv_cache_memory = "1GiB"
enable-prefix-caching = false
max-tokens = 9

[serve]
port = 9000
api-key = ["a-long-key", "another-key"]
served-model-name = ["x"]
"""


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, ServerSettings]]:
    calls: list[tuple[EngineConfig, ServerSettings]] = []
    monkeypatch.setattr(
        pagewick.server.run, "run_server", lambda config, settings, **_: calls.append((config, settings))
    )
    return calls


def serve(*arguments: str, environment: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(cli, ["serve", *arguments], env=environment, prog_name="pagewick")


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "pagewick.toml"
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_keys_in_a_file_act_as_flags(tmp_path: Path, ran: list[tuple[EngineConfig, ServerSettings]]) -> None:
    file = write(tmp_path, CONFIG)
    for result in (serve("--config", file), serve(environment={"PAGEWICK_CONFIG": file})):
        assert result.exit_code == 0, result.output
    assert serve("--config", write(tmp_path, f"\ufeff{CONFIG}")).exit_code == 0
    config = EngineConfig(model="some/model", max_model_len=512, kv_cache_memory=2**30, enable_prefix_caching=False)
    settings = ServerSettings(port=9000, api_key=("a-long-key", "another-key"), served_model_name=("x",))
    assert ran == [(config, settings)] * 3


def test_the_file_in_the_documentation_is_read(tmp_path: Path, ran: list[tuple[EngineConfig, ServerSettings]]) -> None:
    """Its command overrides the port."""
    document = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"^```toml\n(.*?)^```", document, re.DOTALL | re.MULTILINE)
    result = serve("--config", write(tmp_path, example), "--port", "9001", environment={"PAGEWICK_UI": "false"})
    assert result.exit_code == 0, result.output
    config = EngineConfig(model="Qwen/Qwen3-0.6B", max_model_len=8192, kv_cache_memory=4 * 2**30)
    assert ran == [(config, ServerSettings(port=9001, served_model_name=("qwen", "gpt-4o"), ui=False))]


def test_the_command_line_overrides_the_environment_and_both_the_file(
    tmp_path: Path, ran: list[tuple[EngineConfig, ServerSettings]]
) -> None:
    file = write(tmp_path, CONFIG)
    environment = {"PAGEWICK_MAX_MODEL_LEN": "64", "PAGEWICK_PORT": "2"}
    result = serve("other/model", "--config", file, "--port", "1", environment=environment)
    assert result.exit_code == 0, result.output
    ((config, settings),) = ran
    assert (config.model, config.max_model_len, settings.port) == ("other/model", 64, 1)


def test_keys_may_have_the_other_names_of_flags(tmp_path: Path, ran: list[tuple[EngineConfig, ServerSettings]]) -> None:
    assert serve("--config", write(tmp_path, 'ctx-size = 77\n[serve]\nalias = ["it"]')).exit_code == 0
    ((config, settings),) = ran
    assert (config.max_model_len, settings.model_name) == (77, "it")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("max-model-length = 3", "max-model-length is not a flag; did you mean max-model-len?"),
        ("[serve]\nprot = 3", "prot is not a flag of pagewick serve; did you mean port?"),
        ("[serve]\n'' = 3", "'' is not a flag of pagewick serve."),
        ("[sevre]\nport = 3", "[sevre] is not a command; did you mean serve?"),
        ("model = ", "is not valid TOML"),
        ("[serve]\nport = [1, 2]", "pagewick.toml: port takes one value, not a list"),
        ("port = []", "pagewick.toml: port takes one value, not a list"),
        ("[serve]\nport = {a = 1}", "pagewick.toml: port takes one value, not a table"),
        ("[serve.port]\na = 1", "pagewick.toml: port takes one value, not a table"),
        ("ctx-size = [7]", "pagewick.toml: ctx-size takes one value, not a list"),
        ("enable-prefix-caching = [true]", "pagewick.toml: enable-prefix-caching takes one value, not a list"),
        ("api-key = [['a'], 'b']", "pagewick.toml: api-key takes a list of single values"),
        ("api-key = [{a = 1}]", "pagewick.toml: api-key takes a list of single values"),
        ("api-key = 'a-long-key'", "pagewick.toml: api-key takes a list: write it in [ ]"),
        ('max-model-len = "many"', "'many' is not a valid integer"),
        ('max-num-seqs = "all"', "--max-num-seqs in the file of --config: 'all'"),
        ("max-model-len = 5\nctx-size = 6", "--max-model-len is given twice"),
        ('isq = "aqlm"', "--quantization aqlm: such checkpoints cannot be loaded yet"),
        ("[serve]\nroot-path = 'x'", "--root-path: let a proxy change paths"),
        (
            "max-num-seqs = 0",
            "--max-num-seqs must be a whole number above 0; got 0 (from --max-num-seqs in the file of --config)",
        ),
        ("temperature = 9", "got 9.0 (from --temperature in the file of --config)"),
        ("max-model-len = 5\nmax_model_len = 6", "max-model-len is given twice (once as max_model_len); leave one out"),
        ("max_model_len = 5\nmax-model-len = 6", "max-model-len is given twice (once as max_model_len); leave one out"),
        ("max-model-len = true", "'true' is not a valid integer"),
        ("temperature = false", "'false' is not a valid float"),
        ("kv-cache-memory = true", "'true' is not a size"),
        ("config = 'other.toml'", "a file cannot name another one"),
        ("[serve]\nport = 5\n'--port' = 6", "port is given twice (once as --port); leave one out"),
        ("no-ui = true", "no-ui is not a flag; write ui = false"),
        ("[serve]\nno-docs = true", "no-docs is not a flag of pagewick serve; write docs = false"),
        ("served-model-name = ['']", "--served-model-name must not be empty"),
    ],
)
@pytest.mark.usefixtures("ran")
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, complaint: str) -> None:
    result = serve("--config", write(tmp_path, text))
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())
    assert len(result.output.splitlines()) <= 6


def test_a_file_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    path = tmp_path / "pagewick.toml"
    path.write_bytes(b"port = 5 # \xff")
    result = serve("--config", str(path))
    assert result.exit_code == 2
    assert "(it is not UTF-8: invalid start byte at byte 11)" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        (
            {"PAGEWICK_MAX_NUM_SEQS": "0"},
            "--max-num-seqs must be a whole number above 0; got 0 (from PAGEWICK_MAX_NUM_SEQS)",
        ),
        ({"PAGEWICK_TEMPERATURE": "9"}, "got 9.0 (from PAGEWICK_TEMPERATURE)"),
        ({"PORT": "70000"}, "--port must be 0 to 65535; got 70000 (from PORT)"),
        (
            {"PAGEWICK_UI": "maybe"},
            "Invalid value for PAGEWICK_UI: 'maybe' is not a valid boolean. Recognized values: 0, 1,",
        ),
    ],
)
@pytest.mark.usefixtures("ran")
def test_a_wrong_value_in_a_variable_is_traced_to_it(environment: dict[str, str], complaint: str) -> None:
    result = serve(environment=environment)
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("typed", "name", "value", "kept", "note"),
    [
        ("--num-kv-blocks 9", "kv-cache-memory", "1GiB", {"num_kv_blocks": 9}, "--num-kv-blocks"),
        ("--num-blocks 9", "kv-cache-memory", "1GiB", {"num_kv_blocks": 9}, "--num-blocks"),
        ("--speculative-model m", "speculative-method", "ngram", {"speculative_model": "m"}, "--speculative-model"),
        ("--speculative-method none", "speculative-model", "m", {}, "--speculative-method"),
        (
            "--no-enable-prefix-caching", "kv-cache-disk", "here", {"enable_prefix_caching": False},
            "--no-enable-prefix-caching",
        ),
        (
            "--ngram-prompt-lookup-max 3 --speculative-method ngram", "ngram-prompt-lookup-min", "5",
            {"speculative_method": "ngram", "ngram_prompt_lookup_max": 3}, "--ngram-prompt-lookup-max",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_the_command_line_wins_over_what_contradicts_it_elsewhere(
    typed: str, name: str, value: str, kept: dict[str, Any], note: str, tmp_path: Path,
    ran: list[tuple[EngineConfig, ServerSettings]],
) -> None:  # fmt: skip
    """A line says which variable or key of the file changes nothing."""
    file, variable = write(tmp_path, f'{name} = "{value}"'), f"PAGEWICK_{name.upper().replace('-', '_')}"
    for result, place in (
        (serve(*typed.split(), environment={variable: value}), variable),
        (serve(*typed.split(), "--config", file), f"--{name} in the file of --config"),
    ):
        assert result.exit_code == 0, result.output
        assert result.stderr == f"note: {place} changes nothing: {note} is on the command line\n"
    assert [config for config, _ in ran] == [EngineConfig(**kept)] * 2


def test_a_variable_wins_over_what_contradicts_it_in_a_file(
    tmp_path: Path, ran: list[tuple[EngineConfig, ServerSettings]]
) -> None:
    file = write(tmp_path, 'kv-cache-memory = "1GiB"')
    result = serve("--config", file, environment={"PAGEWICK_NUM_KV_BLOCKS": "9"})
    note = "note: --kv-cache-memory in the file of --config changes nothing: PAGEWICK_NUM_KV_BLOCKS is set\n"
    assert (result.exit_code, result.stderr) == (0, note)
    assert ran[0][0] == EngineConfig(num_kv_blocks=9)
    twice = serve(environment={"PAGEWICK_NUM_KV_BLOCKS": "9", "PAGEWICK_KV_CACHE_MEMORY": "1GiB"})
    message = "not both (from PAGEWICK_KV_CACHE_MEMORY, PAGEWICK_NUM_KV_BLOCKS)"
    assert twice.exit_code == 2 and message in " ".join(twice.stderr.split())
    typed = serve("--num-kv-blocks", "9", "--kv-cache-memory", "1GiB")
    assert typed.exit_code == 2 and "give --kv-cache-memory or --num-kv-blocks, not both" in typed.stderr


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    result = serve("--config", str(tmp_path / "no.toml"))
    assert result.exit_code == 2
    assert "no.toml (No such file or directory)" in " ".join(result.output.split())


# The others have no flags, or subcommands in which only some flags have a variable.
@pytest.mark.parametrize("name", [name for name in COMMANDS if name not in ("models", "completion")])
def test_every_flag_has_a_variable_and_a_key(name: str) -> None:
    command = cli.get_command(click.Context(cli), name)
    assert isinstance(command, Command)
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden and option.name != "help":
            assert long_name(option) is not None, option.opts
            assert option.envvar, option.opts
