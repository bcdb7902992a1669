"""Responses have the same bits with one, two or three threads, in bfloat16 and float32, in any batch.

These tests use the built-in model, whose products are large enough to be divided. Without the native library products
are PyTorch's, and only rows of their own are the same; then threads are not tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from pagewick.demo import MODEL_DIR
from pagewick.engine.messages import EngineRequest
from pagewick.kernels import native_status
from tests.engine.serving import Answers, assert_same, request, running, serve

pytestmark = pytest.mark.skipif("off" in native_status(), reason="needs the native library: make install")

WAYS: dict[str, dict[str, Any]] = {
    "together": {"enable_prefix_caching": False},
    "in chunks of 7": {"max_num_batched_tokens": 7},
    "preempted": {"num_kv_blocks": 22, "enable_prefix_caching": False},
    "drafted": {"speculative_method": "ngram", "ngram_prompt_lookup_min": 1},
}


def requests() -> list[EngineRequest]:
    """Prompts of all lengths, one beyond a tile of attention, with repetitions to draft from; greedy and drawn."""
    random = Random(9)
    common = [random.randrange(2, 4000) for _ in range(60)]
    made = []
    for number, length in enumerate((1, 33, 64, 97, 290)):
        prompt = [*common[: length // 2], *common[: length // 4], *(random.randrange(2, 4000) for _ in range(length))]
        drawn: dict[str, Any] = {"temperature": 0.7, "top_p": 0.9} if number % 2 else {"temperature": 0.0}
        made.append(
            request(prompt[:length], f"r{number}", seed=number, max_tokens=48, ignore_eos=True, logprobs=3, **drawn)
        )
    return made


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def alone(dtype: str) -> Iterator[Answers]:
    """Each by itself, on one thread."""
    answers: Answers = {}
    with running(MODEL_DIR, dtype=dtype, max_model_len=352, max_num_seqs=1, enable_prefix_caching=False) as engine:
        for each in requests():
            answers |= serve(engine, [each])
    yield answers


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_bits_are_the_same(way: str, num_threads: int, dtype: str, alone: Answers) -> None:
    with running(MODEL_DIR, dtype=dtype, max_model_len=352, num_threads=num_threads, **WAYS[way]) as engine:
        assert_same(serve(engine, requests()), alone)
        # Once more: now prompts are in the prefix cache, and steps are replayed.
        assert_same(serve(engine, requests()[::-1]), alone)
        assert way != "preempted" or engine.stats().num_preemptions > 0
