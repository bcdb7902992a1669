"""AWQ's search for the factors of columns."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.quantization.calibrated.awq import Reader, search_factors
from pagewick.quantization.calibrated.inputs import InputSum
from pagewick.quantization.calibrated.results import Recipe
from pagewick.quantization.calibrated.rounding import round_to_nearest

RECIPE = Recipe(method="awq", group_size=32, symmetric=False)


def example(num_rows: int, columns: int = 96) -> tuple[Tensor, Tensor]:
    """Return a weight, and inputs of which some columns are large."""
    generator = torch.Generator().manual_seed(num_rows)
    inputs = torch.randn(num_rows, columns, generator=generator)
    inputs[:, ::17] *= 20
    return torch.randn(41, columns, generator=generator), inputs


def summed(inputs: Tensor) -> InputSum:
    found = InputSum()
    for rows in inputs.split(23):
        found.add(rows)
    return found


def error(weight: Tensor, inputs: Tensor, factors: Tensor) -> float:
    rounded = round_to_nearest(weight * factors, RECIPE).named("layer", slice(0, 41), RECIPE).dequantize() / factors
    return float((inputs @ (rounded - weight).t()).square().sum())


def test_factors_make_the_errors_of_products_smaller() -> None:
    weight, inputs = example(200)
    factors = search_factors([Reader(weight, summed(inputs))], RECIPE, powers_of_two=False)
    assert error(weight, inputs, factors) < 0.5 * error(weight, inputs, torch.ones(96))
    assert factors[::17].mean() > 2 * factors.mean()


def test_powers_of_two_are_exact() -> None:
    weight, inputs = example(200)
    factors = search_factors([Reader(weight, summed(inputs))], RECIPE, powers_of_two=True)
    assert torch.equal(factors.log2(), factors.log2().round()) and len(factors.unique()) > 1


def test_columns_without_inputs_keep_their_size() -> None:
    weight, inputs = example(200)
    inputs[:, 5] = 0
    factors = search_factors([Reader(weight, summed(inputs))], RECIPE, powers_of_two=False)
    assert factors[5] == 1 and factors.isfinite().all()
    nothing = search_factors([Reader(weight, summed(inputs * 0))], RECIPE, powers_of_two=False)
    assert torch.equal(nothing, torch.ones(96))


def test_sums_do_not_depend_on_how_long_rows_are_kept() -> None:
    weight, inputs = example(200)
    for num_rows in (40, 95, 96, 200):
        found, rows = summed(inputs[:num_rows]), inputs[:num_rows].double()
        torch.testing.assert_close(found.gram().double(), rows.t() @ rows, rtol=1e-4, atol=1e-2)
        torch.testing.assert_close(found.diagonal().double(), rows.square().sum(0), rtol=1e-4, atol=1e-3)
        expected = float((rows @ weight.double().t()).square().sum())
        assert abs(found.squared_error(weight) / expected - 1) < 1e-4 and found.num_rows == num_rows
