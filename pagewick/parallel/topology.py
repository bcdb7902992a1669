"""Topology: the rank of this process, read from the variables that a launcher sets. Imports no torch.

    launcher   what it is                 variables
    spawn      pagewick.parallel.launch   torchrun's, and PAGEWICK_LAUNCHER=spawn
    torchrun   torch.distributed.run      RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK
    openmpi    mpirun of Open MPI         OMPI_COMM_WORLD_RANK _SIZE _LOCAL_RANK _LOCAL_SIZE
    pmi        mpirun of MPICH, Intel     PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS
    slurm      srun                       SLURM_PROCID SLURM_NTASKS SLURM_LOCALID SLURM_NODEID ...
    lws        LeaderWorkerSet            LWS_LEADER_ADDRESS LWS_GROUP_SIZE LWS_WORKER_INDEX

Explicit flags win over all of them, and an earlier line of the table over a later one.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pagewick.config import EngineConfig
from pagewick.errors import ConfigError
from pagewick.parallel.slurm import expand_nodelist, tasks_of_node

Launcher = Literal["single", "spawn", "torchrun", "openmpi", "pmi", "slurm", "lws"]

LOOPBACK = "127.0.0.1"
DEFAULT_MASTER_PORT = 29500
LAUNCHER_VARIABLE = "PAGEWICK_LAUNCHER"


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of this process among the ranks of one engine; the words are torchrun's.

    `master_port` 0 means that any free port will do: `LocalRanks` picks it. `has_agent_store` says that
    torchrun's agent already serves the store at the master address, so that rank 0 must not.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    master_addr: str
    master_port: int
    launcher: Launcher
    has_agent_store: bool = False

    @property
    def is_single_host(self) -> bool:
        """Whether all ranks are on this machine, so that nothing needs to leave the loopback interface."""
        return self.local_world_size == self.world_size or is_loopback(self.master_addr)

    @property
    def num_sharing(self) -> int:
        """The number of ranks that share this machine's processors and memory.

        Ranks that find each other on the loopback interface share one machine, even if they were told of several.
        """
        return self.world_size if self.is_single_host else self.local_world_size

    @property
    def starts_local_ranks(self) -> bool:
        """Whether this process has to start the other ranks of its node (see `launch.LocalRanks`)."""
        return self.launcher in ("spawn", "lws") and self.local_rank == 0 and self.local_world_size > 1


def is_loopback(host: str) -> bool:
    """Whether a host name or an address can only mean this machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True, slots=True)
