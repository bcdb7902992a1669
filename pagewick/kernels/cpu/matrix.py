"""Weights in the native library's layout, and products with them."""

import ctypes

import torch
from torch import Tensor

from pagewick.kernels.cpu.binding import BAD_ROW, DTYPES, NativeLibrary, as_rows

PANEL_ROWS = 64  # kPanelRows in csrc/matrix.h


class LinearArgs(ctypes.Structure):
    """LinearArgs in csrc/matrix.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "out_features", "in_features", "x_stride", "out_stride")),
        ("dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
    )


class PackArgs(ctypes.Structure):
    """PackArgs in csrc/matrix.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("rows", "weight")),
        *((name, ctypes.c_int64) for name in ("first_row", "num_rows", "in_features", "row_stride")),
        ("dtype", ctypes.c_int32),
    )


class GatherArgs(ctypes.Structure):
    """GatherArgs in csrc/matrix.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "row_ids", "out")),
        *((name, ctypes.c_int64) for name in ("num_rows", "out_features", "in_features")),
        ("dtype", ctypes.c_int32),
        ("is_packed", ctypes.c_int32),
    )


def packed_shape(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """[panels, steps, rows of a panel, columns of a step] of a packed weight [out_features, in_features]."""
    step = 2 if dtype == torch.bfloat16 else 1
    return -(-out_features // PANEL_ROWS), -(-in_features // step), PANEL_ROWS, step


def pack_rows(library: NativeLibrary, rows: Tensor, weight: Tensor, first_row: int) -> None:
    """Put rows [n, in_features] into a packed weight of zeros, from `first_row` on.

    Raises ValueError if they do not fit.
    """
    if rows.dtype not in DTYPES or rows.dtype != weight.dtype or rows.stride(1) != 1:
        raise ValueError(f"cannot pack {rows.dtype} rows with strides {rows.stride()} into {weight.dtype}")
    num_panels, *panel = packed_shape(first_row + len(rows), rows.shape[1], rows.dtype)
    if num_panels > len(weight) or panel != list(weight.shape[1:]) or first_row < 0:
        raise ValueError(f"{len(rows)} rows from {first_row} on do not fit into {list(weight.shape)}")
    args = PackArgs(
        rows.data_ptr(), weight.data_ptr(), first_row, len(rows), rows.shape[1], rows.stride(0), DTYPES[rows.dtype]
    )
    library.run(library.operation("pack_rows"), args)


def linear(
    library: NativeLibrary,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out_features: int,
    *,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """x [..., in_features] times a packed weight [out_features, in_features] transposed, plus bias.

    Returns [..., out_features] in out_dtype (None: x's).

    Raises ValueError for tensors that do not fit together.
    """
    in_features, dtype = x.shape[-1], x.dtype
    if dtype not in DTYPES or weight.dtype != dtype or not weight.is_contiguous():
        raise ValueError(f"no native product of {dtype} with {weight.dtype}")
    if tuple(weight.shape) != packed_shape(out_features, in_features, dtype):
        raise ValueError(f"x {list(x.shape)} does not fit a weight packed as {list(weight.shape)}")
    if bias is not None and (bias.shape != (out_features,) or bias.dtype != dtype or not bias.is_contiguous()):
        raise ValueError(f"bias {bias.dtype} {list(bias.shape)} must be {dtype} [{out_features}], contiguous")
    shape = (*x.shape[:-1], out_features)
    out = library.empty(shape, out_dtype or dtype) if out is None else out
    if out.shape != shape or not out.is_contiguous() or out.dtype not in DTYPES:
        raise ValueError(f"out must be contiguous {list(shape)}")
    if not in_features or not out.numel():
        # A rank may have nothing of a weight: its share of the sum is 0.
        return out.zero_() if bias is None else out.copy_(bias.expand(shape))
    rows, stride = as_rows(x)
    args = LinearArgs(
        rows.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        len(rows), out_features, in_features, stride, out_features, DTYPES[dtype], DTYPES[out.dtype],
    )  # fmt: skip
    library.run(library.operation("linear"), args)
    return out


def gather_rows(
    library: NativeLibrary, weight: Tensor, row_ids: Tensor, out_features: int, in_features: int, *, is_packed: bool
) -> Tensor:
    """Rows row_ids [n] int64 of a weight [out_features, in_features], packed or not: [n, in_features].

    Raises IndexError for an id outside the weight, ValueError for ids that are no list of int64.
    """
    if row_ids.dtype != torch.int64 or row_ids.dim() != 1 or not row_ids.is_contiguous() or not row_ids.is_cpu:
        raise ValueError(f"row ids must be contiguous int64 on the CPU, not {row_ids.dtype} {list(row_ids.shape)}")
    out = library.empty((len(row_ids), in_features), weight.dtype)
    args = GatherArgs(
        weight.data_ptr(), row_ids.data_ptr(), out.data_ptr(),
        len(row_ids), out_features, in_features, DTYPES[weight.dtype], int(is_packed),
    )  # fmt: skip
    if library.run(library.operation("gather_rows"), args) == BAD_ROW:
        raise IndexError(f"a row id is outside 0 .. {out_features - 1}")
    return out
