"""philox_uniform against published vectors, sample_tokens against a plain loop and by its statistics."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from pagewick import kernels
from pagewick.kernels import reference, reference_sampling
from pagewick.kernels.options import DrawOptions
from pagewick.kernels.reference_sampling import Purpose, philox4x32

# The "philox4x32 10" lines of Random123's tests/kat_vectors: counter, key, result.
KNOWN_ANSWERS = [
    (
        (0, 0, 0, 0),
        (0, 0),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
NUM_DRAWS = 20000
Sampler = Callable[..., torch.Tensor]


def uniforms(num: int, seed: int = 0) -> torch.Tensor:
    zeros = torch.zeros(num, dtype=torch.int64)
    return kernels.philox_uniform(zeros + seed, zeros, torch.arange(num), Purpose.SAMPLE)


def philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    c0, c1, c2, c3, k0, k1 = torch.tensor([*counter, *key]).split(1)
    return tuple(int(word) for word in philox4x32((c0, c1, c2, c3), (k0, k1)))


@pytest.mark.parametrize(("counter", "key", "result"), KNOWN_ANSWERS)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], result: tuple[int, ...]) -> None:
    assert philox(counter, key) == result


def test_philox_uniform_is_made_of_the_first_two_words() -> None:
    # Seed and position reach into the high words of key and counter.
    seed, choice, position = 0x299F31D0_A4093822, 0x13198A2E, 0x05A308D3_243F6A88
    counter = (0x243F6A88, 0x05A308D3, 0x13198A2E, int(Purpose.XTC))
    words = philox(counter, (0xA4093822, 0x299F31D0))
    arguments = (torch.tensor([seed]), torch.tensor([choice]), torch.tensor([position]))
    expected = ((words[0] >> 5) * 2**26 + (words[1] >> 6)) / 2**53
    assert kernels.philox_uniform(*arguments, Purpose.XTC).item() == expected


def test_philox_uniform_depends_on_each_of_its_arguments_and_on_no_other_row() -> None:
    rows = [(0, 0, 0), (1, 0, 0), (-1, 0, 0), (2**62, 0, 0), (0, 1, 0), (0, 0, 1), (0, 0, 2**32)]
    drawn = torch.cat([uniforms_of(rows, purpose) for purpose in Purpose])
    assert len(set(drawn.tolist())) == len(rows) * len(Purpose)
    alone = [uniforms_of([row], purpose) for purpose in Purpose for row in rows]
    assert torch.equal(torch.cat(alone), drawn)


def uniforms_of(rows: list[tuple[int, int, int]], purpose: Purpose) -> torch.Tensor:
    seed, choice_index, position = torch.tensor(rows).unbind(1)
    return kernels.philox_uniform(seed, choice_index, position, purpose)


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1, -(2**63)])
def test_philox_uniform_is_uniform(seed: int) -> None:
    drawn = uniforms(NUM_DRAWS, seed)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    assert_matches_counts((drawn * 50).long(), torch.full((50,), 1 / 50, dtype=torch.float64))
    # Neighbouring positions are independent: pairs fill the unit square evenly.
    pairs = (drawn[::2] * 10).long() * 10 + (drawn[1::2] * 10).long()
    assert_matches_counts(pairs, torch.full((100,), 1 / 100, dtype=torch.float64))


def assert_matches_counts(drawn: torch.Tensor, probs: torch.Tensor) -> None:
    """Pearson's chi-square test; at six standard deviations a right sampler does not fail."""
    counts, expected = torch.bincount(drawn, minlength=len(probs)), probs * len(drawn)
    assert counts[probs == 0].sum() == 0
    possible = probs > 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum().item()
    freedom = int(possible.sum()) - 1
    assert abs(statistic - freedom) <= 6 * math.sqrt(2 * freedom)


