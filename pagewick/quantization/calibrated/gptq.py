"""GPTQ (Frantar et al. 2022, arXiv:2210.17323): each column's rounding error is made up for by the columns after it.

n: columns of a weight, in the order in which they are quantized. With H the Hessian of the squared error of the
products, X^T X of the inputs, and H^-1 = U^T U, U upper triangular, the error of column i, divided by U[i, i], times
U[i, j] is subtracted from every later column j. Columns are taken in blocks: within a block one after the other, and
the errors of a block reach all later columns in one product.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.quantization.calibrated.results import Recipe
from pagewick.quantization.calibrated.rounding import Levels
from pagewick.quantization.calibrated.scales import Grid, grouped, search_grid

# A multiple of every size of groups, so that no group lies in two blocks.
_BLOCK: Final = 128
_MOST_DAMPING: Final = 100.0


def quantize_gptq(weight: Tensor, gram: Tensor, recipe: Recipe) -> Levels:
    """Return the levels of a weight [R, n] float32. gram: X^T X of its inputs, [n, n] float32."""
    columns = weight.shape[1]
    order = gram.diagonal().argsort(descending=True, stable=True) if recipe.act_order else torch.arange(columns)
    factor = inverse_factor(gram[order][:, order], recipe.damping)
    size = recipe.columns_per_group(columns)
    keeps_groups = recipe.group_size == -1 or recipe.static_groups or not recipe.act_order
    groups = (order if keeps_groups else torch.arange(columns)) // size
    work = _Work(weight[:, order].t().contiguous(), factor, groups, recipe)
    if recipe.group_size == -1 or (recipe.act_order and recipe.static_groups):
        work.fit_all(weight, factor.diagonal()[order.argsort()], size)
    work.run()
    back = order.argsort()
    return Levels(
        work.levels[back].t().contiguous(),
        work.scales.t().contiguous().half(),
        None if recipe.symmetric else work.zeros.t().contiguous().to(torch.uint8),
        None if keeps_groups else groups[back].int(),
    )


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """Return U, upper triangular, with U^T U the inverse of the damped Hessian [n, n].

    Damping adds this share of the diagonal's mean to the diagonal, and ten times as much if rounding errors make the
    sum indefinite. Raises ModelLoadError if the Hessian is not finite.
    """
    mean = hessian.diagonal().mean()
    if not mean.isfinite():
        raise ModelLoadError("the inputs of its weights are not finite; is the checkpoint damaged?")
    unit = mean if mean > 0 else torch.ones_like(mean)
    # The factor R of H = R R^T with R upper triangular is that of Cholesky with the columns in reverse.
    flipped = hessian.flip(0, 1)
    while damping < _MOST_DAMPING:
        damped = flipped + torch.eye(len(hessian)) * (damping * unit)
        lower, info = torch.linalg.cholesky_ex(damped)
        if info == 0:
            factor: Tensor = torch.linalg.solve_triangular(lower.flip(0, 1), torch.eye(len(hessian)), upper=True)
            return factor
        damping *= 10
    raise ModelLoadError("the inputs of its weights have no positive definite Hessian; is the checkpoint damaged?")


class _Work:
    """A weight while it is quantized. columns: [n, R], those after the current one changed by the errors before.

    groups: the group of each column, in the order of the columns. scales, zeros: [G, R].
    """

    def __init__(self, columns: Tensor, factor: Tensor, groups: Tensor, recipe: Recipe) -> None:
        self._columns, self._factor, self._groups, self._recipe = columns, factor, groups.tolist(), recipe
        num_columns, num_rows = columns.shape
        num_groups = 1 + max(self._groups)
        self.levels = torch.empty(num_columns, num_rows, dtype=torch.uint8)
        self.scales, self.zeros = torch.zeros(2, num_groups, num_rows)
        self._size = num_columns // num_groups
        self._is_fitted = False

    def fit_all(self, weight: Tensor, factors: Tensor, size: int) -> None:
        """Fit the scales of all groups to the unchanged weight [R, n]; factors: U[i, i] of its columns."""
        grid = search_grid(grouped(weight, self._recipe), factors.pow(-2).view(-1, size), self._recipe)
        self.scales, self.zeros = grid.scale.squeeze(-1).t(), grid.zero.squeeze(-1).t()
        self._is_fitted = True

    def run(self) -> None:
        num_columns = len(self._columns)
        for first in range(0, num_columns, _BLOCK):
            last = min(first + _BLOCK, num_columns)
            errors = self._quantize_block(first, last)
            self._columns[last:].addmm_(self._factor[first:last, last:].t(), errors, alpha=-1)

    def _quantize_block(self, first: int, last: int) -> Tensor:
        """Quantize the columns first .. last - 1 and return their errors, divided by the factor's diagonal."""
        columns = self._columns[first:last]
        factor = self._factor[first:last, first:last]
        errors = torch.empty_like(columns)
        diagonal = factor.diagonal().tolist()
        for place in range(last - first):
            group = self._groups[first + place]
            if not self._is_fitted and (first + place) % self._size == 0:
                self._fit(group, columns[place : place + self._size], factor.diagonal()[place : place + self._size])
            grid = Grid(self.scales[group], self.zeros[group], self._recipe.max_level)
            column = columns[place]
            levels = grid.levels(column)
            self.levels[first + place] = levels
            torch.sub(column, grid.values(levels), out=errors[place]).div_(diagonal[place])
            columns[place + 1 :].addr_(factor[place, place + 1 :], errors[place], alpha=-1)
        return errors

    def _fit(self, group: int, columns: Tensor, factors: Tensor) -> None:
        """Fit a group's scales to its columns [C, R] as they are now; factors: U[i, i] of each."""
        grid = search_grid(columns.t().unsqueeze(1), factors.pow(-2).unsqueeze(0), self._recipe)
        self.scales[group], self.zeros[group] = grid.scale.flatten(), grid.zero.flatten()
