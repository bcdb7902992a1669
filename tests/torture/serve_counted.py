"""`pagewick serve`, which on SIGUSR1 logs how many asyncio tasks there are."""

from __future__ import annotations

import asyncio
import logging
import signal
from types import FrameType

from pagewick.cli import main


def count_tasks(number: int, frame: FrameType | None) -> None:
    logging.getLogger("pagewick.tasks").info("%d tasks", len(asyncio.all_tasks()))


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, count_tasks)
    main()
