"""Ranks started on this machine get their inputs, and none outlives its parent."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagewick.errors import ConfigError
from pagewick.parallel.launch import LocalRanks, die_with_parent, environment_of
from pagewick.parallel.topology import Topology, detect_topology

ENVIRON = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def wait_for(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.02)


def start(folder: Path, mode: str, num_ranks: int = 3, payload: bytes = b"") -> LocalRanks:
    topology = detect_topology({}, tensor_parallel_size=num_ranks)
    ranks = LocalRanks(
        topology,
        module="tests.parallel.idle_worker",
        arguments=[str(folder), mode],
        stdin_payload=payload,
        environ=ENVIRON,
    )
    return ranks


def reports(folder: Path, num_children: int) -> dict[int, dict[str, Any]]:
    """Wait for the children's reports and return them by rank."""
    wait_for(lambda: len(list(folder.glob("*.json"))) == num_children, "the children's reports")
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def is_gone(pid: int) -> bool:
    """Whether a process has ended; its exit status need not have been collected."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def test_environment_is_torchruns() -> None:
    topology = Topology(4, 8, 0, 4, 1, "10.0.0.1", 29500, "spawn")
    assert environment_of(topology, 2) == {
        "RANK": "6", "WORLD_SIZE": "8", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500", "PAGEWICK_LAUNCHER": "spawn",
    }  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        {"tensor_parallel_size": 3, "master_port": 4000},
        {"tensor_parallel_size": 6, "nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1"},
    ],
)
def test_environment_is_read_back_as_the_same_group(flags: dict[str, Any]) -> None:
    topology = detect_topology({}, **flags)
    for local_rank in range(topology.local_world_size):
        child = detect_topology(environment_of(topology, local_rank), **flags)
        assert child.rank == topology.rank + local_rank
        assert child.local_rank == local_rank
        assert (child.world_size, child.local_world_size) == (topology.world_size, 3)
        assert (child.master_addr, child.master_port) == (topology.master_addr, topology.master_port)
        assert child.launcher == "spawn"


def test_children_get_their_rank_and_the_payload(tmp_path: Path) -> None:
    payload = json.dumps({"model": "x" * 200_000}).encode()
    with start(tmp_path, "sleep", payload=payload) as ranks:
        told = reports(tmp_path, 2)
        assert ranks.poll() is None
        assert ranks.listener is not None
        port = ranks.listener.getsockname()[1]
        assert ranks.topology.master_port == port
    assert sorted(told) == [1, 2]
    for rank, report in told.items():
        assert report["stdin"].encode() == payload
        expected = environment_of(ranks.topology, rank)
        assert expected["MASTER_PORT"] == str(port)
        assert {name: report["environ"].get(name) for name in expected} == expected
        assert is_gone(report["pid"])


def test_a_killed_child_is_noticed_and_the_rest_is_ended(tmp_path: Path) -> None:
    with start(tmp_path, "sleep") as ranks:
        told = reports(tmp_path, 2)
        os.kill(told[2]["pid"], signal.SIGKILL)
        wait_for(lambda: ranks.poll() is not None, "the death of rank 2")
        assert ranks.poll() == 2
        assert ranks._processes[2].poll() == -signal.SIGKILL
        assert ranks._processes[1].poll() is None
    assert is_gone(told[1]["pid"])


def test_a_child_that_ends_by_itself_is_noticed(tmp_path: Path) -> None:
    with start(tmp_path, "exit", num_ranks=2) as ranks:
        wait_for(lambda: ranks.poll() == 1, "the end of rank 1")
        assert ranks._processes[1].poll() == 3


def test_a_child_that_was_told_to_stop_may_finish(tmp_path: Path) -> None:
    with start(tmp_path, "finish") as ranks:
        reports(tmp_path, 2)
        assert not ranks.wait(timeout_s=0.1)
        (tmp_path / "stop").touch()
        assert ranks.wait(timeout_s=30)
    assert len(list(tmp_path.glob("*.written"))) == 2


def test_terminate_ends_a_child_that_ignores_it(tmp_path: Path) -> None:
    ranks = start(tmp_path, "stubborn", num_ranks=2)
    told = reports(tmp_path, 1)
    ranks.terminate(grace_s=0.1)
    assert is_gone(told[1]["pid"])
    assert ranks._processes[1].poll() == -signal.SIGKILL
    ranks.terminate()


def test_children_die_with_a_killed_parent(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.parallel.parent_of_idle", str(tmp_path)]
    parent = subprocess.Popen(command, env=ENVIRON, stderr=subprocess.DEVNULL)
    try:
        told = reports(tmp_path, 2)
    finally:
        parent.kill()
        parent.wait()
    for report in told.values():
        wait_for(lambda pid=report["pid"]: is_gone(pid), "a child of a killed parent")  # type: ignore[misc]


def test_standard_output_is_rank_0s_alone(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with start(tmp_path, "sleep", num_ranks=2) as ranks:
        reports(tmp_path, 1)
        ranks.terminate()
    assert capfd.readouterr().out == ""


def test_an_orphan_does_not_start() -> None:
    code = "from pagewick.parallel.launch import die_with_parent; die_with_parent()"
    # The variable names a process that is not the parent, as if the parent had died just before.
    environ = {**ENVIRON, "PAGEWICK_PARENT_PID": "1" if os.getpid() != 1 else "2"}
    done = subprocess.run([sys.executable, "-c", code], env=environ, stderr=subprocess.PIPE, check=False)
    assert done.returncode == 1
    assert b"the parent process is gone" in done.stderr


def test_die_with_parent_leaves_others_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PAGEWICK_PARENT_PID", raising=False)
    die_with_parent()


def test_a_taken_port_names_the_variable(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        topology = detect_topology({}, tensor_parallel_size=2, master_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match=r"in use by another process: set MASTER_PORT to another"):
            LocalRanks(
                topology, module="tests.parallel.idle_worker", arguments=[str(tmp_path), "sleep"], environ=ENVIRON
            )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("address", "message"),
    [
        # 203.0.113.0/24 is reserved for documentation (RFC 5737).
        ("203.0.113.77", r"rank 0 cannot listen at 203\.0\.113\.77:\d+ .*one of its own machine"),
        ("no-such-host.invalid", r"'no-such-host\.invalid' cannot be resolved .*MASTER_ADDR"),
    ],
)
def test_a_master_address_of_another_machine_is_refused(address: str, message: str) -> None:
    topology = detect_topology(
        {}, tensor_parallel_size=4, nnodes=2, node_rank=0, master_addr=address, master_port=29876
    )
    with pytest.raises(ConfigError, match=message):
        LocalRanks(topology, module="tests.parallel.idle_worker", environ=ENVIRON)
