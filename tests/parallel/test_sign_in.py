"""Ranks sign in when they start: two that have the same GPU, and ranks that ended, are found then."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore

from pagewick.errors import ConfigError, EngineDeadError
from pagewick.parallel import sign_in
from pagewick.parallel.layout import RankLayout
from pagewick.parallel.topology import Topology


def test_two_ranks_with_the_same_gpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher may show each rank one GPU of its own, or all of them the same."""
    store = HashStore()
    topology = Topology(0, 3, 0, 3, 0, "127.0.0.1", 1, "slurm")

    def start(*gpus: str) -> None:
        for rank in (2, 1, 0):
            monkeypatch.setattr(sign_in, "gpu_uuid", lambda device, rank=rank: gpus[rank])
            sign_in.sign_in(store, replace(topology, rank=rank), torch.device("cuda", 0))
        sign_in.await_ranks(store, topology, None, time.monotonic())

    start("GPU-1", "GPU-2", "GPU-3")
    start("", "", "")
    with pytest.raises(ConfigError, match=r"ranks 0 and 2 have the same GPU: .*CUDA_VISIBLE_DEVICES"):
        start("GPU-1", "GPU-2", "GPU-1")


def test_the_first_rank_of_a_machine_watches_those_that_it_starts() -> None:
    store = HashStore()
    topology = Topology(2, 6, 0, 2, 1, "127.0.0.1", 1, "lws")
    with pytest.raises(EngineDeadError, match="rank 3 ended while it started"):
        sign_in.await_ranks(store, topology, lambda: 3, time.monotonic() + 60)
    sign_in.sign_in(store, replace(topology, rank=3), torch.device("cpu"))
    sign_in.await_ranks(store, topology, lambda: None, time.monotonic())


def test_ranks_with_another_layout_are_refused() -> None:
    store = HashStore()
    for _ in range(2):
        sign_in.check_layout(store, RankLayout(pipeline_size=2, tensor_size=2))
    message = r"is one of 4 ranks of data 1 x pipeline 1 x tensor 4, and another one is one of 4 ranks .* pipeline 2 x"
    with pytest.raises(ConfigError, match=message):
        sign_in.check_layout(store, RankLayout(tensor_size=4))
