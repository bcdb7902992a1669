"""Every command line of the documents means what it means there, and runs."""

from __future__ import annotations

import logging
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import click
import pytest

from pagewick import log
from pagewick.cli import cli
from pagewick.cli.converting import conversion
from pagewick.cli.converting.text import calibration_tokens
from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.engine.preflight import check_models
from pagewick.errors import PagewickError
from pagewick.local_models import with_local_models
from pagewick.server.settings import ANY_NAME, ServerSettings
from pagewick.vllm_rs.__main__ import main as vllm_rs_main
from tests.architecture.source import ROOT
from tests.dialects.documents import Line, read_lines
from tests.weights.conftest import HubServer
from tests.weights.packed.harness import write_packed, write_zeros
from tests.weights.packed.test_readers import AWQ
from tests.weights.packed.writers import awq

LINES = read_lines()
COMMANDS = [line for line in LINES if line.expect["command"] in ("serve", "chat", "complete", "help")]


@dataclass
class Outcome:
    """The result of parsing a command line: the values that it sets, or an error."""

    values: dict[str, Any]
    error: str


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Parse a command line as the program does, up to the command's own code, and check its model."""
    seen: dict[str, Any] = {}
    for name in ("serve", "chat", "complete", "bench"):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        monkeypatch.setattr(command, "callback", lambda name=name, **given: seen.update(given, command=name))
    monkeypatch.setattr(log, "set_up", lambda **given: seen.update(log_level=given["level"]))

    def parse(words: list[str], environment: dict[str, str]) -> Outcome:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        if words[0] == "pagewick":
            program: Callable[[], None] = lambda: cli(words[1:], prog_name="pagewick")  # noqa: E731
        else:
            module = words[2].removeprefix("pagewick.vllm_rs").removeprefix(".")
            command = {"server": "serve", "completion": "complete"}.get(module, module) or None
            monkeypatch.setattr(sys, "argv", ["x", *words[3:]])
            program = lambda: vllm_rs_main(command)  # noqa: E731
        status, error = 0, ""
        try:
            program()
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        output = capsys.readouterr()
        if not status and "config" in seen:
            try:
                check_models(with_local_models(seen["config"]))
            except PagewickError as refusal:
                status, error = 1, str(refusal)
        if not status and "Usage: pagewick" in output.out:
            seen["command"] = "help"
        return Outcome(values_of(seen, environment), error or (output.err if status else ""))

    return parse


def values_of(seen: dict[str, Any], environment: dict[str, str]) -> dict[str, Any]:
    """Return the values that differ from their defaults, except the model's, which may have a path of the test's."""
    values = dict(seen)
    config, settings = values.pop("config", None), values.pop("settings", None)
    level, _ = values.pop("log_level", None), values.pop("given", None)
    values = {name: value for name, value in values.items() if value not in (None, False, ())}
    values |= values.pop("sampling", {})
    for made, default in ((config, EngineConfig()), (settings, ServerSettings())):
        for field in fields(default) if made is not None else ():
            value = getattr(made, field.name)
            if field.name not in ("model", "weight_file", "served_model_name") and value != getattr(
                default, field.name
            ):
                values[field.name] = value
    if settings is not None and ANY_NAME in settings.served_model_name:
        values["any_name"] = True
    return values | ({"log_level": level} if "RUST_LOG" in environment and level != "INFO" else {})


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: f"{line.document}: {line.printed[-60:]}")
def test_a_line_means_the_same_here(
    line: Line,
    run: Callable[..., Outcome],
    tiny_model: Path,
    moe_model: Path,
    gguf: Path,
    hub: HubServer,
    tmp_path: Path,
) -> None:
    if line.published is not None:
        repository, file = line.published
        hub.add(repository, {file: gguf.read_bytes(), "other-Q8_0.gguf": b""})
    model = moe_model if line.expect.get("tensor_parallel_size") == 8 else tiny_model
    if line.packed is not None:
        model = write_zeros(model, line.packed, tmp_path / "packed")
    outcome = run(line.words(model, gguf), line.environment)
    assert outcome.error == ""
    assert outcome.values == line.expect
    # The header of a file is fetched first, and then all of it.
    assert set(hub.fetched()) == (set() if line.published is None else {line.published[1]})


@pytest.mark.parametrize("packed", ["gptq", "awq", "marlin", ""])
@pytest.mark.parametrize("quantization", ["marlin", "q4_k"])
def test_weights_of_every_format_can_be_quantized(
    quantization: str, packed: str, run: Callable[..., Outcome], tiny_model: Path, gguf: Path, tmp_path: Path
) -> None:
    """candle-vllm turns unquantized, GPTQ and AWQ weights into any of ggml's types, or into Marlin's."""
    line = next(line for line in COMMANDS if line.expect.get("quantization") == quantization)
    model = write_zeros(tiny_model, packed, tmp_path / "packed") if packed else tiny_model
    outcome = run(line.words(model, gguf), line.environment)
    assert (outcome.error, outcome.values) == ("", line.expect)


@pytest.mark.parametrize(
    "line",
    [line for line in LINES if line.expect["command"] == "convert"],
    ids=lambda line: f"{line.document}: {line.printed[-60:]}",
)
def test_a_converter_writes_a_model_that_the_next_line_serves(
    line: Line, gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, script, *arguments = line.words(MODEL_DIR, gguf)
    is_awq = script.endswith("convert_awq_marlin.py")
    source = write_packed(tmp_path / "awq", AWQ, awq()).directory if is_awq else MODEL_DIR
    for flag, path in (("--src", source), ("--dst", tmp_path / "converted")):
        arguments[arguments.index(flag) + 1] = str(path)
    few = lambda text, directory, _, *others: calibration_tokens(text, directory, 128, *others)  # noqa: E731
    monkeypatch.setattr(conversion, "calibration_tokens", few)
    monkeypatch.setattr(sys, "argv", [script, *arguments])
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    runpy.run_path(str(ROOT / script), run_name="__main__")
    label = "14 weights as AWQ int4 g128 with zero points for Marlin" if is_awq else "35 weights as GPTQ int4 g128"
    assert label in capsys.readouterr().out
    config = EngineConfig(model=str(tmp_path / "converted"), quantization="awq" if is_awq else "gptq")
    check_models(with_local_models(config))


@pytest.mark.parametrize(
    ("source", "flags", "complaint"),
    [
        (MODEL_DIR, [], "is not quantized, and --method is awq\n  quantize it first: pagewick convert "),
        ("awq", ["--method", "gptq"], "is AWQ, and --method is gptq\n  give --method awq"),
        ("awq", ["--group", "64"], "--group 64 has no effect: the checkpoint is quantized already"),
    ],
)
def test_a_converter_of_another_model(
    source: Path | str, flags: list[str], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_packed(tmp_path / "awq", AWQ, awq())
    arguments = ["--src", str(tmp_path / source), "--dst", str(tmp_path / "converted"), *flags]
    monkeypatch.setattr(sys, "argv", ["convert_awq_marlin.py", *arguments])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples" / "convert_awq_marlin.py"), run_name="__main__")
    assert complaint in str(end.value.code) and not (tmp_path / "converted").exists()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Put the logger back as it was."""
    logger = logging.getLogger("pagewick")
    before = logger.handlers, logger.level
    yield
    logger.handlers, logger.level = before


def test_all_documents_are_there() -> None:
    assert {line.document for line in LINES} == {
        "hanzo", "candle-vllm", "vllm.rs", "candle-vllm-2024", "vllm.rs-first",
    }  # fmt: skip
    assert len(LINES) == 86
