"""Products with plain weights, which replace those of cuBLAS and hipBLASLt where results must not depend on the batch.

Those libraries choose an order of additions by the number of rows. Here a tile is the same for any number of rows, and
adds columns in their order. float32, which tensor cores do not have, is multiplied row by row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.options import StoredMatrix
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.launches import PLAIN, PRODUCTS, ROWS, SOME, Stored
from pagewick.kernels.triton.quantized import multiplied
from pagewick.kernels.triton.variant import Workload

_KINDS = {torch.bfloat16: SOME, torch.float16: SOME, torch.float32: ROWS}
VARIANTS = tuple(variant for (kind, name, x, _), variant in PRODUCTS.items() if name == PLAIN and kind == _KINDS[x])

# The output product and a layer's largest one of Llama 3.1 8B, in bfloat16.
WORKLOADS = tuple(
    Workload("linear", f"{rows} x {outputs} x 4096, bf16", 2 * (4096 * outputs + rows * (4096 + outputs)),
             2 * rows * 4096 * outputs)
    for outputs in (14336, 128256)
    for rows in (1, 256)
)  # fmt: skip


def linear(
    x: Tensor,
    weight: StoredMatrix,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """reference.linear; a sum is in float32 and rounded once. Raises ValueError for tensors that do not fit together.

    A row of the result has the same bits whatever other rows x has.
    """
    if weight.is_packed or weight.data.dtype != x.dtype or not weight.data.is_contiguous():
        return by_definition(reference.linear, x, weight, bias, out_dtype, out)
    stored = Stored(weight.data, weight.num_rows, weight.num_columns)
    return multiplied(x, stored, _KINDS[x.dtype], bias, out_dtype, out)
