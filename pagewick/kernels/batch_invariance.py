"""Whether kernels must give a row the same bits in every batch, at the cost of speed: --batch-invariant.

On a CPU the native library always does. On a GPU, the fastest kernel for a few rows adds in another order than the one
for many. The demand holds for the whole process and is never taken back: engines that do not need it are slower then,
not wrong.
"""

from __future__ import annotations

from threading import Event

import torch
from torch import Tensor

_IS_REQUIRED = Event()


def require() -> None:
    """Require it of all kernels from now on."""
    _IS_REQUIRED.set()


def is_required() -> bool:
    """Whether a kernel must not choose an order of additions by the size of the batch."""
    return _IS_REQUIRED.is_set()


def sum_rows(rows: Tensor) -> Tensor:
    """Return the sum of each row [..., N]: [...]. If it is required, its order of additions depends on N alone."""
    if not is_required():
        return rows.sum(-1)
    while (size := rows.shape[-1]) > 1:
        half = size // 2
        added = rows[..., :half] + rows[..., half : 2 * half]
        rows = torch.cat((added, rows[..., 2 * half :]), dim=-1) if size % 2 else added
    return rows.squeeze(-1)
