"""A rank with a heartbeat and without torch, on a machine of its own.

Usage: python -m tests.parallel.heartbeat_worker FOLDER SILENCE_S hang|work|hello

It writes FOLDER/<rank> once it is watched. hang: then it waits in C for ever, as in a collective of NCCL. work: rank 1
computes for twice the time limit, and rank 0 then ends all in order. hello: other programs connect, and rank 1 late.
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
import time
from pathlib import Path

import msgspec

from pagewick import log
from pagewick.parallel.heartbeat import begin_heartbeat
from pagewick.parallel.topology import detect_topology

START_S = 60.0


class FileStore:
    """A Store in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def set(self, key: str, value: str, /) -> None:
        unfinished = self.folder / f"{key}.part"
        unfinished.write_text(value, encoding="utf-8")
        unfinished.rename(self.folder / key)

    def get(self, key: str, /) -> bytes:
        await_file(self.folder / key)
        return (self.folder / key).read_bytes()


def await_file(path: Path) -> None:
    deadline = time.monotonic() + START_S
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.02)


def say_hello(store: FileStore, rank: int) -> None:
    """Connect as other programs might, and as a rank that there already is."""
    invitation = msgspec.json.decode(store.get("heartbeat of rank 0"))
    for line in (b"GET / HTTP/1.1\r\n", b"\xff\n", f"{'0' * 32} {rank}\n".encode(), b""):
        with socket.create_connection((invitation["host"], invitation["port"])) as connection:
            connection.sendall(line)
    for number in ("0", "-1", "9", "x"):
        with socket.create_connection((invitation["host"], invitation["port"])) as connection:
            connection.sendall(f"{invitation['secret']} {number}\n".encode())


def main() -> None:
    folder, silence_s, mode = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    topology, store = detect_topology(os.environ), FileStore(folder)
    log.set_up(rank=topology.rank)
    if mode == "hello" and topology.rank == 1:
        say_hello(store, topology.rank)
        time.sleep(1.5 * silence_s)
    # Only that of rank 0 counts.
    heartbeat = begin_heartbeat(store, topology, silence_s if topology.rank == 0 else 1e9, START_S)
    assert heartbeat is not None
    store.set(str(topology.rank), "")
    if mode == "hang":
        ctypes.CDLL(None).pause()
    if mode == "work" and topology.rank == 1:
        end = time.monotonic() + 2 * silence_s
        while time.monotonic() < end:
            sum(range(1000))
    store.set(f"{topology.rank} is done", "")
    if topology.rank == 0:
        for rank in range(topology.world_size):
            await_file(folder / f"{rank} is done")
        heartbeat.close(says_bye=True)
        store.set("the end", "")
    else:
        await_file(folder / "the end")
        # Long enough to notice that rank 0 has ended.
        time.sleep(1)
    heartbeat.close()
    print("ended in order")


if __name__ == "__main__":
    main()