class _Inputs:
    """Environment variables and flags, from which a topology is detected."""

    environ: Mapping[str, str]
    tensor_parallel_size: int
    pipeline_parallel_size: int
    nnodes: int | None
    node_rank: int | None
    master_addr: str | None
    master_port: int | None

    @property
    def num_wanted(self) -> int:
        """The number of ranks that the flags ask for; 1 if they say nothing."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def flags(self) -> str:
        """The flags that ask for ranks, for messages."""
        given = f"--tensor-parallel-size {self.tensor_parallel_size}"
        stages = self.pipeline_parallel_size
        return given if stages == 1 else f"{given} --pipeline-parallel-size {stages}"

    def integer(self, name: str, fix: str, minimum: int = 0) -> int:
        """Read a variable that must be set. Raises ConfigError, which ends with `fix`."""
        text = self.environ.get(name, "").strip()
        if not text:
            raise ConfigError(f"{name} is missing: {fix}")
        if not (text.isascii() and text.isdigit()) or int(text) < minimum:
            raise ConfigError(f"{name}={text!r} is not a whole number from {minimum} up: {fix}")
        return int(text)

    def address(self, default: str = "") -> str:
        """Return the master address from the flag, else from MASTER_ADDR, else `default`."""
        return self.master_addr or self.environ.get("MASTER_ADDR", "").strip() or default

    def port(self) -> int:
        """Return the master port from the flag, else from MASTER_PORT, else the default."""
        if self.master_port is not None:
            return self.master_port
        if not self.environ.get("MASTER_PORT", "").strip():
            return DEFAULT_MASTER_PORT
        fix = "set it to a port from 1 to 65535, or unset it"
        port = self.integer("MASTER_PORT", fix, minimum=1)
        if port > 65535:
            raise ConfigError(f"MASTER_PORT={port} is no port: {fix}")
        return port

    def first_of_node(
        self, num_nodes: int, node_rank: int, address: str, launcher: Launcher, variable: str, node: str
    ) -> Topology:
        """Return the topology of a node's only process, which starts the other ranks of its node.

        variable, node: where `num_nodes` comes from and what a node is called, for messages.
        """
        world_size = num_nodes if self.num_wanted == 1 else self.num_wanted
        if world_size % num_nodes:
            product = "" if self.pipeline_parallel_size == 1 else f" ({world_size} ranks)"
            raise ConfigError(
                f"{self.flags}{product} must be a multiple of {variable}{num_nodes}:"
                f" every {node} runs the same number of ranks"
            )
        local_size = world_size // num_nodes
        return Topology(node_rank * local_size, world_size, 0, local_size, node_rank, address, self.port(), launcher)


def detect_topology(
    environ: Mapping[str, str],
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    nnodes: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Topology:
    """Return the Topology that flags and environment variables describe; a pure function of its arguments.

    `tensor_parallel_size` 1 counts as unset: under a launcher of N processes it means N, divided by
    `pipeline_parallel_size`. `nnodes` above 1
    means one such process per machine, which starts the other ranks of its machine itself. Raises
    ConfigError, naming the variable or flag and the fix, where a value is missing, unreadable or contradicts
    another.
    """
    inputs = _Inputs(environ, tensor_parallel_size, pipeline_parallel_size, nnodes, node_rank, master_addr, master_port)
    _check_flags(inputs)
    if environ.get(LAUNCHER_VARIABLE) != "spawn" and nnodes is not None and nnodes > 1:
        return _from_flags(inputs, nnodes)
    topology = next(filter(None, (detect(inputs) for detect in _DETECTORS)), None)
    if topology is None:
        return _local(inputs)
    for small, large, small_name, large_name in (
        (topology.rank, topology.world_size, "rank", "world size"),
        (topology.local_rank, topology.local_world_size, "local rank", "local world size"),
        (topology.local_world_size, topology.world_size + 1, "local world size", "world size + 1"),
    ):
        if not 0 <= small < large:
            raise ConfigError(
                f"{small_name} {small} contradicts {large_name} {large}: check {_VARIABLES[topology.launcher]},"
                f" or unset them to run without {topology.launcher}"
            )
    if topology.world_size == 1 and topology.launcher != "torchrun":
        return _local(inputs)
    is_free = tensor_parallel_size == 1 and topology.world_size % pipeline_parallel_size == 0
    if inputs.num_wanted != topology.world_size and not is_free:
        raise ConfigError(
            f"{inputs.flags} contradicts {topology.launcher}, which started"
            f" {topology.world_size} ranks: start {inputs.num_wanted}, or drop the flag"
        )
    if nnodes == 1 and topology.local_world_size != topology.world_size:
        raise ConfigError(f"--nnodes 1 contradicts {topology.launcher}, which uses several machines: drop it")
    if topology.has_agent_store:
        return topology
    if topology.local_world_size == topology.world_size:
        return replace(topology, master_addr=LOOPBACK)
    if not topology.master_addr:
        raise ConfigError(
            f"MASTER_ADDR is missing, but {topology.launcher} started ranks on several machines: export it"
            " (mpirun -x MASTER_ADDR=...); it is the address of rank 0's machine"
        )
    return topology


def topology_of(config: EngineConfig, environ: Mapping[str, str]) -> Topology:
    """Return what detect_topology finds for an engine's config. Raises ConfigError."""
    sizes = config.tensor_parallel_size, config.pipeline_parallel_size
    return detect_topology(environ, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])


