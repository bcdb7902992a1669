"""GPTQ against the paper's steps in float64, one column after the other; and the search for scales."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.quantization.calibrated.gptq import inverse_factor, quantize_gptq
from pagewick.quantization.calibrated.results import QuantizedLinear, Recipe
from pagewick.quantization.calibrated.rounding import round_to_nearest
from pagewick.quantization.calibrated.scales import SHRINKS, search_grid

RECIPES: list[dict[str, Any]] = [
    {"group_size": 32},
    {"group_size": 64, "symmetric": False},
    {"group_size": 128, "bits": 3, "symmetric": False},
    {"group_size": -1, "bits": 8},
    {"group_size": 32, "act_order": True, "symmetric": False},
    {"group_size": 32, "act_order": True, "static_groups": True},
    {"group_size": -1, "act_order": True, "symmetric": False},
    {"group_size": 128, "bits": 2, "act_order": True},
]


def example(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Return a weight, and inputs whose columns are correlated and differ in size."""
    generator = torch.Generator().manual_seed(rows + columns)
    inputs = torch.randn(3 * columns, columns, generator=generator) * torch.logspace(-1, 1, columns)
    mixing = torch.randn(columns, columns, generator=generator) / columns**0.5
    return torch.randn(rows, columns, generator=generator), inputs + inputs @ mixing


def columns_for(recipe: Recipe) -> int:
    """Return more columns than a block of GPTQ has, and no multiple of it where groups allow that."""
    return {32: 160, 64: 192, 128: 256, -1: 149}[recipe.group_size]


def slow_gptq(weight: Tensor, hessian: Tensor, order: Tensor, found: QuantizedLinear, damping: float) -> Tensor:
    """Return the paper's levels for the scales that were found (its equations 2 and 3), in float64."""
    left, weight = order.tolist(), weight.double().clone()
    inverse = (hessian + damping * hessian.diagonal().mean() * torch.eye(len(hessian))).inverse()
    levels = torch.zeros(weight.shape)
    zeros = torch.full(found.scales.shape, 2.0 ** (found.bits - 1)) if found.zeros is None else found.zeros
    while left:
        column = left.pop(0)
        group = int(found.groups[column])
        scale, zero = found.scales[:, group].double(), zeros[:, group].double()
        levels[:, column] = (weight[:, column] / scale + zero).round().clamp(0, 2**found.bits - 1)
        error = (weight[:, column] - (levels[:, column] - zero) * scale) / inverse[column, column]
        weight[:, left] -= error[:, None] * inverse[column, left]
        inverse = inverse - inverse[:, [column]] @ inverse[[column]] / inverse[column, column]
    return levels


@pytest.mark.parametrize("entries", RECIPES, ids=str)
def test_levels_are_those_of_the_paper(entries: dict[str, Any]) -> None:
    recipe = Recipe(**entries)
    weight, inputs = example(37, columns_for(recipe))
    gram = inputs.t() @ inputs
    levels = quantize_gptq(weight, gram, recipe)
    found = levels.named("layer", slice(0, 37), recipe)
    order = gram.diagonal().argsort(descending=True) if recipe.act_order else torch.arange(len(gram))
    expected = slow_gptq(weight, gram.double(), order, found, recipe.damping)
    # A number that lies between two levels may be rounded either way, and changes the rest of its row.
    is_equal = (expected == found.levels).all(dim=1)
    assert is_equal.float().mean() > 0.9
    assert (found.zeros is None) == recipe.symmetric and found.scales.dtype == torch.float16

    nearest = round_to_nearest(weight, recipe).named("layer", slice(0, 37), recipe)
    errors = [((one.dequantize() - weight) @ inputs.t()).square().sum() for one in (found, nearest)]
    assert errors[0] < 0.8 * errors[1]


def test_groups_are_made_of_columns_in_the_order_in_which_they_are_taken() -> None:
    weight, inputs = example(5, 96)
    gram = inputs.t() @ inputs
    order = gram.diagonal().argsort(descending=True)
    groups = quantize_gptq(weight, gram, Recipe(group_size=32, act_order=True)).group_of_column
    assert groups is not None and groups.dtype == torch.int32
    assert groups[order].tolist() == [0] * 32 + [1] * 32 + [2] * 32
    static = quantize_gptq(weight, gram, Recipe(group_size=32, act_order=True, static_groups=True))
    assert static.group_of_column is None


