"""Collectives: sums and gathers of tensors in a tensor-parallel group, and bytes from rank 0 to all ranks.

Layers that need a `Collectives` get it as an argument. torch.distributed keeps process groups of its own;
this module has no global state.
"""

from __future__ import annotations

import copy
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, but not in __all__

from pagewick.errors import ConfigError
from pagewick.parallel.heartbeat import Heartbeat, begin_heartbeat
from pagewick.parallel.layout import RankLayout, layout_of
from pagewick.parallel.rendezvous import interface_to_master
from pagewick.parallel.sign_in import await_ranks, check_layout, not_found, open_store, sign_in
from pagewick.parallel.stages import Stages
from pagewick.parallel.symmetric_memory import SmallSums, open_small_sums
from pagewick.parallel.topology import Topology

# An idle rank waits in `broadcast_bytes` until the next request. A dead peer is noticed by its closed connection, and
# on another machine by the heartbeat, not by this timeout.
_IDLE_TIMEOUT = timedelta(days=365)
# Ranks enter the same layer at nearly the same time; if one waits longer than this, another one hangs.
_TENSOR_TIMEOUT = timedelta(minutes=10)
# A stage waits for all layers of the others. The watchdog of rank 0 has a limit for that, which depends on the model.
_STAGE_TIMEOUT = timedelta(hours=6)
_LENGTH_BYTES = 8
# Its name before PyTorch 2.13.
_all_gather: Callable[..., object] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
# Up to this size the first message holds length and payload: one round trip for nearly every step plan.
_HEADER_BYTES = 4096


