"""Which rank this process is, read from the variables that a launcher sets. Imports no torch.

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
class _Flags:
    tensor_parallel_size: int
    nnodes: int | None
    node_rank: int | None
    master_addr: str | None
    master_port: int | None


def detect_topology(
    environ: Mapping[str, str],
    *,
    tensor_parallel_size: int = 1,
    nnodes: int | None = None,
    node_rank: int | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Topology:
    """The Topology that flags and environment variables describe; a pure function of its arguments.

    `tensor_parallel_size` 1 counts as unset: under a launcher of N processes it means N. `nnodes` above 1
    means one such process per machine, which starts the other ranks of its machine itself. Raises
    ConfigError, naming the variable or flag and the fix, where a value is missing, unreadable or contradicts
    another.
    """
    flags = _Flags(tensor_parallel_size, nnodes, node_rank, master_addr, master_port)
    _check_flags(flags)
    if environ.get(LAUNCHER_VARIABLE) != "spawn" and nnodes is not None and nnodes > 1:
        return _from_flags(environ, flags)
    topology = next(filter(None, (detect(environ, flags) for detect in _DETECTORS)), None)
    if topology is None:
        return _local(flags)
    _check_ranks(topology)
    if topology.world_size == 1 and topology.launcher != "torchrun":
        return _local(flags)
    _check_against_flags(topology, flags)
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


def _check_flags(flags: _Flags) -> None:
    if flags.tensor_parallel_size < 1:
        raise ConfigError(f"--tensor-parallel-size must be at least 1; got {flags.tensor_parallel_size}")
    if flags.nnodes is not None and flags.nnodes < 1:
        raise ConfigError(f"--nnodes must be at least 1; got {flags.nnodes}")
    if flags.node_rank is not None and not 0 <= flags.node_rank < (flags.nnodes or 1):
        raise ConfigError(
            f"--node-rank {flags.node_rank} must be from 0 to {(flags.nnodes or 1) - 1}, one below --nnodes"
            f" ({'not given' if flags.nnodes is None else flags.nnodes})"
        )
    if flags.master_port is not None and not 0 < flags.master_port < 65536:
        raise ConfigError(f"--master-port must be from 1 to 65535; got {flags.master_port}")


def _local(flags: _Flags) -> Topology:
    """No launcher: this process alone, or it and the ranks that it starts on this machine."""
    if flags.master_addr is not None and not is_loopback(flags.master_addr):
        raise ConfigError(
            f"--master-addr {flags.master_addr} names the first of several machines: drop it, or add --nnodes"
            " and --node-rank"
        )
    size = flags.tensor_parallel_size
    port = flags.master_port or (0 if size > 1 else DEFAULT_MASTER_PORT)
    return Topology(0, size, 0, size, 0, LOOPBACK, port, "spawn" if size > 1 else "single")


def _from_flags(environ: Mapping[str, str], flags: _Flags) -> Topology:
    """One process per node, described by --nnodes, --node-rank and --master-addr; launchers are ignored."""
    nnodes, node_rank = flags.nnodes or 1, flags.node_rank
    if node_rank is None:
        raise ConfigError(f"--nnodes {nnodes} needs --node-rank: 0 on the first machine, up to {nnodes - 1}")
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"):
        if environ.get(name, "0") not in ("", "0"):
            raise ConfigError(
                f"{name}={environ[name]} contradicts --nnodes, which means one process per machine:"
                " drop --nnodes and --node-rank, or start one process per machine"
            )
    world_size = nnodes if flags.tensor_parallel_size == 1 else flags.tensor_parallel_size
    if world_size % nnodes:
        raise ConfigError(
            f"--tensor-parallel-size {world_size} must be a multiple of --nnodes {nnodes}:"
            " every machine runs the same number of ranks"
        )
    address = _master_addr(environ, flags)
    if not address:
        raise ConfigError("--nnodes needs --master-addr, the address of the machine with --node-rank 0")
    local_size = world_size // nnodes
    port = _master_port(environ, flags)
    return Topology(node_rank * local_size, world_size, 0, local_size, node_rank, address, port, "spawn")


def _check_ranks(topology: Topology) -> None:
    for small, large, small_name, large_name in (
        (topology.rank, topology.world_size, "rank", "world size"),
        (topology.local_rank, topology.local_world_size, "local rank", "local world size"),
        (topology.local_world_size, topology.world_size + 1, "local world size", "world size + 1"),
    ):
        if not 0 <= small < large:
            variables = _VARIABLES[topology.launcher]
            raise ConfigError(
                f"{small_name} {small} contradicts {large_name} {large}: check {variables}, or unset them to"
                f" run without {topology.launcher}"
            )


def _check_against_flags(topology: Topology, flags: _Flags) -> None:
    wanted = flags.tensor_parallel_size
    if wanted not in (1, topology.world_size):
        raise ConfigError(
            f"--tensor-parallel-size {wanted} contradicts {topology.launcher}, which started"
            f" {topology.world_size} ranks: start {wanted}, or drop the flag"
        )
    if flags.nnodes == 1 and topology.local_world_size != topology.world_size:
        raise ConfigError(f"--nnodes 1 contradicts {topology.launcher}, which uses several machines: drop it")


def _integer(environ: Mapping[str, str], name: str, fix: str, minimum: int = 0) -> int:
    text = environ.get(name, "").strip()
    if not text:
        raise ConfigError(f"{name} is missing: {fix}")
    if not (text.isascii() and text.isdigit()) or int(text) < minimum:
        raise ConfigError(f"{name}={text!r} is not a whole number from {minimum} up: {fix}")
    return int(text)


def _master_addr(environ: Mapping[str, str], flags: _Flags, default: str = "") -> str:
    return flags.master_addr or environ.get("MASTER_ADDR", "").strip() or default


def _master_port(environ: Mapping[str, str], flags: _Flags) -> int:
    if flags.master_port is not None:
        return flags.master_port
    if not environ.get("MASTER_PORT", "").strip():
        return DEFAULT_MASTER_PORT
    fix = "set it to a port from 1 to 65535, or unset it"
    port = _integer(environ, "MASTER_PORT", fix, minimum=1)
    if port > 65535:
        raise ConfigError(f"MASTER_PORT={port} is no port: {fix}")
    return port


def _from_torchrun(environ: Mapping[str, str], flags: _Flags) -> Topology | None:
    """Ours and torchrun's processes; also RANK and WORLD_SIZE set by hand, as Kubernetes training jobs do."""
    if not (environ.get("RANK") or environ.get("WORLD_SIZE")):
        return None
    fix = "start with torchrun, or unset RANK and WORLD_SIZE to run alone"
    rank = _integer(environ, "RANK", fix)
    world_size = _integer(environ, "WORLD_SIZE", fix, minimum=1)
    if world_size > 1 or environ.get("LOCAL_RANK"):
        fix = "start with torchrun, or set LOCAL_RANK and LOCAL_WORLD_SIZE (0 and 1: one process per machine)"
        local_rank = _integer(environ, "LOCAL_RANK", fix)
        local_size = _integer(environ, "LOCAL_WORLD_SIZE", fix, minimum=1)
    else:
        local_rank, local_size = 0, 1
    node_rank = _integer(environ, "GROUP_RANK", fix) if environ.get("GROUP_RANK") else rank // local_size
    address, port = _master_addr(environ, flags), _master_port(environ, flags)
    # An address given by flag is not the agent's.
    has_agent_store = (
        environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and address == environ.get("MASTER_ADDR")
        and str(port) == environ.get("MASTER_PORT")
    )
    launcher: Launcher = "spawn" if environ.get(LAUNCHER_VARIABLE) == "spawn" else "torchrun"
    return Topology(rank, world_size, local_rank, local_size, node_rank, address, port, launcher, has_agent_store)