def expected_probs(logits: list[float], temperature: float, min_p: float, top_k: int, top_p: float) -> dict[int, float]:
    """Token id -> probability, in the order in which the inverse CDF passes them, one step at a time."""
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    if temperature == 0:
        return {order[0]: 1.0}
    order = [token_id for token_id in order if math.exp((logits[token_id] - logits[order[0]]) / temperature) >= min_p]
    order = order[: top_k or len(order)]
    weights = [math.exp((logits[token_id] - logits[order[0]]) / temperature) for token_id in order]
    kept: dict[int, float] = {}
    for token_id, weight in zip(order, weights, strict=True):
        if kept and sum(kept.values()) >= top_p:
            break
        kept[token_id] = weight / sum(weights)
    return {token_id: prob / sum(kept.values()) for token_id, prob in kept.items()}


def expected_token(probs: dict[int, float], uniform: float) -> int:
    passed = 0.0
    for token_id, prob in probs.items():
        passed += prob
        if uniform < passed:
            return token_id
    return token_id


@pytest.fixture(params=["native", "reference"])
def sample(request: pytest.FixtureRequest) -> Sampler:
    """Every definition of sample_tokens that there is, with the columns of DrawOptions as arguments."""
    function = kernels.sample_tokens if request.param == "native" else reference.sample_tokens
    return lambda logits, *columns: function(logits, DrawOptions(*columns))


PARAMETERS = [
    (0.0, 0.0, 0, 1.0),
    (0.0, 0.1, 3, 0.5),
    (1.0, 0.0, 0, 1.0),
    (0.7, 0.0, 0, 1.0),
    (1.0, 0.0, 1, 1.0),
    (1.5, 0.0, 5, 1.0),
    (1.0, 0.0, 1000, 1.0),
    (1.0, 0.0, 0, 0.9),
    (1.0, 0.0, 0, 0.5),
    (2.0, 0.0, 0, 1e-9),
    (1.0, 0.0, 0, 0.0),
    (0.8, 0.0, 7, 0.8),
    (1e-4, 0.0, 0, 1.0),
    (1.0, 1.0, 0, 1.0),
    (0.7, 0.0503, 0, 1.0),
    (1.3, 0.0203, 4, 1.0),
    (1.0, 1e-6, 1000, 0.7),
    (2.0, 0.1003, 6, 0.8),
]


def test_sample_tokens_equals_a_plain_loop(sample: Sampler) -> None:
    torch.manual_seed(0)
    repeats = 40
    parameters = torch.tensor(PARAMETERS, dtype=torch.float64).repeat(repeats, 1)
    logits = (3 * torch.randn(len(parameters), 23)).round(decimals=1)  # ties occur
    uniform = torch.rand(len(parameters), dtype=torch.float64)
    temperature, min_p, top_k, top_p = parameters.unbind(1)
    drawn = sample(logits, temperature.float(), min_p, top_k.int(), top_p.float(), uniform)
    assert drawn.dtype == torch.int64
    for row, token_id in enumerate(drawn.tolist()):
        probs = expected_probs(logits[row].tolist(), *PARAMETERS[row % len(PARAMETERS)])
        assert token_id == expected_token(probs, uniform[row].item()), PARAMETERS[row % len(PARAMETERS)]
    alone = [
        sample(
            logits[row : row + 1],
            temperature[row : row + 1].float(),
            min_p[row : row + 1],
            top_k[row : row + 1].int(),
            top_p[row : row + 1].float(),
            uniform[row : row + 1],
        )
        for row in range(len(parameters))
    ]
    assert torch.equal(torch.cat(alone), drawn)


