"""Quantized weights in the native library's layout, and products with them."""

from __future__ import annotations

from functools import partial
from typing import Final

import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import BAD_ROW, DTYPES, Operation, address, as_rows, empty
from pagewick.kernels.cpu.matrix import product_memory
from pagewick.kernels.cpu.structs import (
    PANEL_ROWS,
    GatherQuantizedArgs,
    PackQuantizedArgs,
    QuantizedFormat,
    QuantizedLinearArgs,
)
from pagewick.kernels.dispatch import QuantizedLayout
from pagewick.kernels.options import StoredQuantized

# Columns and bytes of a block of a row. A packed weight takes as many bytes.
BLOCKS: Final = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "MXFP4": (32, 17),
    "IQ4_NL": (32, 18),
    "int8_g32": (32, 36),
    "Q2_K": (256, 84),
    "Q3_K": (256, 110),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
    "int4_g32": (32, 21),
    "int4_g64": (64, 37),
    "int4_g128": (128, 69),
    "fp8_g32": (32, 36),
    "fp8_g128": (128, 132),
    "iq4_g32": (32, 20),
    "iq3_g32": (32, 20),
    "iq3s_g32": (32, 20),
    "iq2_g32": (32, 20),
    "iq2_g16": (32, 24),
    "iq1_g32": (32, 20),
    "iq1_g16": (32, 24),
    "fp4_g16": (32, 24),
}
FORMATS: Final = {name: QuantizedFormat[name.upper()].value for name in BLOCKS}
_LINEAR = Operation("quantized_linear", QuantizedLinearArgs)
_PACK_ROWS = Operation("pack_quantized_rows", PackQuantizedArgs)
_GATHER_ROWS = Operation("gather_quantized_rows", GatherQuantizedArgs)


def packed_shape(name: str, out_features: int, in_features: int) -> tuple[int, int, int]:
    """Return [panels, blocks, bytes of a block of a panel] of a packed weight [out_features, in_features]."""
    columns, num_bytes = BLOCKS[name]
    return -(-out_features // PANEL_ROWS), in_features // columns, PANEL_ROWS * num_bytes


def pack_rows(name: str, rows: Tensor, weight: Tensor, first_row: int) -> None:
    """Store rows of blocks [n, bytes] uint8 of the format `name` in a packed weight from `first_row` on.

    Raises ValueError if they do not fit.
    """
    num_panels, num_blocks, _ = weight.shape
    if rows.dtype != torch.uint8 or rows.shape[1] != num_blocks * BLOCKS[name][1] or rows.stride(1) != 1:
        raise ValueError(f"{rows.dtype} rows {list(rows.shape)} do not fit into a packed weight {list(weight.shape)}")
    if first_row < 0 or first_row + len(rows) > num_panels * PANEL_ROWS:
        raise ValueError(f"{len(rows)} rows from {first_row} on do not fit into {num_panels} panels")
    args = PackQuantizedArgs(
        rows=rows.data_ptr(), weight=weight.data_ptr(), first_row=first_row, num_rows=len(rows),
        num_blocks=num_blocks, row_stride=rows.stride(0), format=FORMATS[name],
    )  # fmt: skip
    _PACK_ROWS.run(args)


def quantized_linear(
    x: Tensor,
    weight: StoredQuantized,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """reference.quantized_linear for a packed weight; blocks are added with fused multiply-adds.

    Raises ValueError for tensors that do not fit together.
    """
    if not weight.is_packed:
        return reference.quantized_linear(x, weight, bias, out_dtype, out)
    out_features, in_features, dtype = weight.num_rows, x.shape[-1], x.dtype
    if in_features != weight.num_columns:
        raise ValueError(f"x {list(x.shape)} does not fit a weight of {weight.num_columns} columns")
    out = product_memory(x, out_features, bias, out_dtype, out)
    if not in_features or not out.numel():
        # A rank may have no share of a weight; then its part of the sum is 0.
        return out.zero_() if bias is None else out.copy_(bias.expand(out.shape))
    rows, stride = as_rows(x)
    args = QuantizedLinearArgs(
        x=rows.data_ptr(), weight=weight.data.data_ptr(), bias=address(bias), out=out.data_ptr(), num_rows=len(rows),
        out_features=out_features, in_features=in_features, x_stride=stride,
        out_stride=out_features if out.is_contiguous() else out.view(-1, out_features).stride(0),
        format=FORMATS[weight.format], dtype=DTYPES[dtype], out_dtype=DTYPES[out.dtype],
    )  # fmt: skip
    _LINEAR.run(args)
    return out


def gather_quantized_rows(row_ids: Tensor, weight: StoredQuantized, dtype: torch.dtype) -> Tensor:
    """reference.gather_quantized_rows for a packed weight.

    Raises IndexError for an id outside the weight, ValueError for ids that are not a list of int64.
    """
    if not weight.is_packed or dtype not in DTYPES:
        return reference.gather_quantized_rows(row_ids, weight, dtype)
    if row_ids.dim() != 1 or not row_ids.is_contiguous():
        raise ValueError(f"row ids must be a contiguous list, not {list(row_ids.shape)}")
    out = empty((len(row_ids), weight.num_columns), dtype)
    args = GatherQuantizedArgs(
        weight=weight.data.data_ptr(), row_ids=row_ids.data_ptr(), out=out.data_ptr(), num_rows=len(row_ids),
        out_features=weight.num_rows, in_features=weight.num_columns, format=FORMATS[weight.format],
        dtype=DTYPES[dtype],
    )  # fmt: skip
    if _GATHER_ROWS.run(args) == BAD_ROW:
        raise IndexError(f"a row id is outside 0 .. {weight.num_rows - 1}")
    return out


LAYOUTS = {name: QuantizedLayout(partial(packed_shape, name), partial(pack_rows, name)) for name in BLOCKS}
OPERATIONS = {quantized_linear: DTYPES, gather_quantized_rows: (torch.int64,)}
