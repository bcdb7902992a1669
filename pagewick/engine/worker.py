"""The ranks of one engine: rank 0 decides and broadcasts, the other ranks receive and run.

Every rank has a ModelRunner for its share of the model. `RankGroup` is rank 0's view of all ranks; `run` is the main
function of every other rank. With a single rank there are no broadcasts.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from pagewick import log
from pagewick.config import EngineConfig
from pagewick.devices import check_num_gpus, choose_device, torch_device, total_memory
from pagewick.engine.batch import StepMasks, StepOutput, StepPlan
from pagewick.engine.cache.kv_cache import (
    CacheMemory,
    blocks_in,
    blocks_per_group,
    cache_memory,
    capacity_of,
    check_capacity,
)
from pagewick.engine.device_errors import explaining_device_errors
from pagewick.engine.model_runner import ModelRunner, StepHandle
from pagewick.engine.preflight import FreeMemory, WeightBytes, check_memory, choose_quantization
from pagewick.engine.progress import Progress
from pagewick.engine.speculation.drafting import Drafter
from pagewick.errors import ConfigError, EngineDeadError
from pagewick.parallel.collectives import Collectives, init_collectives
from pagewick.parallel.launch import LocalRanks, die_with_parent
from pagewick.parallel.layout import layout_of
from pagewick.parallel.topology import Topology, topology_of

logger = log.get_logger(__name__)

# Sent in place of a plan to end the group.
_STOP = b""
# Time for ranks that were told to stop to write their last blocks to disk.
_LAST_WRITES_S = 60.0
# A rank that fails closes its connections before its process ends.
_ENDING_S = 10.0


class _Setup(msgspec.Struct):
    """The sizes that rank 0 decides once every rank has loaded its model."""

    num_blocks: list[int]
    num_host_blocks: list[int]
    num_draft_blocks: list[int]
    max_model_len: int

    def apply(self, runner: ModelRunner) -> int:
        return runner.allocate(
            self.num_blocks,
            self.max_model_len,
            num_host_blocks=self.num_host_blocks,
            num_draft_blocks=self.num_draft_blocks,
        )


class RankGroup:
    """Rank 0: loads its share, starts the other ranks of this machine unless a launcher did, and leads them.

    num_blocks, num_host_blocks: KV cache blocks per cache group, on the device and in host memory.
    max_model_len: the length that the user asked for, or that the cache can hold. drafter: see ModelRunner; with one
    rank only. weights: see Engine.
    Raises ConfigError and ModelLoadError.
    """

    @explaining_device_errors()
    def __init__(
        self,
        config: EngineConfig,
        environ: Mapping[str, str],
        drafter: Drafter | None = None,
        weights: WeightBytes | None = None,
    ) -> None:
        topology = topology_of(config, environ)
        if topology.rank != 0:
            raise ConfigError(
                f"this process is rank {topology.rank}; only rank 0 leads, start it with the pagewick command"
            )
        self.layout = layout = layout_of(topology.world_size, config.pipeline_parallel_size)
        config = replace(config, tensor_parallel_size=layout.tensor_size)
        self.world_size = topology.world_size
        kind = choose_device(config.device)
        free = FreeMemory.of_rank(kind, topology.num_sharing)
        # A mistake is reported before other ranks are started, as far as this rank can find it alone.
        if self.world_size > 1 and config.quantization != "auto":
            check_memory(config, kind, free, weights)
        self._ranks_may_finish = False
        with ExitStack() as cleanup:
            listener = lost_rank = None
            if topology.starts_local_ranks:
                local_ranks = cleanup.enter_context(_start_local_ranks(config, topology, kind))
                # Runs after collectives.close, in which all ranks may have to take part.
                cleanup.callback(lambda: self._ranks_may_finish and local_ranks.wait(_LAST_WRITES_S))
                topology, listener, lost_rank = local_ranks.topology, local_ranks.listener, local_ranks.poll
            device = torch_device(kind, topology.local_rank)
            with _naming_lost_rank(lost_rank):
                self._collectives = init_collectives(
                    topology, device, layout=layout, listener=listener, lost_rank=lost_rank,
                    rank_timeout_s=config.rank_timeout,
                )  # fmt: skip
                cleanup.callback(self._collectives.close)
                free = _least_free(free, kind, self._collectives)
                config = choose_quantization(config, free)
                check_memory(config, kind, free, weights)
                self._collectives.broadcast_bytes(msgspec.msgpack.encode(config))
                self.runner = ModelRunner(
                    config, self._collectives, topology.local_rank, drafter, Progress.inherited(environ)
                )
                setup, self.kv_cache_bytes = _set_up(self.runner, self._collectives, config)
            self.local_world_size = self._collectives.local_world_size
            self.num_blocks, self.num_host_blocks = setup.num_blocks, setup.num_host_blocks
            self.max_model_len = setup.max_model_len
            self._is_usable = True
            self._cleanup = cleanup.pop_all()

    def submit(self, plan: StepPlan) -> GroupHandle:
        """Begin a step on every rank. If it fails on one, the group cannot be used again."""
        self._is_usable = False
        if self.world_size > 1:
            self._collectives.broadcast_bytes(msgspec.msgpack.encode(plan))
        handle = self.runner.submit(plan)
        self._is_usable = True
        return GroupHandle(self, handle)

    def sample(self, handle: StepHandle, masks: StepMasks) -> None:
        """Sample a step that awaits masks, on every rank. If it fails on one, the group cannot be used again."""
        self._is_usable = False
        if self.world_size > 1:
            self._collectives.broadcast_bytes(msgspec.msgpack.encode(masks))
        handle.sample(masks)
        self._is_usable = True

    def close(self) -> None:
        """End the other ranks; may be called twice."""
        with self._cleanup:
            self.runner.close()
            # After a failed step the other ranks may wait in another operation than this broadcast.
            if self.world_size > 1 and self._is_usable:
                self._collectives.stop_watching()
                self._collectives.broadcast_bytes(_STOP)
                self._ranks_may_finish = True
            self._is_usable = False


@dataclass(frozen=True, slots=True)
class GroupHandle:
    """A step that every rank has begun. It wraps rank 0's handle, and sends masks to the other ranks too."""

    _group: RankGroup
    _handle: StepHandle

    @property
    def awaits_masks(self) -> bool:
        return self._handle.awaits_masks

    def sample(self, masks: StepMasks) -> None:
        """As StepHandle.sample, on every rank."""
        self._group.sample(self._handle, masks)

    def result(self) -> StepOutput:
        """As StepHandle.result."""
        return self._handle.result()


