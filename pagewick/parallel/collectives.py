"""What ranks say to each other: sums and gathers of tensors in a tensor-parallel group, bytes from rank 0 to all.

A `Collectives` is an argument of the layers that need it. torch.distributed keeps process groups of its own;
this module keeps nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]  # public, but not in __all__
from torch.distributed.rendezvous import rendezvous

from pagewick.errors import ConfigError, EngineDeadError
from pagewick.parallel.layout import RankLayout, layout_of
from pagewick.parallel.rendezvous import interface_to_master, open_listener
from pagewick.parallel.topology import Topology

# A rank with nothing to do waits in `broadcast_bytes`, for as long as nobody asks anything. A dead peer is
# noticed by its closed connection, not by this.
_IDLE_TIMEOUT = timedelta(days=365)
# Ranks enter the same layer within moments of each other; longer than this means that one hangs.
_TENSOR_TIMEOUT = timedelta(minutes=10)
_SIGN_IN_INTERVAL_S = 0.02
_LENGTH_BYTES = 8
# Up to this size the first message holds length and payload: one round trip for nearly every step plan.
_HEADER_BYTES = 4096


class Collectives:
    """The ranks of one engine; made by `init_collectives` or `single`.

    rank, world_size: among all ranks. layout: what each of them does; all share every layer if it is not given.
    tp_rank, tp_size: this rank's place among the ranks that share its layers, and their number.
    tensor_group: those ranks; control_group: all ranks. Both None where there is nobody else.

    `all_reduce` and `all_gather` must be called by all ranks of a tensor group, `broadcast_bytes` and `barrier` by all
    ranks, in the same order and with the same shapes. RuntimeError means that another rank is lost: the group is
    unusable from then on.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        layout: RankLayout | None = None,
        tensor_group: dist.ProcessGroup | None = None,
        control_group: dist.ProcessGroup | None = None,
        ordered_sum: bool = True,
    ) -> None:
        layout = layout or layout_of(world_size)
        assert layout.world_size == world_size, (layout, world_size)
        self.rank = rank
        self.world_size = world_size
        self.tp_rank = layout.coordinates(rank).tensor
        self.tp_size = layout.tensor_size
        self._tensor_group = tensor_group
        self._control_group = control_group
        self._ordered_sum = ordered_sum

    @classmethod
    def single(cls) -> Collectives:
        """A group of one, for which every operation is free."""
        return cls(0, 1)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the tensor group, the same bits on each rank; overwrites `tensor` (any shape) and returns it.

        On a CPU every element is summed in rank order in float32 (or wider) and rounded once. A ring, which
        gloo would use, begins the sum at a rank that depends on the element's offset, so that from three
        ranks on a token's result would depend on its place in the batch.
        """
        if self.tp_size == 1 or tensor.numel() == 0:
            return tensor
        if self._ordered_sum:
            return tensor.copy_(_sum_in_order(self._gather(tensor)))
        reduced = tensor.contiguous()
        dist.all_reduce(reduced, group=self._tensor_group)
        return tensor if reduced is tensor else tensor.copy_(reduced)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """The tensors of the tensor group's ranks concatenated along `dim` in rank order.

        `sizes` holds each rank's length along `dim` (see `sharding.shard_sizes`); without it all are equal.
        The other dimensions must agree.
        """
        if self.tp_size == 1:
            return tensor
        dim %= tensor.ndim
        if sizes is None:
            sizes = [tensor.shape[dim]] * self.tp_size
        assert len(sizes) == self.tp_size and tensor.shape[dim] == sizes[self.tp_rank], (tensor.shape, sizes)
        # The backends exchange equal parts only: short shards travel padded.
        missing = max(sizes) - tensor.shape[dim]
        if missing:
            padding = list(tensor.shape)
            padding[dim] = missing
            tensor = torch.cat([tensor, tensor.new_zeros(padding)], dim)
        parts = self._gather(tensor)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Rank 0's `payload`, on every rank of the world; the others pass None and wait, without using the CPU."""
        assert (payload is None) == (self.rank != 0), "rank 0, and only rank 0, has a payload"
        if self.world_size == 1:
            assert payload is not None
            return payload
        header = bytearray(_HEADER_BYTES)
        room = _HEADER_BYTES - _LENGTH_BYTES
        if payload is not None:
            start = payload[:room]
            header[: _LENGTH_BYTES + len(start)] = len(payload).to_bytes(_LENGTH_BYTES, "little") + start
        self._broadcast(header)
        length = int.from_bytes(header[:_LENGTH_BYTES], "little")
        if length <= room:
            return bytes(header[_LENGTH_BYTES : _LENGTH_BYTES + length])
        rest = bytearray(length - room) if payload is None else bytearray(payload[room:])
        self._broadcast(rest)
        return bytes(header[_LENGTH_BYTES:] + rest)

    def barrier(self) -> None:
        """Waits until every rank of the world is here; says nothing about work queued on a GPU."""
        if self.world_size > 1:
            dist.barrier(group=self._control_group)

    def close(self) -> None:
        """Leaves the group. Ranks that still wait in an operation get a RuntimeError. May be called twice."""
        if self._control_group is not None:
            self._tensor_group = self._control_group = None
            dist.destroy_process_group()

    def _broadcast(self, buffer: bytearray) -> None:
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=0, group=self._control_group)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """[tp_size, *tensor.shape], moved as bytes: no backend needs to know the dtype."""
        gathered = tensor.new_empty((self.tp_size, *tensor.shape))
        if tensor.numel():
            outgoing = tensor.contiguous().view(-1).view(torch.uint8)
            incoming = gathered.view(self.tp_size, -1).view(torch.uint8)
            dist.all_gather(list(incoming.unbind(0)), outgoing, group=self._tensor_group)
        return gathered


