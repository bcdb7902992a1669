"""InputSum: X^T X of the rows that a weight is multiplied by, over a whole text. n: columns of the weight."""

from __future__ import annotations

import torch
from torch import Tensor


class InputSum:
    """The sum for one weight, or for several with the same inputs. num_rows: number of rows in it.

    Rows are kept as long as they take less memory than their sum.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._sum: Tensor | None = None
        self._rows: list[Tensor] = []

    def add(self, rows: Tensor) -> None:
        """Count rows [*, n] float32."""
        self.num_rows += len(rows)
        self._rows.append(rows.clone())
        if self._sum is not None or sum(map(len, self._rows)) >= rows.shape[1]:
            self._sum, self._rows = self.gram(), []

    def gram(self) -> Tensor:
        """Return the sum so far, [n, n] float32; at least one row has been added."""
        if not self._rows:
            assert self._sum is not None, "there are rows"
            return self._sum
        rows = torch.cat(self._rows)
        return rows.t() @ rows if self._sum is None else self._sum.addmm_(rows.t(), rows)

    def diagonal(self) -> Tensor:
        """Return the diagonal of the sum: the columns' squares, [n]."""
        return torch.cat(self._rows).square().sum(0) if self._sum is None else self._sum.diagonal()

    def squared_error(self, errors: Tensor) -> float:
        """Return the sum of the squares of all rows' products with the errors [R, n] of a weight."""
        if self._sum is None:
            return float((torch.cat(self._rows) @ errors.t()).square().sum())
        return float((errors @ self._sum).mul_(errors).sum())
