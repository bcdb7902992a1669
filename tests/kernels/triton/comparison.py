"""Comparison of interpreted kernels with their definitions."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Relative errors. Triton's interpreter cuts off what does not fit into bfloat16, where GPUs round: twice the error of a
# rounding, for each of two roundings.
_RELATIVE = {torch.float32: 4e-6, torch.float16: 2**-10, torch.bfloat16: 2**-6}


def assert_near(found: Tensor, expected: Tensor, absolute: float = 2e-6) -> None:
    """That both have one dtype and shape, and the same numbers but for rounding."""
    relative = _RELATIVE.get(expected.dtype, 0.0)
    smallest = 2**-24 if expected.dtype == torch.float16 else 0.0
    torch.testing.assert_close(found, expected, rtol=relative, atol=absolute + smallest, equal_nan=True)


def numbers(*shape: int, seed: int = 0) -> Tensor:
    """Normally distributed numbers, the same every time."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
