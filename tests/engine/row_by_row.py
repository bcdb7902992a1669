"""Matrix products whose rows cannot depend on each other, so that whole engines can be compared bit for bit.

The native library promises that by itself, and nothing is changed where it is used. Without it, products are PyTorch's,
which may add in another order for many rows than for one: under `row_by_row` they are products of single rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from pagewick.kernels import reference


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K] @ weight [N, K].T + bias [N], as T products of one row each."""
    assert x.ndim == 2
    # Not one batched product: on some processors that adds in another order for one row than for many.
    product = torch.cat([nn.functional.linear(row.clone(), weight) for row in x.split(1)])
    return product if bias is None else product + bias


@contextmanager
def row_by_row() -> Iterator[None]:
    """Until the end of the block, in this process."""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "product", linear)
        patch.setattr(reference, "QUERY_SLICE", 1)
        yield
