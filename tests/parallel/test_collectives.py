"""Collectives between real gloo processes, compared with sums and concatenations in NumPy."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from pagewick.errors import ConfigError, EngineDeadError
from pagewick.parallel.collectives import Collectives, init_collectives
from pagewick.parallel.launch import LocalRanks
from pagewick.parallel.topology import Topology, detect_topology
from tests.parallel.gloo_worker import payload_of, run_operations, save, values

ENVIRON = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "OMP_NUM_THREADS": "1",
}

Results = list[dict[str, np.ndarray]]


def load(folder: Path, world_size: int) -> Results:
    return [dict(np.load(folder / f"{rank}.npz")) for rank in range(world_size)]


def run_spawned(folder: Path, world_size: int) -> Results:
    topology = detect_topology({}, tensor_parallel_size=world_size)
    arguments = [str(folder), "operations"]
    with LocalRanks(topology, module="tests.parallel.gloo_worker", arguments=arguments, environ=ENVIRON) as ranks:
        collectives = init_collectives(ranks.topology, "cpu", listener=ranks.listener, timeout_s=60)
        save(folder, 0, run_operations(collectives))
        collectives.barrier()
        collectives.close()
        collectives.close()
    return load(folder, world_size)


def run_torchrun(folder: Path) -> Results:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, "-m", "tests.parallel.gloo_worker", str(folder), "operations"], env=ENVIRON, check=True)
    return load(folder, 2)


def own_address() -> str:
    """Return an address of this machine in a network, or else the loopback address."""
    own = [
        entry.address
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == socket.AF_INET and not entry.address.startswith("127.")
    ]
    return str(own[0]) if own else "127.0.0.1"


def free_port(address: str = "127.0.0.1") -> int:
    with socket.create_server((address, 0)) as probe:
        return int(probe.getsockname()[1])


def run_slurm(folder: Path) -> Results:
    """Run two tasks as Slurm starts them on two nodes of a network, without a socket from a parent."""
    variables = {
        "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_STEP_ID": "0", "SLURM_JOB_NODELIST": "n[1-2]",
        "MASTER_ADDR": own_address(), "MASTER_PORT": str(free_port(own_address())),
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.parallel.gloo_worker", str(folder), "operations"]
    tasks = [
        subprocess.Popen(command, env={**ENVIRON, **variables, "SLURM_PROCID": str(rank), "SLURM_NODEID": str(rank)})
        for rank in range(2)
    ]
    try:
        assert [task.wait(timeout=120) for task in tasks] == [0, 0]
    finally:
        for task in tasks:
            task.kill()
            task.wait()
    return load(folder, 2)


@pytest.fixture(scope="module", params=["spawn-2", "spawn-3", "torchrun-2", "slurm-2"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return the results of each rank of a group, for each way to start one."""
    launcher, _, world_size = request.param.partition("-")
    folder = tmp_path_factory.mktemp(request.param)
    if launcher == "spawn":
        return run_spawned(folder, int(world_size))
    return run_torchrun(folder) if launcher == "torchrun" else run_slurm(folder)


def inputs(results: Results, *shape: int) -> list[np.ndarray]:
    return [values(rank, *shape) for rank in range(len(results))]


def test_sum_is_in_rank_order_and_the_same_everywhere(results: Results) -> None:
    expected, *others = inputs(results, 5, 7)
    for other in others:
        expected = expected + other
    for result in results:
        np.testing.assert_array_equal(result["sum"], expected)


def test_sum_does_not_depend_on_the_rest_of_the_batch(results: Results) -> None:
    for result in results:
        np.testing.assert_array_equal(result["sum_of_row"], result["sum"][3])


def test_sum_of_a_tensor_that_is_not_contiguous(results: Results) -> None:
    expected = np.sum(np.stack(inputs(results, 4, 6)).astype(np.float64), axis=0).T
    for result in results:
        np.testing.assert_allclose(result["sum_transposed"], expected, rtol=1e-6, atol=1e-4)


def test_bfloat16_is_summed_in_float32_and_rounded_once(results: Results) -> None:
    total = torch.zeros(3, 11)
    for part in inputs(results, 3, 11):
        total += torch.from_numpy(part).bfloat16().float()
    for result in results:
        np.testing.assert_array_equal(result["sum_bfloat16"], total.bfloat16().float().numpy())


def test_sum_of_integers_and_of_nothing(results: Results) -> None:
    world_size = len(results)
    offset = 2**40 * sum(range(world_size))
    for result in results:
        np.testing.assert_array_equal(result["sum_int64"], np.arange(5) * world_size + offset)
        assert result["sum_of_nothing"].shape == (0, 7)


def test_small_sums_are_added_in_rank_order(results: Results) -> None:
    for name, shape in (("small", (4, 8)), ("small_again", (16, 16))):
        expected, *others = inputs(results, *shape)
        for other in others:
            expected = expected + other
        for result in results:
            np.testing.assert_array_equal(result[name], expected)
    for result in results:
        np.testing.assert_array_equal(result["small_bfloat16"], results[0]["small_bfloat16"])


