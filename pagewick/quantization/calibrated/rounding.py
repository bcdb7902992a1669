"""Levels: a quantized weight without its name; and rounding to nearest, with or without a search for scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagewick.quantization.calibrated.results import QuantizedLinear, Recipe
from pagewick.quantization.calibrated.scales import grid_of, grouped, search_grid


@dataclass(frozen=True, slots=True)
class Levels:
    """The tensors of a QuantizedLinear. Rows may belong to several weights that are multiplied by the same inputs."""

    levels: Tensor
    scales: Tensor
    zeros: Tensor | None
    group_of_column: Tensor | None = None

    def named(self, name: str, rows: slice, recipe: Recipe, input_scale: Tensor | None = None) -> QuantizedLinear:
        """Return the weight in these rows."""
        return QuantizedLinear(
            name,
            self.levels[rows].clone(),
            self.scales[rows].clone(),
            None if self.zeros is None else self.zeros[rows].clone(),
            self.group_of_column,
            recipe.bits,
            recipe.group_size,
            input_scale,
        )


def round_to_nearest(weight: Tensor, recipe: Recipe, gram: Tensor | None = None) -> Levels:
    """Return the nearest levels of a weight [R, n] float32.

    gram: X^T X of its inputs, [n, n]; with it each group's range is cut where the errors of the products are least.
    """
    size = recipe.columns_per_group(weight.shape[1])
    groups = grouped(weight, recipe)
    if gram is None:
        grid = grid_of(groups, recipe)
    else:
        blocks = [gram[first : first + size, first : first + size] for first in range(0, len(gram), size)]
        grid = search_grid(groups, torch.stack(blocks), recipe)
    levels = grid.levels(groups).to(torch.uint8).flatten(1)
    zeros = None if recipe.symmetric else grid.zero.squeeze(-1).to(torch.uint8)
    return Levels(levels, grid.scale.squeeze(-1).half(), zeros)