def _check_flags(inputs: _Inputs) -> None:
    if inputs.tensor_parallel_size < 1:
        raise ConfigError(f"--tensor-parallel-size must be at least 1; got {inputs.tensor_parallel_size}")
    if inputs.pipeline_parallel_size < 1:
        raise ConfigError(f"--pipeline-parallel-size must be at least 1; got {inputs.pipeline_parallel_size}")
    if inputs.nnodes is not None and inputs.nnodes < 1:
        raise ConfigError(f"--nnodes must be at least 1; got {inputs.nnodes}")
    if inputs.node_rank is not None and not 0 <= inputs.node_rank < (inputs.nnodes or 1):
        raise ConfigError(
            f"--node-rank {inputs.node_rank} must be from 0 to {(inputs.nnodes or 1) - 1}, one below --nnodes"
            f" ({'not given' if inputs.nnodes is None else inputs.nnodes})"
        )
    if inputs.master_port is not None and not 0 < inputs.master_port < 65536:
        raise ConfigError(f"--master-port must be from 1 to 65535; got {inputs.master_port}")


def _local(inputs: _Inputs) -> Topology:
    """No launcher: this process alone, or it and the ranks that it starts on this machine."""
    if inputs.master_addr is not None and not is_loopback(inputs.master_addr):
        raise ConfigError(
            f"--master-addr {inputs.master_addr} names the first of several machines: drop it, or add --nnodes"
            " and --node-rank"
        )
    size = inputs.num_wanted
    port = inputs.master_port or (0 if size > 1 else DEFAULT_MASTER_PORT)
    return Topology(0, size, 0, size, 0, LOOPBACK, port, "spawn" if size > 1 else "single")


def _from_flags(inputs: _Inputs, nnodes: int) -> Topology:
    """One process per node, described by --nnodes, --node-rank and --master-addr; launchers are ignored."""
    if inputs.node_rank is None:
        raise ConfigError(f"--nnodes {nnodes} needs --node-rank: 0 on the first machine, up to {nnodes - 1}")
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if inputs.environ.get(name, "0") not in ("", "0"):
            raise ConfigError(
                f"{name}={inputs.environ[name]} contradicts --nnodes, which means one process per machine:"
                " drop --nnodes and --node-rank, or start one process per machine"
            )
    address = inputs.address()
    if not address:
        raise ConfigError("--nnodes needs --master-addr, the address of the machine with --node-rank 0")
    return inputs.first_of_node(nnodes, inputs.node_rank, address, "spawn", "--nnodes ", "machine")


def _from_torchrun(inputs: _Inputs) -> Topology | None:
    """Processes of ours and of torchrun; also RANK and WORLD_SIZE set by hand, as Kubernetes training jobs do."""
    environ = inputs.environ
    if not (environ.get("RANK") or environ.get("WORLD_SIZE")):
        return None
    fix = "start with torchrun, or unset RANK and WORLD_SIZE to run alone"
    rank = inputs.integer("RANK", fix)
    world_size = inputs.integer("WORLD_SIZE", fix, minimum=1)
    local_rank, local_size = 0, 1
    if world_size > 1 or environ.get("LOCAL_RANK"):
        fix = "start with torchrun, or set LOCAL_RANK and LOCAL_WORLD_SIZE (0 and 1: one process per machine)"
        local_rank = inputs.integer("LOCAL_RANK", fix)
        local_size = inputs.integer("LOCAL_WORLD_SIZE", fix, minimum=1)
    node_rank = inputs.integer("GROUP_RANK", fix) if environ.get("GROUP_RANK") else rank // local_size
    address, port = inputs.address(), inputs.port()
    # The agent serves the store at its own address only, not at one that a flag names.
    has_agent_store = (
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and address == environ.get("MASTER_ADDR")
        and str(port) == environ.get("MASTER_PORT")
    )
    launcher: Launcher = "spawn" if environ.get(LAUNCHER_VARIABLE) == "spawn" else "torchrun"
    return Topology(rank, world_size, local_rank, local_size, node_rank, address, port, launcher, has_agent_store)


