"""Whether products with FP8 weights round activations to FP8, too, on a GPU: --fp8-activations.

Tensor cores multiply FP8 numbers at twice the rate of bfloat16 ones. The demand holds for the whole process and is
never taken back. Products of few rows, which are bound by the bytes of weights, keep their activations.
"""

from __future__ import annotations

from threading import Event

_IS_REQUIRED = Event()


def require() -> None:
    """Require it of all products from now on."""
    _IS_REQUIRED.set()


def is_required() -> bool:
    """Whether products of more than 16 rows round activations to FP8 if weights are FP8."""
    return _IS_REQUIRED.is_set()