def test_other_sums_of_gpus_are_the_backends(results: Results) -> None:
    transposed = np.sum(np.stack(inputs(results, 4, 6)).astype(np.float64), axis=0).T
    expected = {
        "not_small": np.sum(np.stack(inputs(results, 17, 16)).astype(np.float64), axis=0),
        "not_aligned": np.sum(np.stack(inputs(results, 1, 7)).astype(np.float64), axis=0),
        "not_contiguous": transposed,
        "not_float": np.arange(8) * len(results) + sum(range(len(results))),
    }
    for result in results:
        for name, numbers in expected.items():
            np.testing.assert_allclose(result[name], numbers, rtol=1e-5, atol=1e-2)


def test_gather_along_either_dimension(results: Results) -> None:
    parts = inputs(results, 2, 3)
    for result in results:
        np.testing.assert_array_equal(result["gather_last"], np.concatenate(parts, axis=1))
        np.testing.assert_array_equal(result["gather_first"], np.concatenate(parts, axis=0))
        rounded = torch.from_numpy(np.concatenate(parts, axis=1)).bfloat16().float().numpy()
        np.testing.assert_array_equal(result["gather_bfloat16"], rounded)


def test_gather_of_uneven_and_empty_shards(results: Results) -> None:
    world_size = len(results)
    uneven = np.concatenate([values(rank, 3, 2 + rank) for rank in range(world_size)], axis=1)
    with_empty = np.concatenate([values(rank, 2, 3) for rank in range(1, world_size)], axis=1)
    for result in results:
        np.testing.assert_array_equal(result["gather_uneven"], uneven)
        np.testing.assert_array_equal(result["gather_with_empty"], with_empty)


def test_every_rank_gets_the_bytes_of_rank_0(results: Results) -> None:
    for result in results:
        assert result["payloads_right"].all()


def test_every_rank_gets_the_lowest_numbers(results: Results) -> None:
    for result in results:
        assert result["lowest"].tolist() == [0, 1 - len(results), 2**40]


def test_every_rank_knows_how_many_share_its_machine(results: Results, request: pytest.FixtureRequest) -> None:
    is_alone = request.node.callspec.params["results"] == "slurm-2" and own_address() != "127.0.0.1"
    for result in results:
        assert result["local_world_size"] == (1 if is_alone else len(results))


def test_nothing_listens_beyond_the_interface_to_rank_0(results: Results, request: pytest.FixtureRequest) -> None:
    across_nodes = request.node.callspec.params["results"] == "slurm-2"
    addresses = {str(address) for result in results for address in result["listening"]}
    assert addresses == {own_address() if across_nodes else "127.0.0.1"}


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[LocalRanks, Collectives]]:
    """Return rank 0's end of a group of two, whose other rank waits in `broadcast_bytes`."""
    topology = detect_topology({}, tensor_parallel_size=2)
    arguments = [str(tmp_path), "wait"]
    with LocalRanks(topology, module="tests.parallel.gloo_worker", arguments=arguments, environ=ENVIRON) as ranks:
        collectives = init_collectives(ranks.topology, "cpu", listener=ranks.listener, timeout_s=60)
        yield ranks, collectives
        collectives.close()


def test_a_lost_rank_is_an_error_and_not_a_hang(pair: tuple[LocalRanks, Collectives]) -> None:
    ranks, collectives = pair
    children = [child for child in psutil.Process().children() if "tests.parallel.gloo_worker" in child.cmdline()]
    assert len(children) == 1
    children[0].send_signal(signal.SIGKILL)
    children[0].wait()
    with pytest.raises(RuntimeError):
        collectives.all_reduce(torch.ones(3))
    assert ranks.poll() == 1


def test_a_group_of_one_does_nothing() -> None:
    collectives = Collectives.single()
    tensor = torch.arange(6.0).view(2, 3)
    assert collectives.all_reduce(tensor) is tensor
    assert collectives.all_gather(tensor, dim=0) is tensor
    assert collectives.broadcast_bytes(payload_of(5000)) == payload_of(5000)
    assert collectives.minimum([3, 2**40]) == [3, 2**40]
    assert (collectives.tp_rank, collectives.tp_size) == (0, 1)
    collectives.barrier()
    collectives.close()
    assert init_collectives(detect_topology({}), "cpu").world_size == 1


def test_a_device_that_cannot_share_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"needs --device cpu or cuda, not mps"):
        init_collectives(detect_topology({}, tensor_parallel_size=2), "mps")


def test_a_missing_rank_0_is_reported() -> None:
    port = free_port()
    topology = Topology(1, 2, 1, 2, 0, "127.0.0.1", port, "openmpi")
    with pytest.raises(ConfigError, match=rf"rank 1 of 2 did not find the others .*127\.0\.0\.1:{port}"):
        init_collectives(topology, "cpu", timeout_s=0.5)


def test_missing_ranks_are_named() -> None:
    topology = Topology(0, 3, 0, 3, 0, "127.0.0.1", free_port(), "openmpi")
    with pytest.raises(ConfigError, match=r"rank 0 of 3 did not find the others .*\(missing: 1, 2\)"):
        init_collectives(topology, "cpu", timeout_s=0.1)


def test_a_rank_that_ends_while_starting_is_noticed(tmp_path: Path) -> None:
    topology = detect_topology({}, tensor_parallel_size=2)
    module, arguments = "tests.parallel.idle_worker", [str(tmp_path), "exit"]
    with (
        LocalRanks(topology, module=module, arguments=arguments, environ=ENVIRON) as ranks,
        pytest.raises(EngineDeadError, match="rank 1 ended while it started"),
    ):
        init_collectives(ranks.topology, "cpu", listener=ranks.listener, lost_rank=ranks.poll, timeout_s=60)
