"""The KV cache: groups of layers that share block tables, the number of blocks that fit in memory, and the memory."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pagewick.attention.cache_spec import CacheSpec
from pagewick.config import EngineConfig
from pagewick.devices import available_memory, total_memory
from pagewick.engine.step_memory import gpu_cache_bytes
from pagewick.errors import ConfigError, NotEnoughMemoryError
from pagewick.huge_memory import HUGE_PAGE
from pagewick.kernels.huge_pages import huge_zeros
from pagewick.parallel.layout import RankLayout

# The cache's share of the memory that is free once the weights are loaded; the rest is for activations and for other
# programs. On a CPU the pools open blocks as they need them, as long as the machine has memory left. On CUDA,
# engine.step_memory computes what the rest needs.
_CACHE_SHARE = {"cpu": 0.6, "mps": 0.4}
_GROWTH_BYTES = 64 * 2**20
_RESERVED_SHARE = 0.05
_RESERVED_BYTES = 512 * 2**20
# After a refusal, the number of further requests that are refused without asking the system again.
_REFUSALS_KEPT = 64


@runtime_checkable
class CachedLayer(Protocol):
    """A layer with a cache."""

    @property
    def cache_spec(self) -> CacheSpec: ...

    def bind_cache(self, blocks: Tensor, group: int) -> None: ...


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers with the same spec: a block id names one block in each of them.

    layers: those of this rank. num_per_stage: their number on the ranks of each stage; empty: there are no stages.
    """

    spec: CacheSpec
    layers: tuple[CachedLayer, ...]
    num_per_stage: tuple[int, ...] = ()

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in all layers of this rank."""
        return self.spec.block_bytes * len(self.layers)

    @property
    def bytes_per_stage(self) -> list[int]:
        """Bytes of a block in all layers of a rank, for each stage."""
        return [self.spec.block_bytes * number for number in self.num_per_stage or (len(self.layers),)]


def cache_groups(model: nn.Module, stages: Sequence[Sequence[nn.Module]] = (), own_stage: int = 0) -> list[CacheGroup]:
    """Group the model's caching layers by spec, in the order in which the specs appear.

    stages: the modules of each stage; empty: this rank has the whole model. The groups are those of all stages, because
    all have the same block tables.
    """
    by_spec: dict[CacheSpec, list[list[CachedLayer]]] = {}
    parts = stages or [[model]]
    for stage, modules in enumerate(parts):
        for layer in (each for module in modules for each in module.modules()):
            if isinstance(layer, CachedLayer):
                by_spec.setdefault(layer.cache_spec, [[] for _ in parts])[stage].append(layer)
    return [
        CacheGroup(spec, tuple(found[own_stage]), tuple(map(len, found)) if len(stages) > 1 else ())
        for spec, found in by_spec.items()
    ]


@dataclass(frozen=True, slots=True)
class CacheMemory:
    """Bytes for the KV cache of one rank.

    usual: those that it gets unless the user gives a number of bytes or of blocks. most: the upper limit of what can
    ever be available. On a GPU, this is what a step leaves of the free memory; on a CPU, where blocks take memory when
    they are used, it is the rank's part of all memory.
    """

    usual: int
    most: int


def cache_memory(config: EngineConfig, step_bytes: int = 0, local_world_size: int | None = None) -> CacheMemory:
    """Return the memory that this process finds on its device. config, step_bytes: see blocks_per_group.

    local_world_size: the number of ranks that share this machine's memory on a CPU; None: all ranks.
    """
    kind, share = config.device.partition(":")[0], config.gpu_memory_utilization
    free, total = available_memory(config.device), total_memory(config.device)
    if kind == "cpu":
        free = max(0, free - config.memory_reserve)
    if kind == "cuda":
        return CacheMemory(gpu_cache_bytes(free, total, step_bytes, share), free - step_bytes)
    usable = free * _CACHE_SHARE[kind]
    if share is not None:
        usable = max(0.0, min(usable, free - total * (1 - share)))
    # On a CPU the ranks of a machine share its memory.
    num_shares = local_world_size or config.num_ranks
    return CacheMemory(int(usable / num_shares), total // num_shares if kind == "cpu" else free)


def blocks_per_group(
    groups: Sequence[CacheGroup], config: EngineConfig, step_bytes: int = 0, memory: CacheMemory | None = None
) -> list[int]:
    """Return the number of blocks of each group's pool. `config` is resolved.

    step_bytes: the memory that a step on a GPU needs beside them (engine.step_memory). memory: what every rank has;
    None: what cache_memory finds.

    A group that keeps every token gets blocks for as many tokens as memory allows. A group with a window or with
    snapshots gets at most as many as `max_num_seqs` sequences can hold at a time. Raises ConfigError, with the
    arithmetic, if memory is too small for one block of every layer (two for snapshots), or the token budget for the
    smallest chunk of a prompt. With stages, every rank has as many blocks as the one that has least room.
    """
    memory = memory or cache_memory(config, step_bytes)
    return _least(_blocks_of_rank(stage, config, step_bytes, memory) for stage in _by_stage(groups))


def _blocks_of_rank(
    groups: Sequence[_GroupBytes], config: EngineConfig, step_bytes: int, memory: CacheMemory
) -> list[int]:
    """Do what blocks_per_group says for the ranks of one stage."""
    alignment = math.lcm(*(group.spec.chunk_alignment for group in groups))
    if config.max_num_batched_tokens < alignment:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is too small: this model's layers take prompts "
            f"in multiples of {alignment} tokens; give at least {alignment}"
        )
    if config.num_kv_blocks is not None:
        least = max(_least_blocks(group.spec) for group in groups)
        if config.num_kv_blocks < least:
            raise ConfigError(
                f"--num-kv-blocks {config.num_kv_blocks} is too small for this model; give at least {least}"
            )
        wanted = sum(group.block_bytes for group in groups) * config.num_kv_blocks
        _check_wanted(wanted, "--num-kv-blocks", config, memory)
        return [config.num_kv_blocks] * len(groups)
    num_bytes = config.kv_cache_memory
    if num_bytes is not None:
        _check_wanted(num_bytes, "--kv-cache-memory", config, memory)
    else:
        num_bytes = memory.usual
    unit = math.lcm(*(group.spec.block_size for group in groups))
    limit = num_bytes
    if config.kv_cache_memory is None:
        # No more than every sequence at full length: blocks beyond that could only serve as prefix cache.
        limit = config.max_num_seqs * -(-(config.max_model_len or 1) // unit) * unit
    lengths = range(1, limit + 1)
    num_tokens = bisect_right(lengths, num_bytes, key=lambda num_tokens: _bytes_for(groups, num_tokens, config))
    blocks = [_blocks_for(group.spec, num_tokens, config) for group in groups]
    if 0 in blocks or _bytes_for(groups, num_tokens, config) > num_bytes:
        needed = _bytes_for(groups, unit, config)
        is_share = config.gpu_memory_utilization is not None or (
            config.device.startswith("cuda") and config.kv_cache_memory is None
        )
        flag = "--gpu-memory-utilization" if is_share else "--kv-cache-memory"
        step = f"\n  or lower --max-num-batched-tokens: a step takes {step_bytes / 2**30:.1f} GiB" if step_bytes else ""
        kind = NotEnoughMemoryError if config.kv_cache_memory is None else ConfigError
        raise kind(
            f"the KV cache may use {num_bytes} bytes, but its minimum of {unit} tokens takes {needed}; "
            f"raise {flag}{step}"
        )
    return blocks


@dataclass(frozen=True, slots=True)
class _GroupBytes:
    """A cache group on the ranks of one stage; see CacheGroup."""

    spec: CacheSpec
    block_bytes: int


def _by_stage(groups: Sequence[CacheGroup]) -> list[list[_GroupBytes]]:
    """Return the groups on each stage; a group without stages, as of a draft model, is the same on all."""
    count = max((len(group.num_per_stage) for group in groups), default=0) or 1
    stages = []
    for stage in range(count):
        sizes = (sizes[stage % len(sizes)] for sizes in (group.bytes_per_stage for group in groups))
        stages.append([_GroupBytes(group.spec, size) for group, size in zip(groups, sizes, strict=True)])
    # A stage without any cache limits nothing.
    return [stage for stage in stages if any(group.block_bytes for group in stage)] or stages[:1]


def _least(numbers: Iterable[Sequence[int]]) -> list[int]:
    return [min(each) for each in zip(*numbers, strict=True)]


def _check_wanted(num_bytes: int, flag: str, config: EngineConfig, memory: CacheMemory) -> None:
    """Raise ConfigError if `num_bytes` can never be available."""
    if num_bytes > memory.most:
        owner = config.device if config.num_ranks == 1 else "the fullest GPU"
        has = "this machine has for each rank" if config.device == "cpu" else f"{owner} has free beside a step"
        raise ConfigError(
            f"{flag} asks for {num_bytes / 2**30:.1f} GiB of KV cache, but {has} only {memory.most / 2**30:.1f} GiB; "
            "lower it, or leave it out to use as much as fits"
        )


def capacity_of(groups: Sequence[CacheGroup], num_blocks: Sequence[int], config: EngineConfig) -> int:
    """Return the length of the longest sequence that fits when it is alone."""
    limits = [
        number * group.spec.block_size
        for group, number in zip(groups, num_blocks, strict=True)
        if (most := _held_by_one(group.spec, config)) is None or number < most
    ]
    return min(limits, default=2**31)


def check_capacity(capacity: int, requested: EngineConfig, groups: Sequence[CacheGroup]) -> None:
    """Raise ConfigError if the user has asked for sequences longer than the cache's `capacity` in tokens.

    It is a NotEnoughMemoryError if the size of the cache follows from the memory that is free.
    """
    requested_max_model_len = requested.max_model_len
    if requested_max_model_len is not None and requested_max_model_len > capacity:
        # The size of snapshots does not depend on the length of the sequence.
        growing = [group for group in groups if not group.spec.has_snapshots]
        per_token = sum(group.block_bytes / group.spec.block_size for group in growing)
        needed, there = (tokens * per_token / 2**20 for tokens in (requested_max_model_len, capacity))
        is_fixed = requested.kv_cache_memory is not None or requested.num_kv_blocks is not None
        raise (ConfigError if is_fixed else NotEnoughMemoryError)(
            f"--max-model-len {requested_max_model_len} needs {needed:.0f} MiB of KV cache ({per_token:.0f} bytes a "
            f"token), and there are {there:.0f} MiB, enough for {capacity} tokens; raise --kv-cache-memory or "
            "--num-kv-blocks, or lower --max-model-len"
        )


def allocate_cache(groups: Sequence[CacheGroup], num_blocks: Sequence[int], device: torch.device) -> list[list[Tensor]]:
    """Give every layer its blocks; return them per group and layer, [num_blocks, block_bytes] uint8.

    On a GPU there is one block more, the last: the null block, where the padding of captured steps stores its keys.
    On a CPU, memory is committed when a block is first written; the first blocks are in small pages, so that a short
    sequence does not take a huge page in every layer.
    """
    caches: list[list[Tensor]] = []
    for index, (group, number) in enumerate(zip(groups, num_blocks, strict=True)):
        caches.append([])
        for layer in group.layers:
            block_bytes = group.spec.block_bytes
            if device.type == "cpu":
                blocks = huge_zeros((number, block_bytes), torch.uint8, num_small_bytes=HUGE_PAGE)
            else:
                blocks = torch.empty(number + 1, block_bytes, dtype=torch.uint8, device=device)
                blocks[number].zero_()
            layer.bind_cache(blocks, index)
            caches[-1].append(blocks)
    return caches


def blocks_in(groups: Sequence[CacheGroup], num_bytes: int) -> list[int]:
    """Return the number of blocks of each group that fit into `num_bytes`, for the same number of tokens in each.

    A group of snapshots gets one block for every block_size tokens.
    """
    found = []
    for stage in _by_stage(groups):
        bytes_per_token = sum(group.block_bytes / group.spec.block_size for group in stage)
        found.append([int(num_bytes / bytes_per_token) // group.spec.block_size for group in stage])
    return _least(found)


def machine_block_bytes(group: CacheGroup, layout: RankLayout, local_world_size: int) -> int:
    """Return the bytes of a block on all ranks of one machine, the one where they are most."""
    sizes = group.bytes_per_stage
    of_rank = [sizes[layout.coordinates(rank).pipeline % len(sizes)] for rank in range(layout.world_size)]
    firsts = range(0, layout.world_size, local_world_size)
    return max(sum(of_rank[first : first + local_world_size]) for first in firsts)


class MemoryGuard:
    """Lets the pool of one group grow while the machine keeps some memory free; see BlockPool.

    block_bytes: the size of a block on all ranks of this machine. free_memory: returns the free memory in bytes.
    """

    def __init__(self, block_bytes: int, free_memory: Callable[[], int], total_memory: int) -> None:
        self._block_bytes = block_bytes
        self._free_memory = free_memory
        self._reserved = max(_RESERVED_BYTES, int(total_memory * _RESERVED_SHARE))
        self._num_refusals_left = 0

    def __call__(self, num_wanted: int) -> int:
        if self._num_refusals_left:
            self._num_refusals_left -= 1
            return 0
        num_blocks = max(num_wanted, _GROWTH_BYTES // self._block_bytes)
        num_affordable = (self._free_memory() - self._reserved) // self._block_bytes
        if num_affordable < num_wanted:
            self._num_refusals_left = _REFUSALS_KEPT
            return 0
        return min(num_blocks, num_affordable)


def _blocks_for(spec: CacheSpec, num_tokens: int, config: EngineConfig) -> int:
    """Return the blocks needed to cache `num_tokens` tokens at the same time, over all sequences."""
    number, most = num_tokens // spec.block_size, _held_by_one(spec, config)
    if most is not None:
        number = min(number, most * config.max_num_seqs)
    return max(number, _least_blocks(spec)) if spec.has_snapshots else number


def _held_by_one(spec: CacheSpec, config: EngineConfig) -> int | None:
    """Return the most blocks that a sequence of any length holds during a step; None if that depends on its length.

    With a window these are the blocks of the window before the chunk and those of the chunk, either of which may begin
    inside a block. With snapshots they are the states before and after the step.
    """
    if spec.has_snapshots:
        return 2
    if spec.lookback is None:
        return None
    return spec.num_blocks(spec.lookback + config.max_num_batched_tokens) + 1


def _least_blocks(spec: CacheSpec) -> int:
    """Return the blocks without which a sequence cannot continue even if it is alone."""
    return 2 if spec.has_snapshots else 1


def _bytes_for(groups: Sequence[_GroupBytes], num_tokens: int, config: EngineConfig) -> int:
    return sum(group.block_bytes * _blocks_for(group.spec, num_tokens, config) for group in groups)
