"""Products with quantized weights on GPUs. T: rows of x; N: outputs; K: inputs.

Unlike on a CPU, activations are not quantized: the definition is the product of x with the exact numbers of the weight,
`block_formats.unpack(...).numbers()`, in float32. Decision 38 says why.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.options import StoredQuantized
from pagewick.kernels.triton import fp8_products
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.launches import (
    GATHERS,
    PLAIN,
    PRODUCTS,
    Stored,
    kind_for,
    launch_gather,
    launch_product,
    workload,
)

VARIANTS = (
    *(variant for key, variant in PRODUCTS.items() if key[1] != PLAIN), *GATHERS.values(), *fp8_products.VARIANTS,
)  # fmt: skip
WORKLOADS = (
    *(workload("quantized_linear", name, 1, 4096, 4096) for name in ("Q4_K", "Q6_K", "Q8_0", "int4_g128", "fp8_g128")),
    *(workload("quantized_linear", "Q4_K", num_tokens, 14336, 4096) for num_tokens in (1, 16, 512, 8192)),
)


def quantized_linear(
    x: Tensor,
    weight: StoredQuantized,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Return x [..., K] times the transposed weight, plus bias [N]: [..., N] in out_dtype, or x's dtype.

    The sum is rounded once to the result's dtype. With one row, or in float32, weights are exact; with more rows, each
    is rounded to x's dtype first. So bits of a row depend on the number of rows: 1, up to 16, up to 256, or more. With
    --fp8-activations and weights in FP8, x is rounded, too, if there are more than 16 rows (fp8_products.py).
    Raises ValueError for tensors that do not fit together.
    """
    if not weight.is_packed:
        return by_definition(reference.quantized_linear, x, weight, bias, out_dtype, out)
    stored = Stored(weight.data, weight.num_rows, weight.num_columns, weight.format, row_scales=weight.row_scales)
    return multiplied(x, stored, kind_for(prod(x.shape[:-1]), x.dtype), bias, out_dtype, out)


def multiplied(
    x: Tensor, weight: Stored, kind: str, bias: Tensor | None, out_dtype: torch.dtype | None, out: Tensor | None
) -> Tensor:
    """Return quantized_linear with tiles of a kind, for quantized and plain weights."""
    num_rows, num_columns = weight.num_rows, weight.num_columns
    if x.shape[-1] != num_columns:
        raise ValueError(f"x {list(x.shape)} does not fit a weight of {num_columns} columns")
    if bias is not None and (bias.shape != (num_rows,) or bias.dtype != x.dtype):
        raise ValueError(f"bias {bias.dtype} {list(bias.shape)} must be {x.dtype} [{num_rows}]")
    shape = (*x.shape[:-1], num_rows)
    result = x.new_empty(shape, dtype=out_dtype or x.dtype) if out is None else out
    if result.shape != shape or (x.dtype, result.dtype) not in _PAIRS_SERVED:
        raise ValueError(f"out {result.dtype} {list(result.shape)} does not fit x {x.dtype} {list(x.shape)}")
    if not num_columns or not result.numel():
        # A rank may have no share of a weight; then its part of the sum is 0.
        return result.zero_() if bias is None else result.copy_(bias.expand(shape))
    launch = fp8_products.multiply if fp8_products.serves(kind, weight, x.dtype) else launch_product
    launch(kind, as_rows(x), weight, bias, result.view(prod(x.shape[:-1]), num_rows))
    return result


def gather_quantized_rows(row_ids: Tensor, weight: StoredQuantized, dtype: torch.dtype) -> Tensor:
    """Return rows row_ids [n] int64 of a weight as numbers [n, K], rounded once to dtype.

    A row that does not exist becomes NaN: to raise IndexError, the call would have to wait for the GPU.
    """
    if not weight.is_packed or (weight.format, dtype) not in GATHERS:
        return by_definition(reference.gather_quantized_rows, row_ids, weight, dtype)
    out = torch.empty(len(row_ids), weight.num_columns, dtype=dtype, device=row_ids.device)
    if out.numel():
        launch_gather(
            row_ids.contiguous(), Stored(weight.data, weight.num_rows, weight.num_columns, weight.format), out
        )
    return out


def as_rows(x: Tensor) -> Tensor:
    """Return x [..., K] as [T, K] whose rows are whole, a copy if they are not."""
    rows = x.reshape(prod(x.shape[:-1]), x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


_PAIRS_SERVED = {(dtype, out_dtype) for _, _, dtype, out_dtype in PRODUCTS}
