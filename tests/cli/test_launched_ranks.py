"""Several ranks that a launcher starts with the same command: they work together, and report a mistake once."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("arguments", "words"),
    [([], "--tensor-parallel-size 3 does not divide the model's 4 attention heads"), (["./none"], "./none")],
    ids=["three ranks on four heads", "no such model"],
)
def test_ranks_of_one_machine_report_a_mistake_once(arguments: list[str], words: str) -> None:
    common = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command = [sys.executable, "-m", "pagewick", "complete", *arguments, "--prompts", "a"]
    ranks = [
        subprocess.Popen(
            ["env", *(f"{name}={value}" for name, value in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()),
             *command],
            stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    said = [rank.communicate(timeout=60)[1] for rank in ranks]
    assert words in said[0] and said[0].count("error:") == 1
    assert said[1:] == ["", ""]
    assert all(rank.returncode for rank in ranks)


def test_each_pod_of_a_leader_worker_set_starts_its_ranks() -> None:
    """Two pods with two ranks each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    common = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": "127.0.0.1", "MASTER_PORT": port}
    command = [sys.executable, "-m", "pagewick", "complete", "--tensor-parallel-size", "4", "--num-threads", "1"]
    options = ["--num-kv-blocks", "16", "--temperature", "0", "--max-tokens", "4", "--prompts", "Pagewick is"]
    pods = [
        subprocess.Popen(
            ["env", *(f"{name}={value}" for name, value in {**common, "LWS_WORKER_INDEX": pod}.items()),
             *command, *options],
            stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for pod in range(2)
    ]  # fmt: skip
    said = [pod.communicate(timeout=240) for pod in pods]
    assert [pod.returncode for pod in pods] == [0, 0], said
    assert said[0][0].strip() and not said[1][0]
