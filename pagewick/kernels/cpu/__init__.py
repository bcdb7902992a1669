"""The native library for CPUs. `binding` loads it; each family of its operations has a module."""

import torch

from pagewick.kernels.cpu import (
    attention,
    compressed,
    delta,
    elementwise,
    hyper,
    index,
    logits,
    lora,
    matrix,
    mla,
    moe,
    norm,
    quantized,
    quantizers,
    rope,
    scan,
    streams,
    truncation,
)
from pagewick.kernels.cpu.binding import LIBRARY_PATH, NativeLibrary, empty, library, status
from pagewick.kernels.dispatch import Backend, WeightLayout

__all__ = ["BACKEND", "LIBRARY_PATH", "NativeLibrary", "empty", "library", "status", "supports"]

_FAMILIES = (
    attention, compressed, delta, elementwise, hyper, index, logits, lora, matrix, mla, moe, norm, quantized,
    quantizers, rope, scan, streams, truncation,
)  # fmt: skip
# Each module lists its operations and the dtypes that their first tensor may have.
_OPERATIONS = {
    function.__name__: (function, dtypes) for family in _FAMILIES for function, dtypes in family.OPERATIONS.items()
}


def supports(operation: str, device_kind: str, dtype: torch.dtype) -> bool:
    """Whether the library is on and has this operation for tensors of this device and dtype."""
    if device_kind != "cpu" or operation not in _OPERATIONS or library() is None:
        return False
    return dtype in _OPERATIONS[operation][1]


BACKEND = Backend(
    "cpu",
    {name: function for name, (function, _) in _OPERATIONS.items()},
    supports,
    WeightLayout(matrix.packed_shape, matrix.pack_rows),
    quantized.LAYOUTS,
)