def _from_mpi(inputs: _Inputs) -> Topology | None:
    """Neither MPI names the node; ranks fill the nodes one by one, so the node is rank // local size."""
    environ = inputs.environ
    launcher: Launcher
    if "OMPI_COMM_WORLD_RANK" in environ:
        launcher = "openmpi"
        names = [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    # srun --mpi=pmi2 sets PMI_RANK too, but only Slurm's own variables say where the rank is.
    elif "PMI_RANK" in environ and ("MPI_LOCALRANKID" in environ or "SLURM_PROCID" not in environ):
        launcher, names = "pmi", ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"]
    else:
        return None
    fix = "start with mpirun, or unset the variables of MPI to run alone"
    rank, size, local_rank, local_size = (
        inputs.integer(name, fix, minimum) for name, minimum in zip(names, (0, 1, 0, 1), strict=True)
    )
    address, port = inputs.address(), inputs.port()
    return Topology(rank, size, local_rank, local_size, rank // local_size, address, port, launcher)


def _from_slurm(inputs: _Inputs) -> Topology | None:
    environ = inputs.environ
    if "SLURM_PROCID" not in environ:
        return None
    fix = "start with srun, or unset SLURM_PROCID to run alone"
    rank = inputs.integer("SLURM_PROCID", fix)
    # The step is what one srun started; the job may be larger.
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    world_size = inputs.integer(size_name, fix, minimum=1)
    if world_size == 1:
        return _local(inputs)
    # A batch script has the task count of the whole allocation, although it is one process.
    if rank == 0 and not (environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")):
        raise ConfigError(
            f"{size_name}={world_size}, but without SLURM_STEP_ID srun did not start this process: put srun"
            f" before the command for {world_size} ranks, or unset SLURM_PROCID to run alone"
        )
    local_rank = inputs.integer("SLURM_LOCALID", fix)
    node_rank = inputs.integer("SLURM_NODEID", fix)
    list_name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    hosts = expand_nodelist(environ.get(list_name, ""), list_name)
    local_size = tasks_of_node(environ, world_size, node_rank, len(hosts))
    address = inputs.address(hosts[0])
    return Topology(rank, world_size, local_rank, local_size, node_rank, address, inputs.port(), "slurm")


def _from_lws(inputs: _Inputs) -> Topology | None:
    """One process per pod; with a larger --tensor-parallel-size it starts the other ranks of its pod."""
    if "LWS_GROUP_SIZE" not in inputs.environ:
        return None
    fix = "the LeaderWorkerSet controller sets it in every pod; unset LWS_GROUP_SIZE to run alone"
    num_pods = inputs.integer("LWS_GROUP_SIZE", fix, minimum=1)
    if num_pods == 1:
        return _local(inputs)
    node_rank = inputs.integer("LWS_WORKER_INDEX", fix)
    if node_rank >= num_pods:
        raise ConfigError(f"LWS_WORKER_INDEX={node_rank} must be below LWS_GROUP_SIZE={num_pods}: {fix}")
    leader = inputs.environ.get("LWS_LEADER_ADDRESS", "").strip()
    if not leader:
        raise ConfigError(f"LWS_LEADER_ADDRESS is missing: {fix}")
    return inputs.first_of_node(num_pods, node_rank, inputs.address(leader), "lws", "LWS_GROUP_SIZE=", "pod")


_DETECTORS: tuple[Callable[[_Inputs], Topology | None], ...] = (_from_torchrun, _from_mpi, _from_slurm, _from_lws)
_VARIABLES: Mapping[Launcher, str] = {
    "spawn": "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
    "torchrun": "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
    "openmpi": "OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE",
    "pmi": "PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS",
    "slurm": "SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID",
    "lws": "LWS_GROUP_SIZE, LWS_WORKER_INDEX",
}
