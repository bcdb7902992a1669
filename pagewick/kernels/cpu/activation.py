"""Activation functions by the native library."""

import ctypes

from torch import Tensor

from pagewick.kernels.cpu.binding import DTYPES, NativeLibrary, as_rows, is_plain

# Activation in csrc/activation.h
KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "quick_gelu": 4, "relu2": 5}


class ActivationArgs(ctypes.Structure):
    """ActivationArgs in csrc/activation.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "size", "x_stride")),
        *((name, ctypes.c_int32) for name in ("dtype", "kind", "is_gated")),
    )


def has_activation(x: Tensor) -> bool:
    """Whether activation and gated_activation are native for x."""
    return x.dtype in DTYPES and x.numel() > 0 and is_plain(x)


def activation(library: NativeLibrary, x: Tensor, kind: str, *, out: Tensor | None = None) -> Tensor:
    """reference.activation for x [..., I], written into `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together.
    """
    return _run(library, x, kind, x.shape[-1], out, is_gated=False)


def gated_activation(library: NativeLibrary, x: Tensor, kind: str, *, out: Tensor | None = None) -> Tensor:
    """reference.gated_activation for x [..., 2 * I]: [..., I], written into `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together.
    """
    if x.shape[-1] % 2:
        raise ValueError(f"x {list(x.shape)} has no two halves")
    return _run(library, x, kind, x.shape[-1] // 2, out, is_gated=True)


def _run(library: NativeLibrary, x: Tensor, kind: str, size: int, out: Tensor | None, *, is_gated: bool) -> Tensor:
    shape = (*x.shape[:-1], size)
    if x.dtype not in DTYPES:
        raise ValueError(f"no native activation of {x.dtype}")
    out = library.empty(shape, x.dtype) if out is None else out
    if out.shape != shape or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {x.dtype} {list(shape)}")
    rows, stride = as_rows(x)
    args = ActivationArgs(
        rows.data_ptr(), out.data_ptr(), len(rows), size, stride, DTYPES[x.dtype], KINDS[kind], int(is_gated)
    )
    library.run(library.operation("activation"), args)
    return out