def test_rows_are_quantized_independently() -> None:
    weight, inputs = example(6, 64)
    gram, recipe = inputs.t() @ inputs, Recipe(group_size=32)
    together, alone = (quantize_gptq(rows, gram, recipe) for rows in (weight, weight[2:4]))
    assert torch.equal(together.levels[2:4], alone.levels) and torch.equal(together.scales[2:4], alone.scales)


def test_a_column_without_inputs_is_rounded_to_nearest() -> None:
    weight, inputs = example(4, 64)
    inputs[:, 40] = 0
    recipe = Recipe(group_size=64, bits=8)
    found = quantize_gptq(weight, inputs.t() @ inputs, recipe).named("layer", slice(0, 4), recipe)
    assert (found.dequantize()[:, 40] - weight[:, 40]).abs().max() <= found.scales.float().max() / 2 + 1e-6


@pytest.mark.parametrize("rank", [0, 1, 40])
def test_hessians_of_few_rows_are_damped(rank: int) -> None:
    inputs = torch.randn(rank, 64, generator=torch.Generator().manual_seed(1))
    gram = inputs.t() @ inputs
    factor = inverse_factor(gram, 0.01)
    mean = gram.diagonal().mean().double()
    damped = gram.double() + 0.01 * (mean if rank else 1.0) * torch.eye(64)
    torch.testing.assert_close((factor.t() @ factor).double(), damped.inverse(), rtol=1e-3, atol=1e-3)
    assert torch.equal(factor, factor.triu())


def test_inputs_that_are_not_finite_are_an_error() -> None:
    with pytest.raises(ModelLoadError, match="not finite"):
        inverse_factor(torch.full((4, 4), float("nan")), 0.01)


@pytest.mark.parametrize("is_symmetric", [True, False])
@pytest.mark.parametrize("kind", ["none", "columns", "products"])
def test_the_search_finds_the_least_error(kind: str, is_symmetric: bool) -> None:
    recipe = Recipe(bits=3, symmetric=is_symmetric)
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(7, 2, 32, generator=generator) ** 3
    inputs = torch.randn(50, 2, 32, generator=generator).double()
    products = torch.einsum("ngc,ngd->gcd", inputs, inputs)
    importance = {"none": None, "columns": products.diagonal(dim1=1, dim2=2), "products": products}[kind]
    grid = search_grid(weight, None if importance is None else importance.float(), recipe)

    def error(scale: Tensor, zero: Tensor) -> Tensor:
        errors = (((weight.double() / scale).round() + zero).clamp(0, 7) - zero) * scale - weight
        if kind == "products":
            return torch.einsum("ngc,rgc->rgn", inputs, errors).square().sum(-1)
        return (errors.square() * (1.0 if importance is None else importance)).sum(-1)

    found = error(grid.scale.double(), grid.zero.double())
    for shrink in SHRINKS:
        low, high = weight.amin(-1, True).clamp(max=0) * shrink, weight.amax(-1, True).clamp(min=0) * shrink
        if is_symmetric:
            scale = (torch.maximum(-low, high) * 2 / 7).half().double()
            zero = torch.full_like(scale, 4)
        else:
            scale = ((high - low) / 7).half().double()
            zero = (-low / scale).round()
        assert (found <= error(scale, zero) * 1.001).all()


def test_groups_of_zeros_and_of_tiny_numbers_have_scales() -> None:
    weight = torch.zeros(2, 64)
    weight[1] = 1e-9
    recipe = Recipe(group_size=32, symmetric=False)
    found = round_to_nearest(weight, recipe, torch.eye(64)).named("layer", slice(0, 2), recipe)
    assert (found.scales > 0).all() and found.dequantize().abs().max() <= 1e-6


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"method": "hqq"}, "no method 'hqq'; give one of gptq, awq, rtn"),
        ({"bits": 5}, "bits 5 is not supported; give one of 2, 3, 4, 8"),
        ({"group_size": 48}, "group_size 48 is not supported"),
        ({"method": "awq", "act_order": True}, "act_order is GPTQ's"),
        ({"damping": 0.0}, "damping 0 is not between 0 and 1"),
    ],
)
def test_impossible_recipes_are_errors(entries: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Recipe(**entries)
