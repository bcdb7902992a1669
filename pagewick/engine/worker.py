"""The ranks of one engine: rank 0 decides and broadcasts, the others receive and run.

Every rank holds a ModelRunner for its share of the model. `RankGroup` is rank 0's view of all of them; `run` is what
every other rank does from start to end. With one rank the broadcasts cost nothing.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import msgspec

from pagewick import log
from pagewick.config import EngineConfig
from pagewick.devices import choose_device, torch_device
from pagewick.engine.batch import StepPlan
from pagewick.engine.kv_cache import blocks_per_group, capacity_of, check_capacity
from pagewick.engine.model_runner import ModelRunner, StepHandle
from pagewick.errors import ConfigError
from pagewick.parallel.collectives import Collectives, init_collectives
from pagewick.parallel.launch import LocalRanks, die_with_parent
from pagewick.parallel.topology import Topology, detect_topology

logger = log.get_logger(__name__)

# Instead of a plan: the group ends.
_STOP = b""


class _Setup(msgspec.Struct):
    """What rank 0 decides once every rank has its model."""

    num_blocks: list[int]
    max_model_len: int


class RankGroup:
    """Rank 0: loads its share, starts the other ranks of this machine unless a launcher did, and leads them.

    num_blocks: KV cache blocks per cache group. max_model_len: what the user asked for, or what the cache can hold.
    Raises ConfigError and ModelLoadError.
    """

    def __init__(self, config: EngineConfig, environ: Mapping[str, str]) -> None:
        topology = detect_topology(environ, tensor_parallel_size=config.tensor_parallel_size)
        if topology.rank != 0:
            raise ConfigError(
                f"this process is rank {topology.rank}; only rank 0 leads, start it with the pagewick command"
            )
        config = replace(config, tensor_parallel_size=topology.world_size)
        self.world_size = topology.world_size
        with ExitStack() as cleanup:
            listener = lost_rank = None
            if topology.starts_local_ranks:
                local_ranks = cleanup.enter_context(
                    LocalRanks(topology, module="pagewick.engine.worker", stdin_payload=msgspec.json.encode(config))
                )
                topology, listener, lost_rank = local_ranks.topology, local_ranks.listener, local_ranks.poll
            device = torch_device(choose_device(config.device), topology.local_rank)
            self._collectives = init_collectives(topology, device, listener=listener, lost_rank=lost_rank)
            cleanup.callback(self._collectives.close)
            self._collectives.broadcast_bytes(msgspec.msgpack.encode(config))
            self.runner = ModelRunner(config, self._collectives, topology.local_rank)
            setup = _decide(self.runner, config)
            self._collectives.broadcast_bytes(msgspec.msgpack.encode(setup))
            self.num_blocks, self.max_model_len = setup.num_blocks, setup.max_model_len
            self._is_usable = True
            self.kv_cache_bytes = self.runner.allocate(setup.num_blocks, setup.max_model_len)
            self._cleanup = cleanup.pop_all()

    def submit(self, plan: StepPlan) -> StepHandle:
        """Run one step on every rank. If it fails on one, the group cannot be used any more."""
        self._is_usable = False
        if self.world_size > 1:
            self._collectives.broadcast_bytes(msgspec.msgpack.encode(plan))
        handle = self.runner.submit(plan)
        self._is_usable = True
        return handle

    def close(self) -> None:
        """End the other ranks; may be called twice."""
        with self._cleanup:
            # After a failed step the others may wait in another operation than this one.
            if self.world_size > 1 and self._is_usable:
                self._collectives.broadcast_bytes(_STOP)
            self._is_usable = False


def run(config: EngineConfig, topology: Topology) -> None:
    """What a rank above 0 does: load its share, then do what rank 0 has decided, until it says stop.

    `config` says on which device, and where the model is if rank 0's directory is not on this machine.
    """
    log.set_up(rank=topology.rank)
    device = torch_device(choose_device(config.device), topology.local_rank)
    collectives = init_collectives(topology, device)
    try:
        decided = msgspec.msgpack.decode(collectives.broadcast_bytes(None), type=EngineConfig)
        if not Path(decided.model).is_dir():
            decided = replace(decided, model=config.model)
        _follow(ModelRunner(decided, collectives, topology.local_rank), collectives)
    finally:
        collectives.close()


def _follow(runner: ModelRunner, collectives: Collectives) -> None:
    setup = msgspec.msgpack.decode(collectives.broadcast_bytes(None), type=_Setup)
    runner.allocate(setup.num_blocks, setup.max_model_len)
    decoder = msgspec.msgpack.Decoder(StepPlan)
    while (received := collectives.broadcast_bytes(None)) != _STOP:
        runner.submit(decoder.decode(received)).result()


def _decide(runner: ModelRunner, requested: EngineConfig) -> _Setup:
    """Size the KV cache; a context that the user did not ask for shrinks to what fits, with a word about it."""
    num_blocks = blocks_per_group(runner.groups, runner.config)
    capacity = capacity_of(runner.groups, num_blocks, runner.config)
    check_capacity(capacity, requested.max_model_len, runner.groups)
    max_model_len = runner.config.max_model_len or capacity
    if capacity < max_model_len:
        logger.warning("the KV cache holds %d tokens: so long is the context, not %d", capacity, max_model_len)
    return _Setup(num_blocks, min(max_model_len, capacity))


def main() -> None:
    """A rank that LocalRanks has started: its config comes on standard input."""
    die_with_parent()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    run(config, detect_topology(os.environ, tensor_parallel_size=config.tensor_parallel_size))


if __name__ == "__main__":
    main()
