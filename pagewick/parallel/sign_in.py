"""The store through which the ranks find each other, and in which each of them signs in when it starts."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.rendezvous import rendezvous

from pagewick.devices import gpu_uuid
from pagewick.errors import ConfigError, EngineDeadError
from pagewick.parallel.layout import RankLayout
from pagewick.parallel.rendezvous import open_listener
from pagewick.parallel.topology import Topology

_SIGN_IN_INTERVAL_S = 0.02
# Its key in the store; its value is the GPU.
_SIGNATURE = "rank {} is here"
# The key of what the first rank to come has.
_LAYOUT = "layout"


def open_store(topology: Topology, listener: socket.socket | None, timeout: timedelta) -> Store:
    if topology.has_agent_store:
        # torchrun's agent serves the store, and prefixes its keys with the number of the restart.
        agent_store: Store
        agent_store, _, _ = next(rendezvous("env://", topology.rank, topology.world_size, timeout=timeout))
        return agent_store
    listener_fd = None
    host, port = topology.master_addr, topology.master_port
    if topology.rank == 0:
        # TCPStore alone would listen on every interface; with a socket it listens only where that one does.
        bound = listener or open_listener(topology)
        host, port = bound.getsockname()[:2]
        listener_fd = bound.detach()
    return TCPStore(
        host, port, is_master=topology.rank == 0, timeout=timeout, wait_for_workers=False, master_listen_fd=listener_fd
    )


def sign_in(store: Store, topology: Topology, device: torch.device) -> None:
    store.set(_SIGNATURE.format(topology.rank), gpu_uuid(device))


def check_layout(store: Store, layout: RankLayout) -> None:
    """Raise ConfigError if another rank has another layout: then each would wait for groups that never form."""
    own = layout.in_words
    found = store.compare_set(_LAYOUT, "", own).decode()
    if found != own:
        raise ConfigError(
            f"this rank is one of {own}, and another one is one of {found}: start all ranks with the same "
            "--tensor-parallel-size and --pipeline-parallel-size"
        )


def await_ranks(store: Store, topology: Topology, lost_rank: Callable[[], int | None] | None, deadline: float) -> None:
    """On rank 0, wait until all have signed in; on a rank that started others, until those have.

    Meanwhile it watches the ranks that it started, which torch would not do.
    """
    if topology.rank != 0 and lost_rank is None:
        return
    last = topology.world_size if topology.rank == 0 else topology.rank + topology.local_world_size
    missing = list(range(topology.rank + 1, last))
    while missing := [rank for rank in missing if not store.check([_SIGNATURE.format(rank)])]:
        lost = lost_rank() if lost_rank is not None else None
        if lost is not None:
            raise EngineDeadError(f"rank {lost} ended while it started; its own message, above, says why")
        if time.monotonic() > deadline:
            raise ConfigError(not_found(topology, f"(missing: {', '.join(map(str, missing))})"))
        time.sleep(_SIGN_IN_INTERVAL_S)
    if topology.rank == 0:
        _check_gpus([store.get(_SIGNATURE.format(rank)) for rank in range(topology.world_size)])


def _check_gpus(uuids: Sequence[bytes]) -> None:
    """Raise ConfigError if two ranks have the same GPU, with which NCCL would fail. uuids: by rank; empty: unknown."""
    owners: dict[bytes, int] = {}
    for rank, uuid in enumerate(uuids):
        if uuid and (owner := owners.setdefault(uuid, rank)) != rank:
            raise ConfigError(
                f"ranks {owner} and {rank} have the same GPU: start fewer ranks, or let the launcher show each of them"
                " another GPU (srun --gpus-per-task 1, CUDA_VISIBLE_DEVICES), or show all GPUs to all of them"
            )


def not_found(topology: Topology, details: str) -> str:
    return (
        f"rank {topology.rank} of {topology.world_size} did not find the others in time through"
        f" {topology.master_addr}:{topology.master_port}: start every rank, with the same MASTER_ADDR and MASTER_PORT,"
        f" and let no firewall stand between them {details}"
    )
