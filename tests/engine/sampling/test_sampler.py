"""Each row of a batch is sampled as if it were alone, and with the probabilities that its parameters mean."""

from __future__ import annotations

import math
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick import kernels
from pagewick.engine.sampling.sampler import candidate_logprobs, score_tokens
from pagewick.engine.sampling.traits import SampleRow
from pagewick.kernels.reference_sampling import Purpose
from tests.deep import IS_DEEP
from tests.engine.sample_rows import mixed_rows, random_logits, row, sample
from tests.kernels import truncation_definitions as definitions

VOCAB_SIZE = 50
NUM_DRAWS = 20000


@pytest.mark.parametrize("vocab_size", [1, 7, 193, 5000])
@pytest.mark.parametrize("seed", range(4))
def test_a_row_s_token_does_not_depend_on_the_others(seed: int, vocab_size: int) -> None:
    count = 30
    logits, rows = mixed_rows(seed, vocab_size, count)
    before = logits.clone()
    together = sample(logits, rows)
    assert torch.equal(logits, before), "logits are needed afterwards, for log-probabilities"
    for order in [[index] for index in range(count)] + [Random(seed).sample(range(count), size) for size in (13, 30)]:
        some = sample(logits[order], [rows[index] for index in order])
        valid = together.is_valid[order]
        assert torch.equal(some.is_valid, valid)
        assert torch.equal(some.token_ids[valid], together.token_ids[order][valid])
        assert some.mirostat_mu == [together.mirostat_mu[index] for index in order]


def test_seed_choice_and_position_each_change_the_noise() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)

    def stream(start: int = 0, **options: int) -> list[int]:
        rows = [row(1.0, position=start + i, **options) for i in range(16)]
        return sample(logits.expand(16, -1), rows).token_ids.tolist()

    streams = [stream(), stream(seed=1), stream(seed=-1), stream(choice_index=1), stream(start=100)]
    assert stream() == streams[0]
    assert all(a != b for i, a in enumerate(streams) for b in streams[:i])


@pytest.mark.parametrize(
    "options",
    [
        {}, {"temperature": 1.0}, {"temperature": 0.5, "typical_p": 0.5, "top_n_sigma": 1.0, "min_p": 0.1},
        {"temperature": 1.0, "xtc_probability": 1.0, "top_k": 5}, {"temperature": 1.0, "mirostat": 1},
        {"temperature": 1.0, "mirostat": 2}, {"history": [3], "repetition_penalty": 1.5}, {"logit_bias": {2: 1.0}},
        {"allowed_token_ids": (1, 2, 3)},
    ],
)  # fmt: skip
@pytest.mark.parametrize("poison", [[math.nan], [math.inf], [-math.inf] * VOCAB_SIZE])
def test_a_row_that_is_not_numbers_is_invalid_alone(poison: list[float], options: dict[str, Any]) -> None:
    logits, rows = random_logits(3, VOCAB_SIZE), [row(seed=seed, **options) for seed in range(3)]
    clean = sample(logits, rows)
    assert clean.is_valid.tolist() == [True] * 3
    logits[1, : len(poison)] = torch.tensor(poison)
    sampled = sample(logits, rows)
    assert sampled.is_valid.tolist() == [True, False, True]
    assert sampled.is_poisoned.tolist() == [False, True, False]
    assert not clean.is_poisoned.any()
    assert [sampled.token_ids[0], sampled.token_ids[2]] == [clean.token_ids[0], clean.token_ids[2]]
    assert 0 <= sampled.token_ids[1] < VOCAB_SIZE


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("options", [{"allowed_token_ids": (1, 2)}, {"allowed": [1, 2], "vocab_size": VOCAB_SIZE}])
def test_a_nan_is_seen_behind_a_mask(options: dict[str, Any], temperature: float) -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7] = math.nan
    sampled = sample(logits, [row(temperature, **options)])
    assert (sampled.is_valid.tolist(), sampled.is_poisoned.tolist()) == ([False], [True])


