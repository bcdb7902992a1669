"""AWQ (Lin et al. 2023, arXiv:2306.00978): columns with large inputs are enlarged before they are rounded.

A weight's columns are multiplied by factors, its inputs are divided by them where they come from. n: columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from pagewick.quantization.calibrated.inputs import InputSum
from pagewick.quantization.calibrated.results import Recipe
from pagewick.quantization.calibrated.scales import grid_of, grouped

# Factors to try: sizes of inputs to the power of these, alone, and divided by sizes of weights to 1 minus the power.
_EXPONENTS: Final = tuple(step / 20 for step in range(1, 21))
# Errors are measured on this number of rows of all weights together.
_MOST_ROWS: Final = 512


class Reader(NamedTuple):
    """A weight [R, n] float32, and its inputs."""

    weight: Tensor
    inputs: InputSum


def search_factors(readers: Sequence[Reader], recipe: Recipe, *, powers_of_two: bool) -> Tensor:
    """Return the factors of the columns, float32 [n], under which rounding costs the readers' products least.

    powers_of_two: the factors are powers of two, so that no product with them is rounded.
    """
    sampled = _sample(readers)
    squares = torch.stack([reader.inputs.diagonal() for reader in readers]).sum(0)
    inputs = squares.sqrt()
    weights = torch.cat([reader.weight.abs() for reader in sampled]).mean(0)
    best = torch.ones_like(inputs)
    least = _error(sampled, best, recipe)
    for divides_by_weight in (False, True):
        for exponent in _EXPONENTS:
            factors = inputs.pow(exponent)
            if divides_by_weight:
                factors = factors / weights.pow(1 - exponent).clamp(min=1e-4)
            factors = _normalised(factors, powers_of_two=powers_of_two)
            error = _error(sampled, factors, recipe)
            if error < least:
                best, least = factors, error
    return best


def _sample(readers: Sequence[Reader]) -> list[Reader]:
    """Take some rows of every reader, at equal distances."""
    step = -(-sum(len(reader.weight) for reader in readers) // _MOST_ROWS)
    return [Reader(reader.weight[::step], reader.inputs) for reader in readers]


def _normalised(factors: Tensor, *, powers_of_two: bool) -> Tensor:
    """Move factors around 1, in the middle between the least and the largest. A column without inputs gets 1."""
    is_used = factors.isfinite() & (factors > 0)
    if not is_used.any():
        return torch.ones_like(factors)
    used = factors[is_used]
    factors = torch.where(is_used, factors / (used.max() * used.min()).sqrt(), 1.0).clamp(1e-3, 1e3)
    return torch.exp2(factors.log2().round()) if powers_of_two else factors


def _error(readers: Sequence[Reader], factors: Tensor, recipe: Recipe) -> float:
    """Return the squared error of the products with the readers' weights, rounded to nearest with these factors."""
    total = 0.0
    for weight, inputs in readers:
        groups = grouped(weight * factors, recipe)
        total += inputs.squared_error(grid_of(groups, recipe).errors(groups).flatten(1) / factors)
    return total
