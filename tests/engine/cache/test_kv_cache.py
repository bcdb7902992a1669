"""How many blocks memory gives: the arithmetic, and the errors that explain it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pagewick.attention.cache_spec import CacheSpec, KeptHeads, native_spec
from pagewick.config import EngineConfig
from pagewick.engine.cache import kv_cache
from pagewick.engine.cache.kv_cache import (
    CacheGroup,
    CacheMemory,
    MemoryGuard,
    allocate_cache,
    blocks_in,
    blocks_per_group,
    cache_groups,
    cache_memory,
    capacity_of,
    check_capacity,
)
from pagewick.errors import ConfigError, NotEnoughMemoryError
from tests.engine.requests import full_spec, recurrent_spec, window_spec


class FakeLayer(nn.Module):
    def __init__(self, spec: CacheSpec) -> None:
        super().__init__()
        self.cache_spec = spec
        self.bound: tuple[Tensor, int] | None = None

    def bind_cache(self, blocks: Tensor, group: int) -> None:
        self.bound = (blocks, group)


def groups(*specs: CacheSpec, num_layers: int = 1) -> list[CacheGroup]:
    return [CacheGroup(spec, tuple(FakeLayer(spec) for _ in range(num_layers))) for spec in specs]


def config(**options: Any) -> EngineConfig:
    return EngineConfig(**{"max_model_len": 100, "max_num_batched_tokens": 512, "device": "cpu", **options})


def test_layers_of_equal_spec_form_a_group() -> None:
    first, same, second = (native_spec(KeptHeads(heads, 8), 16, "bfloat16") for heads in (2, 2, 1))
    layers = [FakeLayer(spec) for spec in (first, second, same, second)]
    found = cache_groups(nn.Sequential(nn.Linear(1, 1), *layers))
    assert [group.spec for group in found] == [first, second]
    assert [group.layers for group in found] == [(layers[0], layers[2]), (layers[1], layers[3])]
    # 2 (keys, values) * 2 heads * 16 (8, rounded up) * 16 tokens * 2 bytes, in each of two layers.
    assert [group.block_bytes for group in found] == [2 * 2048, 2 * 1024]


def test_every_layer_gets_its_blocks() -> None:
    made = groups(full_spec(), window_spec(3), num_layers=3)
    caches = allocate_cache(made, [5, 7], torch.device("cpu"))
    assert [[cache.shape for cache in layers] for layers in caches] == [[(5, 4)] * 3, [(7, 4)] * 3]
    for index, (group, number) in enumerate(zip(made, [5, 7], strict=True)):
        bound = [layer.bound for layer in group.layers if isinstance(layer, FakeLayer) and layer.bound is not None]
        assert [(blocks.shape, blocks.dtype, place) for blocks, place in bound] == [
            (torch.Size([number, 4]), torch.uint8, index)
        ] * 3
        assert [blocks.data_ptr() for blocks, _ in bound] == [cache.data_ptr() for cache in caches[index]]
        assert len({blocks.data_ptr() for blocks, _ in bound}) == 3


def test_a_number_of_blocks_is_taken_as_given() -> None:
    assert blocks_per_group(groups(full_spec(), window_spec(3)), config(num_kv_blocks=9)) == [9, 9]


@pytest.mark.parametrize("memory", [40, 41, 79, 80, 1000])
def test_memory_gives_as_many_blocks_as_fit(memory: int) -> None:
    made = groups(full_spec(4), num_layers=10)
    assert blocks_per_group(made, config(kv_cache_memory=memory)) == [memory // 40]


@pytest.mark.parametrize("memory", range(17, 400, 7))
def test_groups_hold_the_same_tokens_until_the_window_has_enough(memory: int) -> None:
    made = groups(full_spec(4), window_spec(6, block_size=8))
    chosen = config(kv_cache_memory=memory, max_num_seqs=2, max_num_batched_tokens=10)
    num_blocks = blocks_per_group(made, chosen)
    assert 4 * num_blocks[0] + 8 * num_blocks[1] <= memory
    # A sequence looks back at 6 tokens and computes 10: 2 blocks, and one more for being cut anywhere.
    enough = 2 * 3
    assert num_blocks[1] <= enough

    def used(num_tokens: int) -> int:
        return 4 * (num_tokens // 4) + 8 * min(num_tokens // 8, enough)

    most = max(num_tokens for num_tokens in range(memory + 1) if used(num_tokens) <= memory)
    assert num_blocks == [most // 4, min(most // 8, enough)]


@pytest.mark.parametrize("max_model_len", [1, 31, 32, 33, 100])
@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_unless_told_otherwise_the_cache_holds_every_sequence_at_full_length(
    max_model_len: int, max_num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: 2**30)
    made = groups(full_spec(32), full_spec(8))
    chosen = config(max_model_len=max_model_len, max_num_seqs=max_num_seqs)
    num_blocks = blocks_per_group(made, chosen)
    needed = [max_num_seqs * -(-max_model_len // block_size) for block_size in (32, 8)]
    assert all(number >= least for number, least in zip(num_blocks, needed, strict=True))
    assert num_blocks[0] == needed[0], "no more than that"
    assert capacity_of(made, num_blocks, chosen) >= max_model_len


def test_unless_told_otherwise_the_cache_takes_a_share_of_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: 1000)
    made = groups(full_spec(4))
    assert blocks_per_group(made, config(max_model_len=10**6)) == [150]
    assert blocks_per_group(made, config(max_model_len=10**6, tensor_parallel_size=2)) == [75]
    assert blocks_per_group(made, config(max_model_len=10**6, memory_reserve=800)) == [30]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_ranks_share_the_memory_of_their_machine(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: 1000)
    monkeypatch.setattr(kv_cache, "total_memory", lambda device: 4000)
    found = cache_memory(config(tensor_parallel_size=4), local_world_size=num_ranks)
    assert found == CacheMemory(usual=600 // num_ranks, most=4000 // num_ranks)


@pytest.mark.parametrize(
    ("options", "step_bytes", "num_bytes"),
    [
        ({}, 0, 3000 - 400),
        ({}, 700, 3000 - 400 - 700),
        ({"gpu_memory_utilization": 1.0}, 700, 3000 - 700),
        ({"gpu_memory_utilization": 0.5}, 700, 3000 - 2000 - 700),
        ({"tensor_parallel_size": 2}, 700, 3000 - 400 - 700),
        ({"kv_cache_memory": 2300}, 700, 2300),
    ],
)
def test_on_a_gpu_the_cache_takes_what_a_step_leaves(
    options: dict[str, Any], step_bytes: int, num_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights and other programs take 1,000 of 4,000 bytes. A tenth stays free unless the user says otherwise."""
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: 3000)
    monkeypatch.setattr(kv_cache, "total_memory", lambda device: 4000)
    chosen = config(max_model_len=10**6, device="cuda:0", **options)
    assert blocks_per_group(groups(full_spec(4)), chosen, step_bytes) == [num_bytes // 4]


def test_on_a_gpu_errors_name_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: 3 * 2**30)
    monkeypatch.setattr(kv_cache, "total_memory", lambda device: 4 * 2**30)
    with pytest.raises(
        ConfigError, match=r"raise --gpu-memory-utilization\n  or lower --max-num-batched-tokens: .* 3.0"
    ):
        blocks_per_group(groups(full_spec(4)), config(device="cuda:0"), 3 * 2**30)
    with pytest.raises(ConfigError, match=r"asks for 2.5 GiB .* cuda:0 has free beside a step only 2.0 GiB; lower it"):
        blocks_per_group(groups(full_spec(4)), config(device="cuda:0", kv_cache_memory=5 * 2**29), 2**30)