@pytest.mark.parametrize("vocab_size", [7, 193, 5000])
@pytest.mark.parametrize("share", [0.01, 0.9])
def test_a_mask_alone_acts_as_beside_another_edit(vocab_size: int, share: float) -> None:
    """Rows that have a mask and no other edit go another way, without a copy of the logits."""
    random = Random(vocab_size)
    logits = random_logits(40, vocab_size)
    options: list[dict[str, Any]] = [
        {"allowed": {0, *random.sample(range(vocab_size), int(share * vocab_size))}, "vocab_size": vocab_size}
        if random.random() < 0.8
        else {}
        for _ in logits
    ]
    for params in ({}, {"top_k": 3}, {"top_p": 0.7}, {"top_k": 20, "top_p": 0.9}):
        temperatures = [random.choice([0.0, 0.3, 1.0, 2.0]) for _ in logits]
        both = [
            [
                row(t, seed=seed, **one, **params, **more)
                for seed, (t, one) in enumerate(zip(temperatures, options, strict=True))
            ]
            for more in ({}, {"logit_bias": {0: 0.0}})
        ]
        alone, beside = (sample(logits, rows) for rows in both)
        assert torch.equal(alone.token_ids, beside.token_ids)
        assert alone.is_valid.all() and not alone.is_poisoned.any()


def test_a_row_may_hold_minus_infinity() -> None:
    logits = torch.full((8, VOCAB_SIZE), -math.inf)
    logits[:, 7] = 0.0
    rows = [
        row(0.0), row(2.0), row(1.0, typical_p=0.1), row(1.0, xtc_probability=1.0, xtc_threshold=0.0),
        row(1.0, mirostat=1), row(1.0, mirostat=2, mu=-1.0), row(1.0, top_n_sigma=1.0), row(1.0, min_p=1.0),
    ]  # fmt: skip
    sampled = sample(logits, rows)
    assert (sampled.token_ids.tolist(), sampled.is_valid.tolist()) == ([7] * 8, [True] * 8)
    assert not sampled.is_poisoned.any()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "options",
    [
        {"allowed": [], "vocab_size": 7},
        {"allowed": [1, 2], "vocab_size": 7, "allowed_token_ids": (3, 4)},
        {"bad": [[token_id] for token_id in range(7)]},
        {"stop": range(7), "min_tokens": 1},
        {"stop": [0, 1, 2], "min_tokens": 1, "bad": [[3], [5, 4]], "allowed_token_ids": (2, 3, 4), "history": [5],
         "num_prompt_tokens": 1, "logit_bias": {3: 100.0}},
    ],
)  # fmt: skip
def test_a_row_without_any_token_left_is_invalid_alone(options: dict[str, Any], temperature: float) -> None:
    sampled = sample(random_logits(3, 7), [row(temperature), row(temperature, **options), row(temperature)])
    assert sampled.is_valid.tolist() == [True, False, True]
    # It is the request's doing: what was computed for it is right.
    assert not sampled.is_poisoned.any()


def test_greedy_takes_the_lowest_of_equal_tokens() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, [31, 12, 40]] = 5.0
    rows = [row(), row(1.0, top_k=1), row(1e-45), row(1.0, mirostat=1, mu=-50.0), row(1.0, mirostat=2, mu=-50.0)]
    assert sample(logits.expand(5, -1), rows).token_ids.tolist() == [12] * 5


def test_greedy_is_after_the_edits_and_before_the_truncations() -> None:
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 30], logits[0, 20], logits[0, 10] = 9.0, 8.0, 7.0
    options: dict[str, Any] = {"typical_p": 0.01, "xtc_probability": 1.0, "xtc_threshold": 0.0}
    assert sample(logits, [row(0.0, bad=[[30]], **options)]).token_ids.tolist() == [20]
    sampled = sample(logits, [row(0.0, mirostat=2, mu=3.0)])
    assert (sampled.token_ids.tolist(), sampled.mirostat_mu) == ([30], [None])


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_stop_tokens_are_impossible_before_enough_tokens_are_out(temperature: float) -> None:
    logits = torch.zeros(3, VOCAB_SIZE)
    logits[:, 4] = logits[:, 9] = 30.0
    stop: dict[str, Any] = {"stop": [4, 9], "num_prompt_tokens": 4}
    rows = [
        row(temperature, min_tokens=2, position=5, **stop),
        row(temperature, min_tokens=2, position=6, **stop),
        row(temperature, position=4, **stop),
    ]
    token_ids = sample(logits, rows).token_ids.tolist()
    assert token_ids[0] not in (4, 9)
    assert token_ids[1] in (4, 9) and token_ids[2] in (4, 9)