class Collectives:
    """The ranks of one engine; made by `init_collectives` or `single`.

    rank, world_size: this rank and the number of all ranks. layout: the task of each; None: all share every layer.
    local_world_size: the number of ranks that share this machine's processors and memory; None: all ranks.
    tp_rank, tp_size: this rank's place among the ranks that share its layers, and their number.
    tensor_group: those ranks; control_group: all ranks. Each is None if this rank is its only member.
    stages: the ranks that hold the other layers of this rank's pipeline; None: it holds all layers.
    heartbeat: watches ranks on other machines; None: there are none.
    ordered_sum: whether all_reduce sums in rank order. small_sums: sums the tensors that it serves; None: nothing does.

    `all_reduce` and `all_gather` must be called by all ranks of a tensor group, the other operations by all ranks, in
    the same order and with the same shapes. RuntimeError means that another rank is lost and that the group cannot be
    used any more.
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        layout: RankLayout | None = None,
        local_world_size: int | None = None,
        tensor_group: dist.ProcessGroup | None = None,
        control_group: dist.ProcessGroup | None = None,
        stages: Stages | None = None,
        ordered_sum: bool = True,
        small_sums: SmallSums | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        layout = layout or layout_of(world_size)
        assert layout.world_size == world_size, (layout, world_size)
        self.rank = rank
        self.world_size = world_size
        self.local_world_size = local_world_size or world_size
        self.tp_rank = layout.coordinates(rank).tensor
        self.tp_size = layout.tensor_size
        self.stages = stages or Stages()
        self._tensor_group = tensor_group
        self._control_group = control_group
        self._ordered_sum = ordered_sum
        self._small_sums = small_sums
        self._heartbeat = heartbeat

    @classmethod
    def single(cls) -> Collectives:
        """Make a group of one rank, whose operations do nothing."""
        return cls(0, 1)

    @property
    def share(self) -> str:
        """A name for the part of the model that this rank holds."""
        share = f"{self.tp_rank}-of-{self.tp_size}"
        return share if self.stages.size == 1 else f"stage-{self.stages.index}-of-{self.stages.size}-{share}"

    def of_stage(self) -> Collectives:
        """Return these ranks for a model of which every stage holds all layers. It is closed with this group."""
        own = copy.copy(self)
        own.stages = Stages()
        return own

    def sum_in_rank_order(self) -> None:
        """Let all_reduce sum in rank order from now on, as it always does on a CPU."""
        self._ordered_sum = True

    @property
    def is_on_device(self) -> bool:
        """Whether all_reduce and all_gather only join a GPU's queue, so that a CUDA graph can contain them."""
        return self._tensor_group is None or dist.get_backend(self._tensor_group) == "nccl"

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Overwrite `tensor` (any shape) with the sum over the tensor group, the same bits on each rank; return it.

        On a CPU every element is summed in rank order in float32 (or wider) and rounded once. gloo would use a ring,
        which begins the sum at a rank that depends on the element's offset: with three or more ranks a token's result
        would depend on its place in the batch.
        """
        if self.tp_size == 1 or tensor.numel() == 0:
            return tensor
        if self._ordered_sum:
            parts = self._gather(tensor)
            is_narrow = parts.is_floating_point() and parts.element_size() < 4
            total = parts[0].to(torch.float32) if is_narrow else parts[0]
            for part in parts[1:]:
                total += part
            return tensor.copy_(total)
        if self._small_sums is not None and self._small_sums.serves(tensor):
            return self._small_sums.all_reduce(tensor)
        reduced = tensor.contiguous()
        dist.all_reduce(reduced, group=self._tensor_group)
        return tensor if reduced is tensor else tensor.copy_(reduced)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None) -> torch.Tensor:
        """Concatenate the tensors of the tensor group's ranks along `dim` in rank order.

        `sizes` holds each rank's length along `dim` (see `sharding.shard_sizes`); without it all are equal.
        The other dimensions must be equal.
        """
        if self.tp_size == 1:
            return tensor
        dim %= tensor.ndim
        if sizes is None:
            sizes = [tensor.shape[dim]] * self.tp_size
        assert len(sizes) == self.tp_size and tensor.shape[dim] == sizes[self.tp_rank], (tensor.shape, sizes)
        # The backends exchange equal parts only, so short shards are padded.
        missing = max(sizes) - tensor.shape[dim]
        if missing:
            padding = list(tensor.shape)
            padding[dim] = missing
            tensor = torch.cat([tensor, tensor.new_zeros(padding)], dim)
        parts = self._gather(tensor)
        return torch.cat([part.narrow(dim, 0, size) for part, size in zip(parts, sizes, strict=True)], dim)

    def broadcast_bytes(self, payload: bytes | None) -> bytes:
        """Return rank 0's `payload` on every rank. The other ranks pass None and wait without using the CPU."""
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

    def minimum(self, values: Sequence[int]) -> list[int]:
        """Return, on every rank, the lowest of all ranks' numbers in each place of `values` (64-bit integers).

        It goes through the host, and waits for nothing that is queued on a GPU.
        """
        return self._reduce(values, dist.ReduceOp.MIN)

    def total(self, values: Sequence[int]) -> list[int]:
        """Return, on every rank, the sum over all ranks in each place of `values`; see `minimum`."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def _reduce(self, values: Sequence[int], operation: dist.ReduceOp.RedOpType) -> list[int]:
        if self.world_size == 1:
            return list(values)
        reduced = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(reduced, op=operation, group=self._control_group)
        return [int(value) for value in reduced]

    def barrier(self) -> None:
        """Wait until every rank of the world has called this. Work queued on a GPU may still be running."""
        if self.world_size > 1:
            dist.barrier(group=self._control_group)

    def stop_watching(self) -> None:
        """Let all ranks end when they like, from now on. Rank 0 calls this before it tells them to."""
        if self._heartbeat is not None:
            self._heartbeat.close(says_bye=True)

    def close(self) -> None:
        """Leave the group. Ranks that still wait in an operation get a RuntimeError. May be called twice."""
        if self._control_group is not None:
            self._tensor_group = self._control_group = self._small_sums = None
            self.stages = Stages()
            dist.destroy_process_group()
        # Last: if a rank is lost, the above may hang, and only the heartbeat would end it.
        if self._heartbeat is not None:
            self._heartbeat.close()

    def _broadcast(self, buffer: bytearray) -> None:
        dist.broadcast(torch.frombuffer(buffer, dtype=torch.uint8), src=0, group=self._control_group)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return [tp_size, *tensor.shape]. Tensors are moved as bytes, because not every backend knows every dtype."""
        gathered = tensor.new_empty((self.tp_size, *tensor.shape))
        if tensor.numel():
            outgoing = tensor.contiguous().view(-1).view(torch.uint8)
            incoming = gathered.view(self.tp_size, -1).view(torch.uint8)
            _all_gather(incoming.view(-1), outgoing, group=self._tensor_group)
        return gathered