@explaining_device_errors()
def run(config: EngineConfig, topology: Topology) -> None:
    """Run a rank above 0: load its share of the model, then run the plans of rank 0 until it sends _STOP.

    The first rank of a further machine also starts the others there, unless a launcher did. `config` names the device,
    and the model's directory for the case that rank 0's does not exist on this machine.
    """
    log.set_up(rank=topology.rank)
    kind = choose_device(config.device)
    if not topology.starts_local_ranks:
        _take_part(config, topology, kind)
        return
    with _start_local_ranks(config, topology, kind) as local_ranks:
        _take_part(config, topology, kind, local_ranks.poll)
        local_ranks.wait(_LAST_WRITES_S)


def _take_part(
    config: EngineConfig, topology: Topology, kind: str, lost_rank: Callable[[], int | None] | None = None
) -> None:
    """Do what `run` says on this rank alone. lost_rank: the `poll` of the ranks that it started."""
    with ExitStack() as cleanup:
        device = torch_device(kind, topology.local_rank)
        free = FreeMemory.of_rank(str(device), topology.num_sharing)
        layout = layout_of(topology.world_size, config.pipeline_parallel_size)
        collectives = init_collectives(topology, device, layout=layout, lost_rank=lost_rank)
        cleanup.callback(collectives.close)
        _least_free(free, kind, collectives)
        decided = msgspec.msgpack.decode(collectives.broadcast_bytes(None), type=EngineConfig)
        if not Path(decided.model).is_dir():
            decided = replace(decided, model=config.model)
        if decided.speculative_model is not None and not Path(decided.speculative_model).is_dir():
            decided = replace(decided, speculative_model=config.speculative_model)
        # This machine may have the adapters at other paths than rank 0's.
        decided = replace(decided, lora=config.lora, lora_modules=config.lora_modules)
        runner = ModelRunner(decided, collectives, topology.local_rank)
        _set_up(runner, collectives)
        cleanup.callback(runner.close)
        _follow(runner, collectives)


def _start_local_ranks(config: EngineConfig, topology: Topology, kind: str) -> LocalRanks:
    """Start the other ranks of this machine. Raises ConfigError if there is not a GPU for each."""
    check_num_gpus(kind, topology.local_world_size)
    return LocalRanks(topology, module="pagewick.engine.worker", stdin_payload=msgspec.json.encode(config))


@contextmanager
def _naming_lost_rank(lost_rank: Callable[[], int | None] | None) -> Iterator[None]:
    """Raise EngineDeadError in place of the error of a closed connection if a rank has ended that this one started.

    lost_rank: the `poll` of LocalRanks; None: this rank has started none.
    """
    try:
        yield
    except RuntimeError as error:
        deadline = time.monotonic() + _ENDING_S
        while lost_rank is not None and time.monotonic() < deadline:
            if (rank := lost_rank()) is not None:
                raise EngineDeadError(f"rank {rank} has ended; its own message, above, says why") from error
            time.sleep(0.05)
        raise


