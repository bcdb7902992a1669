"""A model that is loaded beside others leaves them the main memory that they may still take."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from pagewick.config import EngineConfig
from pagewick.engine.messages import EngineStats
from pagewick.errors import NotEnoughMemoryError
from pagewick.local_models import weight_bytes, with_local_models
from pagewick.server.router import loading
from pagewick.server.router.loading import ServedModel
from tests.fake_engine import FakeClient

# The built-in model has 4,984,192 parameters in bfloat16.
WEIGHTS = 9_968_384


@pytest.fixture
def config() -> EngineConfig:
    return with_local_models(EngineConfig())


def served(*, num_open: int, device: str = "cpu") -> ServedModel:
    client = FakeClient()
    client.info.num_kv_blocks, client.info.kv_cache_bytes, client.info.device = 100, 10_000, device
    client.stats = EngineStats(num_blocks=num_open)
    engine = SimpleNamespace(info=client.info, stats=client.stats)
    nothing: Any = None
    return ServedModel(cast(Any, engine), nothing, nothing, nothing, nothing)


def test_a_cache_may_still_take_the_blocks_that_are_not_open() -> None:
    assert served(num_open=0).promised_bytes == 10_000
    assert served(num_open=75).promised_bytes == 2_500
    assert served(num_open=100).promised_bytes == 0
    assert served(num_open=300).promised_bytes == 0
    assert served(num_open=0, device="cuda:0").promised_bytes == 0


def test_the_weights_of_a_config_are_counted(config: EngineConfig) -> None:
    assert weight_bytes(config) == WEIGHTS
    assert weight_bytes(replace(config, dtype="float32")) == 2 * WEIGHTS
    assert weight_bytes(replace(config, quantization="auto")) == 0


def test_memory_is_left_to_others_now_and_later(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "available_memory", lambda device: WEIGHTS + 9000)
    assert loading._beside(config, 0, 1) == config
    # 3,000 are promised, and of the other 6,000 each of three models gets a third.
    assert loading._beside(config, 3000, 3).memory_reserve == 3000 + 4000
    assert loading._beside(replace(config, memory_reserve=5), 3000, 1).memory_reserve == 3005
    with pytest.raises(NotEnoughMemoryError, match="not enough memory"):
        loading._beside(config, 9001, 1)


def test_blocking_work_of_a_thread_raises_and_returns_as_it_does() -> None:
    def fail() -> None:
        raise NotEnoughMemoryError("too little")

    async def scenario() -> None:
        assert await loading._in_daemon_thread(lambda: 7) == 7
        with pytest.raises(NotEnoughMemoryError, match="too little"):
            await loading._in_daemon_thread(fail)

    asyncio.run(scenario())
