"""The one logging set-up: one line per record on stderr, with the rank when there are several."""

from __future__ import annotations

import logging
import os
import sys

_FORMAT = "%(levelname)s %(asctime)s %(message)s"


def get_logger(name: str) -> logging.Logger:
    """A logger below `pagewick`; nothing is shown before set_up."""
    return logging.getLogger(name)


def set_up(*, rank: int = 0, level: str | None = None) -> None:
    """Send Pagewick's records to stderr. The level is PAGEWICK_LOG_LEVEL, or INFO (WARNING on ranks above 0)."""
    chosen = level or os.environ.get("PAGEWICK_LOG_LEVEL") or ("INFO" if rank == 0 else "WARNING")
    handler = logging.StreamHandler(sys.stderr)
    prefix = f"[rank {rank}] " if rank else ""
    handler.setFormatter(logging.Formatter(prefix + _FORMAT, datefmt="%m-%d %H:%M:%S"))
    logger = logging.getLogger("pagewick")
    logger.handlers = [handler]
    logger.setLevel(chosen.upper())
    logger.propagate = False