@pytest.mark.parametrize(("temperature", "min_p", "top_k", "top_p"), PARAMETERS)
def test_sample_tokens_draws_with_the_right_probabilities(
    sample: Sampler, temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    torch.manual_seed(1)
    logits = torch.randn(12)
    probs = torch.zeros(12, dtype=torch.float64)
    for token_id, prob in expected_probs(logits.tolist(), temperature, min_p, top_k, top_p).items():
        probs[token_id] = prob
    drawn = sample(
        logits.expand(NUM_DRAWS, 12),
        torch.full((NUM_DRAWS,), temperature),
        torch.full((NUM_DRAWS,), min_p),
        torch.full((NUM_DRAWS,), top_k),
        torch.full((NUM_DRAWS,), top_p),
        uniforms(NUM_DRAWS),
    )
    assert_matches_counts(drawn, probs.where(probs > 1e-12, 0))


@pytest.mark.parametrize("vocab_size", [23, 9001])
def test_masks_come_before_everything_else(vocab_size: int) -> None:
    torch.manual_seed(3)
    parameters = torch.tensor(PARAMETERS, dtype=torch.float64).repeat(20, 1)
    logits = (3 * torch.randn(len(parameters), vocab_size)).round(decimals=1)
    is_allowed = torch.rand(logits.shape) < 0.3
    is_allowed[:, 5] = True
    masks = torch.from_numpy(np.packbits(is_allowed, axis=1, bitorder="little"))
    temperature, min_p, top_k, top_p = parameters.unbind(1)
    uniform = torch.rand(len(parameters), dtype=torch.float64)
    draw = DrawOptions(temperature.float(), min_p, top_k.long(), top_p, uniform)
    masked = logits.masked_fill(~is_allowed, float("-inf"))
    expected = reference.sample_tokens(masked, draw)
    assert torch.equal(reference.sample_tokens(logits, draw, masks), expected)
    drawn = kernels.sample_tokens(logits, draw, masks)
    assert torch.equal(drawn, kernels.sample_tokens(masked, draw))
    assert is_allowed.gather(1, drawn.unsqueeze(1)).all()


# Temperature, min_p, top_k and top_p. A row of 9,001 logits has 71 groups, of which the greatest logits are known.
LARGE_PARAMETERS = [
    (0.7, 0.0, 20, 0.8),
    (1.0, 0.0, 71, 1.0),
    (1.0, 0.0, 72, 0.9),
    (1.0, 0.05, 0, 1.0),
    (5.0, 1e-3, 3000, 0.95),
    (0.5, 0.5, 50, 0.5),
    (1.0, 0.0, 0, 1.0),
    (3.0, 0.0, 0, 1.0),
    (0.3, 0.0, 0, 0.9),
    (1.0, 0.0, 0, 0.999999),
    (1e-3, 0.0, 0, 1.0),
]


@pytest.mark.parametrize("kind", ["flat", "peaked", "rising", "falling", "equal", "masked"])
def test_a_large_vocabulary_is_drawn_from_as_defined(kind: str) -> None:
    torch.manual_seed(4)
    parameters = torch.tensor(LARGE_PARAMETERS, dtype=torch.float64).repeat(12, 1)
    logits = 3 * torch.randn(len(parameters), 9001)
    if kind == "peaked":
        logits[torch.rand(logits.shape) < 1e-3] += 12
    elif kind in ("rising", "falling"):
        logits = logits.sort(descending=kind == "falling").values
    elif kind == "equal":
        logits = logits.round()
    elif kind == "masked":
        logits[torch.rand(logits.shape) < 0.999] = float("-inf")
        logits[:, 70] = 1.0
    uniform = torch.rand(len(parameters), dtype=torch.float64)
    uniform[:: len(LARGE_PARAMETERS) + 1] = 1 - 2.0**-53
    temperature, min_p, top_k, top_p = parameters.unbind(1)
    draw = DrawOptions(temperature.float(), min_p, top_k.long(), top_p, uniform)
    # Sums are rounded differently, which the last tokens of all show.
    chosen = torch.ones(len(parameters), dtype=torch.bool) if kind == "masked" else uniform < 0.999999
    expected = reference.sample_tokens(logits, draw)
    assert torch.equal(kernels.sample_tokens(logits, draw)[chosen], expected[chosen])


@pytest.mark.parametrize("head", [2, 5, 300, 1024])
def test_sorting_only_the_head_changes_no_token(monkeypatch: pytest.MonkeyPatch, head: int) -> None:
    torch.manual_seed(2)
    parameters = torch.tensor([*PARAMETERS, (1.0, 0.0, 6, 1.0), (1.0, 0.0, 300, 0.95), (0.5, 0.0, 5, 0.999)]).repeat(
        30, 1
    )
    logits = (3 * torch.randn(len(parameters), 1500)).round(decimals=1)
    logits[::7] = 0.0
    logits[::5, 1:] = float("-inf")
    uniform = torch.rand(len(parameters), dtype=torch.float64)
    uniform[::3] = 1 - 2.0**-53
    temperature, min_p, top_k, top_p = parameters.unbind(1)
    draw = DrawOptions(temperature, min_p, top_k.long(), top_p, uniform)
    monkeypatch.setattr(reference_sampling, "sorted_head", sort_everything)
    expected = reference.sample_tokens(logits, draw)
    monkeypatch.undo()
    monkeypatch.setattr(reference_sampling, "SORTED_HEAD", head)
    assert torch.equal(reference.sample_tokens(logits, draw), expected)


def sort_everything(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    order = logits.argsort(dim=-1, descending=True, stable=True)
    return order, torch.full((len(order), 1), order.shape[1])


def test_ties_go_to_the_lowest_id(sample: Sampler) -> None:
    logits = torch.zeros(3, 100)
    logits[:, [30, 60]] = 5.0
    greedy = sample(
        logits,
        torch.tensor([0.0, 1.0, 1.0]),
        torch.zeros(3),
        torch.tensor([0, 1, 2]),
        torch.ones(3),
        torch.tensor([0.9, 0.9, 0.9]),
    )
    assert greedy.tolist() == [30, 30, 60]


def test_a_masked_token_is_never_drawn(sample: Sampler) -> None:
    logits = torch.full((3, 50), float("-inf"))
    logits[:, 17] = -1000.0
    logits[1:, 3] = -1000.5
    uniform = torch.tensor([1 - 2**-53, 1 - 2**-53, 0.0], dtype=torch.float64)
    drawn = sample(logits, torch.ones(3), torch.zeros(3), torch.zeros(3, dtype=torch.int32), torch.ones(3), uniform)
    assert drawn.tolist() == [17, 3, 17]


def test_rounding_leads_to_no_unlikely_token(sample: Sampler) -> None:
    """In float32 25 times 1/25 is less than 1, by more than the last token has."""
    logits = torch.zeros(1, 26)
    logits[0, 9] = -60.0
    uniform = torch.tensor([1 - 2**-53], dtype=torch.float64)
    for top_k, top_p in ((0, 1.0), (26, 1.0), (40, 1.0)):
        drawn = sample(logits, torch.ones(1), torch.zeros(1), torch.tensor([top_k]), torch.tensor([top_p]), uniform)
        assert drawn.tolist() == [25]


def test_extreme_temperatures(sample: Sampler) -> None:
    logits = torch.tensor([[1e4, -1e4, 9.9e3]]).expand(2, 3)
    drawn = sample(
        logits,
        torch.tensor([1e-30, 1e30]),
        torch.zeros(2),
        torch.zeros(2, dtype=torch.int64),
        torch.ones(2),
        torch.tensor([0.99, 0.99]),
    )
    assert drawn.tolist() == [0, 1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_row_that_cannot_be_drawn_from_changes_no_other(sample: Sampler, value: float) -> None:
    logits = torch.randn(5, 1000, generator=torch.Generator().manual_seed(3))
    columns = (
        torch.full((5,), 0.9),
        torch.tensor([0.0, 0.0, 0.0, 0.1, 0.1]),
        torch.tensor([0, 0, 40, 0, 0]),
        torch.tensor([1.0, 0.8, 1.0, 0.5, 1.0]),
        uniforms(5),
    )
    expected = sample(logits, *columns)
    # -inf must fill a row to be its greatest logit.
    for row in (1, 4):
        logits[row, 70 : 1000 if value < 0 else 71] = value
        logits[row, : 70 if value < 0 else 0] = value
    found = sample(logits, *columns)
    assert found[[0, 2, 3]].tolist() == expected[[0, 2, 3]].tolist()
    assert found[[1, 4]].tolist() == [0 if value < 0 else 70] * 2
