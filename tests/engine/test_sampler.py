"""Each row of a batch is sampled as if it were alone."""

from __future__ import annotations

import math
from random import Random

import pytest
import torch
from torch import Tensor

from pagewick.engine.batch import SlotSampling
from pagewick.engine.sampler import sample, token_logprobs

VOCAB_SIZE = 50


def row(temperature: float = 0.0, *, seed: int = 0, top_k: int = 0, top_p: float = 1.0, choice_index: int = 0,
        min_position: int = 0, stop_token_ids: tuple[int, ...] = ()) -> SlotSampling:  # fmt: skip
    return SlotSampling(temperature, top_k, top_p, seed, choice_index, min_position, list(stop_token_ids), None, None)


def random_logits(num_rows: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def mixed_rows(seed: int, count: int = 12) -> tuple[Tensor, list[SlotSampling], list[int]]:
    """Rows that have nothing in common."""
    random = Random(seed)
    rows = [
        row(
            random.choice([0.0, 0.7, 1.0, 2.0]),
            seed=random.choice([0, 1, -1, 2**63 - 1, -(2**63), random.getrandbits(40)]),
            top_k=random.choice([0, 1, 5, 1000]),
            top_p=random.choice([1.0, 0.9, 0.3, 1e-9]),
            choice_index=random.randrange(4),
            min_position=random.choice([0, 10, 10**6]),
            stop_token_ids=tuple(random.sample(range(VOCAB_SIZE), random.randrange(6))),
        )
        for _ in range(count)
    ]
    return random_logits(count, seed), rows, [random.randrange(20) for _ in range(count)]


@pytest.mark.parametrize("seed", range(10))
def test_a_row_s_token_does_not_depend_on_the_others(seed: int) -> None:
    logits, rows, positions = mixed_rows(seed)
    alone = [
        int(sample(logits[index : index + 1], [rows[index]], [positions[index]]).token_ids[0])
        for index in range(len(rows))
    ]
    assert sample(logits, rows, positions).token_ids.tolist() == alone
    order = Random(seed).sample(range(len(rows)), len(rows))
    shuffled = sample(logits[order], [rows[index] for index in order], [positions[index] for index in order])
    assert shuffled.token_ids.tolist() == [alone[index] for index in order]
    greedy = [index for index in range(len(rows)) if rows[index].temperature == 0]
    if greedy:
        only = sample(logits[greedy], [rows[index] for index in greedy], [positions[index] for index in greedy])
        assert only.token_ids.tolist() == [alone[index] for index in greedy]


def test_seed_choice_and_position_each_change_the_noise() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)

    def stream(**options: int) -> list[int]:
        start = options.pop("start", 0)
        return [int(sample(logits, [row(1.0, **options)], [start + i]).token_ids[0]) for i in range(16)]  # type: ignore[arg-type]

    streams = [stream(), stream(seed=1), stream(seed=-1), stream(choice_index=1), stream(start=100)]
    assert stream() == streams[0]
    assert all(a != b for i, a in enumerate(streams) for b in streams[:i])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("poison", [[math.nan], [math.inf], [-math.inf] * VOCAB_SIZE])
def test_a_row_that_is_not_numbers_is_invalid_alone(poison: list[float], temperature: float) -> None:
    logits, rows = random_logits(3), [row(temperature, seed=seed) for seed in range(3)]
    clean = sample(logits, rows, [0, 0, 0])
    assert clean.is_valid.tolist() == [True] * 3
    logits[1, : len(poison)] = torch.tensor(poison)
    sampled = sample(logits, rows, [0, 0, 0])
    assert sampled.is_valid.tolist() == [True, False, True]
    assert [sampled.token_ids[0], sampled.token_ids[2]] == [clean.token_ids[0], clean.token_ids[2]]


def test_a_row_may_hold_minus_infinity() -> None:
    logits = torch.full((2, VOCAB_SIZE), -math.inf)
    logits[:, 7] = 0.0
    sampled = sample(logits, [row(0.0), row(2.0)], [0, 0])
    assert (sampled.token_ids.tolist(), sampled.is_valid.tolist()) == ([7, 7], [True, True])


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [31, 12, 40]] = 5.0
    assert sample(logits, [row()], [0]).token_ids.tolist() == [12]
    assert sample(logits.expand(2, -1), [row(), row(1.0, top_k=1)], [0, 0]).token_ids.tolist() == [12, 12]


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_stop_tokens_are_impossible_before_the_minimum_position(temperature: float) -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 4] = logits[:, 9] = 30.0
    before = logits.clone()
    rows = [
        row(temperature, min_position=6, stop_token_ids=(4, 9)),
        row(temperature, min_position=6, stop_token_ids=(4, 9)),
        row(temperature, stop_token_ids=(4, 9)),
    ]
    token_ids = sample(logits, rows, [5, 6, 0]).token_ids.tolist()
    assert token_ids[0] not in (4, 9)
    assert token_ids[1] in (4, 9) and token_ids[2] in (4, 9)
    assert torch.equal(logits, before), "logits are needed afterwards, for log-probabilities"


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB_SIZE, VOCAB_SIZE + 9])
def test_logprobs_and_ranks_are_those_of_the_definition(num_top: int) -> None:
    logits, chosen = random_logits(4), [3, 17, 0, 49]
    for values, token_id, found in zip(
        logits.double().tolist(), chosen, token_logprobs(logits, torch.tensor(chosen), num_top), strict=True
    ):
        total = math.log(sum(math.exp(value) for value in values))
        order = sorted(range(VOCAB_SIZE), key=lambda candidate, values=values: -values[candidate])  # type: ignore[misc]
        assert found.token_id == token_id
        assert found.logprob == pytest.approx(values[token_id] - total, abs=1e-5)
        assert found.rank == order.index(token_id) + 1
        assert [candidate for candidate, _ in found.top] == order[:num_top]
        assert [logprob for _, logprob in found.top] == pytest.approx(
            [values[candidate] - total for candidate in order[:num_top]], abs=1e-5
        )


def test_the_rank_counts_only_more_likely_tokens() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0]])
    assert [token_logprobs(logits, torch.tensor([token_id]), 0)[0].rank for token_id in range(4)] == [3, 1, 1, 4]
