"""Logging: one line per record on stderr, as text or as JSON, with the rank, API process or model if there are several.

Messages contain text from clients. A record is always one line, because a client that could insert a line break could
forge a record.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

FORMATS = ("text", "json")
# Passes the format to the engine process.
FORMAT_VARIABLE = "PAGEWICK_LOG_FORMAT"
LEVEL_VARIABLE = "PAGEWICK_LOG_LEVEL"
# Passes the model of a server of several to its engine process.
MODEL_VARIABLE = "PAGEWICK_LOG_MODEL"
# The variable of candle-vllm and vllm.rs, and our names for its levels.
RUST_VARIABLE = "RUST_LOG"
_RUST_LEVELS = {name: name.upper() for name in ("error", "info", "debug")}
_RUST_LEVELS |= {"off": "CRITICAL", "warn": "WARNING", "trace": "DEBUG"}

_TEXT = "%(levelname)s %(asctime)s %(message)s"
# Libraries whose warnings go to the same log.
_OTHERS = ("asyncio", "uvicorn", "opentelemetry")
# Control characters, Unicode's line separators, and characters that change the direction of text.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")

_model: ContextVar[str | None] = ContextVar("model", default=None)


@contextmanager
def of_model(name: str) -> Iterator[None]:
    """Add a model's name to the records of this context, of its new tasks, and of the processes that these start."""
    token = _model.set(name)
    try:
        yield
    finally:
        _model.reset(token)


def get_logger(name: str) -> logging.Logger:
    """Return a logger below `pagewick`. It writes nothing before set_up."""
    return logging.getLogger(name)


def set_up(
    *, rank: int = 0, api_process: int | None = None, level: str | None = None, log_format: str | None = None
) -> None:
    """Send Pagewick's records, and the warnings of uvicorn, asyncio and OpenTelemetry, to stderr.

    api_process: the number of this process, if the server has several that answer requests.
    level: None: PAGEWICK_LOG_LEVEL or RUST_LOG, else INFO (WARNING on ranks above 0). log_format: None:
    PAGEWICK_LOG_FORMAT, else text. Raises ValueError for an unknown format or level.
    """
    level = level or os.environ.get(LEVEL_VARIABLE) or rust_level() or ("INFO" if rank == 0 else "WARNING")
    log_format = log_format or os.environ.get(FORMAT_VARIABLE) or "text"
    if log_format not in FORMATS:
        raise ValueError(f"the log format must be one of {', '.join(FORMATS)}; got {log_format!r}")
    handler = logging.StreamHandler(sys.stderr)
    source: dict[str, int | str] = (
        {"rank": rank} if rank else {} if api_process is None else {"api_process": api_process}
    )
    if model := os.environ.get(MODEL_VARIABLE):
        source = {"model": model, **source}
    handler.setFormatter(_JsonFormatter(source) if log_format == "json" else _TextFormatter(source))
    logger = logging.getLogger("pagewick")
    logger.setLevel(level.upper())
    for one in (logger, *map(logging.getLogger, _OTHERS)):
        one.handlers = [handler]
        one.propagate = False
        if one is not logger:
            one.setLevel(max(logging.WARNING, logger.level))


def rust_level() -> str | None:
    """Return the level that RUST_LOG sets for all modules; None if it has levels of single modules only, or none."""
    directives = os.environ.get(RUST_VARIABLE, "").lower().split(",")
    return next((_RUST_LEVELS[text] for one in directives if (text := one.strip()) in _RUST_LEVELS), None)


def child_environment() -> dict[str, str]:
    """Return environment variables that make a child process log like this one; empty before `set_up`."""
    logger = logging.getLogger("pagewick")
    if not logger.handlers:
        return {}
    is_json = any(isinstance(handler.formatter, _JsonFormatter) for handler in logger.handlers)
    variables = {FORMAT_VARIABLE: "json" if is_json else "text", RUST_VARIABLE: ""}
    # INFO is the default of rank 0. If it were passed on, the other ranks would use it instead of WARNING.
    if logger.level != logging.INFO:
        variables[LEVEL_VARIABLE] = logging.getLevelName(logger.level)
    if (model := _model.get()) is not None:
        variables[MODEL_VARIABLE] = model
    return variables


def one_line(error: BaseException) -> str:
    """Return the message of an error, whose further lines say what to do, in one line."""
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip())


def printable(text: str) -> str:
    """Escape control characters, including line breaks (a line feed becomes \\n)."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _TextFormatter(logging.Formatter):
    """Indents the lines of tracebacks: only a record begins at the start of a line, so none can be forged.

    source: what the records of this process are about, with the name of its kind; empty if there are no others.
    """

    def __init__(self, source: dict[str, int | str]) -> None:
        super().__init__(_TEXT, datefmt="%m-%d %H:%M:%S")
        self._source = source

    def formatMessage(self, record: logging.LogRecord) -> str:
        origin = "".join(f"[{name.removesuffix('_process')} {which}] " for name, which in _with_model(self._source))
        return printable(origin + super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


class _JsonFormatter(logging.Formatter):
    """Writes one JSON object per line, in ASCII, so that no reader sees a line separator in it."""

    def __init__(self, source: dict[str, int | str]) -> None:
        super().__init__()
        self._source = source

    def format(self, record: logging.LogRecord) -> str:
        seconds = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        entry: dict[str, Any] = {
            "ts": f"{seconds}.{int(record.msecs):03d}Z",
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = getattr(record, "request_id", None)
        if request_id is not None:
            entry["request_id"] = str(request_id)
        entry |= dict(_with_model(self._source))
        if record.exc_info and record.exc_info[0] is not None:
            entry["exc"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = record.stack_info
        return json.dumps(entry)


def _with_model(source: dict[str, int | str]) -> Iterable[tuple[str, int | str]]:
    model = _model.get()
    return (source if model is None else {"model": model, **source}).items()


def _indented(text: str) -> str:
    return "\n".join("    " + printable(line) for line in text.split("\n"))
