"""A request's tokens and log-probabilities are its own, to the last bit, whatever else runs, and however it is cut into
steps. test_exactness_properties does the same for random requests; here each circumstance is by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewick.engine.batch import Tier
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest
from tests.engine.all_works import works_of
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import (
    Answers,
    answers_of,
    assert_same,
    count_transfers,
    deltas_of,
    record_plans,
    request,
    running,
    serve,
)
from tests.models.checkpoints import write_checkpoint

NUM_NEW_TOKENS = 24
OPTIONS: dict[str, Any] = {"max_model_len": 128, "num_kv_blocks": 100}


@pytest.fixture(scope="module", autouse=True)
def exact_products() -> Iterator[None]:
    with row_by_row():
        yield


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
                stop_token_ids=tuple(range(2, 20) if number % 3 == 0 else ()),
                logprobs=3,
                prompt_logprobs=2 if number % 4 == 2 else None,
                **sampled,
            )
        )
    return made


def engine_of(checkpoint: Path, **options: Any) -> Any:
    return running(checkpoint, **{**OPTIONS, **options})


@pytest.fixture(autouse=True, params=[1, 2], ids=lambda depth: f"depth {depth}")
def depth(request: pytest.FixtureRequest, alone: Answers, monkeypatch: pytest.MonkeyPatch) -> int:
    """Number of steps in flight in the engines under test."""
    monkeypatch.setitem(OPTIONS, "max_steps_in_flight", request.param)
    number: int = request.param
    return number


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Answers:
    """Each request by itself, its whole prompt in one step, and one step at a time."""
    answers: Answers = {}
    with engine_of(checkpoint, max_num_seqs=1, enable_prefix_caching=False, max_steps_in_flight=1) as engine:
        for each in requests():
            answers |= serve(engine, [each])
    assert len({len(answer.token_ids) for answer in answers.values()}) > 1, "some end before the others"
    assert all(len(answer.logprobs) == len(answer.token_ids) for answer in answers.values())
    assert [len(answer.prompt_logprobs) for answer in answers.values()] == [0, 0, 15, 0, 0, 0, 63, 0]
    return answers


def test_in_a_batch(checkpoint: Path, alone: Answers) -> None:
    with engine_of(checkpoint, enable_prefix_caching=False) as engine:
        assert_same(serve(engine, requests()), alone)
        assert_same(serve(engine, requests()[::-1]), alone)


@pytest.mark.parametrize("budget", [1, 7])
def test_in_chunks(budget: int, checkpoint: Path, alone: Answers) -> None:
    with engine_of(checkpoint, max_num_batched_tokens=budget, enable_prefix_caching=False) as engine:
        assert_same(serve(engine, requests()), alone)


@pytest.mark.parametrize("block_size", [4, 8, 32])
def test_in_other_blocks(block_size: int, checkpoint: Path, alone: Answers) -> None:
    with engine_of(checkpoint, block_size=block_size) as engine:
        assert_same(serve(engine, requests()), alone)


def num_cached_tokens(engine: Engine) -> list[int]:
    """Serve the requests; what each found in the prefix cache."""
    found = {delta.request_id: delta.num_cached_tokens for delta in deltas_of(engine, requests())}
    return [found[each.request_id] for each in requests()]


def test_on_prefix_hits(checkpoint: Path, alone: Answers) -> None:
    with engine_of(checkpoint) as engine:
        assert_same(serve(engine, requests()), alone)
        # All whole blocks but the one that holds the last token; none where the prompt's log-probabilities are wanted.
        assert num_cached_tokens(engine) == [0, 0, 0, 16, 32, 32, 0, 48]
        assert_same(serve(engine, requests()), alone)


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("swap_space", [0, 2**20])
def test_preempted(enable_prefix_caching: bool, swap_space: int, checkpoint: Path, alone: Answers) -> None:
    with engine_of(
        checkpoint,
        num_kv_blocks=8,
        max_num_batched_tokens=50,
        enable_prefix_caching=enable_prefix_caching,
        swap_space=swap_space,
    ) as engine:
        plans = record_plans(engine)
        assert_same(serve(engine, requests()), alone)
        assert engine.stats().num_preemptions >= 3
        assert bool(count_transfers(plans)[Tier.HOST, Tier.DEVICE]) == bool(swap_space)


def test_from_disk(checkpoint: Path, alone: Answers, tmp_path: Path) -> None:
    for is_first in (True, False):
        with engine_of(checkpoint, num_kv_blocks=9, kv_cache_disk=str(tmp_path)) as engine:
            plans = record_plans(engine)
            assert_same(serve(engine, requests()), alone)
        transfers = count_transfers(plans)
        assert transfers[Tier.DEVICE, Tier.DISK] > 0 or not is_first
        assert transfers[Tier.DISK, Tier.DEVICE] > (0 if is_first else 5)


def test_beside_others_that_come_and_go(checkpoint: Path, alone: Answers) -> None:
    random = Random(1)
    with engine_of(checkpoint, max_num_batched_tokens=40, num_kv_blocks=20) as engine:
        waiting = requests()
        deltas = []
        for number in range(1000):
            if random.random() < 0.2 and waiting:
                engine.add(waiting.pop())
            if random.random() < 0.3 and number < 100:
                prompt = [random.randrange(2, 193) for _ in range(random.randrange(1, 60))]
                engine.add(request(prompt, f"other{number}", seed=number, max_tokens=30))
            engine.abort([f"other{random.randrange(100)}"])
            deltas += engine.step()
            if not waiting and not engine.has_work:
                break
        assert_same(answers_of(deltas), alone)


# A choice is sampled with (seed, choice index), independently of the number of choices.


def test_choices_share_the_prompt_s_work_and_are_drawn_by_their_index(checkpoint: Path) -> None:
    prompt = [*range(10, 60)]
    asked: dict[str, Any] = {"temperature": 0.8, "max_tokens": 12, "ignore_eos": True, "logprobs": 2}
    with engine_of(checkpoint) as engine:
        plans = record_plans(engine)
        three = serve(engine, [request(prompt, seed=5, n=3, **asked)])
        # The prompt once; of the two others its last token again; 11 tokens each, the last one is never computed.
        assert sum(work.num_tokens for plan in plans for work in works_of(plan)) == 50 + 2 * 1 + 3 * 11
        one = serve(engine, [request(prompt, seed=5, **asked)])
    assert [index for _, index in three] == [0, 1, 2]
    assert three["a", 0] == one["a", 0]
    assert len({tuple(answer.token_ids) for answer in three.values()}) == 3
    company = [
        request([*range(5 * number, 5 * number + 30)], f"b{number}", seed=5, n=2, **asked) for number in range(6)
    ]
    with engine_of(checkpoint, num_kv_blocks=9, max_num_seqs=5, max_num_batched_tokens=20) as engine:
        # More choices than before: the first three are the same, although most of them wait and are preempted.
        five = serve(engine, [*company, request(prompt, seed=5, n=5, **asked)])
        assert engine.stats().num_preemptions > 0
    assert_same(five, three)
    assert len({tuple(five["a", index].token_ids) for index in range(5)}) == 5


def test_a_choice_that_is_stopped_changes_no_other(checkpoint: Path) -> None:
    asked: dict[str, Any] = {"temperature": 0.8, "max_tokens": 12, "ignore_eos": True, "n": 4}
    with engine_of(checkpoint, num_kv_blocks=8) as engine:
        expected = serve(engine, [request([*range(30)], **asked)])

        def stop_one(number: int) -> None:
            if number == 5:
                engine.abort([], [("a", 1), ("a", 0)])

        found = serve(engine, [request([*range(30)], **asked)], before_step=stop_one)
    assert_same(found, {choice: expected[choice] for choice in (("a", 2), ("a", 3))})
    for index in (0, 1):
        token_ids = found["a", index].token_ids if ("a", index) in found else []
        assert token_ids == expected["a", index].token_ids[: len(token_ids)] != expected["a", index].token_ids


@pytest.mark.parametrize("drafter", ["ngram", "itself"])
def test_with_draft_tokens(drafter: str, checkpoint: Path, alone: Answers) -> None:
    given: dict[str, Any] = {"speculative_method": "ngram", "ngram_prompt_lookup_min": 1}
    if drafter == "itself":
        given = {"speculative_model": str(checkpoint)}
    with engine_of(checkpoint, speculative_max_batch=16, **given) as engine:
        assert_same(serve(engine, requests()), alone)
        assert engine.stats().num_draft_tokens > 10
        assert (engine.stats().num_accepted_tokens > 50) == (drafter == "itself")
