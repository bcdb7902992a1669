"""Each filter, native or not, against its definition, from 1 token up, with ties and with tokens that cannot come."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick import kernels
from pagewick.kernels import cpu, reference, reference_sampling
from pagewick.kernels import reference_truncation as truncation
from tests.kernels import truncation_definitions as definitions


@pytest.fixture(params=["native", "reference"])
def source(request: pytest.FixtureRequest) -> Any:
    """The namespace of the filters."""
    if request.param == "native" and cpu.library() is None:
        pytest.skip("needs the native library: make install")
    return kernels if request.param == "native" else reference


VOCAB_SIZES = [1, 7, 193, 5000]
TEMPERATURES = [0.3, 1.0, 1.7]
NO_TOKEN = -math.inf


def logits_of(vocab_size: int, num_rows: int, seed: int = 0) -> Tensor:
    """Rows of different steepness; one has ties, one tokens that cannot come, one is flat."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, vocab_size, generator=generator) * torch.linspace(0.5, 5, num_rows).unsqueeze(1)
    logits[0] = logits[0].round(decimals=1)
    logits[1, torch.rand(vocab_size, generator=generator) < 0.5] = NO_TOKEN
    logits[1, 0] = 1.0
    logits[2] = -3.0
    return logits


def filled(num_rows: int, value: float) -> Tensor:
    return torch.full((num_rows,), value, dtype=torch.int64 if isinstance(value, int) else torch.float64)


def kept_by(masked: Tensor, logits: Tensor) -> list[set[int]]:
    """The tokens that are left; the logits of these must be untouched."""
    is_kept = masked > NO_TOKEN
    assert torch.equal(masked[is_kept], logits[is_kept])
    return [set(row.nonzero().flatten().tolist()) for row in is_kept]


def expected_by(
    logits: Tensor, temperature: float, definition: Callable[[definitions.Probs], definitions.Probs]
) -> list[set[int]]:
    return [set(definition(definitions.softmax(row, temperature))) for row in logits.double().tolist()]


# No mass is a multiple of 1 / 5000: whether equal tokens reach one exactly is a matter of rounding.
FILTERS: list[tuple[str, Callable[..., definitions.Probs], list[tuple[Any, ...]]]] = [
    ("mask_min_p", definitions.min_p, [(1e-6,), (0.05,), (0.5,), (1.0,)]),
    ("mask_typical_p", definitions.typical_p, [(0.02003,), (0.30003,), (0.95003,), (0.999999,)]),
    (
        "mask_top_k_top_p",
        definitions.top_k_top_p,
        [
            (1, 1.0),
            (5, 1.0),
            (5, 0.7),
            (0, 0.90003),
            (0, 1e-9),
            (60, 0.99003),
            (1000, 0.50003),
            (9999, 1.0),
            (0, 0.999999),
        ],
    ),
    ("mask_xtc", definitions.xtc, [(0.0,), (0.001,), (0.1,), (0.4,), (0.51,), (1.0,)]),
    ("mask_surprise", definitions.mirostat_2, [(-2.0,), (0.01,), (2.5,), (5.0,), (12.0,), (200.0,)]),
]
CASES = [(mask, definition, values) for mask, definition, all_values in FILTERS for values in all_values]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize(
    ("mask", "definition", "values"), CASES, ids=[f"{mask[5:]}-{values}" for mask, _, values in CASES]
)
def test_a_filter_keeps_what_its_definition_keeps(
    mask: str,
    definition: Callable[..., definitions.Probs],
    values: tuple[Any, ...],
    vocab_size: int,
    source: Any,
) -> None:
    for temperature in TEMPERATURES:
        logits = logits_of(vocab_size, 6, seed=vocab_size)
        before = logits.clone()
        masked = getattr(source, mask)(logits, filled(6, temperature), *(filled(6, value) for value in values))
        assert torch.equal(logits, before)
        expected = expected_by(logits, temperature, lambda probs: definition(probs, *values))
        assert kept_by(masked, logits) == expected
        assert all(expected)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("num_sigmas", [1e-9, 0.5, 1.0, 2.0, 3.3, 50.0])
