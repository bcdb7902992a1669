"""Scales and zero points of groups of columns, and the search for those with the least squared error.

R: rows of a weight; G: groups of columns; C: columns of a group. A group of a row has one scale and one zero point.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from pagewick.quantization.calibrated.results import Recipe

# The range of a group is tried in full and with its ends cut off by up to a half.
SHRINKS: Final = tuple(1 - step / 40 for step in range(21))
# Rounds of fitting the scale to the levels, and the zero point beside it.
_REFINEMENTS: Final = 2
_SMALLEST, _LARGEST = 2.0**-24, 65504.0
_ELEMENTS_AT_ONCE: Final = 2**22


@dataclass(frozen=True, slots=True)
class Grid:
    """The numbers that levels 0 .. max_level stand for: (level - zero) * scale.

    scale, zero: [..., 1] float32 beside weights [..., C]. Every scale is a float16; every zero is a level.
    """

    scale: Tensor
    zero: Tensor
    max_level: int

    def levels(self, weight: Tensor) -> Tensor:
        """Return the nearest levels, float32 of the weight's shape."""
        return (weight / self.scale).round_().add_(self.zero).clamp_(0, self.max_level)

    def values(self, levels: Tensor) -> Tensor:
        return (levels - self.zero) * self.scale

    def errors(self, weight: Tensor) -> Tensor:
        """Return values minus weight."""
        return self.values(self.levels(weight)).sub_(weight)


def grouped(weight: Tensor, recipe: Recipe) -> Tensor:
    """Return a weight [R, n] as groups [R, G, C]."""
    return weight.reshape(len(weight), -1, recipe.columns_per_group(weight.shape[1]))


def grid_of(weight: Tensor, recipe: Recipe, shrink: float = 1.0) -> Grid:
    """Return the grid of each group that spans its numbers and zero. weight: [..., C] float32.

    shrink: the share of the range that it spans; numbers outside get the nearest level.
    """
    low, high = weight.amin(-1, keepdim=True).clamp_(max=0), weight.amax(-1, keepdim=True).clamp_(min=0)
    return _spanning(low, high, recipe, shrink)


def search_grid(weight: Tensor, importance: Tensor | None, recipe: Recipe, shrinks: Sequence[float] = SHRINKS) -> Grid:
    """Return the grid of each group whose squared errors, times the columns' importance, have the least sum.

    weight: [R, G, C] float32. importance: [G, C], or [G, C, C] with the inner products of the columns' inputs; None:
    all columns count alike.
    """
    rows = max(1, _ELEMENTS_AT_ONCE // max(1, weight[0].numel()))
    found = [_search(part, importance, recipe, shrinks) for part in torch.split(weight, rows)]
    return Grid(torch.cat([one.scale for one in found]), torch.cat([one.zero for one in found]), recipe.max_level)


def _search(weight: Tensor, importance: Tensor | None, recipe: Recipe, shrinks: Sequence[float]) -> Grid:
    low, high = weight.amin(-1, keepdim=True).clamp_(max=0), weight.amax(-1, keepdim=True).clamp_(min=0)
    best = _Best(weight, importance, _spanning(low, high, recipe, 1.0))
    for shrink in shrinks:
        best.consider(_spanning(low, high, recipe, shrink))
    for _ in range(_REFINEMENTS):
        best.consider(replace(best.grid, scale=best.fitted_scale()))
        for step in () if recipe.symmetric else (-1, 1):
            best.consider(replace(best.grid, zero=(best.grid.zero + step).clamp_(0, recipe.max_level)))
    return best.grid


class _Best:
    """The best grid so far of each group of a weight [R, G, C]."""

    def __init__(self, weight: Tensor, importance: Tensor | None, grid: Grid) -> None:
        self._weight, self._importance, self.grid = weight, importance, grid
        self._error = self._error_of(grid)

    def consider(self, grid: Grid) -> None:
        """Take another grid for the groups where it has less error."""
        error = self._error_of(grid)
        is_better = error < self._error
        self._error = torch.where(is_better, error, self._error)
        scale = torch.where(is_better, grid.scale, self.grid.scale)
        self.grid = Grid(scale, torch.where(is_better, grid.zero, self.grid.zero), grid.max_level)

    def fitted_scale(self) -> Tensor:
        """Return the scale with the least error for the levels that the weight has now (least squares)."""
        levels = self.grid.levels(self._weight).sub_(self.grid.zero)
        weighed = self._weighed(levels)
        scale = (weighed * self._weight).sum(-1, keepdim=True) / (weighed * levels).sum(-1, keepdim=True)
        return _as_float16(torch.where(scale > 0, scale, self.grid.scale))

    def _error_of(self, grid: Grid) -> Tensor:
        """Return the error of each group [R, G, 1]."""
        errors = grid.errors(self._weight)
        return self._weighed(errors).mul(errors).sum(-1, keepdim=True)

    def _weighed(self, numbers: Tensor) -> Tensor:
        if self._importance is None or self._importance.ndim == 2:
            return numbers if self._importance is None else numbers * self._importance
        return torch.bmm(numbers.transpose(0, 1), self._importance).transpose(0, 1)


def _spanning(low: Tensor, high: Tensor, recipe: Recipe, shrink: float) -> Grid:
    if recipe.symmetric:
        scale = _as_float16(torch.maximum(-low, high) * (2 * shrink / recipe.max_level))
        return Grid(scale, torch.full_like(scale, recipe.middle), recipe.max_level)
    scale = _as_float16((high - low) * (shrink / recipe.max_level))
    return Grid(scale, (-low * shrink / scale).round_().clamp_(0, recipe.max_level), recipe.max_level)


def _as_float16(scale: Tensor) -> Tensor:
    return scale.clamp(_SMALLEST, _LARGEST).half().float()
