#!/usr/bin/env python3
"""with_server.py COMMAND...: run a client's command beside a `pagewick serve` with the built-in model.

The exit status is the command's, and 1 if the server did not start, did not stop cleanly or logged a traceback. The
command finds in its environment:
    PAGEWICK_URL        the server's address, without /v1
    PAGEWICK_KEY        a key that the server accepts
    PAGEWICK_MODEL_DIR  the directory of the built-in model, for clients that need its tokenizer
The server requires its key, refuses unknown fields (--strict) instead of ignoring them, and computes in float32, where
the likeliest tokens are the same however requests are batched.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KEY = "a-key-for-clients"
READY = re.compile(r"ready on (http://\S+)")
# Seconds, long enough for everything that does not hang.
START_S, STOP_S, CLIENT_S = 120, 30, 900


def serve() -> subprocess.Popen[str]:
    command = [
        str(ROOT / ".venv/bin/python"),
        "-m",
        "pagewick",
        "serve",
        "--port",
        "0",
        "--strict",
        "--dtype",
        "float32",
    ]
    environment = {**os.environ, "PAGEWICK_API_KEY": KEY}
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def address_of(server: subprocess.Popen[str]) -> str | None:
    """Return the server's address; None if the server ended or did not start in time."""
    assert server.stdout is not None
    limit = threading.Timer(START_S, server.kill)
    limit.start()
    try:
        return next((match[1] for line in server.stdout if (match := READY.search(line))), None)
    finally:
        limit.cancel()


def run_beside(server: subprocess.Popen[str], command: list[str]) -> int:
    """Run the command and return its exit status; 1 if there is no server."""
    address = address_of(server)
    if address is None:
        print("the server did not start", file=sys.stderr)
        return 1
    found = {"PAGEWICK_URL": address, "PAGEWICK_KEY": KEY, "PAGEWICK_MODEL_DIR": str(ROOT / "pagewick/demo/model")}
    try:
        return subprocess.run(command, env=os.environ | found, timeout=CLIENT_S).returncode
    except subprocess.TimeoutExpired:
        print(f"{command[0]} did not end within {CLIENT_S} s", file=sys.stderr)
        return 1


def main(command: list[str]) -> int:
    server = serve()
    log: list[str] = []
    # Read all the time: a full pipe would block the server.
    reader = threading.Thread(target=lambda: log.extend(server.stderr or []))
    reader.start()
    try:
        status = run_beside(server, command)
        server.send_signal(signal.SIGINT)
        stopped = server.wait(STOP_S)
    finally:
        server.kill()
        reader.join()
    if stopped != 0 or any("Traceback" in line for line in log):
        print(f"the server stopped with {stopped}", file=sys.stderr)
        status = status or 1
    if status != 0:
        sys.stderr.writelines(log)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
