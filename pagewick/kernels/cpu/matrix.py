"""Weights in the native library's layout, and products with them."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import BAD_ROW, DTYPES, Operation, address, as_rows, empty
from pagewick.kernels.cpu.structs import PANEL_ROWS, GatherArgs, LinearArgs, PackArgs
from pagewick.kernels.options import StoredMatrix

_LINEAR = Operation("linear", LinearArgs)
_PACK_ROWS = Operation("pack_rows", PackArgs)
_GATHER_ROWS = Operation("gather_rows", GatherArgs)


def packed_shape(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return [panels, steps, rows of a panel, columns of a step] of a packed weight [out_features, in_features]."""
    step = 2 if dtype == torch.bfloat16 else 1
    return -(-out_features // PANEL_ROWS), -(-in_features // step), PANEL_ROWS, step


def pack_rows(rows: Tensor, weight: Tensor, first_row: int) -> None:
    """Store rows [n, in_features] in a packed weight, which is zero there, from `first_row` on.

    Raises ValueError if they do not fit.
    """
    if rows.dtype not in DTYPES or rows.dtype != weight.dtype or rows.stride(1) != 1:
        raise ValueError(f"cannot pack {rows.dtype} rows with strides {rows.stride()} into {weight.dtype}")
    num_panels, *panel = packed_shape(first_row + len(rows), rows.shape[1], rows.dtype)
    if num_panels > len(weight) or panel != list(weight.shape[1:]) or first_row < 0:
        raise ValueError(f"{len(rows)} rows from {first_row} on do not fit into {list(weight.shape)}")
    args = PackArgs(
        rows=rows.data_ptr(), weight=weight.data_ptr(), first_row=first_row, num_rows=len(rows),
        in_features=rows.shape[1], row_stride=rows.stride(0), dtype=DTYPES[rows.dtype],
    )  # fmt: skip
    _PACK_ROWS.run(args)


def product_memory(
    x: Tensor, out_features: int, bias: Tensor | None, out_dtype: torch.dtype | None, out: Tensor | None
) -> Tensor:
    """Return `out`, or memory for a product of x, in out_dtype or x's.

    Raises ValueError if bias or `out` do not fit.
    """
    dtype, shape = x.dtype, (*x.shape[:-1], out_features)
    if bias is not None and (bias.shape != (out_features,) or bias.dtype != dtype or not bias.is_contiguous()):
        raise ValueError(f"bias {bias.dtype} {list(bias.shape)} must be {dtype} [{out_features}], contiguous")
    if out is None:
        out = empty(shape, out_dtype or dtype)
    elif out.shape != shape or out.dtype != (out_dtype or dtype) or out.stride(-1) != 1:
        raise ValueError(
            f"out {out.dtype} {list(out.shape)} must be {out_dtype or dtype} {list(shape)}, its rows whole"
        )
    if out.dtype not in DTYPES:
        raise ValueError(f"no native product in {out.dtype}")
    return out


def linear(
    x: Tensor,
    weight: StoredMatrix,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """reference.linear for a packed weight, in fp32 and rounded once, to out_dtype.

    A row of the result has the same bits whatever other rows x has. Raises ValueError for tensors that do not fit
    together.
    """
    if not weight.is_packed:
        return reference.linear(x, weight, bias, out_dtype, out)
    data, out_features = weight.data, weight.num_rows
    in_features, dtype = x.shape[-1], x.dtype
    if dtype not in DTYPES or data.dtype != dtype or not data.is_contiguous():
        raise ValueError(f"no native product of {dtype} with {data.dtype}")
    if in_features != weight.num_columns or data.shape != packed_shape(out_features, in_features, dtype):
        raise ValueError(f"x {list(x.shape)} does not fit a weight packed as {list(data.shape)}")
    out = product_memory(x, out_features, bias, out_dtype, out)
    if not in_features or not out.numel():
        # A rank may have no share of a weight; then its part of the sum is 0.
        return out.zero_() if bias is None else out.copy_(bias.expand(out.shape))
    rows, stride = as_rows(x)
    args = LinearArgs(
        x=rows.data_ptr(), weight=data.data_ptr(), bias=address(bias), out=out.data_ptr(), num_rows=len(rows),
        out_features=out_features, in_features=in_features, x_stride=stride,
        out_stride=out_features if out.is_contiguous() else out.view(-1, out_features).stride(0),
        dtype=DTYPES[dtype], out_dtype=DTYPES[out.dtype],
    )  # fmt: skip
    _LINEAR.run(args)
    return out


def gather_rows(weight: Tensor, row_ids: Tensor, num_rows: int, num_columns: int, is_packed: bool) -> Tensor:
    """reference.gather_rows of a weight that may be packed.

    Raises IndexError for an id outside the weight, ValueError for ids that are not a list of int64.
    """
    if row_ids.dtype != torch.int64 or row_ids.dim() != 1 or not row_ids.is_contiguous() or not row_ids.is_cpu:
        raise ValueError(f"row ids must be contiguous int64 on the CPU, not {row_ids.dtype} {list(row_ids.shape)}")
    out = empty((len(row_ids), num_columns), weight.dtype)
    args = GatherArgs(
        weight=weight.data_ptr(), row_ids=row_ids.data_ptr(), out=out.data_ptr(), num_rows=len(row_ids),
        out_features=num_rows, in_features=num_columns, dtype=DTYPES[weight.dtype], is_packed=is_packed,
    )  # fmt: skip
    if _GATHER_ROWS.run(args) == BAD_ROW:
        raise IndexError(f"a row id is outside 0 .. {num_rows - 1}")
    return out


OPERATIONS = dict.fromkeys((linear, gather_rows), DTYPES)