def _sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """parts[0] + parts[1] + ..., in float32 for narrower floating-point types."""
    is_narrow = parts.is_floating_point() and parts.element_size() < 4
    total = parts[0].to(torch.float32) if is_narrow else parts[0]
    for part in parts[1:]:
        total += part
    return total


def init_collectives(
    topology: Topology,
    device: torch.device | str,
    *,
    layout: RankLayout | None = None,
    listener: socket.socket | None = None,
    lost_rank: Callable[[], int | None] | None = None,
    batch_invariant: bool = False,
    timeout_s: float = 300.0,
) -> Collectives:
    """Joins the group that `topology` describes: NCCL for a CUDA device, gloo for the CPU; gloo for control.

    `layout` says which ranks share layers; all do if it is not given.
    Waits at most `timeout_s` seconds for the other ranks. `listener` and `lost_rank` are the socket and the `poll` of
    `LocalRanks`, if there is one. `batch_invariant` asks for the ordered sum of `Collectives.all_reduce` on a GPU, too,
    where NCCL's own choice depends on the size of the tensor. Raises ConfigError if the ranks do not find each other
    or are not as many as the layout needs, EngineDeadError if one of this machine ends meanwhile.
    """
    layout = layout or layout_of(topology.world_size)
    layout.check_world(topology.world_size)
    if topology.world_size == 1:
        return Collectives.single()
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--tensor-parallel-size needs --device cpu or cuda, not {device.type}")
    try:
        store = _open_store(topology, listener, timedelta(seconds=timeout_s))
        _await_ranks(store, topology, lost_rank, time.monotonic() + timeout_s)
        with _on_interface_to_master(topology):
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=store,
                rank=topology.rank,
                world_size=topology.world_size,
                timeout=_TENSOR_TIMEOUT,
                device_id=device if device.type == "cuda" else None,
            )
            control_group = dist.new_group(backend="gloo", timeout=_IDLE_TIMEOUT)
            tensor_group = _make_tensor_group(topology.rank, layout)
    except dist.DistError as error:
        raise ConfigError(_not_found(topology, f"({error})")) from error
    return Collectives(
        topology.rank,
        topology.world_size,
        layout=layout,
        tensor_group=tensor_group,
        control_group=control_group,
        ordered_sum=device.type == "cpu" or batch_invariant,
    )


def _make_tensor_group(rank: int, layout: RankLayout) -> dist.ProcessGroup | None:
    """This rank's tensor group. Every rank takes part in making every group: torch wants that."""
    if layout.tensor_size == layout.world_size:
        return dist.group.WORLD
    if layout.tensor_size == 1:
        return None
    own: dist.ProcessGroup | None = None
    for members in layout.tensor_groups:
        group = dist.new_group(list(members), timeout=_TENSOR_TIMEOUT)
        if rank in members:
            own = group
    return own


def _await_ranks(store: Store, topology: Topology, lost_rank: Callable[[], int | None] | None, deadline: float) -> None:
    """Rank 0 waits for all to sign in, and watches those it started: torch would only wait."""
    store.set(f"rank {topology.rank} is here", "")
    if topology.rank != 0:
        return
    missing = list(range(1, topology.world_size))
    while missing := [rank for rank in missing if not store.check([f"rank {rank} is here"])]:
        lost = lost_rank() if lost_rank is not None else None
        if lost is not None:
            raise EngineDeadError(f"rank {lost} ended while it started; its own message, above, says why")
        if time.monotonic() > deadline:
            raise ConfigError(_not_found(topology, f"(missing: {', '.join(map(str, missing))})"))
        time.sleep(_SIGN_IN_INTERVAL_S)


def _not_found(topology: Topology, details: str) -> str:
    return (
        f"rank {topology.rank} of {topology.world_size} did not find the others in time through"
        f" {topology.master_addr}:{topology.master_port}: start every rank, with the same MASTER_ADDR and MASTER_PORT,"
        f" and let no firewall stand between them {details}"
    )


@contextmanager
def _on_interface_to_master(topology: Topology) -> Iterator[None]:
    """Gloo, and on one host NCCL's handshake, use the interface that leads to rank 0 for groups made inside.

    Left alone, gloo takes the address that the host's name resolves to, which need not be reachable at all.
    A user's own choice stands. Both libraries can only be told by variables, and read them once per group.
    """
    names = ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"] if topology.is_single_host else ["GLOO_SOCKET_IFNAME"]
    interface = interface_to_master(topology)
    added = [name for name in names if interface is not None and name not in os.environ]
    os.environ.update(dict.fromkeys(added, interface or ""))
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _open_store(topology: Topology, listener: socket.socket | None, timeout: timedelta) -> Store:
    if topology.has_agent_store:
        # torchrun's agent serves it, and names its keys by the number of the restart.
        agent_store: Store
        agent_store, _, _ = next(rendezvous("env://", topology.rank, topology.world_size, timeout=timeout))
        return agent_store
    listener_fd = None
    host, port = topology.master_addr, topology.master_port
    if topology.rank == 0:
        # Left alone, TCPStore listens on every interface; given a socket, it listens where that one does.
        bound = listener or open_listener(topology)
        host, port = bound.getsockname()[:2]
        listener_fd = bound.detach()
    return TCPStore(
        host,
        port,
        is_master=topology.rank == 0,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listener_fd,
    )