def _from_mpi(
    environ: Mapping[str, str], flags: _Flags, launcher: Launcher, names: tuple[str, str, str, str]
) -> Topology:
    """Both MPIs count nodes implicitly; with ranks filled node by node the node is rank // local size."""
    fix = "start with mpirun, or unset the variables of MPI to run alone"
    rank = _integer(environ, names[0], fix)
    world_size = _integer(environ, names[1], fix, minimum=1)
    local_rank = _integer(environ, names[2], fix)
    local_size = _integer(environ, names[3], fix, minimum=1)
    address, port = _master_addr(environ, flags), _master_port(environ, flags)
    return Topology(rank, world_size, local_rank, local_size, rank // local_size, address, port, launcher)


def _from_openmpi(environ: Mapping[str, str], flags: _Flags) -> Topology | None:
    if "OMPI_COMM_WORLD_RANK" not in environ:
        return None
    prefix = "OMPI_COMM_WORLD_"
    names = (prefix + "RANK", prefix + "SIZE", prefix + "LOCAL_RANK", prefix + "LOCAL_SIZE")
    return _from_mpi(environ, flags, "openmpi", names)


def _from_pmi(environ: Mapping[str, str], flags: _Flags) -> Topology | None:
    # srun --mpi=pmi2 sets PMI_RANK too, but only Slurm's own variables say where the rank is.
    if "PMI_RANK" not in environ or ("MPI_LOCALRANKID" not in environ and "SLURM_PROCID" in environ):
        return None
    return _from_mpi(environ, flags, "pmi", ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))