def expected_probs(logits: Tensor, of: SampleRow) -> definitions.Probs:
    """Return the distribution after all truncations, in the order of docs/sampling.md; XTC always applies."""
    params = of.sampling.params
    values = logits.double().tolist()
    if params.top_n_sigma:
        values = definitions.top_n_sigma(values, params.top_n_sigma)
    probs = definitions.softmax(values, params.temperature)
    probs = definitions.min_p(probs, params.min_p)
    if params.typical_p < 1:
        probs = definitions.typical_p(probs, params.typical_p)
    probs = definitions.top_k_top_p(probs, params.top_k, params.top_p)
    if params.xtc_probability:
        probs = definitions.xtc(probs, params.xtc_threshold)
    mu = 2 * params.mirostat_tau if of.mirostat_mu is None else of.mirostat_mu
    if params.mirostat == 1:
        probs = definitions.top_k_top_p(probs, definitions.mirostat_1_top_k(probs, mu), 1.0)
    if params.mirostat == 2:
        probs = definitions.mirostat_2(probs, mu)
    return probs


def column(values: definitions.Probs, vocab_size: int) -> Tensor:
    return torch.tensor([values.get(token_id, 0.0) for token_id in range(vocab_size)], dtype=torch.float64)


def assert_drawn_from(drawn: Tensor, probs: Tensor) -> None:
    """Pearson's chi-square test; a right sampler fails once in a million times."""
    counts, expected = torch.bincount(drawn, minlength=len(probs)), probs * len(drawn)
    assert counts[probs == 0].sum() == 0
    # The approximation needs several expected counts per class: rarer tokens are one class together.
    rare = (expected < 5) & (expected > 0)
    counts = torch.cat([counts[expected >= 5], counts[rare].sum().unsqueeze(0)])
    expected = torch.cat([expected[expected >= 5], expected[rare].sum().unsqueeze(0)])
    if expected[-1] < 1:
        assert counts[-1] <= 10
        counts, expected = counts[:-1], expected[:-1]
    half = (((counts - expected) ** 2 / expected).sum() / 2).double()
    assert len(expected) == 1 or torch.special.gammaincc(half.new_tensor((len(expected) - 1) / 2), half) > 1e-6


def draws(logits: Tensor, count: int = NUM_DRAWS, **options: Any) -> Tensor:
    """Draw the tokens of `count` positions of one sequence, all with these logits."""
    first = row(**options)
    rows = [SampleRow(first.sampling, position, (), None, first.mirostat_mu) for position in range(count)]
    return sample(logits.expand(count, -1), rows).token_ids


STATISTICS: list[dict[str, Any]] = [
    {"min_p": 0.05},
    {"top_n_sigma": 1.2},
    {"typical_p": 0.6},
    {"temperature": 0.6, "typical_p": 0.95},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.05, "top_k": 9},
    {"temperature": 1.5, "top_n_sigma": 2.0, "min_p": 0.1, "typical_p": 0.9, "top_k": 12, "top_p": 0.8},
    {"top_n_sigma": 2.0, "min_p": 0.02, "typical_p": 0.9, "top_p": 0.9, "xtc_probability": 1.0},
    {"mirostat": 1},
    {"mirostat": 1, "mu": 5.0, "temperature": 0.8},
    {"mirostat": 2},
    {"mirostat": 2, "mu": 4.5, "temperature": 1.3},
    {"mirostat": 2, "mirostat_tau": 2.25},
]


@pytest.mark.parametrize("options", STATISTICS[:: 1 if IS_DEEP else 2], ids=str)
def test_tokens_are_drawn_with_the_right_probabilities(options: dict[str, Any]) -> None:
    options = {"temperature": 1.0, "seed": 5, **options}
    logits = random_logits(1, VOCAB_SIZE, seed=3) / 2
    probs = expected_probs(logits[0], row(**options))
    assert 1 < len(probs) <= VOCAB_SIZE
    assert_drawn_from(draws(logits, **options), column(probs, VOCAB_SIZE))


@pytest.mark.parametrize("vocab_size", [1, 7, 193, 5000])
@pytest.mark.parametrize("options", STATISTICS[:7], ids=str)
def test_only_the_right_tokens_are_drawn_whatever_the_vocabulary(options: dict[str, Any], vocab_size: int) -> None:
    options = {"temperature": 1.0, **options}
    logits = random_logits(1, vocab_size, seed=vocab_size)
    probs = column(expected_probs(logits[0], row(**options)), vocab_size)
    assert_drawn_from(draws(logits, 500, **options), probs)


@pytest.mark.parametrize("probability", [0.25, 0.9])
def test_xtc_acts_as_often_as_it_should(probability: float) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "xtc_threshold": 0.04, "top_p": 0.95, "seed": 9}
    logits = random_logits(1, VOCAB_SIZE, seed=3) / 2
    acting = column(expected_probs(logits[0], row(**options, xtc_probability=1.0)), VOCAB_SIZE)
    idle = column(expected_probs(logits[0], row(**options)), VOCAB_SIZE)
    expected = probability * acting + (1 - probability) * idle
    assert (acting - idle).abs().sum() > 0.5
    assert_drawn_from(draws(logits, xtc_probability=probability, **options), expected)


