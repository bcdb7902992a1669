"""Kernels for GPUs in Triton. There are none yet, and nothing here imports triton: it is an optional package."""

import torch

from pagewick.kernels.dispatch import Backend


def supports(operation: str, device_kind: str, dtype: torch.dtype) -> bool:
    """Whether an operation on tensors of this device and dtype runs here: none does yet."""
    return False


BACKEND = Backend("triton", {}, supports)
