"""Functions of single numbers: activations, with or without a gate, products with a factor, soft caps and limits.

Definitions: activation, gated_activation, scale, sigmoid_gate, soft_cap and limit of reference.py, computed in float32
and rounded once.
PyTorch would run a kernel for every step of them, and write float32 in between. A result depends on its own operands
alone.

Dimensions: N rows, I numbers of a row of the result.
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

BLOCK = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MAX_ROWS = 65535


@triton.jit
def _tanh(x):
    """Return tanh(x) by the exponential of a number that is not positive, so that nothing overflows."""
    small = tl.exp(-2.0 * tl.abs(x))
    size = (1.0 - small) / (1.0 + small)
    # Where the difference from 1 has few digits left, the series: its next term is below 2^-24 of the first.
    square = x * x
    series = tl.abs(x) * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0))))
    size = tl.where(tl.abs(x) < 0.125, series, size)
    return tl.where(x < 0, -size, size)


@triton.jit
def _softplus(x):
    """Return log(1 + exp(x)) = max(x, 0) + log(1 + t) with t = exp(-|x|), and log(1 + t) = 2 atanh(t / (2 + t))."""
    small = tl.exp(-tl.abs(x))
    ratio = small / (2.0 + small)
    square = ratio * ratio
    # The series of atanh, whose argument is at most 1 / 3: its next term is below 2^-29 of the first.
    series = 1.0 / 9.0 + square * (1.0 / 11.0 + square * (1.0 / 13.0 + square * (1.0 / 15.0)))
    series = 1.0 + square * (1.0 / 3.0 + square * (1.0 / 5.0 + square * (1.0 / 7.0 + square * series)))
    return tl.where(x < 0, 0.0, x) + 2.0 * ratio * series


@triton.jit
def _activate(x, factor, KIND: tl.constexpr):
    if KIND == "silu":
        return x / (1.0 + tl.exp(-x))
    elif KIND == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        # (1 + tanh(u)) / 2 is the logistic function of 2 u, which keeps its digits where tanh(u) is near -1.
        return x / (1.0 + tl.exp(-1.5957691216057308 * (x + 0.044715 * x * x * x)))
    elif KIND == "relu":
        return tl.where(x < 0, 0.0, x)
    elif KIND == "quick_gelu":
        return x / (1.0 + tl.exp(-1.702 * x))
    elif KIND == "relu2":
        positive = tl.where(x < 0, 0.0, x)
        return positive * positive
    elif KIND == "clamped_swish":
        bounded = tl.where(x > 7.0, 7.0, x)
        return bounded / (1.0 + tl.exp(-1.702 * bounded))
    elif KIND == "clamped_silu10":
        bounded = tl.where(x > 10.0, 10.0, x)
        return bounded / (1.0 + tl.exp(-bounded))
    elif KIND == "softplus":
        return _softplus(x)
    elif KIND == "silu_within4":
        silu = x / (1.0 + tl.exp(-x))
        return tl.where(silu > 4.0, 4.0, silu)
    elif KIND == "silu_within5":
        silu = x / (1.0 + tl.exp(-x))
        return tl.where(silu > 5.0, 5.0, silu)
    elif KIND == "silu_within7":
        silu = x / (1.0 + tl.exp(-x))
        return tl.where(silu > 7.0, 7.0, silu)
    elif KIND == "silu_within16":
        silu = x / (1.0 + tl.exp(-x))
        return tl.where(silu > 16.0, 16.0, silu)
    elif KIND == "scale":
        return x * factor
    elif KIND == "limit":
        below = tl.where(x > factor, factor, x)
        return tl.where(below < -factor, -factor, below)
    else:
        return factor * _tanh(tl.math.div_rn(x, factor))


@triton.jit(do_not_specialize=["factor"])
def map_rows(x_ptr, out_ptr, size, x_stride, factor, BLOCK: tl.constexpr, KIND: tl.constexpr, IS_GATED: tl.constexpr):
    """Write KIND of BLOCK numbers of row program_id(0) of x [N, I] to out [N, I]; gated, x is [N, 2 * I] = (gate, up).

    The rows of out follow each other.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = _activate(x, factor, KIND)
    if IS_GATED:
        up = tl.load(x_ptr + row * x_stride + size + columns, mask=inside, other=0.0).to(tl.float32)
        if KIND == "clamped_swish":
            up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up)) + 1.0
        elif KIND == "clamped_silu10":
            up = tl.where(up > 10.0, 10.0, tl.where(up < -10.0, -10.0, up))
        elif KIND == "silu_within4":
            up = tl.where(up > 4.0, 4.0, tl.where(up < -4.0, -4.0, up))
        elif KIND == "silu_within5":
            up = tl.where(up > 5.0, 5.0, tl.where(up < -5.0, -5.0, up))
        elif KIND == "silu_within7":
            up = tl.where(up > 7.0, 7.0, tl.where(up < -7.0, -7.0, up))
        elif KIND == "silu_within16":
            up = tl.where(up > 16.0, 16.0, tl.where(up < -16.0, -16.0, up))
        result *= up
    tl.store(out_ptr + row * size + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def gate_rows(x_ptr, gate_ptr, out_ptr, size, x_stride, gate_stride, BLOCK: tl.constexpr):
    """Write BLOCK numbers of row program_id(0) of x [N, I] to out [N, I], times the sigmoid of those of gate [N, I]."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < size
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    result = x / (1.0 + tl.exp(-gate))
    tl.store(out_ptr + row * size + columns, result.to(out_ptr.dtype.element_ty), mask=inside)


def _variant(dtype: torch.dtype, kind: str, is_gated: bool) -> Variant:
    number = f"*{TYPE_NAMES[dtype]}"
    return Variant(
        name=f"{'gated_' if is_gated else ''}{kind}_{TYPE_NAMES[dtype]}",
        kernel=map_rows,
        signature={"x_ptr": number, "out_ptr": number, "size": "i32:16", "x_stride": "i32:16", "factor": "fp32"},
        constexprs={"BLOCK": BLOCK, "KIND": kind, "IS_GATED": is_gated},
        num_warps=4,
        in_sample=(dtype, kind, is_gated) == (torch.bfloat16, "gelu_tanh", True),
    )


def _gate_variant(dtype: torch.dtype) -> Variant:
    number = f"*{TYPE_NAMES[dtype]}"
    sizes = dict.fromkeys(("size", "x_stride", "gate_stride"), "i32:16")
    return Variant(
        name=f"sigmoid_gate_{TYPE_NAMES[dtype]}",
        kernel=gate_rows,
        signature={"x_ptr": number, "gate_ptr": number, "out_ptr": number, **sizes},
        constexprs={"BLOCK": BLOCK},
        in_sample=dtype == torch.bfloat16,
    )


_PLAIN = ("scale", "soft_cap", "limit")
_GATES = {dtype: _gate_variant(dtype) for dtype in _DTYPES}
_VARIANTS = {key: _variant(*key) for key in itertools.product(_DTYPES, reference.ACTIVATIONS, (False, True))} | {
    (dtype, kind, False): _variant(dtype, kind, False) for dtype, kind in itertools.product(_DTYPES, _PLAIN)
}
VARIANTS = (*_VARIANTS.values(), *_GATES.values())

# The SiLU of a gate of 14,336 times as many numbers; about 8 operations for each.
WORKLOADS = tuple(
    Workload("gated_activation", f"{rows} rows of 2 x 14,336, bf16", 3 * rows * 14336 * 2, 8 * rows * 14336, False)
    for rows in (1, 256, 8192)
)


def activation(x: Tensor, kind: str) -> Tensor:
    """reference.activation for x [..., I]."""
    return _run(x, kind, x.shape[-1]) if _is_served(x) else by_definition(reference.activation, x, kind)


def gated_activation(x: Tensor, kind: str) -> Tensor:
    """reference.gated_activation for x [..., 2 * I]: [..., I]."""
    if not _is_served(x) or x.shape[-1] % 2:
        return by_definition(reference.gated_activation, x, kind)
    return _run(x, kind, x.shape[-1] // 2, is_gated=True)


def scale(x: Tensor, factor: float) -> Tensor:
    """reference.scale for x [..., H]."""
    return _run(x, "scale", x.shape[-1], factor) if _is_served(x) else by_definition(reference.scale, x, factor)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """reference.sigmoid_gate for x, gate [..., H]."""
    if not _is_served(x) or gate.dtype != x.dtype or gate.shape != x.shape:
        return by_definition(reference.sigmoid_gate, x, gate)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows, gates = _as_rows(x), _as_rows(gate)
    _GATES[x.dtype].launch(
        (len(rows), -(-x.shape[-1] // BLOCK)), x_ptr=rows, gate_ptr=gates, out_ptr=out, size=x.shape[-1],
        x_stride=rows.stride(0), gate_stride=gates.stride(0),
    )  # fmt: skip
    return out


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """reference.soft_cap for x [..., H]."""
    return _run(x, "soft_cap", x.shape[-1], cap) if _is_served(x) else by_definition(reference.soft_cap, x, cap)


def limit(x: Tensor, bound: float) -> Tensor:
    """reference.limit for x [..., H]."""
    return _run(x, "limit", x.shape[-1], bound) if _is_served(x) else by_definition(reference.limit, x, bound)


def _is_served(x: Tensor) -> bool:
    return x.dtype in _DTYPES and x.dim() > 0 and x.shape[-1] > 0 and -(-x.shape[-1] // BLOCK) <= _MAX_ROWS


def _as_rows(x: Tensor) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _run(x: Tensor, kind: str, size: int, factor: float = 1.0, *, is_gated: bool = False) -> Tensor:
    out = torch.empty((*x.shape[:-1], size), dtype=x.dtype, device=x.device)
    rows = _as_rows(x)
    _VARIANTS[x.dtype, kind, is_gated].launch(
        (len(rows), -(-size // BLOCK)), x_ptr=rows, out_ptr=out, size=size, x_stride=rows.stride(0), factor=factor
    )
    return out