def _follow(runner: ModelRunner, collectives: Collectives) -> None:
    decoder = msgspec.msgpack.Decoder(StepPlan)
    while (received := collectives.broadcast_bytes(None)) != _STOP:
        handle = runner.submit(decoder.decode(received))
        if handle.awaits_masks:
            masks = collectives.broadcast_bytes(None)
            if masks == _STOP:  # rank 0 has failed since
                return
            handle.sample(msgspec.msgpack.decode(masks, type=StepMasks))


def _set_up(runner: ModelRunner, collectives: Collectives, requested: EngineConfig | None = None) -> tuple[_Setup, int]:
    """Agree on sizes and allocate what they say; return them and the bytes of the KV cache, once all ranks have that.

    requested: as for _agree_on_sizes. A rank that fails ends the start of all, and not their first request.
    """
    setup = _agree_on_sizes(runner, collectives, requested)
    (num_bytes,) = collectives.total([setup.apply(runner)])
    return setup, num_bytes


def _least_free(own: FreeMemory, kind: str, collectives: Collectives) -> FreeMemory:
    """Return what every rank had free before the ranks joined, as _common_memory does later for the KV cache.

    With it, rank 0 chooses the quantization and checks the weights for all. Every rank must call this.
    """
    if kind != "cuda" and collectives.local_world_size == collectives.world_size:
        return own
    return FreeMemory(*collectives.minimum(own))


def _agree_on_sizes(runner: ModelRunner, collectives: Collectives, requested: EngineConfig | None = None) -> _Setup:
    """Return the sizes for all ranks, each of which must call this once its model is loaded.

    requested: the config as the user gave it, with which rank 0 decides; None on the others. Raises ConfigError on
    rank 0.
    """
    memory = _common_memory(runner, collectives)
    local_world_size = _most_local_ranks(collectives)
    setup = None
    if requested is not None:
        setup = msgspec.msgpack.encode(_decide(runner, requested, memory, local_world_size))
    return msgspec.msgpack.decode(collectives.broadcast_bytes(setup), type=_Setup)


def _common_memory(runner: ModelRunner, collectives: Collectives) -> CacheMemory:
    """Return the memory for the KV cache that every rank has.

    GPUs may differ, or other programs may use some of them, and so may machines. On a CPU the ranks of one machine
    share its memory, which rank 0 divides.
    """
    own = cache_memory(runner.config, runner.step_bytes, collectives.local_world_size)
    if runner.device.type != "cuda" and collectives.local_world_size == collectives.world_size:
        return own
    common = CacheMemory(*collectives.minimum([own.usual, own.most]))
    if common.usual < own.usual and collectives.rank == 0:
        logger.info(
            "rank 0 has %.1f GiB for the KV cache, another rank only %.1f GiB: all use the least",
            own.usual / 2**30,
            common.usual / 2**30,
        )
    return common


def _most_local_ranks(collectives: Collectives) -> int:
    """Return the number of ranks on the machine that has most of them."""
    if collectives.local_world_size == collectives.world_size:
        return collectives.world_size
    return -collectives.minimum([-collectives.local_world_size])[0]


def _decide(runner: ModelRunner, requested: EngineConfig, memory: CacheMemory, local_world_size: int) -> _Setup:
    """Size the KV cache. A default context length is reduced to what fits, with a warning.

    local_world_size: the number of ranks that share a machine's memory.
    """
    draft_groups = runner.draft_model.groups if runner.draft_model is not None else []
    num_blocks = blocks_per_group([*runner.groups, *draft_groups], runner.config, runner.step_bytes, memory)
    num_blocks, num_draft_blocks = num_blocks[: len(runner.groups)], num_blocks[len(runner.groups) :]
    capacity = capacity_of(runner.groups, num_blocks, runner.config)
    check_capacity(capacity, requested, runner.groups)
    max_model_len = runner.config.max_model_len or capacity
    if capacity < max_model_len:
        logger.warning("the KV cache holds %d tokens: the context is that long, not %d", capacity, max_model_len)
    swap_space = runner.config.swap_space or 0
    if requested.swap_space is None:
        swap_space = min(swap_space, total_memory() // 8)
    swap_space //= local_world_size
    num_host_blocks = blocks_in(runner.groups, swap_space)
    if requested.swap_space and 0 in num_host_blocks:
        raise ConfigError(f"--swap-space {requested.swap_space} is less than one block of the KV cache")
    return _Setup(num_blocks, num_host_blocks, num_draft_blocks, min(max_model_len, capacity))


def main() -> None:
    """Run a rank that LocalRanks has started; its config comes on standard input."""
    die_with_parent()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    run(config, topology_of(config, os.environ))


if __name__ == "__main__":
    main()
    logging.shutdown()
    # Everything is closed, and rank 0 waits for this process. Shutting down the interpreter would take another second.
    os._exit(0)
