"""Normalisation by the native library."""

import ctypes
from collections.abc import Sequence

from torch import Tensor

from pagewick.kernels.cpu.binding import DTYPES, NativeLibrary, as_rows, check_out, is_plain


class NormArgs(ctypes.Structure):
    """NormArgs in csrc/norm.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "residual", "weight", "bias", "out", "new_residual")),
        *((name, ctypes.c_int64) for name in ("num_rows", "hidden_size", "x_stride", "residual_stride")),
        *((name, ctypes.c_float) for name in ("eps", "weight_offset")),
        ("dtype", ctypes.c_int32),
    )


def has_norm(x: Tensor, weight: Tensor) -> bool:
    """Whether the operations of this module are native for these tensors."""
    return x.dtype in DTYPES and weight.dtype == x.dtype and x.numel() > 0 and is_plain(x)


def rms_norm(
    library: NativeLibrary,
    x: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """reference.rms_norm for x [..., H], written into `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together.
    """
    return _norm(library, "rms_norm", x, weight, None, eps, weight_offset, out)


def layer_norm(
    library: NativeLibrary, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """reference.layer_norm for x [..., H], written into `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together.
    """
    return _norm(library, "layer_norm", x, weight, bias, eps, 0.0, out)


def add_rms_norm(
    library: NativeLibrary,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """reference.add_rms_norm, written into the two tensors of `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together.
    """
    return _add_norm(library, "rms_norm", x, residual, weight, None, eps, weight_offset, out)


def add_layer_norm(
    library: NativeLibrary,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    *,
    out: Sequence[Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """reference.add_layer_norm, written into the two tensors of `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together.
    """
    return _add_norm(library, "layer_norm", x, residual, weight, bias, eps, 0.0, out)


def _norm(
    library: NativeLibrary,
    operation: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    out: Tensor | None,
) -> Tensor:
    out = library.empty(x.shape, x.dtype) if out is None else out
    _check_norm(x, weight, bias, out)
    rows, stride = as_rows(x)
    args = NormArgs(
        rows.data_ptr(), None, weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(), None,
        rows.shape[0], rows.shape[1], stride, 0, eps, weight_offset, DTYPES[x.dtype],
    )  # fmt: skip
    library.run(library.operation(operation), args)
    return out


def _add_norm(
    library: NativeLibrary,
    operation: str,
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float,
    out: Sequence[Tensor] | None,
) -> tuple[Tensor, Tensor]:
    if residual.shape != x.shape:
        raise ValueError(f"residual {list(residual.shape)} and x {list(x.shape)} differ in shape")
    normed, new_residual = out or (library.empty(x.shape, x.dtype) for _ in range(2))
    _check_norm(x, weight, bias, normed)
    _check_norm(residual, weight, bias, new_residual)
    rows, stride = as_rows(x)
    residual_rows, residual_stride = as_rows(residual)
    args = NormArgs(
        rows.data_ptr(), residual_rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(),
        normed.data_ptr(), new_residual.data_ptr(),
        rows.shape[0], rows.shape[1], stride, residual_stride, eps, weight_offset, DTYPES[x.dtype],
    )  # fmt: skip
    library.run(library.operation(operation), args)
    return normed, new_residual


def _check_norm(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    for parameter in (weight,) if bias is None else (weight, bias):
        if parameter.shape != x.shape[-1:] or not parameter.is_contiguous():
            raise ValueError(f"weight or bias {list(parameter.shape)} must be contiguous and fit x {list(x.shape)}")
        if x.dtype not in DTYPES or parameter.dtype != x.dtype:
            raise ValueError(f"x, weight and bias must share a native dtype, not {x.dtype} and {parameter.dtype}")
    check_out(x, out)
