"""Sixty-four requests in memory for four, until a thousand sequences were preempted: all get what each gets alone, and
nobody waits for ever.

PAGEWICK_DEEP=1 goes on to ten thousand.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import pytest

from pagewick.engine.messages import EngineRequest, RequestDelta
from tests.deep import IS_DEEP
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, answers_of, assert_idle, assert_same, request, running, serve
from tests.models.checkpoints import write_checkpoint

NUM_REQUESTS = 64
NUM_PROMPT_TOKENS = 5
NUM_NEW_TOKENS = 35
BLOCK_SIZE = 4
# The blocks that four sequences need at their end.
NUM_BLOCKS = 4 * (NUM_PROMPT_TOKENS + NUM_NEW_TOKENS) // BLOCK_SIZE
NUM_PREEMPTIONS = 10_000 if IS_DEEP else 1_000
pytestmark = pytest.mark.timeout(0 if IS_DEEP else 300)


SHARED: dict[str, Any] = {"block_size": BLOCK_SIZE, "max_model_len": NUM_PROMPT_TOKENS + NUM_NEW_TOKENS}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("llama-linear-rope")
    write_checkpoint("llama-linear-rope", directory)
    with row_by_row():
        yield directory


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Answers:
    answers: Answers = {}
    with running(checkpoint, num_kv_blocks=20, enable_prefix_caching=False, **SHARED) as engine:
        for each in requests():
            answers |= serve(engine, [each])
    return answers


def requests() -> list[EngineRequest]:
    """Equals: as long as each other, half of them greedy."""
    random = Random(1)
    made = []
    for number in range(NUM_REQUESTS):
        prompt = [random.randrange(2, 193) for _ in range(NUM_PROMPT_TOKENS)]
        sampled: dict[str, Any] = {"temperature": 0.0} if number % 2 else {"temperature": 0.8, "top_p": 0.9}
        if number % 8 == 0:
            sampled = {"temperature": 0.8, "mirostat": 2, "mirostat_tau": 4.0}
        made.append(
            request(
                prompt, f"r{number}", seed=number, max_tokens=NUM_NEW_TOKENS, ignore_eos=True, logprobs=1, **sampled
            )
        )
    return made


def check_waits(deltas: list[tuple[int, RequestDelta]]) -> None:
    """Steps from arrival to the first token, and to the last: nobody waits much longer than most do."""
    last = {delta.request_id: number for number, delta in deltas}
    first = {delta.request_id: number for number, delta in reversed(deltas)}
    for waits in (first, last):
        assert len(waits) == NUM_REQUESTS
        assert max(waits.values()) <= 3 * median(waits.values())


@pytest.mark.parametrize(
    "options",
    [{}, {"enable_prefix_caching": False}, {"swap_space": 2**20, "max_num_batched_tokens": 20}],
    ids=["prefix caching", "recomputed", "host memory"],
)
def test_all_get_what_each_gets_alone(checkpoint: Path, alone: Answers, options: dict[str, Any]) -> None:
    num_preemptions = num_rounds = 0
    with running(checkpoint, num_kv_blocks=NUM_BLOCKS, max_num_seqs=NUM_REQUESTS, **SHARED, **options) as engine:
        while num_preemptions < NUM_PREEMPTIONS / 3:
            wanted = requests()
            Random(num_rounds).shuffle(wanted)
            for each in wanted:
                engine.add(each)
            deltas: list[tuple[int, RequestDelta]] = []
            number = 0
            while engine.has_work:
                number += 1
                assert number < 20 * NUM_REQUESTS, "nobody gets on"
                deltas += [(number, delta) for delta in engine.step()]
            assert_idle(engine)
            assert_same(answers_of(delta for _, delta in deltas), alone)
            check_waits(deltas)
            num_rounds += 1
            num_preemptions = engine.stats().num_preemptions
    print(f"{num_preemptions} preemptions in {num_rounds} rounds, the last one of {number} steps")
