"""One record is one line, in both formats, whatever the record says."""

from __future__ import annotations

import ast
import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from pagewick import log

HOSTILE = "evil\r\nINFO 01-01 00:00:00 forged\x1b[2J\x00\u2028next\u202e\x85\ttab"


@pytest.fixture(autouse=True)
def loggers() -> Iterator[None]:
    """Put the loggers back as they were."""
    names = ["pagewick", "uvicorn", "asyncio", "opentelemetry"]
    before = {name: (one.handlers, one.level, one.propagate) for name in names if (one := logging.getLogger(name))}
    yield
    for name, (handlers, level, propagate) in before.items():
        one = logging.getLogger(name)
        one.handlers, one.propagate = handlers, propagate
        one.setLevel(level)


@pytest.fixture
def entries(capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda: [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_text_records_are_single_lines(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up(log_format="text")
    log.get_logger("pagewick.server").info("ignored: %s", HOSTILE)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("INFO ") and line.isprintable()
    assert r"evil\r\nINFO 01-01 00:00:00 forged\x1b[2J\x00\u2028next\u202e\x85\ttab" in line


def test_text_that_is_harmless_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up(log_format="text")
    log.get_logger("pagewick").info("Modell »größer« 模型 😀 C:\\n")
    assert capsys.readouterr().err.endswith(" Modell »größer« 模型 😀 C:\\n\n")


def test_a_traceback_forges_no_record(capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up(log_format="text")
    try:
        raise ValueError("bad\nINFO 01-01 00:00:00 forged\rERROR x")
    except ValueError:
        log.get_logger("pagewick").exception("it failed")
    first, *rest = capsys.readouterr().err.split("\n")[:-1]
    assert first.startswith("ERROR ") and first.endswith(" it failed")
    assert all(line.startswith("    ") and line.isprintable() for line in rest)
    assert "    INFO 01-01 00:00:00 forged\\rERROR x" in rest and any("Traceback" in line for line in rest)


def test_json_records_are_objects(entries: Any) -> None:
    log.set_up(log_format="json")
    logger = log.get_logger("pagewick.server")
    before = datetime.now(UTC)
    logger.info("ignored: %s", HOSTILE, extra={"request_id": "r-1"})
    try:
        raise ValueError("bad\nline")
    except ValueError:
        logger.exception("it failed")
    first, second = entries()
    moment = datetime.fromisoformat(first.pop("ts"))
    assert -0.001 <= (moment - before).total_seconds() < 60
    assert first == {
        "level": "INFO",
        "logger": "pagewick.server",
        "message": f"ignored: {HOSTILE}",
        "request_id": "r-1",
    }
    assert second["exc"].endswith("ValueError: bad\nline") and second["level"] == "ERROR"


def test_json_lines_are_ascii(capfd: pytest.CaptureFixture[str]) -> None:
    log.set_up(log_format="json")
    log.get_logger("pagewick").info("😀 \udc80")
    text = capfd.readouterr().err
    assert text.isascii() and json.loads(text)["message"] == "😀 \udc80"


@pytest.mark.parametrize("log_format", log.FORMATS)
def test_ranks_are_told_apart_and_quieter(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up(rank=3, log_format=log_format)
    log.get_logger("pagewick").info("no")
    log.get_logger("pagewick").warning("yes")
    (line,) = capsys.readouterr().err.splitlines()
    assert ("[rank 3] WARNING" in line) if log_format == "text" else json.loads(line)["rank"] == 3


@pytest.mark.parametrize("log_format", log.FORMATS)
def test_api_processes_are_told_apart(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up(api_process=0, log_format=log_format)
    log.get_logger("pagewick").info("yes")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[api 0] INFO") if log_format == "text" else json.loads(line)["api_process"] == 0


@pytest.mark.parametrize("log_format", log.FORMATS)
def test_models_are_told_apart(log_format: str, capsys: pytest.CaptureFixture[str]) -> None:
    log.set_up(log_format=log_format)
    logger = log.get_logger("pagewick")

    async def watch() -> None:
        await asyncio.sleep(0.01)
        logger.info("later")

    async def load() -> None:
        with log.of_model("a\nb"):
            logger.info("now")
            watching = asyncio.create_task(watch())
            assert log.child_environment()[log.MODEL_VARIABLE] == "a\nb"
        logger.info("of the server")
        assert log.MODEL_VARIABLE not in log.child_environment()
        await watching

    asyncio.run(load())
    now, other, later = capsys.readouterr().err.splitlines()
    if log_format == "text":
        assert now.startswith(r"[model a\nb] INFO ") and later.startswith(r"[model a\nb] INFO ")
        assert other.startswith("INFO ")
    else:
        assert [json.loads(line).get("model") for line in (now, other, later)] == ["a\nb", None, "a\nb"]


@pytest.mark.parametrize("log_format", log.FORMATS)
def test_an_engine_process_names_its_model(
    log_format: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(log.MODEL_VARIABLE, "small")
    log.set_up(rank=1, log_format=log_format)
    log.get_logger("pagewick").warning("yes")
    line = capsys.readouterr().err
    if log_format == "text":
        assert line.startswith("[model small] [rank 1] WARNING ")
    else:
        assert (json.loads(line)["model"], json.loads(line)["rank"]) == ("small", 1)


def test_the_variables_say_what_nobody_else_does(monkeypatch: pytest.MonkeyPatch, entries: Any) -> None:
    monkeypatch.setenv(log.FORMAT_VARIABLE, "json")
    monkeypatch.setenv(log.LEVEL_VARIABLE, "warning")
    log.set_up()
    log.get_logger("pagewick").info("no")
    log.get_logger("pagewick").warning("yes")
    assert [entry["message"] for entry in entries()] == ["yes"]


def test_another_format_is_refused() -> None:
    with pytest.raises(ValueError, match="one of text, json; got 'xml'"):
        log.set_up(log_format="xml")


@pytest.mark.parametrize("name", ["uvicorn.error", "asyncio", "opentelemetry.exporter"])
def test_libraries_warn_in_the_same_log(name: str, entries: Any) -> None:
    log.set_up(log_format="json")
    logging.getLogger(name).info("chatter")
    logging.getLogger(name).warning("Invalid HTTP request received.\r\n")
    assert [(entry["logger"], entry["message"]) for entry in entries()] == [
        (name, "Invalid HTTP request received.\r\n")
    ]


def test_set_up_again_changes_and_does_not_double(entries: Any) -> None:
    log.set_up(log_format="text")
    log.set_up(log_format="json", level="ERROR")
    log.get_logger("pagewick").warning("no")
    log.get_logger("pagewick").error("yes")
    logging.getLogger("uvicorn.error").warning("no")
    assert [entry["message"] for entry in entries()] == ["yes"]


def test_importing_it_needs_nothing_of_pagewick() -> None:
    code = "import sys, pagewick; known = {*sys.modules}; import pagewick.log; print({*sys.modules} - known)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert [name for name in ast.literal_eval(found.stdout) if name.startswith("pagewick")] == ["pagewick.log"]


def test_processes_that_are_started_log_in_the_same_way(monkeypatch: pytest.MonkeyPatch) -> None:
    logger = logging.getLogger("pagewick")
    monkeypatch.setattr(logger, "handlers", [])
    assert log.child_environment() == {}
    for level, log_format, expected in (
        ("INFO", "json", {log.FORMAT_VARIABLE: "json"}),
        ("warning", None, {log.FORMAT_VARIABLE: "text", log.LEVEL_VARIABLE: "WARNING"}),
    ):
        log.set_up(level=level, log_format=log_format)
        assert log.child_environment() == {**expected, log.RUST_VARIABLE: ""}


@pytest.mark.parametrize(
    ("rust_log", "level", "expected"),
    [
        ("warn", "", "WARNING"),
        ("hyper=warn, DEBUG", "", "DEBUG"),
        ("trace", "", "DEBUG"),
        ("candle_vllm=debug", "", "INFO"),
        ("debug", "ERROR", "ERROR"),
        ("", "", "INFO"),
    ],
)
def test_rust_log_sets_the_level(monkeypatch: pytest.MonkeyPatch, rust_log: str, level: str, expected: str) -> None:
    monkeypatch.setenv("RUST_LOG", rust_log)
    monkeypatch.setenv(log.LEVEL_VARIABLE, level)
    log.set_up()
    assert logging.getLevelName(logging.getLogger("pagewick").level) == expected


def test_the_lines_of_an_error_become_one() -> None:
    assert log.one_line(ValueError("not found: config.json\n  Pagewick reads it\n")) == (
        "not found: config.json; Pagewick reads it"
    )
