"""The engine in this process: what it makes of its memory, what it refuses, and a model that goes wrong."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewick.config import EngineConfig
from pagewick.engine.engine import Engine
from pagewick.engine.messages import RequestDelta
from pagewick.errors import ConfigError, ContextLengthError, EngineDeadError, InvalidRequestError
from tests.engine.requests import request, token_ids_of
from tests.models.checkpoints import write_checkpoint

POISONED_TOKEN = 150
CONTEXT = 512


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", directory)
    return directory


def start(checkpoint: Path, **options: Any) -> Engine:
    return Engine(EngineConfig(model=str(checkpoint), device="cpu", num_threads=1, block_size=16, **options))


@pytest.fixture
def engine(checkpoint: Path) -> Iterator[Engine]:
    made = start(checkpoint, num_kv_blocks=12)
    yield made
    made.close()


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
    assert engine.stats().num_free_blocks == engine.stats().num_blocks == engine.info.num_kv_blocks
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


def test_a_request_whose_logits_are_no_numbers_fails_alone_and_leaves_nothing_behind(engine: Engine) -> None:
    clean = [request([*range(10, 30)], f"clean{number}", seed=number, max_tokens=20) for number in range(3)]
    for each in clean:
        engine.add(each)
    expected = run(engine)
    with torch.inference_mode():
        engine._ranks.runner.model.model.embed_tokens.weight[POISONED_TOKEN] = math.nan
    for temperature in (0.0, 1.0):
        for number in range(3):
            prompt = [*range(40, 60), POISONED_TOKEN]
            engine.add(request(prompt, f"poisoned{number}", max_tokens=5, temperature=temperature, logprobs=1))
        for each in clean:
            engine.add(each)
        found = run(engine)
        for number in range(3):
            (delta,) = found[f"poisoned{number}"]
            assert delta.finish_reason == "error" and "not numbers" in (delta.error or "")
            assert delta.token_ids == []
            assert token_ids_of(found[f"clean{number}"]) == token_ids_of(expected[f"clean{number}"])
    # Other prompts in the blocks that held what is no number, to the last one.
    prompts = [[20 + number] * 60 for number in range(3)]
    found = {}
    for number, prompt in enumerate(prompts):
        engine.add(request(prompt, f"r{number}", max_tokens=3, ignore_eos=True))
    found = run(engine)
    assert [len(token_ids_of(found[f"r{number}"])) for number in range(3)] == [3, 3, 3]
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