def test_top_n_sigma_keeps_what_its_definition_keeps(num_sigmas: float, vocab_size: int, source: Any) -> None:
    logits = logits_of(vocab_size, 6, seed=vocab_size + 1)
    masked = source.mask_top_n_sigma(logits, filled(6, num_sigmas))
    for row, kept in zip(logits.double().tolist(), kept_by(masked, logits), strict=True):
        expected = definitions.top_n_sigma(row, num_sigmas)
        assert kept == {i for i, logit in enumerate(expected) if logit > NO_TOKEN}


def test_sigma_is_not_moved_by_large_logits(source: Any) -> None:
    logits = torch.tensor([[1e4, 1e4 - 1, 1e4 - 2, 1e4 - 9], [1.0, 0.0, -1.0, -1e30]])
    # The standard deviation of the first row is 3.535, that of the second 4.3e29.
    masked = source.mask_top_n_sigma(logits, filled(2, 0.5))
    assert (masked > NO_TOKEN).tolist() == [[True, True, False, False], [True, True, True, False]]


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("mu", [-3.0, 0.2, 1.0, 4.0, 9.5, 40.0])
def test_mirostat_1_keeps_as_many_as_its_definition(mu: float, vocab_size: int) -> None:
    for temperature in TEMPERATURES:
        logits = logits_of(vocab_size, 6, seed=vocab_size)[[0, 1, 3, 4, 5]]
        found = truncation.mirostat_top_k(logits, filled(5, temperature), filled(5, mu))
        assert found.dtype == torch.int64
        probs = [definitions.softmax(row, temperature) for row in logits.double().tolist()]
        assert found.tolist() == [definitions.mirostat_1_top_k(row, mu) for row in probs]


@pytest.mark.parametrize(("mu", "expected"), [(0.0, 1), (2.0, 1), (8.0, 193), (100.0, 193), (1e6, 193), (-1e6, 1)])
def test_mirostat_1_has_limits_where_its_formula_has_none(mu: float, expected: int) -> None:
    """A flat distribution has the exponent 0: k is 0 or without bound, as 2^mu is below or above N - 1."""
    assert truncation.mirostat_top_k(torch.zeros(1, 193), filled(1, 1.0), filled(1, mu)).tolist() == [expected]


def test_mirostat_1_where_zipf_s_exponent_is_1() -> None:
    """p_i = c / i, where epsilon is 0: k = 2^mu / ln N."""
    logits = -torch.arange(1, 1001).double().log().unsqueeze(0)
    assert truncation.mirostat_top_k(logits, filled(1, 1.0), filled(1, 8.0)).tolist() == [round(256 / math.log(1000))]
    assert truncation._zipf_top_k([0.0, -math.log(2)], 1000, 8.0) == round(256 / math.log(1000))


def test_mirostat_1_with_one_token_and_with_impossible_ones() -> None:
    logits = torch.tensor([[NO_TOKEN, 3.0, NO_TOKEN], [0.0, NO_TOKEN, -1e30]])
    assert truncation.mirostat_top_k(logits, filled(2, 1.0), filled(2, 50.0)).tolist()[0] == 1


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_surprise_is_in_bits_and_under_the_whole_distribution(vocab_size: int, source: Any) -> None:
    logits = logits_of(vocab_size, 6)
    for temperature, token_id in product(TEMPERATURES, {0, vocab_size - 1}):
        found = source.surprise(logits, torch.full((6,), token_id), filled(6, temperature)).tolist()
        rows = [definitions.softmax(row, temperature) for row in logits.double().tolist()]
        expected = [-math.log2(probs[token_id]) if token_id in probs else math.inf for probs in rows]
        # The native library computes weights in float32.
        tolerance = 1e-12 if source is reference else 1e-6
        assert found == pytest.approx(expected, rel=tolerance, abs=tolerance)


