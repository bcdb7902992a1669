"""One sequence that goes wrong ends alone: the others get what they get without it, and nothing of it is left."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewick.engine.batch import Tier
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest
from pagewick.quantization.unquantized import UnquantizedMethod
from tests.engine.exactness import EvenTokens
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import (
    Answers,
    assert_idle,
    assert_same,
    count_transfers,
    record_plans,
    request,
    running,
    serve,
)
from tests.models.checkpoints import COMMON, write_checkpoint

POISONED_TOKEN = 150
VOCAB_SIZE = COMMON["vocab_size"]
POISONED_PROMPT = [*range(40, 60), POISONED_TOKEN]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", directory)
    with row_by_row():
        yield directory


class Failing:
    """A TokenConstraint that raises in one of its two methods, at its call number `at` (from 0)."""

    is_complete = False

    def __init__(self, method: str, at: int) -> None:
        self._calls = {"allowed_mask": 0, "accept": 0}
        self._fails = (method, at)

    def allowed_mask(self) -> bytes:
        self._called("allowed_mask")
        return bytes([255] * -(-VOCAB_SIZE // 8))

    def accept(self, token_id: int) -> None:
        self._called("accept")

    def _called(self, method: str) -> None:
        if self._fails == (method, self._calls[method]):
            raise RuntimeError("the grammar is at a loss")
        self._calls[method] += 1


def make_constraint(said: Any) -> Any:
    return EvenTokens(VOCAB_SIZE) if said == "even" else Failing(*said)


def engine_of(checkpoint: Path, **options: Any) -> Any:
    given = {"num_kv_blocks": 24, "block_size": 8, "max_model_len": 96, "constraint_factory": make_constraint}
    return running(checkpoint, **{**given, **options})


def poison(engine: Engine, value: float = math.nan, token_id: int = POISONED_TOKEN) -> None:
    """Fill the embedding of a token with this number."""
    embedding = engine._ranks.runner.model.model.embed_tokens
    (storage,) = embedding.weight.storages
    poisoned = torch.full((1, storage.spec.in_features), value)
    with torch.inference_mode():
        UnquantizedMethod().load(storage, "weight", poisoned, out_offset=token_id)


def clean_requests() -> list[EngineRequest]:
    """None of them ever meets the poisoned token: they may not draw it."""
    asked: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "logprobs": 2, "logit_bias": {POISONED_TOKEN: -100}}
    return [
        request([*range(10, 30)], "greedy", temperature=0.0, **asked),
        request([*range(40, 59)], "drawn", seed=2, temperature=0.8, n=2, **asked),
        request([*range(40, 60), 3], "cut", seed=3, temperature=0.8, top_p=0.9, repetition_penalty=1.1, **asked),
    ]


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Answers:
    answers: Answers = {}
    with engine_of(checkpoint, enable_prefix_caching=False) as engine:
        for each in clean_requests():
            answers |= serve(engine, [each])
    return answers


SPECULATION: list[dict[str, Any]] = [{}, {"speculative_method": "ngram", "ngram_prompt_lookup_min": 1}]


@pytest.mark.parametrize("budget", [512, 5])
@pytest.mark.parametrize("speculation", SPECULATION, ids=["", "ngram"])
def test_logits_that_are_no_numbers(checkpoint: Path, alone: Answers, budget: int, speculation: dict[str, Any]) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "logprobs": 1, "n": 2},
        {"temperature": 0.7, "min_p": 0.1, "presence_penalty": 1.0},
        {"temperature": 1.0, "mirostat": 2},
        {"temperature": 0.0, "use_beam_search": True, "n": 2},
        {"temperature": 0.0, "prompt_logprobs": 1},
    ]
    with engine_of(checkpoint, max_num_batched_tokens=budget, **speculation) as engine:
        poison(engine)
        for _ in range(2):
            poisoned = [
                request(POISONED_PROMPT, f"poisoned{number}", max_tokens=5, **kind) for number, kind in enumerate(kinds)
            ]
            found = serve(engine, [poisoned[0], *clean_requests(), *poisoned[1:]])
            assert_same(found, alone)
            for number, kind in enumerate(kinds):
                for index in range(kind.get("n", 1)):
                    answer = found[f"poisoned{number}", index]
                    assert answer.finish_reason == "error" and "not numbers" in (answer.error or "")
                    assert answer.token_ids == []
            assert_idle(engine)
            # Blocks of other requests may be used again, but not those after the poisoned token.
            hit = serve(engine, [request([*POISONED_PROMPT, *range(9)], "longer", max_tokens=1)])
            assert hit["longer", 0].error is not None
        # Other prompts in the blocks that held what is no number, to the last one.
        others = [request([20 + number] * 40, f"r{number}", max_tokens=3, ignore_eos=True) for number in range(4)]
        assert all(len(answer.token_ids) == 3 for answer in serve(engine, others).values())


def test_nothing_computed_from_it_stays_in_the_prefix_cache(checkpoint: Path) -> None:
    with engine_of(checkpoint) as engine:
        poison(engine)
        prompt = [POISONED_TOKEN, *range(40, 70)]
        assert serve(engine, [request(prompt, max_tokens=5)])["a", 0].error is not None
        assert engine.stats().num_cached_blocks == 0
        poison(engine, 0.1)
        answer = serve(engine, [request(prompt, max_tokens=5, ignore_eos=True)])["a", 0]
        assert answer.error is None and len(answer.token_ids) == 5


def test_nor_on_disk(checkpoint: Path, tmp_path: Path) -> None:
    """Not even where its blocks had been written before it was noticed."""
    options = {"kv_cache_disk": str(tmp_path), "num_kv_blocks": 12, "max_num_batched_tokens": 8}
    with engine_of(checkpoint, **options) as engine:
        poison(engine)
        prompt = [POISONED_TOKEN, *range(40, 100)]
        # A more urgent one pushes it out while it is on its way.
        wanted = [
            request(prompt, "poisoned", priority=1, max_tokens=5),
            request([*range(30)] * 2, "urgent", priority=0, max_tokens=30, ignore_eos=True, temperature=0.0),
        ]
        plans = record_plans(engine)
        found = serve(engine, wanted, arrivals=[0, 6])
        assert found["poisoned", 0].error is not None and found["urgent", 0].error is None
        transfers = count_transfers(plans)
        assert transfers[Tier.DEVICE, Tier.DISK] > 4 and transfers[Tier.DISK, Tier.DEVICE] > 4
    with engine_of(checkpoint, **options) as engine:
        answer = serve(engine, [request(prompt, max_tokens=5, ignore_eos=True)])["a", 0]
        assert answer.error is None and len(answer.token_ids) == 5


@pytest.mark.parametrize("method", ["allowed_mask", "accept"])
@pytest.mark.parametrize("at", [0, 4])
def test_a_constraint_that_raises(checkpoint: Path, alone: Answers, method: str, at: int) -> None:
    with engine_of(checkpoint) as engine:
        failing = request([*range(40, 60), 9], "failing", constraint=(method, at), max_tokens=20, ignore_eos=True)
        found = serve(engine, [failing, *clean_requests()])
        assert_same(found, alone)
        answer = found["failing", 0]
        assert answer.finish_reason == "error" and "at a loss" in (answer.error or "")
        # A token that the constraint did not take is out already.
        assert len(answer.token_ids) == at + (method == "accept")


def test_only_the_choices_whose_constraints_raise_fail(checkpoint: Path) -> None:
    """Each choice has a constraint of its own, and here the second one's fails."""
    number = iter(range(3))

    def factory(said: Any) -> Any:
        return Failing("accept", 2) if next(number) == 1 else Failing("", 0)

    with engine_of(checkpoint, constraint_factory=factory) as engine:
        wanted = request([*range(40, 60)], n=3, constraint=True, max_tokens=6, ignore_eos=True, temperature=0.8)
        found = serve(engine, [wanted])
    assert [found["a", index].finish_reason for index in range(3)] == ["length", "error", "length"]
    with engine_of(checkpoint) as engine:
        free = serve(engine, [request([*range(40, 60)], n=3, max_tokens=6, ignore_eos=True, temperature=0.8)])
    for index in (0, 2):
        assert found["a", index] == free["a", index], "a constraint that allows everything changes nothing"
    assert found["a", 1].token_ids == free["a", 1].token_ids[:3]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("speculation", SPECULATION, ids=["", "ngram"])
def test_a_constraint_that_allows_even_tokens(
    checkpoint: Path, temperature: float, speculation: dict[str, Any]
) -> None:
    asked: dict[str, Any] = {"n": 3, "max_tokens": 25, "ignore_eos": True, "temperature": temperature, "logprobs": 1}
    wanted = [request([*range(30 + number)], f"r{number}", seed=5, constraint="even", **asked) for number in range(3)]
    with engine_of(checkpoint) as engine:
        alone: Answers = {}
        for each in wanted:
            alone |= serve(engine, [each])
    assert len(alone) == 9
    for answer in alone.values():
        assert len(answer.token_ids) == 25 and all(token_id % 2 == 0 for token_id in answer.token_ids)
        # Log-probabilities are the model's own: that of an odd token may be better.
        assert temperature > 0 or any(each.rank > 1 for each in answer.logprobs)
    with engine_of(checkpoint, num_kv_blocks=12, **speculation) as engine:
        free = [request([*range(25)], f"free{number}", seed=5, **asked) for number in range(2)]
        assert_same(serve(engine, [*wanted, *free]), alone)
        assert engine.stats().num_preemptions > 0
