"""The checks that every layer makes of a checkpoint's tensors."""

from __future__ import annotations

from torch import Tensor

from pagewick.errors import ModelLoadError


def check_shape(tensor: Tensor, expected: tuple[int, ...]) -> None:
    """Raises ModelLoadError, with both shapes, if a checkpoint's tensor has another than config.json implies."""
    if tuple(tensor.shape) != expected:
        raise ModelLoadError(
            f"its shape is {list(tensor.shape)}, and config.json says {list(expected)}\n"
            "  config.json and the weights do not belong together; download or copy both again"
        )


def check_floats(tensor: Tensor, expected: tuple[int, ...]) -> None:
    """check_shape, and that the tensor holds floating-point numbers of 16 bits or more. Raises ModelLoadError."""
    check_shape(tensor, expected)
    if not tensor.is_floating_point() or tensor.dtype.itemsize < 2:
        raise ModelLoadError(f"it holds {tensor.dtype}, and must hold bfloat16, float16 or float32")