@pytest.mark.parametrize(("share", "num_blocks"), [(1.0, 450), (0.75, 450), (0.5, 250), (0.375, 125)])
def test_a_share_of_the_devices_memory_limits_the_cache(
    share: float, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of the memory is taken; the cache never takes more than without a limit."""
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: 3000)
    monkeypatch.setattr(kv_cache, "total_memory", lambda device: 4000)
    chosen = config(max_model_len=10**6, gpu_memory_utilization=share)
    assert blocks_per_group(groups(full_spec(4)), chosen) == [num_blocks]


def test_a_share_that_is_taken_already_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: 1000)
    monkeypatch.setattr(kv_cache, "total_memory", lambda device: 4000)
    with pytest.raises(ConfigError, match=r"may use 0 bytes, .*; raise --gpu-memory-utilization"):
        blocks_per_group(groups(full_spec(4)), config(max_model_len=100, gpu_memory_utilization=0.5))


def test_too_little_memory_for_one_block_is_an_error_with_the_arithmetic() -> None:
    made = groups(full_spec(4), full_spec(8), num_layers=10)
    with pytest.raises(ConfigError, match=r"159 bytes.* 8 tokens takes 160; .*--kv-cache-memory"):
        blocks_per_group(made, config(kv_cache_memory=159))
    assert blocks_per_group(made, config(kv_cache_memory=160)) == [2, 1]


def test_a_token_budget_below_the_smallest_chunk_is_an_error() -> None:
    made = groups(full_spec(4), recurrent_spec(16, chunk_alignment=16))
    with pytest.raises(ConfigError, match=r"--max-num-batched-tokens 15 .* at least 16"):
        blocks_per_group(made, config(num_kv_blocks=9, max_num_batched_tokens=15))
    assert blocks_per_group(made, config(num_kv_blocks=9, max_num_batched_tokens=16)) == [9, 9]


@pytest.mark.parametrize(
    ("number", "expected"),
    # A chunk of 10 tokens after 6 that are looked back at: 2 blocks of 8, and one more for being cut anywhere.
    [(1, 8), (2, 16), (3, 2**31), (9, 2**31)],
)
def test_a_window_limits_the_length_only_when_its_pool_is_small(number: int, expected: int) -> None:
    chosen = config(max_num_batched_tokens=10)
    made = groups(window_spec(6, block_size=8))
    assert capacity_of(made, [number], chosen) == expected
    assert capacity_of([*groups(full_spec(4)), *made], [3, number], chosen) == min(12, expected)


@pytest.mark.parametrize(
    ("memory", "expected"),
    # A block of tokens takes 4 bytes, one of a state 8; of states there are at least 2, and at most 2 for each of 3.
    [
        (20, [1, 2]),
        (27, [2, 2]),
        (28, [3, 2]),
        (31, [3, 2]),
        (64, [8, 4]),
        (95, [11, 5]),
        (96, [12, 6]),
        (100, [13, 6]),
    ],
)
def test_states_are_counted_by_sequences_and_not_by_tokens(memory: int, expected: list[int]) -> None:
    made = groups(full_spec(4), recurrent_spec(8))
    chosen = config(kv_cache_memory=memory, max_num_seqs=3)
    assert blocks_per_group(made, chosen) == expected
    assert capacity_of(made, expected, chosen) == 4 * expected[0], "a state is as large after a thousand tokens"


def test_a_state_needs_another_block_to_go_on() -> None:
    made = groups(recurrent_spec(8), num_layers=3)
    with pytest.raises(ConfigError, match=r"--num-kv-blocks 1 .* at least 2"):
        blocks_per_group(made, config(num_kv_blocks=1))
    assert blocks_per_group(made, config(num_kv_blocks=2)) == [2]
    with pytest.raises(ConfigError, match=r"47 bytes.* takes 48"):
        blocks_per_group(made, config(kv_cache_memory=47))
    assert blocks_per_group(made, config(kv_cache_memory=48)) == [2]


def test_what_a_longer_context_needs_leaves_states_out() -> None:
    mebibyte = CacheSpec(kind="full", block_size=16, block_bytes=2**20)
    state = CacheSpec(kind="state", block_size=16, block_bytes=2**30, lookback=1, prefix_reuse="snapshots")
    with pytest.raises(ConfigError, match=r"--max-model-len 4096 needs 256 MiB .*there are 64 MiB.* 1024 tokens"):
        check_capacity(1024, EngineConfig(max_model_len=4096), groups(mebibyte, state))
    check_capacity(2**31, EngineConfig(max_model_len=4096), groups(state))


def test_a_context_that_does_not_fit_is_an_error_with_the_arithmetic() -> None:
    mebibyte = CacheSpec(kind="full", block_size=16, block_bytes=2**20)
    made = groups(mebibyte, num_layers=4)
    with pytest.raises(ConfigError, match=r"--max-model-len 4096 needs 1024 MiB .*there are 256 MiB.* 1024 tokens"):
        check_capacity(1024, EngineConfig(max_model_len=4096), made)
    check_capacity(1024, EngineConfig(max_model_len=1024), made)
    check_capacity(1024, EngineConfig(), made)


@pytest.mark.parametrize("num_bytes", [0, 59, 60, 119, 120, 1000])
def test_bytes_hold_equally_many_tokens_of_every_group(num_bytes: int) -> None:
    # 10 layers of 4 bytes for 4 tokens, and 5 of 8 for 8: 15 bytes a token.
    made = [*groups(full_spec(4), num_layers=10), *groups(full_spec(8), num_layers=5)]
    num_tokens = num_bytes // 15
    assert blocks_in(made, num_bytes) == [num_tokens // 4, num_tokens // 8]


MEBIBYTE = 2**20
GIBIBYTE = 2**30


def test_pools_grow_by_steps_while_memory_is_left() -> None:
    free = [10 * GIBIBYTE]
    guard = MemoryGuard(MEBIBYTE, lambda: free[0], total_memory=10 * GIBIBYTE)
    assert guard(1) == 64, "the system is asked once for 64 MiB"
    assert guard(100) == 100
    # A twentieth of 10 GiB, and 3 MiB more.
    free[0] = 512 * MEBIBYTE + 3 * MEBIBYTE
    assert guard(1) == 3
    assert guard(3) == 3


def test_a_pool_that_may_not_grow_is_not_asked_about_again_for_a_while() -> None:
    calls = []

    def free_memory() -> int:
        calls.append(1)
        return GIBIBYTE if len(calls) > 1 else 512 * MEBIBYTE + 1

    guard = MemoryGuard(MEBIBYTE, free_memory, total_memory=GIBIBYTE)
    assert guard(1) == 0
    assert [guard(1) for _ in range(64)] == [0] * 64
    assert len(calls) == 1
    assert guard(1) == 64 and len(calls) == 2


def test_a_large_machine_keeps_a_twentieth() -> None:
    guard = MemoryGuard(MEBIBYTE, lambda: 51 * GIBIBYTE + 5 * MEBIBYTE, total_memory=1020 * GIBIBYTE)
    assert guard(1) == 5
    assert guard(6) == 0


@pytest.mark.parametrize("size", [{}, {"kv_cache_memory": 10}, {"num_kv_blocks": 3}])
def test_memory_is_the_cause_only_if_the_user_has_not_chosen_the_size(
    size: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server of several models unloads others for a NotEnoughMemoryError."""
    made = groups(full_spec(100))
    with pytest.raises(ConfigError) as caught:
        check_capacity(1024, EngineConfig(max_model_len=4096, **size), made)
    assert isinstance(caught.value, NotEnoughMemoryError) == (not size)
    if "num_kv_blocks" not in size:
        monkeypatch.setattr(kv_cache, "available_memory", lambda device: 10)
        with pytest.raises(ConfigError, match="KV cache may use") as caught:
            blocks_per_group(made, config(max_model_len=4096, **size))
        assert isinstance(caught.value, NotEnoughMemoryError) == (not size)
