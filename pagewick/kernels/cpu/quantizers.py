"""Quantizers of block formats."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import BAD_ROW, DTYPES, Operation, address
from pagewick.kernels.cpu.structs import QuantizedFormat, QuantizeWeightArgs
from pagewick.kernels.reference_quantizers import check_quantizable, row_bytes

_QUANTIZE_WEIGHT = Operation("quantize_weight", QuantizeWeightArgs)


def quantize_weight(x: Tensor, name: str, importance: Tensor | None = None, search: bool = True) -> Tensor:
    """reference.quantize_weight, to the last bit.

    Raises ValueError as it does.
    """
    kind, weights = check_quantizable(x, name, importance)
    rows = torch.empty((len(x), row_bytes(x, kind)), dtype=torch.uint8)
    source = x if x.stride(1) == 1 else x.contiguous()
    args = QuantizeWeightArgs(
        x=source.data_ptr(), importance=address(weights), rows=rows.data_ptr(), num_rows=len(x),
        num_columns=x.shape[1], x_stride=source.stride(0), dtype=DTYPES[x.dtype], format=QuantizedFormat[name.upper()],
        search=search,
    )  # fmt: skip
    if _QUANTIZE_WEIGHT.run(args) == BAD_ROW:
        # The reference raises an error that names the row and the reason.
        return reference.quantize_weight(x, name, importance, search)
    return rows


OPERATIONS = {quantize_weight: DTYPES}