def test_whether_xtc_acts_is_another_random_number_than_the_token_s() -> None:
    """Were it the same, only small numbers would draw after XTC, and so only the first tokens."""
    logits = torch.zeros(1, 8)
    logits[0, :2] = 3.0
    drawn = draws(logits, temperature=1.0, xtc_probability=0.1, xtc_threshold=0.3)
    position = torch.arange(NUM_DRAWS)
    zeros = torch.zeros(NUM_DRAWS, dtype=torch.int64)
    acts = kernels.philox_uniform(zeros, zeros, position, Purpose.XTC) < 0.1
    # XTC keeps the second of the two likely tokens, whose share is then 20.1 of 26.1.
    share = math.exp(3) / (math.exp(3) + 6)
    found = (drawn[acts] == 1).double().mean().item()
    assert not (drawn[acts] == 0).any()
    assert abs(found - share) < 6 * math.sqrt(share * (1 - share) / int(acts.sum()))


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("temperature", [0.8, 1.0])
def test_mirostat_learns_from_the_surprise_of_its_token(version: int, temperature: float) -> None:
    logits = random_logits(3, VOCAB_SIZE, seed=version)
    given = [None, 6.5, -1.0]
    rows = [
        row(temperature, seed=seed, mirostat=version, mirostat_tau=2.5, mirostat_eta=0.3, mu=mu)
        for seed, mu in enumerate(given)
    ]
    sampled = sample(torch.cat([logits, logits[:1]]), [*rows, row(temperature)])
    for values, token_id, mu, found in zip(
        logits.double().tolist(), sampled.token_ids.tolist(), given, sampled.mirostat_mu, strict=False
    ):
        surprise = -math.log2(definitions.softmax(values, temperature)[token_id])
        # The native library computes the weights of tokens in float32.
        assert found == pytest.approx((5.0 if mu is None else mu) - 0.3 * (surprise - 2.5), abs=1e-6)
    assert sampled.mirostat_mu[3] is None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tau", [3.0, 4.5])
def test_mirostat_keeps_the_surprise_at_its_target(version: int, tau: float) -> None:
    """Tokens with a Zipf distribution: over many of them the mean surprise is tau."""
    logits = -1.1 * torch.arange(1, 301).float().log().unsqueeze(0)
    probs = definitions.softmax(logits[0].double().tolist(), 1.0)
    mu, surprises = None, []
    for position in range(700):
        of = row(1.0, mirostat=version, mirostat_tau=tau, mirostat_eta=0.1, mu=mu, position=position)
        sampled = sample(logits, [of])
        mu = sampled.mirostat_mu[0]
        surprises.append(-math.log2(probs[int(sampled.token_ids[0])]))
    assert sum(surprises[100:]) / 600 == pytest.approx(tau, abs=0.05)


@pytest.mark.parametrize("num_top", [0, 1, 5, VOCAB_SIZE, VOCAB_SIZE + 9])
def test_logprobs_and_ranks_are_those_of_the_definition(num_top: int) -> None:
    logits, chosen = random_logits(4, VOCAB_SIZE), [3, 17, 0, 49]
    for values, token_id, found in zip(
        logits.double().tolist(), chosen, score_tokens(logits, torch.tensor(chosen), num_top).to_list(), strict=True
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
    assert [score_tokens(logits, torch.tensor([token_id]), 0).to_list()[0].rank for token_id in range(4)] == [
        3,
        1,
        1,
        4,
    ]


@pytest.mark.parametrize("num_top", [0, 3, VOCAB_SIZE + 9])
@pytest.mark.parametrize("chosen", [[7], [3, 17, 0, 49], [49, 5, 5, 12, 0], [*range(VOCAB_SIZE)]], ids=len)
def test_tokens_of_one_row_are_reported_as_each_alone(chosen: list[int], num_top: int) -> None:
    for logits in (
        random_logits(1, VOCAB_SIZE, seed=4),
        random_logits(1, VOCAB_SIZE, seed=5).round(),  # many are equal
        torch.zeros(1, VOCAB_SIZE).index_fill(1, torch.arange(9, 40), -math.inf),
    ):
        found = candidate_logprobs(logits[0], torch.tensor(chosen), num_top)
        assert found == score_tokens(logits.expand(len(chosen), -1), torch.tensor(chosen), num_top).to_list()
