"""detect_topology, case by case: the variables of each launcher, the effect of flags, and refused inputs."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.errors import ConfigError
from pagewick.parallel.slurm import expand_nodelist
from pagewick.parallel.topology import Topology, detect_topology


def torchrun(rank: int, world: int, local: int, local_world: int, group: int, **more: str) -> dict[str, str]:
    return {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(local_world), "GROUP_RANK": str(group),
        "MASTER_ADDR": "head", "MASTER_PORT": "29400", **more,
    }  # fmt: skip


def openmpi(rank: int, size: int, local: int, local_size: int, **more: str) -> dict[str, str]:
    prefix = "OMPI_COMM_WORLD_"
    return {
        prefix + "RANK": str(rank), prefix + "SIZE": str(size),
        prefix + "LOCAL_RANK": str(local), prefix + "LOCAL_SIZE": str(local_size), **more,
    }  # fmt: skip


def pmi(rank: int, size: int, local: int, local_size: int, **more: str) -> dict[str, str]:
    return {
        "PMI_RANK": str(rank), "PMI_SIZE": str(size),
        "MPI_LOCALRANKID": str(local), "MPI_LOCALNRANKS": str(local_size), **more,
    }  # fmt: skip


def slurm(rank: int, ntasks: int, local: int, node: int, nodes: str, **more: str) -> dict[str, str]:
    return {
        "SLURM_PROCID": str(rank), "SLURM_NTASKS": str(ntasks), "SLURM_LOCALID": str(local),
        "SLURM_NODEID": str(node), "SLURM_JOB_NODELIST": nodes, "SLURM_STEP_ID": "0", **more,
    }  # fmt: skip


def lws(index: int, size: int, **more: str) -> dict[str, str]:
    return {
        "LWS_LEADER_ADDRESS": "leader.svc", "LWS_GROUP_SIZE": str(size),
        "LWS_WORKER_INDEX": str(index), **more,
    }  # fmt: skip


AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
TWO_NODES: dict[str, Any] = {"nnodes": 2, "node_rank": 1, "master_addr": "10.0.0.1"}
HOME = "127.0.0.1"

# name, environment, flags, (rank, world, local rank, local world, node rank, address, port, launcher)
ACCEPTED: list[tuple[str, dict[str, str], dict[str, Any], tuple[Any, ...]]] = [
    ("stages", {}, {"pipeline_parallel_size": 3}, (0, 3, 0, 3, 0, HOME, 0, "spawn")),
    ("stages of ranks", {}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
     (0, 4, 0, 4, 0, HOME, 0, "spawn")),
    ("stages on two nodes", {}, {**TWO_NODES, "pipeline_parallel_size": 2},
     (1, 2, 0, 1, 1, "10.0.0.1", 29500, "spawn")),
    ("stages under torchrun", torchrun(3, 4, 1, 2, 1), {"pipeline_parallel_size": 2},
     (3, 4, 1, 2, 1, "head", 29400, "torchrun")),
    ("nothing", {}, {}, (0, 1, 0, 1, 0, HOME, 29500, "single")),
    ("single ignores MASTER_ADDR", {"MASTER_ADDR": "x"}, {}, (0, 1, 0, 1, 0, HOME, 29500, "single")),
    ("spawn", {}, {"tensor_parallel_size": 3}, (0, 3, 0, 3, 0, HOME, 0, "spawn")),
    ("spawn with a port", {}, {"tensor_parallel_size": 2, "master_port": 4000},
     (0, 2, 0, 2, 0, HOME, 4000, "spawn")),
    ("spawn ignores MASTER_PORT", {"MASTER_PORT": "1"}, {"tensor_parallel_size": 2},
     (0, 2, 0, 2, 0, HOME, 0, "spawn")),
    ("one node by flag", {}, {"nnodes": 1, "node_rank": 0}, (0, 1, 0, 1, 0, HOME, 29500, "single")),
    ("spawned child", torchrun(1, 2, 1, 2, 0, PAGEWICK_LAUNCHER="spawn"), {"tensor_parallel_size": 2},
     (1, 2, 1, 2, 0, HOME, 29400, "spawn")),
    ("spawned child of two nodes", torchrun(3, 4, 1, 2, 1, PAGEWICK_LAUNCHER="spawn"), TWO_NODES,
     (3, 4, 1, 2, 1, "10.0.0.1", 29400, "spawn")),
    ("nodes by flag", {}, TWO_NODES, (1, 2, 0, 1, 1, "10.0.0.1", 29500, "spawn")),
    ("nodes and ranks by flag", {}, {**TWO_NODES, "tensor_parallel_size": 8, "master_port": 5},
     (4, 8, 0, 4, 1, "10.0.0.1", 5, "spawn")),
    ("nodes by flag, address by variable", {"MASTER_ADDR": "head", "MASTER_PORT": "77"},
     {"nnodes": 2, "node_rank": 0}, (0, 2, 0, 1, 0, "head", 77, "spawn")),
    ("flags before Slurm", slurm(0, 4, 0, 0, "n[1-4]"), TWO_NODES,
     (1, 2, 0, 1, 1, "10.0.0.1", 29500, "spawn")),
    ("torchrun on one node", torchrun(1, 2, 1, 2, 0), {}, (1, 2, 1, 2, 0, HOME, 29400, "torchrun")),
    ("torchrun, size given", torchrun(1, 2, 1, 2, 0), {"tensor_parallel_size": 2},
     (1, 2, 1, 2, 0, HOME, 29400, "torchrun")),
    ("torchrun on two nodes", torchrun(3, 4, 1, 2, 1), {}, (3, 4, 1, 2, 1, "head", 29400, "torchrun")),
    ("torchrun of uneven nodes", torchrun(2, 3, 0, 1, 1), {}, (2, 3, 0, 1, 1, "head", 29400, "torchrun")),
    ("torchrun of one", torchrun(0, 1, 0, 1, 0), {}, (0, 1, 0, 1, 0, HOME, 29400, "torchrun")),
    ("torchrun, address by flag", torchrun(3, 4, 1, 2, 1), {"master_addr": "a", "master_port": 9},
     (3, 4, 1, 2, 1, "a", 9, "torchrun")),
    ("RANK by hand, no GROUP_RANK",
     {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "head"}, {},
     (5, 8, 1, 4, 1, "head", 29500, "torchrun")),
    ("WORLD_SIZE 1 by hand", {"RANK": "0", "WORLD_SIZE": "1"}, {},
     (0, 1, 0, 1, 0, HOME, 29500, "torchrun")),
    ("torchrun before Open MPI", {**openmpi(0, 4, 0, 4), **torchrun(1, 2, 1, 2, 0)}, {},
     (1, 2, 1, 2, 0, HOME, 29400, "torchrun")),
    ("torchrun before LWS", {**lws(1, 2), **torchrun(2, 4, 0, 2, 1)}, {},
     (2, 4, 0, 2, 1, "head", 29400, "torchrun")),
    ("Open MPI on one node", openmpi(2, 4, 2, 4), {}, (2, 4, 2, 4, 0, HOME, 29500, "openmpi")),
    ("Open MPI on two nodes", openmpi(2, 4, 0, 2, MASTER_ADDR="head"), {},
     (2, 4, 0, 2, 1, "head", 29500, "openmpi")),
    ("Open MPI, address by flag", openmpi(2, 4, 0, 2), {"master_addr": "head"},
     (2, 4, 0, 2, 1, "head", 29500, "openmpi")),
    ("Open MPI of one", openmpi(0, 1, 0, 1), {}, (0, 1, 0, 1, 0, HOME, 29500, "single")),
    ("Open MPI of one, two ranks", openmpi(0, 1, 0, 1), {"tensor_parallel_size": 2},
     (0, 2, 0, 2, 0, HOME, 0, "spawn")),
    ("Open MPI before Slurm", {**slurm(0, 8, 0, 0, "n[1-2]"), **openmpi(1, 2, 1, 2)}, {},
     (1, 2, 1, 2, 0, HOME, 29500, "openmpi")),
    ("Hydra on one node", pmi(1, 3, 1, 3), {}, (1, 3, 1, 3, 0, HOME, 29500, "pmi")),
    ("Hydra on two nodes", pmi(5, 6, 2, 3, MASTER_ADDR="head", MASTER_PORT="81"), {},
     (5, 6, 2, 3, 1, "head", 81, "pmi")),
    ("Hydra before Slurm", {**slurm(0, 8, 0, 0, "n[1-2]"), **pmi(1, 2, 1, 2)}, {},
     (1, 2, 1, 2, 0, HOME, 29500, "pmi")),
    ("srun --mpi=pmi2 is Slurm", {**slurm(1, 2, 1, 0, "n1"), "PMI_RANK": "1", "PMI_SIZE": "2"}, {},
     (1, 2, 1, 2, 0, HOME, 29500, "slurm")),
    ("Slurm on one node", slurm(1, 2, 1, 0, "node7"), {}, (1, 2, 1, 2, 0, HOME, 29500, "slurm")),
    ("Slurm on two nodes", slurm(3, 4, 1, 1, "node[09-10]"), {},
     (3, 4, 1, 2, 1, "node09", 29500, "slurm")),
    ("Slurm, uneven", slurm(4, 5, 0, 2, "a[1-2],b", SLURM_STEP_TASKS_PER_NODE="2(x2),1"), {},
     (4, 5, 0, 1, 2, "a1", 29500, "slurm")),
    ("Slurm, a step smaller than the job",
     slurm(1, 8, 0, 1, "n[1-4]", SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NODELIST="n[3-4]",
           SLURM_TASKS_PER_NODE="2(x4)"), {}, (1, 2, 0, 1, 1, "n3", 29500, "slurm")),
    ("Slurm, MASTER_ADDR exported", slurm(1, 2, 0, 1, "n[1-2]", MASTER_ADDR="n1-ib"), {},
     (1, 2, 0, 1, 1, "n1-ib", 29500, "slurm")),
    ("Slurm of one", slurm(0, 1, 0, 0, "n1"), {}, (0, 1, 0, 1, 0, HOME, 29500, "single")),
    ("Slurm of one, two ranks", slurm(0, 1, 0, 0, "n1"), {"tensor_parallel_size": 2},
     (0, 2, 0, 2, 0, HOME, 0, "spawn")),
    ("interactive step of a larger job", slurm(0, 4, 0, 0, "n[1-2]", SLURM_STEP_NUM_TASKS="1"), {},
     (0, 1, 0, 1, 0, HOME, 29500, "single")),
    ("Slurm before LWS", {**lws(0, 2), **slurm(1, 2, 1, 0, "n1")}, {},
     (1, 2, 1, 2, 0, HOME, 29500, "slurm")),
    ("LWS", lws(1, 2), {}, (1, 2, 0, 1, 1, "leader.svc", 29500, "lws")),
    ("LWS, ranks inside the pods", lws(1, 2), {"tensor_parallel_size": 8},
     (4, 8, 0, 4, 1, "leader.svc", 29500, "lws")),
    ("LWS of one", lws(0, 1), {}, (0, 1, 0, 1, 0, HOME, 29500, "single")),
    ("LWS of one, two ranks", lws(0, 1), {"tensor_parallel_size": 2}, (0, 2, 0, 2, 0, HOME, 0, "spawn")),
]  # fmt: skip

# name, environment, flags, words of the message
REFUSED: list[tuple[str, dict[str, str], dict[str, Any], str]] = [
    ("size 0", {}, {"tensor_parallel_size": 0}, r"--tensor-parallel-size must be at least 1"),
    ("node rank alone", {}, {"node_rank": 1}, r"--node-rank 1 .*--nnodes \(not given\)"),
    ("node rank too large", {}, {"nnodes": 2, "node_rank": 2}, r"--node-rank 2 must be from 0 to 1"),
    ("no node rank", {}, {"nnodes": 2, "master_addr": "a"}, r"--nnodes 2 needs --node-rank"),
    ("nnodes 0", {}, {"nnodes": 0}, r"--nnodes must be at least 1"),
    ("no address", {}, {"nnodes": 2, "node_rank": 0}, r"--nnodes needs --master-addr"),
    ("address without nodes", {}, {"master_addr": "head"}, r"--master-addr head .*--nnodes"),
    ("port 0", {}, {"master_port": 0}, r"--master-port must be from 1 to 65535"),
    ("uneven stages", {}, {**TWO_NODES, "pipeline_parallel_size": 3},
     r"--tensor-parallel-size 1 --pipeline-parallel-size 3 \(3 ranks\) must be a multiple of --nnodes 2"),
    ("stages that do not divide", torchrun(0, 3, 0, 3, 0), {"pipeline_parallel_size": 2},
     r"--pipeline-parallel-size 2 contradicts torchrun, which started 3 ranks: start 2"),
    ("no stage", {}, {"pipeline_parallel_size": 0}, r"--pipeline-parallel-size must be at least 1"),
    ("uneven nodes", {}, {**TWO_NODES, "tensor_parallel_size": 3}, r"multiple of --nnodes 2"),
    ("second rank of a node under --nnodes", slurm(1, 2, 1, 0, "n1"), TWO_NODES,
     r"SLURM_LOCALID=1 contradicts --nnodes"),
    ("RANK missing", {"WORLD_SIZE": "2"}, {}, r"RANK is missing: start with torchrun, or unset"),
    ("WORLD_SIZE missing", {"RANK": "0"}, {}, r"WORLD_SIZE is missing"),
    ("LOCAL_RANK missing", {"RANK": "0", "WORLD_SIZE": "2"}, {}, r"LOCAL_RANK is missing: .*LOCAL_WORLD_S"),
    ("RANK garbled", torchrun(0, 2, 0, 2, 0, RANK="one"), {}, r"RANK='one' is not a whole number"),
    ("RANK negative", torchrun(0, 2, 0, 2, 0, RANK="-1"), {}, r"RANK='-1' is not a whole number"),
    ("WORLD_SIZE 0", torchrun(0, 0, 0, 1, 0), {}, r"WORLD_SIZE='0' is not a whole number from 1 up"),
    ("rank too large", torchrun(2, 2, 0, 2, 0), {}, r"rank 2 contradicts world size 2: check RANK"),
    ("local rank too large", torchrun(1, 2, 2, 2, 0), {}, r"local rank 2 contradicts local world size 2"),
    ("local world too large", torchrun(1, 2, 1, 3, 0), {}, r"local world size 3 contradicts"),
    ("MASTER_PORT garbled", torchrun(0, 2, 0, 2, 0, MASTER_PORT="http"), {}, r"MASTER_PORT='http'"),
    ("MASTER_PORT too large", torchrun(0, 2, 0, 2, 0, MASTER_PORT="65536"), {}, r"MASTER_PORT=65536 is no"),
    ("another size", torchrun(0, 2, 0, 2, 0), {"tensor_parallel_size": 4},
     r"--tensor-parallel-size 4 contradicts torchrun, which started 2 ranks: start 4, or drop"),
    ("another size of one", torchrun(0, 1, 0, 1, 0), {"tensor_parallel_size": 2}, r"size 2 contradicts"),
    ("one node under two", torchrun(0, 4, 0, 2, 0), {"nnodes": 1}, r"--nnodes 1 contradicts torchrun"),
    ("torchrun without address", torchrun(0, 4, 0, 2, 0, MASTER_ADDR=""), {}, r"MASTER_ADDR is missing"),
    ("Open MPI without address", openmpi(2, 4, 0, 2), {}, r"MASTER_ADDR is missing.*mpirun -x MASTER_ADDR"),
    ("Open MPI without size", {"OMPI_COMM_WORLD_RANK": "0"}, {}, r"OMPI_COMM_WORLD_SIZE is missing"),
    ("Open MPI rank of one", openmpi(1, 1, 0, 1), {}, r"rank 1 contradicts world size 1: check OMPI_COMM"),
    ("Hydra without local size", {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALRANKID": "0"}, {},
     r"MPI_LOCALNRANKS is missing: start with mpirun"),
    ("Slurm batch script", {**slurm(0, 4, 0, 0, "n[1-2]"), "SLURM_STEP_ID": ""}, {},
     r"SLURM_NTASKS=4, but without SLURM_STEP_ID .*put srun before"),
    ("Slurm without host list", slurm(0, 2, 0, 0, ""), {}, r"SLURM_JOB_NODELIST is missing"),
    ("Slurm, garbled hosts", slurm(0, 2, 0, 0, "node[1-"), {}, r"SLURM_JOB_NODELIST='node\[1-' is not"),
    ("Slurm, reversed range", slurm(0, 2, 0, 0, "node[3-1]"), {}, r"unreadable range '3-1'"),
    ("Slurm, node outside the list", slurm(3, 4, 1, 2, "n[1-2]"), {}, r"SLURM_NODEID=2 contradicts the 2 "),
    ("Slurm, uneven and silent", slurm(0, 3, 0, 0, "n[1-2]"), {}, r"SLURM_STEP_TASKS_PER_NODE is missing"),
    ("Slurm, garbled counts", slurm(0, 4, 0, 0, "n[1-2]", SLURM_STEP_TASKS_PER_NODE="2x2"), {},
     r"SLURM_STEP_TASKS_PER_NODE='2x2' is not"),
    ("Slurm without node", {"SLURM_PROCID": "1", "SLURM_NTASKS": "2", "SLURM_LOCALID": "1"}, {},
     r"SLURM_NODEID is missing"),
    ("LWS without leader", {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0"}, {}, r"LWS_LEADER_ADDRESS is"),
    ("LWS, index too large", lws(2, 2), {}, r"LWS_WORKER_INDEX=2 must be below LWS_GROUP_SIZE=2"),
    ("LWS, uneven", lws(0, 2), {"tensor_parallel_size": 3}, r"multiple of LWS_GROUP_SIZE=2"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "flags", "expected"), [case[1:] for case in ACCEPTED], ids=[case[0] for case in ACCEPTED]
)
def test_accepted(environ: dict[str, str], flags: dict[str, Any], expected: tuple[Any, ...]) -> None:
    assert detect_topology(environ, **flags) == Topology(*expected)


@pytest.mark.parametrize(
    ("environ", "flags", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_refused(environ: dict[str, str], flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        detect_topology(environ, **flags)


@pytest.mark.parametrize(
    ("flags", "has_agent_store"),
    [({}, True), ({"master_addr": "other"}, False), ({"master_port": 1}, False)],
)
def test_agent_store_only_at_the_agents_own_address(flags: dict[str, Any], has_agent_store: bool) -> None:
    topology = detect_topology({**torchrun(1, 2, 1, 2, 0), **AGENT}, **flags)
    assert topology.has_agent_store == has_agent_store
    # The agent's address must be kept as it is; Pagewick's own store on one machine uses the loopback interface.
    assert topology.master_addr == ("head" if has_agent_store else HOME)


@pytest.mark.parametrize(
    ("environ", "flags", "starts"),
    [
        ({}, {}, False),
        ({}, {"tensor_parallel_size": 2}, True),
        (torchrun(1, 2, 1, 2, 0, PAGEWICK_LAUNCHER="spawn"), {}, False),
        (torchrun(0, 2, 0, 2, 0), {}, False),
        ({}, {**TWO_NODES, "tensor_parallel_size": 4}, True),
        ({}, TWO_NODES, False),
        (lws(1, 2), {}, False),
        (lws(1, 2), {"tensor_parallel_size": 4}, True),
    ],
)
def test_who_starts_local_ranks(environ: dict[str, str], flags: dict[str, Any], starts: bool) -> None:
    assert detect_topology(environ, **flags).starts_local_ranks == starts


@pytest.mark.parametrize(
    ("environ", "flags", "single_host"),
    [
        ({}, {}, True),
        (torchrun(1, 2, 1, 2, 0), {}, True),
        (torchrun(1, 2, 0, 1, 1), {}, False),
        (torchrun(1, 2, 0, 1, 1, MASTER_ADDR="127.0.0.5"), {}, True),
        (torchrun(1, 2, 0, 1, 1, MASTER_ADDR="localhost"), {}, True),
        (lws(1, 2), {}, False),
    ],
)
def test_single_host(environ: dict[str, str], flags: dict[str, Any], single_host: bool) -> None:
    assert detect_topology(environ, **flags).is_single_host == single_host


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("gpu1", ["gpu1"]),
        ("node[01-03,07]", ["node01", "node02", "node03", "node07"]),
        ("a,b-[8-11].cluster,c", ["a", "b-8.cluster", "b-9.cluster", "b-10.cluster", "b-11.cluster", "c"]),
        ("rack[1-2]n[05,6]", ["rack1n05", "rack1n6", "rack2n05", "rack2n6"]),
        ("n[098-101]", ["n098", "n099", "n100", "n101"]),
    ],
)
def test_expand_nodelist(text: str, hosts: list[str]) -> None:
    assert expand_nodelist(text, "SLURM_JOB_NODELIST") == hosts


@pytest.mark.parametrize("text", ["n[", "n]", "n[]", "n[a-b]", "n[1-]", "n[1,,2]", ",n", "n,", "n 1", "n[1[2]]"])
def test_unreadable_nodelist(text: str) -> None:
    with pytest.raises(ConfigError, match="THE_LIST"):
        expand_nodelist(text, "THE_LIST")


@given(
    environ=st.dictionaries(
        st.sampled_from([*torchrun(0, 1, 0, 1, 0), *openmpi(0, 1, 0, 1), *slurm(0, 1, 0, 0, ""), *lws(0, 1)]),
        st.sampled_from(["", "0", "1", "2", "4", "x", "node[1-2]", "99999"]),
    )
)
def test_any_environment_gives_a_consistent_topology_or_config_error(environ: dict[str, str]) -> None:
    try:
        topology = detect_topology(environ)
    except ConfigError:
        return
    assert 0 <= topology.rank < topology.world_size
    assert 0 <= topology.local_rank < topology.local_world_size <= topology.world_size
    assert 0 < topology.master_port < 65536
    assert topology.master_addr


def test_imports_no_torch() -> None:
    code = "import sys, pagewick.parallel.launch, pagewick.parallel.topology; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
