"""Ranks capture the same steps or none. Each rank is a thread; what it queues on its GPU is a list of exchanges."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pagewick.engine.forward import ForwardStage
from pagewick.engine.graph.captured import CapturedSteps
from pagewick.engine.graph.static_batch import PaddedSize
from pagewick.errors import EngineDeadError
from tests.engine.thread_ranks import ThreadRank, on_ranks

NUM_RANKS, NUM_LAYERS, NUM_STEPS = 3, 4, 6
SIZE = PaddedSize(num_tokens=1, num_seqs=1, context_len=512)


class Gpu:
    """A rank's model, batches and stream: a step exchanges tensors with the other ranks once in each layer.

    queued: the exchanges that its GPU has to run, in order. fails: whether a layer raises, by what the stream does
    ("waiting is refused", "capturing", "") and the layer.
    """

    def __init__(self, fails: Callable[[str, int], Exception | None]) -> None:
        self.queued: list[int] = []
        self._fails = fails
        self._target = self.queued
        self._doing = ""
        self.num_replays = 0

    def model(self, batch: Any) -> Tensor:
        for layer in range(NUM_LAYERS):
            if (error := self._fails(self._doing, layer)) is not None:
                raise error
            self._target.append(layer)
        return torch.zeros(1, 1)

    @contextmanager
    def refuse_waits(self) -> Iterator[None]:
        self._doing = "waiting is refused"
        try:
            yield
        finally:
            self._doing = ""

    def capture(self, function: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Any]:
        captured = self._target = []
        self._doing = "capturing"
        try:
            results = function()
        finally:
            self._target, self._doing = self.queued, ""

        def replay() -> None:
            self.num_replays += 1
            self.queued.extend(captured)

        return results, SimpleNamespace(replay=replay)


class Batch(SimpleNamespace):
    """One token of one sequence; the padded batch on the device is the same."""

    def on_device(self, tensors: Any) -> Batch:
        return self

    def to(self, device: Any) -> Batch:
        return self


def steps_on_ranks(
    fails: Callable[[int, str, int], Exception | None], *, may_repeat: bool = True
) -> tuple[list[Gpu], list[ThreadRank], list[Any]]:
    """Run steps of one size on every rank; return GPUs, ranks, and None or an exception for each. fails: by rank."""
    gpus, ranks = [], []
    for rank in range(NUM_RANKS):
        gpus.append(Gpu(lambda doing, layer, rank=rank: fails(rank, doing, layer)))

    def run(rank: ThreadRank) -> None:
        ranks.append(rank)
        static: Any = SimpleNamespace(size_for=lambda batch: SIZE, write=lambda batch, size: [])
        gpu: Any = gpus[rank.rank]
        steps = CapturedSteps(gpu.model, static, torch.device("cpu"), gpu, rank, may_repeat=may_repeat)
        batch: Any = Batch(
            is_text=True, cu_seqlens_q=np.array([0, 1]), context_lens=[1], input_ids=[5], extras=(), adapter_ids=None
        )
        for _ in range(NUM_STEPS):
            steps(batch, ForwardStage.HIDDEN_STATES)

    return gpus, ranks, list(on_ranks(NUM_RANKS, run))


def assert_all_run_every_step_once(gpus: list[Gpu], failed: list[int]) -> None:
    """failed: the exchanges of what came before a failure."""
    for gpu in gpus:
        assert gpu.queued == failed + list(range(NUM_LAYERS)) * NUM_STEPS


def test_ranks_ask_each_other_only_when_a_size_is_new() -> None:
    gpus, ranks, ends = steps_on_ranks(lambda rank, doing, layer: None)
    assert ends == [None] * NUM_RANKS
    assert_all_run_every_step_once(gpus, [])
    assert [gpu.num_replays for gpu in gpus] == [NUM_STEPS - 1] * NUM_RANKS
    # In the first, eager step, and when it is captured.
    assert [rank.num_minima for rank in ranks] == [2] * NUM_RANKS


@pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
@pytest.mark.parametrize("failing", [[0], [1], [0, 2], [0, 1, 2]])
def test_if_one_rank_cannot_capture_a_step_all_run_eagerly(
    failing: list[int], kind: type[RuntimeError], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="pagewick")

    def fails(rank: int, doing: str, layer: int) -> Exception | None:
        return kind("a wait\nmore") if doing == "capturing" and rank in failing and layer == 2 else None

    gpus, ranks, ends = steps_on_ranks(fails)
    assert ends == [None] * NUM_RANKS
    assert_all_run_every_step_once(gpus, [])
    assert [gpu.num_replays for gpu in gpus] == [0] * NUM_RANKS
    assert [rank.num_minima for rank in ranks] == [2] * NUM_RANKS
    said = sorted(record.getMessage() for record in caplog.records)
    beginning = "steps are slower, since CUDA graphs cannot hold them: "
    reasons = ["a wait" if rank in failing else "another rank cannot capture this step" for rank in range(NUM_RANKS)]
    assert said == sorted(beginning + reason for reason in reasons)


def test_a_step_that_may_not_be_repeated_waits_where_it_must_and_is_then_captured() -> None:
    """It would change the running states of a model twice."""
    gpus, ranks, ends = steps_on_ranks(
        lambda rank, doing, layer: RuntimeError("a wait") if doing == "waiting is refused" else None, may_repeat=False
    )
    assert ends == [None] * NUM_RANKS
    assert_all_run_every_step_once(gpus, [])
    assert [gpu.num_replays for gpu in gpus] == [NUM_STEPS - 1] * NUM_RANKS
    assert [rank.num_minima for rank in ranks] == [1] * NUM_RANKS


def test_a_step_that_may_not_be_repeated_has_not_run_if_capturing_fails() -> None:
    gpus, _, ends = steps_on_ranks(
        lambda rank, doing, layer: RuntimeError("a wait") if doing == "capturing" and rank == 1 else None,
        may_repeat=False,
    )
    assert ends == [None] * NUM_RANKS
    assert_all_run_every_step_once(gpus, [])
    assert [gpu.num_replays for gpu in gpus] == [0] * NUM_RANKS


def test_if_no_rank_can_run_a_step_without_waiting_all_repeat_it() -> None:
    def fails(rank: int, doing: str, layer: int) -> Exception | None:
        return RuntimeError("a wait") if doing == "waiting is refused" and layer == 1 else None

    gpus, ranks, ends = steps_on_ranks(fails)
    assert ends == [None] * NUM_RANKS
    assert_all_run_every_step_once(gpus, [0])
    assert [rank.num_minima for rank in ranks] == [1] * NUM_RANKS


@pytest.mark.parametrize("failing", [[0], [2], [0, 1]])
def test_if_only_some_ranks_could_run_a_step_the_engine_ends(failing: list[int]) -> None:
    """The others have queued exchanges that those which failed have not."""

    def fails(rank: int, doing: str, layer: int) -> Exception | None:
        return RuntimeError("no kernel") if doing == "waiting is refused" and rank in failing and layer == 1 else None

    _, _, ends = steps_on_ranks(fails)
    for rank, end in enumerate(ends):
        assert isinstance(end, EngineDeadError) and "--enforce-eager" in str(end)
        assert ("no kernel" in str(end)) == (rank in failing)


def test_a_rank_without_memory_ends_all() -> None:
    def fails(rank: int, doing: str, layer: int) -> Exception | None:
        return torch.OutOfMemoryError("none left") if doing == "waiting is refused" and rank == 1 else None

    gpus, _, ends = steps_on_ranks(fails)
    assert isinstance(ends[1], torch.OutOfMemoryError)
    assert all(isinstance(end, RuntimeError) for end in ends), "the others do not go on"
    assert [gpu.num_replays for gpu in gpus] == [0] * NUM_RANKS
