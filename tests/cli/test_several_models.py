"""`pagewick serve --models-dir --models-preset`: which models there are, and with which settings."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pagewick.cli import cli
from pagewick.errors import ConfigError
from pagewick.local_models import models_in
from pagewick.server.router import run
from pagewick.server.router.entry import ModelEntry
from pagewick.server.router.run import FindEntries, ReadyRouter, checked
from pagewick.server.settings import ServerSettings
from tests.log_lines import collected_lines


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def serve(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[FindEntries, ServerSettings]:
    """Return what the command gives to the server. Raises AssertionError with its output if it fails."""
    found: list[Any] = []

    def run_router(find_entries: FindEntries, settings: ServerSettings, **more: Any) -> None:
        found.extend([find_entries, settings])
        names = [entry.name for entry in find_entries()]
        more["on_ready"](ReadyRouter("http://127.0.0.1:1", names, needs_key=True))

    monkeypatch.setattr(run, "run_router", run_router)
    result = CliRunner().invoke(cli, ["serve", *arguments])
    assert result.exit_code == 0, result.output
    assert "authorization" in result.output and "Pagewick is ready on http://127.0.0.1:1" in result.output
    return found[0], found[1]


def fails(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["serve", *arguments])
    assert result.exit_code in (1, 2) and len(result.output.splitlines()) <= 6, result.output
    return result.output


def by_name(entries: Sequence[ModelEntry]) -> dict[str, ModelEntry]:
    return {entry.name: entry for entry in entries}


def test_each_table_is_a_model_and_overrides_the_flags_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("preset.toml").write_text(
        """
        [coder]
        model = "pagewick-demo"
        alias = ["code", "c"]
        max-model-len = 100
        temperature = 0.25
        thinking = false
        rope_scaling = {rope_type = "linear", factor = 2.0}
        stop = ["a", "-b"]
        load-on-startup = true
        pinned = true

        ["Qwen/Qwen3-0.6B"]
        model = "Qwen/Qwen3-0.6B"
        no-enable-prefix-caching = true
        mmap = false
        sleep-idle-seconds = 7
        """
    )
    flags = [
        "--models-preset",
        "preset.toml",
        "--max-model-len",
        "200",
        "--top-k",
        "3",
        "--temperature",
        "1",
        "--port",
        "9",
    ]
    find_entries, settings = serve(monkeypatch, *flags)
    coder, qwen = find_entries()
    assert settings.port == 9 and settings.models_max == 4
    assert coder.names == ("coder", "code", "c") and qwen.names == ("Qwen/Qwen3-0.6B",)
    assert (coder.config.max_model_len, qwen.config.max_model_len) == (100, 200)
    assert (coder.config.rope_scaling, coder.settings.thinking) == ('{"rope_type": "linear", "factor": 2.0}', False)
    assert (coder.config.enable_prefix_caching, qwen.config.enable_prefix_caching) == (True, False)
    assert coder.sampling == {"temperature": 0.25, "top_k": 3, "stop": ("a", "-b")}
    assert qwen.sampling == {"temperature": 1.0, "top_k": 3}
    assert (coder.loads_at_start, qwen.loads_at_start, qwen.settings.thinking) == (True, False, None)
    assert (coder.is_pinned, qwen.is_pinned) == (True, False)
    assert (coder.settings.sleep_idle_seconds, qwen.settings.sleep_idle_seconds) == (None, 7)


def test_a_directory_is_read_again_for_models_that_come_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/config.json", "models/one/config.json"):
        Path(name).parent.mkdir(parents=True)
        Path(name).write_text("{}")
    find_entries, _ = serve(
        monkeypatch, "pagewick-demo", "--models-dir", "models", "--alias", "demo", "--no-models-autoload"
    )
    default, one = find_entries()
    # The default model is not listed a second time where it lies in the directory, too.
    same, _ = serve(monkeypatch, "models/one", "--models-dir", "models")
    assert [entry.name for entry in same()] == ["models/one"]
    assert (default.name, default.is_default, default.loads_at_start) == ("demo", True, True)
    # A relative path would be a model of a hub once the directory is gone.
    assert (one.name, one.config.model, one.is_default) == ("one", str(Path("models/one").absolute()), False)
    assert not one.settings.models_autoload
    Path("a").rename("models/two")
    assert [entry.name for entry in find_entries()] == ["demo", "one", "two"]


def test_models_are_found_by_their_files(tmp_path: Path) -> None:
    files = [
        "plain/config.json", "owner/deep/config.json", "single.gguf", "single/config.json", "split-00001-of-00002.gguf",
        "split-00002-of-00002.gguf", "lost-00002-of-00002.gguf", "seen/seen-Q4.gguf", "seen/mmproj-seen.gguf",
        "lab/m-GGUF/m-Q4.gguf", "lab/m-GGUF/m-Q8.gguf", ".hidden/config.json", "empty/notes.txt", "a/b/c/d/config.json",
    ]  # fmt: skip
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = {name: str(path.relative_to(tmp_path)) for name, path in models_in(tmp_path).items()}
    assert found == {
        "plain": "plain",
        "owner/deep": "owner/deep",
        "single": "single",
        "single.gguf": "single.gguf",
        "split": "split-00001-of-00002.gguf",
        "seen": "seen/seen-Q4.gguf",
        "lab/m-GGUF/m-Q4": "lab/m-GGUF/m-Q4.gguf",
        "lab/m-GGUF/m-Q8": "lab/m-GGUF/m-Q8.gguf",
    }
    with pytest.raises(ConfigError, match="is a model itself"):
        models_in(tmp_path / "plain")


def test_links_upwards_and_names_that_are_no_text_are_left_out(tmp_path: Path) -> None:
    for name in ("owner/one", os.fsdecode(b"b\xffd"), "owner/" + os.fsdecode(b"\xff.gguf")):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "config.json").write_text("{}")
    (tmp_path / "owner" / "up").symlink_to(tmp_path)
    (tmp_path / "owner" / "self").symlink_to(".")
    (tmp_path / "link").symlink_to("owner/one")
    with collected_lines(logging.WARNING) as lines:
        assert list(models_in(tmp_path)) == ["link", "owner/one"]
    assert len(lines) == 2 and all("its name is not UTF-8; rename it" in line for line in lines)
    assert all(line.isascii() for line in lines)


def test_a_directory_of_models_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"No such file.*--models-dir"):
        models_in(tmp_path / "none")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "names no models"),
        ("model = 'pagewick-demo'", "outside of all tables"),
        ("[a]\nmodel = pagewick-demo", "not valid TOML"),
        ("[a]\ntop-k = 3", r"[a]: the table names no model"),
        ("[a]\nmodel = 'pagewick-demo'\nport = 3", "[a]: --port is the server's"),
        ("[a]\nmodel = 'pagewick-demo'\nmax-modle-len = 3", "did you mean --max-model-len?"),
        ("[a]\nmodel = 'pagewick-demo'\nmax-model-len = 'x'", "[a]: Invalid value for '--max-model-len'"),
        ("[a]\nmodel = 'pagewick-demo'\nmax-model-len = -3", "[a]: --max-model-len must be"),
        ("[a]\nmodel = 'pagewick-demo'\ntemperature = -1", "[a]: temperature must be"),
        ("[a]\nmodel = 'pagewick-demo'\nload-on-startup = 1", "load-on-startup must be true or false"),
        ("[a]\nmodel = 'pagewick-demo'\npinned = 'yes'", "pinned must be true or false"),
        ("[a]\nmodel = 'pagewick-demo'\npinned = true\nsleep-idle-seconds = 3", "a pinned model never sleeps"),
        ("[a]\nmodel = './nowhere'", "[a]: "),
        ("[Qwen3-0.6B]\nmodel = 'pagewick-demo'", 'write ["Qwen3-0.6B"]'),
        ("[a]\nmodel = 'pagewick-demo'\nlog-level = 'DEBUG'", "--log-level is not a flag of a model"),
        ("[a]\nmodel = 'pagewick-demo'\nconfig = 'a.toml'", "--config is not a flag of a model"),
        ("[a]\nmodel = 'pagewick-demo'\nui = false", "is the server's"),
        ("[a]\nmodel = 'pagewick-demo'\nchat-template = 'none.jinja'", "cannot read the chat template none.jinja"),
        ("[a]\nmodel = 'pagewick-demo'\ngrpc = true", "only HTTP is served"),
        ("[a]\nmodel = 'pagewick-demo'\nalias = ['*']", "one model"),
        ("[a]\nmodel = 'pagewick-demo'\nkv-cache-disk-size = '1G'", "no effect without --kv-cache-disk"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_at_the_start(content: str, message: str) -> None:
    Path("preset.toml").write_text(content)
    assert message in fails("--models-preset", "preset.toml")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--models-preset none.toml", "cannot read none.toml"),
        ("--models-dir none", "cannot read the models in none"),
        ("--models-dir . --api-server-count 2", "--api-server-count must be 1"),
        ("--models-max 2", "--models-max is for a server with several models"),
        ("--sleep-idle-seconds 2", "--sleep-idle-seconds is for a server with several models"),
        ("--models-dir . --models-max 0", "--models-max must be above 0"),
        ("--models-dir . --mmproj a.gguf", "--mmproj is for one model"),
        ("--models-dir . --allow-runtime-lora-updating", "--allow-runtime-lora-updating is for a server with one"),
    ],
)
def test_wrong_flags_are_refused(flags: str, message: str) -> None:
    assert message in fails(*flags.split())


def test_names_are_unique_and_all_models_of_the_start_have_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    table = "model = 'pagewick-demo'\nload-on-startup = true\n"
    Path("preset.toml").write_text(f"[a]\n{table}[b]\n{table}")
    find_entries, settings = serve(monkeypatch, "--models-preset", "preset.toml", "--models-max", "1")
    with pytest.raises(ConfigError, match="2 models are to be loaded at the start, and --models-max is 1"):
        checked(find_entries(), settings)
    Path("preset.toml").write_text(f"[a]\npinned = true\n{table}[b]\nmodel = 'pagewick-demo'\n")
    find_entries, settings = serve(monkeypatch, "--models-preset", "preset.toml", "--models-max", "1")
    with pytest.raises(ConfigError, match=r"--models-max is 1, and pinned models \(a\) leave the others no place"):
        checked(find_entries(), settings)
    Path("preset.toml").write_text(f"[a]\n{table}[b]\nalias = ['a']\n{table}")
    find_entries, settings = serve(monkeypatch, "--models-preset", "preset.toml")
    with pytest.raises(ConfigError, match="two models are called 'a'"):
        checked(find_entries(), settings)
