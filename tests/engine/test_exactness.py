"""A request's tokens and log-probabilities are its own, whatever else runs, and however it is cut into steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewick.config import EngineConfig
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest, RequestDelta, TokenLogprobs
from tests.engine.requests import request, token_ids_of
from tests.models.checkpoints import write_checkpoint

BLOCK_SIZE = 16
NUM_NEW_TOKENS = 24
# Not zero: matrix products of torch are not the same bits for every number of rows.
TOLERANCE = 5e-5


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("qwen3")
    write_checkpoint("qwen3", directory)
    return directory


def requests() -> list[EngineRequest]:
    """Greedy and seeded ones, lengths around the edges of blocks, a prefix in common, everything asked for."""
    random = Random(5)
    common = [random.randrange(2, 193) for _ in range(40)]
    made = []
    for number, num_prompt_tokens in enumerate((1, 15, 16, 17, 33, 48, 64, 50)):
        prompt = [*common[: num_prompt_tokens // 2], *(random.randrange(2, 193) for _ in range(64))]
        sampled: dict[str, Any] = {"temperature": 0.8, "top_p": 0.95} if number % 2 else {"temperature": 0.0}
        made.append(
            request(
                prompt[:num_prompt_tokens],
                f"r{number}",
                seed=1000 + number,
                max_tokens=NUM_NEW_TOKENS,
                min_tokens=number,
                logprobs=3,
                prompt_logprobs=2 if number % 4 == 2 else None,
                **sampled,
            )
        )
    return made


@contextmanager
def running(checkpoint: Path, **options: Any) -> Iterator[Engine]:
    config = EngineConfig(
        model=str(checkpoint), device="cpu", num_threads=1, block_size=BLOCK_SIZE, max_model_len=128,
        **{"num_kv_blocks": 100, **options},
    )  # fmt: skip
    engine = Engine(config)
    try:
        yield engine
        assert engine.check_integrity() == []
        assert engine.stats().num_referenced_blocks == 0
    finally:
        engine.close()


def serve(engine: Engine, wanted: Sequence[EngineRequest]) -> dict[str, list[RequestDelta]]:
    for each in wanted:
        engine.add(each)
    found: dict[str, list[RequestDelta]] = {each.request_id: [] for each in wanted}
    while engine.has_work:
        for delta in engine.step():
            found[delta.request_id].append(delta)
    return found


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> dict[str, list[RequestDelta]]:
    """Each request by itself, its whole prompt in one step."""
    answers: dict[str, list[RequestDelta]] = {}
    with running(checkpoint, max_num_seqs=1, enable_prefix_caching=False) as engine:
        for each in requests():
            answers |= serve(engine, [each])
    assert {len(token_ids_of(deltas)) for deltas in answers.values()} != {1}
    return answers


def assert_equal(found: dict[str, list[RequestDelta]], expected: dict[str, list[RequestDelta]]) -> None:
    for request_id, deltas in expected.items():
        assert token_ids_of(found[request_id]) == token_ids_of(deltas), request_id
        assert found[request_id][-1].finish_reason == deltas[-1].finish_reason
        for name in ("logprobs", "prompt_logprobs"):
            assert_close(collected(found[request_id], name), collected(deltas, name))


def collected(deltas: Sequence[RequestDelta], name: str) -> list[TokenLogprobs]:
    return [each for delta in deltas for each in getattr(delta, name) or []]


def assert_close(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> None:
    """Two tokens that are equally likely within the tolerance may change places."""
    assert [each.token_id for each in found] == [each.token_id for each in expected]
    for each, other in zip(found, expected, strict=True):
        assert each.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        assert abs(each.rank - other.rank) <= 1
        assert [value for _, value in each.top] == pytest.approx([value for _, value in other.top], abs=TOLERANCE)
        assert len({token_id for token_id, _ in each.top} - {token_id for token_id, _ in other.top}) <= 1


def test_in_a_batch(checkpoint: Path, alone: dict[str, list[RequestDelta]]) -> None:
    with running(checkpoint, enable_prefix_caching=False) as engine:
        assert_equal(serve(engine, requests()), alone)
        assert_equal(serve(engine, requests()[::-1]), alone)


@pytest.mark.parametrize("budget", [1, 7])
def test_in_chunks(budget: int, checkpoint: Path, alone: dict[str, list[RequestDelta]]) -> None:
    with running(checkpoint, max_num_batched_tokens=budget, enable_prefix_caching=False) as engine:
        assert_equal(serve(engine, requests()), alone)


def test_on_prefix_hits(checkpoint: Path, alone: dict[str, list[RequestDelta]]) -> None:
    with running(checkpoint) as engine:
        assert_equal(serve(engine, requests()), alone)
        again = serve(engine, requests())
        assert_equal(again, alone)
    # All whole blocks but the one that holds the last token; none where the prompt's log-probabilities are wanted.
    assert [deltas[0].num_cached_tokens for deltas in again.values()] == [0, 0, 0, 16, 32, 32, 0, 48]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_preempted(enable_prefix_caching: bool, checkpoint: Path, alone: dict[str, list[RequestDelta]]) -> None:
    with running(
        checkpoint, num_kv_blocks=9, max_num_batched_tokens=50, enable_prefix_caching=enable_prefix_caching
    ) as engine:
        assert_equal(serve(engine, requests()), alone)
        assert engine.stats().num_preemptions >= 3


def test_beside_others_that_come_and_go(checkpoint: Path, alone: dict[str, list[RequestDelta]]) -> None:
    random = Random(1)
    with running(checkpoint, max_num_batched_tokens=40, num_kv_blocks=20) as engine:
        waiting = requests()
        found: dict[str, list[RequestDelta]] = {}
        for number in range(1000):
            if random.random() < 0.2 and waiting:
                engine.add(waiting.pop())
            if random.random() < 0.3 and number < 100:
                prompt = [random.randrange(2, 193) for _ in range(random.randrange(1, 60))]
                engine.add(request(prompt, f"other{number}", seed=number, max_tokens=30))
            engine.abort([f"other{random.randrange(100)}"])
            for delta in engine.step():
                found.setdefault(delta.request_id, []).append(delta)
            if not waiting and not engine.has_work:
                break
        assert_equal(found, alone)
