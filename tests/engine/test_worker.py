"""After loading, all ranks agree on one size of the KV cache."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pagewick.config import EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.engine import preflight, worker
from pagewick.engine.cache import kv_cache
from pagewick.engine.cache.kv_cache import CacheGroup
from pagewick.errors import ConfigError, EngineDeadError
from pagewick.parallel.topology import detect_topology
from tests.engine.cache.test_kv_cache import groups
from tests.engine.requests import full_spec
from tests.engine.thread_ranks import ThreadRank, on_ranks

TOTAL, STEP_BYTES, BLOCK_BYTES = 4000, 700, 4
# The rank of a thread.
RANK: ContextVar[int] = ContextVar("RANK")


def agree(kind: str, world_size: int = 3, machines: Sequence[int] | None = None, **options: Any) -> list[Any]:
    """Return the setup that each rank receives, or the exception that it raises. machines: see on_ranks."""

    def run(rank: ThreadRank) -> worker._Setup:
        device = f"cuda:{rank.rank}" if kind == "cuda" else kind
        asked = EngineConfig(device=device, tensor_parallel_size=world_size, max_num_batched_tokens=512, **options)
        made: list[CacheGroup] = groups(full_spec(BLOCK_BYTES))
        runner: Any = SimpleNamespace(
            config=replace(asked, max_model_len=10**6), device=torch.device(device), groups=made, draft_model=None,
            step_bytes=STEP_BYTES if kind == "cuda" else 0,
        )  # fmt: skip
        return worker._agree_on_sizes(runner, rank, asked if rank.rank == 0 else None)

    return list(on_ranks(world_size, run, machines))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """The bytes that each device has free, which a test may change."""
    found = {"cuda:0": 3000, "cuda:1": 3000, "cuda:2": 3000, "cpu": 3000}
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: found[device])
    monkeypatch.setattr(kv_cache, "total_memory", lambda device="cpu": TOTAL)
    return found


@pytest.mark.parametrize(("fullest", "left"), [("cuda:0", 2400), ("cuda:1", 2000), ("cuda:2", 1999)])
def test_all_gpus_plan_with_the_memory_of_the_fullest(fullest: str, left: int, free: dict[str, int]) -> None:
    free[fullest] = left
    setups = agree("cuda")
    # A tenth of all memory stays free.
    num_blocks = (left - TOTAL // 10 - STEP_BYTES) // BLOCK_BYTES
    assert [setup.num_blocks for setup in setups] == [[num_blocks]] * 3


@pytest.mark.parametrize("options", [{"num_kv_blocks": 500}, {"kv_cache_memory": 2000}])
def test_what_the_fullest_gpu_cannot_hold_is_refused(options: dict[str, Any], free: dict[str, int]) -> None:
    assert [setup.num_blocks for setup in agree("cuda", **options)] == [[500]] * 3
    free["cuda:2"] = 2699
    error, *others = agree("cuda", **options)
    assert isinstance(error, ConfigError)
    assert "asks for 0.0 GiB of KV cache, but the fullest GPU has free beside a step only" in str(error)
    assert all(isinstance(other, Exception) for other in others), "no rank goes on alone"


def test_ranks_that_cannot_have_a_gpu_each_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "choose_device", lambda requested: "cuda")
    monkeypatch.setattr(worker, "check_memory", lambda *given: None)
    monkeypatch.setattr(preflight, "available_memory", lambda device: 2**40)
    monkeypatch.setattr(worker, "LocalRanks", None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ConfigError, match="the 2 ranks of this machine need a GPU each, and 1 can be seen"):
        worker.RankGroup(EngineConfig(device="cuda", tensor_parallel_size=2), {})


class Loading(Exception):
    """Raised in place of loading the model. quantization: the one that was chosen."""

    def __init__(self, quantization: str | None) -> None:
        self.quantization = quantization


def load(config: EngineConfig, *given: Any) -> None:
    raise Loading(config.quantization)


def gpu_config(**options: Any) -> EngineConfig:
    return EngineConfig(device="cuda", max_num_batched_tokens=64, max_num_seqs=1, max_model_len=64, **options)


def start_on_gpus(monkeypatch: pytest.MonkeyPatch, free: Sequence[int], **options: Any) -> list[Any]:
    """Start a rank on each of some machines, whose GPUs have these bytes free; return what ends each of them."""
    monkeypatch.setattr(worker, "choose_device", lambda requested: "cuda")
    # A stand-in for one GPU on each machine: the number is the rank's.
    monkeypatch.setattr(worker, "torch_device", lambda kind, local_rank: torch.device("cuda", RANK.get()))
    monkeypatch.setattr(preflight, "available_memory", lambda device: 2**40 if device == "cpu" else free[RANK.get()])
    monkeypatch.setattr(worker, "ModelRunner", load)

    def run(rank: ThreadRank) -> None:
        RANK.set(rank.rank)
        ranks[rank.rank] = rank
        config = gpu_config(**options)
        variables = {
            "RANK": str(rank.rank), "WORLD_SIZE": str(len(free)), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.0.0.1",
        }  # fmt: skip
        if rank.rank == 0:
            worker.RankGroup(config, variables)
        else:
            worker._take_part(config, detect_topology(variables), "cuda")

    ranks: dict[int, ThreadRank] = {}
    monkeypatch.setattr(worker, "init_collectives", lambda topology, *given, **options: ranks[topology.rank])
    return list(on_ranks(len(free), run, [1] * len(free)))


@pytest.mark.parametrize(
    ("free", "chosen"), [([2**40, 2**40], None), ([2**40, 4_000_000], "q8_0"), ([4_000_000, 2**40], "q8_0")]
)
def test_auto_suits_the_gpu_that_has_least(
    free: list[int], chosen: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Half of the built-in model takes 5.0 MB, and 2.7 MB in q8_0."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(worker, "check_memory", lambda *given: None)
    ends = start_on_gpus(monkeypatch, free, model=str(MODEL_DIR), quantization="auto")
    assert [end.quantization for end in ends] == [chosen] * 2
    assert "--quantization auto (the rank that has least, of 2): " in caplog.text


@pytest.mark.parametrize("fullest", [0, 1])
def test_weights_that_one_gpu_cannot_hold_are_refused(fullest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = preflight.WeightBytes.of(gpu_config(model=str(MODEL_DIR), tensor_parallel_size=2), 2)
    free = [2**40, 2**40]
    free[fullest] = weights.all + weights.step
    assert all(isinstance(end, Loading) for end in start_on_gpus(monkeypatch, free, model=str(MODEL_DIR)))
    free[fullest] -= 1
    ends = start_on_gpus(monkeypatch, free, model=str(MODEL_DIR))
    assert isinstance(ends[0], ConfigError) and isinstance(ends[1], RuntimeError)
    expected = "the weights take 0.0 GiB per rank and a step 0.4 GiB, and 0.4 GiB are free on cuda (the rank that has "
    assert expected in str(ends[0])


def test_experts_that_one_machine_cannot_hold_are_refused() -> None:
    free = [preflight.FreeMemory(100, 60), preflight.FreeMemory(90, 70)]
    assert on_ranks(2, lambda rank: worker._least_free(free[rank.rank], "cuda", rank), [1, 1]) == [(90, 60)] * 2


def test_ranks_on_a_cpu_share_what_rank_0_finds(free: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not asked: each would see what the others have taken by then."""
    monkeypatch.setattr(ThreadRank, "minimum", None)
    assert [setup.num_blocks for setup in agree("cpu")] == [[int(free["cpu"] * 0.6 / 3) // BLOCK_BYTES]] * 3


def test_ranks_on_several_machines_share_the_memory_of_their_own(free: dict[str, int]) -> None:
    swap_space = 2**20

    def blocks(*machines: int) -> list[list[int]]:
        setups = agree("cpu", sum(machines), machines, swap_space=swap_space)
        assert len({(*setup.num_blocks, *setup.num_host_blocks) for setup in setups}) == 1
        return [setups[0].num_blocks, setups[0].num_host_blocks]

    def share(num_ranks: int) -> list[list[int]]:
        return [[int(free["cpu"] * 0.6 / num_ranks) // BLOCK_BYTES], [swap_space // num_ranks // BLOCK_BYTES]]

    assert blocks(4) == share(4)
    assert blocks(2, 2) == share(2)
    assert blocks(1, 1, 1) == share(1)
    assert blocks(1, 3) == share(3), "the fullest machine decides"


def test_machines_plan_with_the_memory_of_the_fullest(free: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    memory = iter([3000, 1000])
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: next(memory))
    assert [setup.num_blocks for setup in agree("cpu", 2, (1, 1))] == [[int(1000 * 0.6) // BLOCK_BYTES]] * 2


class Runner:
    """A stand-in for a ModelRunner that a rank can set up. fails: whether it lacks memory for its blocks."""

    def __init__(self, rank: ThreadRank, config: EngineConfig, *, fails: bool) -> None:
        self.config, self.device, self.step_bytes = config, torch.device("cpu"), 0
        self.groups, self.draft_model = groups(full_spec(BLOCK_BYTES)), None
        self._fails = fails

    def allocate(self, num_blocks: list[int], max_model_len: int, **lower_tiers: list[int]) -> int:
        if self._fails:
            raise MemoryError("no memory for the blocks")
        return num_blocks[0] * BLOCK_BYTES


@pytest.mark.parametrize("failing", [None, 0, 1])
def test_a_rank_that_cannot_allocate_ends_the_start_of_all(failing: int | None) -> None:
    config = EngineConfig(device="cpu", num_kv_blocks=9, max_num_batched_tokens=512, tensor_parallel_size=2)

    def run(rank: ThreadRank) -> int:
        runner: Any = Runner(rank, replace(config, max_model_len=8, swap_space=0), fails=rank.rank == failing)
        return worker._set_up(runner, rank, config if rank.rank == 0 else None)[1]

    found = on_ranks(2, run)
    if failing is None:
        assert found == [2 * 9 * BLOCK_BYTES] * 2, "those of all ranks"
        return
    assert isinstance(found[failing], MemoryError)
    assert str(found[1 - failing]) == "another rank is lost"


def test_a_closed_connection_is_the_error_of_the_rank_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process ends a moment after its connections."""
    polls = iter([None, None, 3])
    with (
        pytest.raises(EngineDeadError, match=r"^rank 3 has ended; its own message, above, says why$") as caught,
        worker._naming_lost_rank(lambda: next(polls)),
    ):
        raise RuntimeError("connection closed by peer")
    assert str(caught.value.__cause__) == "connection closed by peer"
    monkeypatch.setattr(worker, "_ENDING_S", 0.1)
    for lost_rank in (None, lambda: None):
        with pytest.raises(RuntimeError, match="out of memory"), worker._naming_lost_rank(lost_rank):
            raise RuntimeError("out of memory")
    with pytest.raises(ConfigError, match="wrong flag"), worker._naming_lost_rank(lambda: 3):
        raise ConfigError("wrong flag")