def all_filters(source: Any, logits: Tensor, temperature: Tensor) -> list[Tensor]:
    def column(value: float) -> Tensor:
        return torch.full((len(logits),), value, dtype=torch.float64)

    results = [source.mask_top_n_sigma(logits, column(1.5))]
    results += [
        getattr(source, mask)(
            logits, temperature, *(column(v) if isinstance(v, float) else column(v).long() for v in all_values[1])
        )
        for mask, _, all_values in FILTERS
    ]
    results.append(truncation.mirostat_top_k(logits, temperature, column(5.0)).unsqueeze(1))
    results.append(source.surprise(logits, logits.argmax(-1), temperature).unsqueeze(1))
    return results


@pytest.mark.parametrize("vocab_size", [7, 5000, 300_000])
def test_a_row_s_bits_do_not_depend_on_the_others(vocab_size: int, source: Any) -> None:
    """Also with threads: torch divides one long row among them, but many rows otherwise."""
    threads = torch.get_num_threads()
    num_rows = 5
    logits = logits_of(vocab_size, num_rows)
    temperature = torch.tensor([0.3, 0.7, 1.0, 2.0, 1e-3], dtype=torch.float64)
    try:
        torch.set_num_threads(2)
        together = all_filters(source, logits, temperature)
        for row in range(num_rows):
            alone = all_filters(source, logits[row : row + 1], temperature[row : row + 1])
            assert all(torch.equal(a, b[row : row + 1]) for a, b in zip(alone, together, strict=True))
        order = [4, 0, 3]
        some = all_filters(source, logits[order], temperature[order])
        assert all(torch.equal(a, b[order]) for a, b in zip(some, together, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("size", [1, 2, 63, 64, 65, 5000, 300_001])
def test_sums_are_right_and_always_in_the_same_order(size: int) -> None:
    threads = torch.get_num_threads()
    x = torch.rand(8, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size)).exp()
    try:
        torch.set_num_threads(2)
        sums = truncation._row_sum(x)
        assert torch.equal(torch.cat([truncation._row_sum(row.unsqueeze(0)) for row in x]), sums)
    finally:
        torch.set_num_threads(threads)
    assert sums.flatten().tolist() == pytest.approx([math.fsum(row) for row in x.tolist()], rel=1e-15)


@pytest.mark.parametrize("head", [2, 5, 300])
def test_sorting_only_the_head_drops_no_other_token(monkeypatch: pytest.MonkeyPatch, head: int) -> None:
    logits = torch.cat([logits_of(1500, 6, seed) for seed in range(4)]).round(decimals=1)
    for (mask, _, all_values), temperature in product(FILTERS[1:3], TEMPERATURES):
        for values in all_values:
            arguments = (filled(24, temperature), *(filled(24, value) for value in values))
            monkeypatch.setattr(reference_sampling, "SORTED_HEAD", 1500)
            expected = getattr(truncation, mask)(logits, *arguments)
            monkeypatch.setattr(reference_sampling, "SORTED_HEAD", head)
            assert torch.equal(getattr(truncation, mask)(logits, *arguments), expected)


def test_among_equal_tokens_the_lowest_ids_are_typical_and_the_highest_id_survives_xtc() -> None:
    logits = torch.zeros(1, 10)
    logits[0, 9] = -20.0
    assert kept_by(truncation.mask_typical_p(logits, filled(1, 1.0), filled(1, 0.3)), logits) == [{0, 1, 2}]
    assert kept_by(truncation.mask_xtc(logits, filled(1, 1.0), filled(1, 0.1)), logits) == [{8, 9}]
    # Ten equal tokens have exactly 0.1 each, which reaches the threshold.
    equal = torch.zeros(1, 10)
    assert kept_by(truncation.mask_xtc(equal, filled(1, 1.0), filled(1, 0.1)), equal) == [{9}]


def test_extreme_logits_and_temperatures_leave_a_token(source: Any) -> None:
    logits = torch.tensor([[3e38, -3e38, 2.9e38], [1e30, 1e30, NO_TOKEN], [0.0, -1e30, -1e-30]])
    for temperature in (2.0**-126, 1e-20, 2.0):
        for masked in all_filters(source, logits, filled(3, temperature))[:-2]:
            assert (masked > NO_TOKEN).any(-1).all()
            assert not masked.isnan().any()
