"""The check that every layer makes of a checkpoint's tensors."""

from __future__ import annotations

from torch import Tensor

from pagewick.errors import ModelLoadError


def check_shape(tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raises ModelLoadError, with both shapes, if a checkpoint's tensor has another than config.json implies."""
    if tuple(tensor.shape) != expected:
        raise ModelLoadError(f"its shape is {list(tensor.shape)}, and config.json says {list(expected)}")
