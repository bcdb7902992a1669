"""A rank without torch, which writes down its inputs and waits to be ended.

Usage: python -m tests.parallel.idle_worker FOLDER sleep|exit|stubborn|finish
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from pagewick.parallel.launch import die_with_parent


def main() -> None:
    die_with_parent()
    folder, mode = Path(sys.argv[1]), sys.argv[2]
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("standard output of a rank")
    report = {"environ": dict(os.environ), "stdin": sys.stdin.read(), "pid": os.getpid()}
    unfinished = folder / f"{os.environ['RANK']}.part"
    unfinished.write_text(json.dumps(report))
    unfinished.rename(folder / f"{os.environ['RANK']}.json")
    if mode == "exit":
        sys.exit(3)
    if mode == "finish":
        # After SIGTERM it still has something to write.
        while not (folder / "stop").exists():
            time.sleep(0.01)
        time.sleep(0.5)
        (folder / f"{os.environ['RANK']}.written").touch()
        return
    time.sleep(600)


if __name__ == "__main__":
    main()
