"""The one logging set-up: one line per record on stderr, as text or as JSON, with the rank when there are several.

A record is one line whatever it says: messages carry what clients sent, and a line that a client can break is a record
that a client can forge.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import time
from typing import Any

FORMATS = ("text", "json")
# The format of the engine process is that of whoever starts it.
FORMAT_VARIABLE = "PAGEWICK_LOG_FORMAT"
LEVEL_VARIABLE = "PAGEWICK_LOG_LEVEL"

_TEXT = "%(levelname)s %(asctime)s %(message)s"
# Libraries in the server's process whose warnings belong to the same log.
_OTHERS = ("asyncio", "uvicorn", "opentelemetry")
# Control characters, the line ends that only Unicode knows, and what turns the direction of writing round.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def get_logger(name: str) -> logging.Logger:
    """A logger below `pagewick`; nothing is shown before set_up."""
    return logging.getLogger(name)


def set_up(*, rank: int = 0, level: str | None = None, log_format: str | None = None) -> None:
    """Send Pagewick's records, and the warnings of uvicorn, asyncio and OpenTelemetry, to stderr.

    The level is PAGEWICK_LOG_LEVEL if none is given, or INFO (WARNING on ranks above 0). The format is
    PAGEWICK_LOG_FORMAT if none is given, or text. Raises ValueError for another format or level.
    """
    level = level or os.environ.get(LEVEL_VARIABLE) or ("INFO" if rank == 0 else "WARNING")
    log_format = log_format or os.environ.get(FORMAT_VARIABLE) or "text"
    if log_format not in FORMATS:
        raise ValueError(f"the log format must be one of {', '.join(FORMATS)}; got {log_format!r}")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonFormatter(rank) if log_format == "json" else _TextFormatter(rank))
    logger = logging.getLogger("pagewick")
    logger.setLevel(level.upper())
    for one in (logger, *map(logging.getLogger, _OTHERS)):
        one.handlers = [handler]
        one.propagate = False
        if one is not logger:
            one.setLevel(max(logging.WARNING, logger.level))


def child_environment() -> dict[str, str]:
    """The variables by which a process that this one starts logs as this one does; none before `set_up`."""
    logger = logging.getLogger("pagewick")
    if not logger.handlers:
        return {}
    is_json = any(isinstance(handler.formatter, _JsonFormatter) for handler in logger.handlers)
    variables = {FORMAT_VARIABLE: "json" if is_json else "text"}
    # INFO is the engine's own choice; said aloud, its ranks would take it for theirs.
    if logger.level != logging.INFO:
        variables[LEVEL_VARIABLE] = logging.getLevelName(logger.level)
    return variables


def printable(text: str) -> str:
    """The text on one line: control characters, line ends among them, are spelled out (a line feed becomes \\n)."""
    return _UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _TextFormatter(logging.Formatter):
    """Tracebacks keep their lines, but indented: a record begins where a line does, so none can be forged in them."""

    def __init__(self, rank: int) -> None:
        super().__init__((f"[rank {rank}] " if rank else "") + _TEXT, datefmt="%m-%d %H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indented(super().formatStack(stack_info))


class _JsonFormatter(logging.Formatter):
    """One object per line; pure ASCII, so that no reader finds a line end in it."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

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
        if self._rank:
            entry["rank"] = self._rank
        if record.exc_info and record.exc_info[0] is not None:
            entry["exc"] = self.formatException(record.exc_info)
        if record.stack_info:
            entry["stack"] = record.stack_info
        return json.dumps(entry)


def _indented(text: str) -> str:
    return "\n".join("    " + printable(line) for line in text.split("\n"))
