"""The engine in this process: what it makes of its memory, what it refuses, and a step that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewick.engine.engine import Engine
from pagewick.engine.messages import RequestDelta
from pagewick.errors import ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError
from tests.engine.serving import request, start
from tests.models.checkpoints import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", directory)
    return directory


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    made = start(checkpoint, num_kv_blocks=12)
    yield made
    made.close()


def token_ids_of(deltas: list[RequestDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]


def run(engine: Engine) -> dict[str, list[RequestDelta]]:
    found: dict[str, list[RequestDelta]] = {}
    while engine.has_work:
        for delta in engine.step():
            found.setdefault(delta.request_id, []).append(delta)
    return found


def test_the_context_shrinks_to_the_cache_unless_it_was_asked_for(checkpoint: Path) -> None:
    engine = start(checkpoint, num_kv_blocks=3)
    assert (engine.info.max_model_len, engine.info.num_kv_blocks) == (48, 3)
    engine.add(request([5] * 40, max_tokens=8, ignore_eos=True))
    assert len(token_ids_of(run(engine)["a"])) == 8
    with pytest.raises(ContextLengthError, match="48 tokens"):
        engine.add(request([5] * 40, max_tokens=9))
    engine.close()
    with pytest.raises(ConfigError, match=r"--max-model-len 49 .* 48 tokens"):
        start(checkpoint, num_kv_blocks=3, max_model_len=49)


def test_the_cache_takes_the_memory_that_it_was_given(checkpoint: Path) -> None:
    engine = start(checkpoint, kv_cache_memory=10**6)
    # 3 layers, keys and values, 2 heads of 16 floats, 16 tokens to a block.
    block_bytes = 3 * 2 * 2 * 16 * 4 * 16
    assert engine.info.num_kv_blocks == 10**6 // block_bytes
    assert engine.info.kv_cache_bytes == engine.info.num_kv_blocks * block_bytes
    # The pool opens as it is used.
    assert engine.stats().num_blocks == 0
    engine.add(request([5] * 40, max_tokens=8))
    run(engine)
    assert 3 <= engine.stats().num_free_blocks + engine.stats().num_cached_blocks == engine.stats().num_blocks
    assert engine.stats().num_blocks <= engine.info.num_kv_blocks
    engine.close()


def test_a_request_id_is_used_once_at_a_time(engine: Engine) -> None:
    engine.add(request([5], max_tokens=1))
    with pytest.raises(InvalidRequestError, match="'a' is in use"):
        engine.add(request([6]))
    run(engine)
    engine.add(request([6], max_tokens=1))
    assert len(run(engine)["a"]) == 1


def test_what_can_never_be_served_is_refused(engine: Engine) -> None:
    for wrong in (request([]), request([193]), request([5], stop_token_ids=[193]), request([5] * (12 * 16))):
        with pytest.raises(InvalidRequestError):
            engine.add(wrong)
    assert not engine.has_work


def test_aborted_requests_give_everything_back(engine: Engine) -> None:
    for number in range(5):
        engine.add(request([5, 6, number], f"r{number}", max_tokens=100))
    engine.step()
    engine.abort([f"r{number}" for number in range(5)])
    assert not engine.has_work
    assert engine.stats().num_referenced_blocks == 0 and engine.check_integrity() == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_after_a_failed_step_the_engine_is_done_for(checkpoint: Path, world_size: int) -> None:
    engine = start(checkpoint, tensor_parallel_size=world_size)
    try:
        runner = engine._ranks.runner

        def fail(plan: object) -> object:
            raise RuntimeError("out of memory")

        runner.submit = fail  # type: ignore[method-assign, assignment]
        engine.add(request([2, 3]))
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.step()
        with pytest.raises(EngineDeadError, match="an earlier step"):
            engine.step()
    finally:
        engine.close()