def init_collectives(
    topology: Topology,
    device: torch.device | str,
    *,
    layout: RankLayout | None = None,
    listener: socket.socket | None = None,
    lost_rank: Callable[[], int | None] | None = None,
    timeout_s: float = 300.0,
    rank_timeout_s: float = 0.0,
) -> Collectives:
    """Join the group that `topology` describes: NCCL for a CUDA device, gloo for the CPU; gloo for control.

    `layout` says which ranks share layers; None: all of them. `listener` and `lost_rank` are the socket and the `poll`
    of `LocalRanks`, if there is one. Waits at most `timeout_s` seconds for the other ranks. `rank_timeout_s` is the
    `silence_s` of begin_heartbeat. Raises ConfigError if the ranks do not find each other, two have the same GPU or
    another layout, or the layout needs another number of ranks, EngineDeadError if a rank that this machine started
    ends meanwhile.
    """
    layout = layout or layout_of(topology.world_size)
    layout.check_world(topology.world_size)
    if topology.world_size == 1:
        return Collectives.single()
    device = torch.device(device)
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"a model on several ranks needs --device cpu or cuda, not {device.type}")
    with ExitStack() as cleanup:
        try:
            store = open_store(topology, listener, timedelta(seconds=timeout_s))
            check_layout(store, layout)
            sign_in(store, topology, device)
            await_ranks(store, topology, lost_rank, time.monotonic() + timeout_s)
            if (heartbeat := begin_heartbeat(store, topology, rank_timeout_s, timeout_s)) is not None:
                cleanup.callback(heartbeat.close)
            tensor_group, control_group, stages, small_sums = _make_groups(store, topology, device, layout)
        except (dist.DistError, OSError) as error:
            raise ConfigError(not_found(topology, f"({error})")) from error
        cleanup.pop_all()
    return Collectives(
        topology.rank,
        topology.world_size,
        layout=layout,
        local_world_size=topology.num_sharing,
        tensor_group=tensor_group,
        control_group=control_group,
        stages=stages,
        ordered_sum=device.type == "cpu",
        small_sums=small_sums,
        heartbeat=heartbeat,
    )


def _make_groups(
    store: Store, topology: Topology, device: torch.device, layout: RankLayout
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup, Stages, SmallSums | None]:
    """Return this rank's tensor group, the control group, its stages, and what serves small sums; await all ranks."""
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
        tensor_group = _make_group(topology.rank, layout.tensor_groups, _TENSOR_TIMEOUT)
        stages = Stages()
        if layout.pipeline_size > 1:
            pipeline_group = _make_group(topology.rank, layout.pipelines, _STAGE_TIMEOUT)
            (ranks,) = (pipeline for pipeline in layout.pipelines if topology.rank in pipeline)
            stages = Stages(layout.coordinates(topology.rank).pipeline, ranks, pipeline_group)
        small_sums = None
        if device.type == "cuda" and tensor_group is not None:
            small_sums = open_small_sums(device, tensor_group, control_group, is_single_host=topology.is_single_host)
    return tensor_group, control_group, stages, small_sums


def _make_group(rank: int, groups: Sequence[range], timeout: timedelta) -> dist.ProcessGroup | None:
    """Make the one of these groups, which have the same size, that has this rank; None if it would be alone.

    torch requires that every rank takes part in making every group.
    """
    size = len(groups[0])
    if size == 1:
        return None
    if len(groups) == 1 and timeout == _TENSOR_TIMEOUT:
        return dist.group.WORLD
    own: dist.ProcessGroup | None = None
    for members in groups:
        group = dist.new_group(list(members), timeout=timeout)
        if rank in members:
            own = group
    return own


@contextmanager
def _on_interface_to_master(topology: Topology) -> Iterator[None]:
    """Make gloo, and on one host NCCL's handshake, use the interface that leads to rank 0 for groups made inside.

    By default gloo takes the address to which the host's name resolves, which may not be reachable at all. Variables
    that the user has set are kept. Both libraries accept only variables, and read them once per group.
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