def _from_slurm(environ: Mapping[str, str], flags: _Flags) -> Topology | None:
    if "SLURM_PROCID" not in environ:
        return None
    fix = "start with srun, or unset SLURM_PROCID to run alone"
    rank = _integer(environ, "SLURM_PROCID", fix)
    # The step is what one srun started; the job may be larger.
    size_name = "SLURM_STEP_NUM_TASKS" if environ.get("SLURM_STEP_NUM_TASKS") else "SLURM_NTASKS"
    world_size = _integer(environ, size_name, fix, minimum=1)
    if world_size == 1:
        return _local(flags)
    # A batch script carries the task count of the whole allocation, although it is one process.
    if rank == 0 and not (environ.get("SLURM_STEP_ID") or environ.get("SLURM_STEPID")):
        raise ConfigError(
            f"{size_name}={world_size}, but without SLURM_STEP_ID srun did not start this process: put srun"
            f" before the command for {world_size} ranks, or unset SLURM_PROCID to run alone"
        )
    local_rank = _integer(environ, "SLURM_LOCALID", fix)
    node_rank = _integer(environ, "SLURM_NODEID", fix)
    list_name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    hosts = expand_nodelist(environ.get(list_name, ""), list_name)
    local_size = tasks_of_node(environ, world_size, node_rank, len(hosts))
    address, port = _master_addr(environ, flags, hosts[0]), _master_port(environ, flags)
    return Topology(rank, world_size, local_rank, local_size, node_rank, address, port, "slurm")


def _from_lws(environ: Mapping[str, str], flags: _Flags) -> Topology | None:
    """One process per pod; with a larger --tensor-parallel-size it starts the other ranks of its pod."""
    if "LWS_GROUP_SIZE" not in environ:
        return None
    fix = "the LeaderWorkerSet controller sets it in every pod; unset LWS_GROUP_SIZE to run alone"
    num_pods = _integer(environ, "LWS_GROUP_SIZE", fix, minimum=1)
    if num_pods == 1:
        return _local(flags)
    node_rank = _integer(environ, "LWS_WORKER_INDEX", fix)
    if node_rank >= num_pods:
        raise ConfigError(f"LWS_WORKER_INDEX={node_rank} must be below LWS_GROUP_SIZE={num_pods}: {fix}")
    if not environ.get("LWS_LEADER_ADDRESS", "").strip():
        raise ConfigError(f"LWS_LEADER_ADDRESS is missing: {fix}")
    world_size = num_pods if flags.tensor_parallel_size == 1 else flags.tensor_parallel_size
    if world_size % num_pods:
        raise ConfigError(
            f"--tensor-parallel-size {world_size} must be a multiple of LWS_GROUP_SIZE={num_pods}:"
            " every pod runs the same number of ranks"
        )
    address = _master_addr(environ, flags, environ["LWS_LEADER_ADDRESS"].strip())
    local_size = world_size // num_pods
    port = _master_port(environ, flags)
    return Topology(node_rank * local_size, world_size, 0, local_size, node_rank, address, port, "lws")


_Detector = Callable[[Mapping[str, str], _Flags], Topology | None]
_DETECTORS: tuple[_Detector, ...] = (_from_torchrun, _from_openmpi, _from_pmi, _from_slurm, _from_lws)
_VARIABLES: Mapping[Launcher, str] = {
    "spawn": "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
    "torchrun": "RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
    "openmpi": "OMPI_COMM_WORLD_RANK, _SIZE, _LOCAL_RANK and _LOCAL_SIZE",
    "pmi": "PMI_RANK, PMI_SIZE, MPI_LOCALRANKID, MPI_LOCALNRANKS",
    "slurm": "SLURM_PROCID, SLURM_NTASKS, SLURM_LOCALID, SLURM_NODEID",
    "lws": "LWS_GROUP_SIZE, LWS_WORKER_INDEX",
}
