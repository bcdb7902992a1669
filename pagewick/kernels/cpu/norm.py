"""Normalisation by the native library."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from pagewick.kernels.cpu.library import DTYPES, NativeLibrary, as_rows, check_out, is_plain


class RmsNormArgs(ctypes.Structure):
    """RmsNormArgs in csrc/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "residual", "weight", "out", "new_residual")),
        *((name, ctypes.c_int64) for name in ("num_rows", "hidden_size", "x_stride", "residual_stride")),
        ("eps", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


def has_rms_norm(x: Tensor, weight: Tensor) -> bool:
    """Whether rms_norm and add_rms_norm are native for these tensors."""
    return x.dtype in DTYPES and weight.dtype == x.dtype and x.numel() > 0 and is_plain(x)


def rms_norm(library: NativeLibrary, x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """reference.rms_norm for x [..., H], written into `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together.
    """
    out = library.empty(x.shape, x.dtype) if out is None else out
    _check_norm(x, weight, out)
    rows, stride = as_rows(x)
    args = RmsNormArgs(
        rows.data_ptr(), None, weight.data_ptr(), out.data_ptr(), None,
        rows.shape[0], rows.shape[1], stride, 0, eps, DTYPES[x.dtype],
    )  # fmt: skip
    library.run(library.operation("rms_norm"), args)
    return out


def add_rms_norm(
    library: NativeLibrary,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """reference.add_rms_norm, written into the two tensors of `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together.
    """
    if residual.shape != x.shape:
        raise ValueError(f"residual {list(residual.shape)} and x {list(x.shape)} differ in shape")
    normed, new_residual = out or (library.empty(x.shape, x.dtype) for _ in range(2))
    _check_norm(x, weight, normed)
    _check_norm(residual, weight, new_residual)
    rows, stride = as_rows(x)
    residual_rows, residual_stride = as_rows(residual)
    args = RmsNormArgs(
        rows.data_ptr(), residual_rows.data_ptr(), weight.data_ptr(), normed.data_ptr(), new_residual.data_ptr(),
        rows.shape[0], rows.shape[1], stride, residual_stride, eps, DTYPES[x.dtype],
    )  # fmt: skip
    library.run(library.operation("rms_norm"), args)
    return normed, new_residual


def _check_norm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        raise ValueError(f"weight {list(weight.shape)} must be contiguous and fit x {list(x.shape)}")
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise ValueError(f"x and weight must share a native dtype, not {x.dtype} and {weight.dtype}")
    check_out(x, out)
