"""Norms of rows, with the residual added in the same pass.

Definitions: rms_norm, add_rms_norm, layer_norm and add_layer_norm of reference.py. A program has a row in registers, so
each number is read once and written once. A row's result depends on that row alone, bit for bit.

Dimensions: N rows, H numbers of a row.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload

# The largest H that a variant serves; a longer row would not fit into a program's registers.
BLOCKS = (512, 1024, 2048, 4096, 8192, 16384)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Numbers of a row that a thread has: two loads of 16 bytes in bfloat16.
_NUMBERS_PER_THREAD = 16
_MAX_WARPS = 16


@triton.jit(do_not_specialize=["eps", "offset"])
def norm_rows(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr, hidden_size, x_stride, residual_stride, eps, offset,
    BLOCK: tl.constexpr, IS_LAYER_NORM: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """Normalise row program_id(0) of x [N, H]; with a residual, that of x + residual, which goes to sum [N, H].

    out, sum: [N, H], their rows in one piece. All have one dtype, but residual and sum may be float32.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < hidden_size
    dtype = out_ptr.dtype.element_ty
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
        total = (x + residual).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * hidden_size + columns, total, mask=inside)
        x = total.to(dtype).to(tl.float32)
    if IS_LAYER_NORM:
        x = tl.where(inside, x - tl.sum(x, axis=0) / hidden_size, 0.0)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / hidden_size + eps)
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_OFFSET:
        result = normed * (weight + offset)
    elif IS_LAYER_NORM:
        result = normed * weight
    else:
        result = normed.to(dtype).to(tl.float32) * weight
    if bias_ptr is not None:
        result += tl.load(bias_ptr + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * hidden_size + columns, result.to(dtype), mask=inside)


def _variant(dtype: torch.dtype, block: int, kind: str, has_residual: bool) -> Variant:
    """kind: "rms", "rms_wide" (with a residual in float32), "rms_offset", "layer" or "layer_bias"."""
    number = f"*{TYPE_NAMES[dtype]}"
    has_bias = kind == "layer_bias"
    signature = {
        "x_ptr": number,
        "weight_ptr": number,
        "out_ptr": number,
        "hidden_size": "i32:16",
        "x_stride": "i32:16",
    }
    signature |= {"eps": "fp32", "offset": "fp32", "residual_stride": "i32:16"}
    of_residual = "*fp32" if kind == "rms_wide" else number
    signature |= dict.fromkeys(("residual_ptr", "sum_ptr"), of_residual) if has_residual else {}
    signature |= {"bias_ptr": number} if has_bias else {}
    absent = dict.fromkeys(("residual_ptr", "sum_ptr", "bias_ptr"), None)
    return Variant(
        name=f"{'add_' if has_residual else ''}{kind}_{TYPE_NAMES[dtype]}_{block}",
        kernel=norm_rows,
        signature=signature,
        constexprs={name: None for name in absent if name not in signature}
        | {"BLOCK": block, "IS_LAYER_NORM": kind.startswith("layer"), "HAS_OFFSET": kind == "rms_offset"},
        num_warps=min(_MAX_WARPS, block // (32 * _NUMBERS_PER_THREAD)),
        in_sample=(dtype, block, kind, has_residual) == (torch.float32, 16384, "layer_bias", True),
        # Else the threads of a row get sums that differ in their last bits: see Variant.
        fuses=False,
    )


_KINDS = ("rms", "rms_offset", "layer", "layer_bias")
_VARIANTS = {key: _variant(*key) for key in itertools.product(_DTYPES, BLOCKS, _KINDS, (False, True))}
_VARIANTS |= {
    (dtype, block, "rms_wide", True): _variant(dtype, block, "rms_wide", True)
    for dtype, block in itertools.product(_DTYPES[:2], BLOCKS)
}
VARIANTS = tuple(_VARIANTS.values())

# Each number is read and written once; a norm takes about 5 operations for a number.
WORKLOADS = tuple(
    Workload("add_rms_norm", f"{rows} rows of 4,096, bf16", 4 * rows * 4096 * 2, 5 * rows * 4096, on_tensor_cores=False)
    for rows in (1, 256, 8192)
)


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, out: Tensor | None = None) -> Tensor:
    """reference.rms_norm for x [..., H]."""
    if not _is_served(x, weight):
        return by_definition(reference.rms_norm, x, weight, eps, weight_offset, out)
    normed = _run("rms_offset" if weight_offset else "rms", x, None, weight, None, eps, weight_offset)[0]
    return normed if out is None else out.copy_(normed)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """reference.add_rms_norm for x, residual [..., H]."""
    is_wide = residual.dtype == torch.float32 != x.dtype and residual.shape == x.shape and not weight_offset
    if not _is_served(x, x if is_wide else residual, weight):
        return by_definition(reference.add_rms_norm, x, residual, weight, eps, weight_offset)
    if is_wide:
        return _run("rms_wide", x, residual, weight, None, eps, 0.0)
    return _run("rms_offset" if weight_offset else "rms", x, residual, weight, None, eps, weight_offset)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """reference.layer_norm for x [..., H]."""
    if not _is_served(x, weight, bias):
        return by_definition(reference.layer_norm, x, weight, bias, eps)
    return _run("layer" if bias is None else "layer_bias", x, None, weight, bias, eps, 0.0)[0]


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """reference.add_layer_norm for x, residual [..., H]."""
    if not _is_served(x, residual, weight, bias):
        return by_definition(reference.add_layer_norm, x, residual, weight, bias, eps)
    return _run("layer" if bias is None else "layer_bias", x, residual, weight, bias, eps, 0.0)


def _is_served(x: Tensor, *others: Tensor | None) -> bool:
    given = [other for other in others if other is not None]
    fits = all(other.dtype == x.dtype and other.shape[-1:] == x.shape[-1:] for other in given)
    return x.dtype in _DTYPES and fits and 0 < x.shape[-1] <= BLOCKS[-1]


def _run(
    kind: str, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, offset: float
) -> tuple[Tensor, Tensor]:
    """Return the norm and the new residual, which is x where there is no residual."""
    hidden_size = x.shape[-1]
    rows, out = x.reshape(-1, hidden_size), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    block = next(block for block in BLOCKS if block >= hidden_size)
    optional: dict[str, Tensor] = {} if bias is None else {"bias_ptr": bias.contiguous()}
    new_residual, residual_stride = x, 0
    if residual is not None:
        new_residual = torch.empty(x.shape, dtype=residual.dtype, device=x.device)
        residual_rows = residual.expand(x.shape).reshape(-1, hidden_size)
        residual_rows = residual_rows if residual_rows.stride(1) == 1 else residual_rows.contiguous()
        optional |= {"residual_ptr": residual_rows, "sum_ptr": new_residual}
        residual_stride = residual_rows.stride(0)
    _VARIANTS[x.dtype, block, kind, residual is not None].launch(
        (len(rows),), x_ptr=rows, weight_ptr=weight.contiguous(), out_ptr=out, hidden_size=hidden_size,
        x_stride=rows.stride(0), residual_stride=residual_stride, eps=eps, offset=offset, **optional,
    )  # fmt: skip
    return out, new_residual
