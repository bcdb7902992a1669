"""Sums, products with a number and soft caps by the native library."""

import ctypes

from torch import Tensor

from pagewick.kernels.cpu.binding import DTYPES, NativeLibrary, as_rows, check_out, is_plain

# Elementwise in csrc/elementwise.h
KINDS = {"add": 0, "scale": 1, "soft_cap": 2}


class ElementwiseArgs(ctypes.Structure):
    """ElementwiseArgs in csrc/elementwise.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "other", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "size", "x_stride", "other_stride")),
        ("factor", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("dtype", "kind")),
    )


def has_elementwise(x: Tensor, other: Tensor | None = None) -> bool:
    """Whether the operations of this module are native for these tensors."""
    is_native = x.dtype in DTYPES and x.numel() > 0 and is_plain(x)
    return is_native and (other is None or (other.dtype == x.dtype and is_plain(other)))


def add(library: NativeLibrary, a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """reference.add for a, b [..., H], written into `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together.
    """
    return _run(library, "add", a, b, 0.0, out)


def scale(library: NativeLibrary, x: Tensor, factor: float, *, out: Tensor | None = None) -> Tensor:
    """reference.scale for x [..., H], written into `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together.
    """
    return _run(library, "scale", x, None, factor, out)


def soft_cap(library: NativeLibrary, x: Tensor, cap: float, *, out: Tensor | None = None) -> Tensor:
    """reference.soft_cap for x [..., H], written into `out` (contiguous) if given; relative error below 2^-20.

    Raises ValueError for tensors that do not fit together.
    """
    return _run(library, "soft_cap", x, None, cap, out)


def _run(
    library: NativeLibrary, kind: str, x: Tensor, other: Tensor | None, factor: float, out: Tensor | None
) -> Tensor:
    if x.dtype not in DTYPES:
        raise ValueError(f"no native {kind} of {x.dtype}")
    if other is not None and (other.shape != x.shape or other.dtype != x.dtype):
        raise ValueError(f"{x.dtype} {list(x.shape)} and {other.dtype} {list(other.shape)} do not fit together")
    out = library.empty(x.shape, x.dtype) if out is None else out
    check_out(x, out)
    rows, stride = as_rows(x)
    other_rows, other_stride = (None, 0) if other is None else as_rows(other)
    args = ElementwiseArgs(
        rows.data_ptr(), None if other_rows is None else other_rows.data_ptr(), out.data_ptr(),
        rows.shape[0], rows.shape[1], stride, other_stride, factor, DTYPES[x.dtype], KINDS[kind],
    )  # fmt: skip
    library.run(library.operation("elementwise"), args)
    return out
