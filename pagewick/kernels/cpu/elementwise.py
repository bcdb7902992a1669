"""Activation functions, their sparse inputs, sums, gates, products, caps, limits and gathered columns, natively."""

import math

import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import BAD_ROW, DTYPES, Operation, address, as_rows, empty, is_plain
from pagewick.kernels.cpu.structs import (
    Activation,
    ActivationArgs,
    Elementwise,
    ElementwiseArgs,
    GatherColumnsArgs,
    GaussianTopKArgs,
    WidenArgs,
    XieluArgs,
)

ACTIVATION_KINDS = {kind.name.lower(): kind.value for kind in Activation}

_ACTIVATION = Operation("activation", ActivationArgs)
_ELEMENTWISE = Operation("elementwise", ElementwiseArgs)
_GATHER_COLUMNS = Operation("gather_columns", GatherColumnsArgs)
_GAUSSIAN_TOP_K = Operation("gaussian_top_k", GaussianTopKArgs)
_WIDEN = Operation("widen", WidenArgs)
_XIELU = Operation("xielu", XieluArgs)
_KINDS = {kind.name.lower(): kind.value for kind in Elementwise}


def activation(x: Tensor, kind: str) -> Tensor:
    """reference.activation for x [..., I]. Raises ValueError for another dtype than the library's."""
    return _activate(x, kind, x.shape[-1], is_gated=False) if _is_served(x) else reference.activation(x, kind)


def gated_activation(x: Tensor, kind: str) -> Tensor:
    """reference.gated_activation for x [..., 2 * I]: [..., I].

    Raises ValueError for another dtype than the library's and for an x that has no two halves.
    """
    if not _is_served(x):
        return reference.gated_activation(x, kind)
    if x.shape[-1] % 2:
        raise ValueError(f"x {list(x.shape)} has no two halves")
    return _activate(x, kind, x.shape[-1] // 2, is_gated=True)


def gaussian_top_k(x: Tensor, factor: float) -> Tensor:
    """reference.gaussian_top_k for x [..., I]. Raises ValueError for another dtype than the library's."""
    if not _is_served(x):
        return reference.gaussian_top_k(x, factor)
    if x.dtype not in DTYPES:
        raise ValueError(f"no native gaussian_top_k of {x.dtype}")
    out = empty(x.shape, x.dtype)
    rows, stride = as_rows(x)
    args = GaussianTopKArgs(
        x=rows.data_ptr(), out=out.data_ptr(), num_rows=rows.shape[0], size=rows.shape[1], x_stride=stride,
        factor=factor, dtype=DTYPES[x.dtype],
    )  # fmt: skip
    _GAUSSIAN_TOP_K.run(args)
    return out


def add(a: Tensor, b: Tensor) -> Tensor:
    """reference.add for a [..., H]. Raises ValueError for tensors that do not fit together."""
    return _run("add", a, b, 0.0) if _are_served(a, b) else reference.add(a, b)


def sigmoid_gate(x: Tensor, gate: Tensor) -> Tensor:
    """reference.sigmoid_gate for x, gate [..., H]. Raises ValueError for tensors that do not fit together."""
    return _run("sigmoid_gate", x, gate, 0.0) if _are_served(x, gate) else reference.sigmoid_gate(x, gate)


def multiply(a: Tensor, b: Tensor) -> Tensor:
    """reference.multiply for a [..., H]. Raises ValueError for tensors that do not fit together."""
    return _run("multiply", a, b, 0.0) if _are_served(a, b) else reference.multiply(a, b)


def scale(x: Tensor, factor: float) -> Tensor:
    """reference.scale for x [..., H]. Raises ValueError for another dtype than the library's."""
    return _run("scale", x, None, factor) if _is_served(x) else reference.scale(x, factor)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """reference.soft_cap for x [..., H]; relative error below 2^-20.

    Raises ValueError for another dtype than the library's.
    """
    return _run("soft_cap", x, None, cap) if _is_served(x) else reference.soft_cap(x, cap)


def limit(x: Tensor, bound: float) -> Tensor:
    """reference.limit for x [..., H]. Raises ValueError for another dtype than the library's."""
    return _run("limit", x, None, bound) if _is_served(x) else reference.limit(x, bound)


def xielu(x: Tensor, positive: float, negative: float, beta: float, eps: float) -> Tensor:
    """reference.xielu for x [..., H]. Raises ValueError for another dtype than the library's."""
    if not _is_served(x):
        return reference.xielu(x, positive, negative, beta, eps)
    if x.dtype not in DTYPES:
        raise ValueError(f"no native xielu of {x.dtype}")
    out = empty(x.shape, x.dtype)
    rows, stride = as_rows(x)
    args = XieluArgs(
        x=rows.data_ptr(), out=out.data_ptr(), num_rows=rows.shape[0], size=rows.shape[1], x_stride=stride,
        positive=positive, negative=negative, beta=beta, eps=eps, dtype=DTYPES[x.dtype],
    )  # fmt: skip
    _XIELU.run(args)
    return out


def widen(x: Tensor) -> Tensor:
    """reference.widen for x [..., H]."""
    if x.dtype == torch.float32:
        return x
    if not _is_served(x):
        return reference.widen(x)
    out = empty(x.shape, torch.float32)
    rows, stride = as_rows(x)
    args = WidenArgs(
        x=rows.data_ptr(), out=out.data_ptr(), num_rows=rows.shape[0], size=rows.shape[1], x_stride=stride,
        dtype=DTYPES[x.dtype],
    )  # fmt: skip
    _WIDEN.run(args)
    return out


def gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    """reference.gather_columns for x [..., H].

    Raises IndexError for a column outside x, ValueError for columns that are not a list of int64.
    """
    if not _is_served(x):
        return reference.gather_columns(x, columns)
    if columns.dtype != torch.int64 or columns.dim() != 1 or not columns.is_contiguous() or not columns.is_cpu:
        raise ValueError(f"columns must be contiguous int64 on the CPU, not {columns.dtype} {list(columns.shape)}")
    out = empty((*x.shape[:-1], len(columns)), x.dtype)
    rows, stride = as_rows(x)
    args = GatherColumnsArgs(
        x=rows.data_ptr(), columns=columns.data_ptr(), out=out.data_ptr(), num_rows=rows.shape[0],
        num_columns=rows.shape[1], size=len(columns), x_stride=stride, dtype=DTYPES[x.dtype],
    )  # fmt: skip
    if _GATHER_COLUMNS.run(args) == BAD_ROW:
        raise IndexError(f"a column is outside 0 .. {rows.shape[1] - 1}")
    return out


OPERATIONS = dict.fromkeys(
    (
        *(activation, gated_activation, gaussian_top_k, xielu),
        *(add, multiply, scale, sigmoid_gate, soft_cap, limit, widen, gather_columns),
    ),
    DTYPES,
)


def _is_served(x: Tensor) -> bool:
    return x.numel() > 0 and is_plain(x)


def _are_served(x: Tensor, other: Tensor) -> bool:
    return _is_served(x) and other.dtype == x.dtype and is_plain(other)


def _activate(x: Tensor, kind: str, size: int, *, is_gated: bool) -> Tensor:
    if x.dtype not in DTYPES:
        raise ValueError(f"no native activation of {x.dtype}")
    out = empty((*x.shape[:-1], size), x.dtype)
    rows, stride = as_rows(x)
    args = ActivationArgs(
        x=rows.data_ptr(), out=out.data_ptr(), num_rows=len(rows), size=size, x_stride=stride, dtype=DTYPES[x.dtype],
        kind=ACTIVATION_KINDS[kind], is_gated=is_gated,
    )  # fmt: skip
    _ACTIVATION.run(args)
    return out


def _run(kind: str, x: Tensor, other: Tensor | None, factor: float) -> Tensor:
    if x.dtype not in DTYPES:
        raise ValueError(f"no native {kind} of {x.dtype}")
    repeat = 1 if other is None or other.shape == x.shape else _repeat(x, other)
    out = empty(x.shape, x.dtype)
    rows, stride = as_rows(x)
    other_rows, other_stride = (None, 0) if other is None else as_rows(other)
    args = ElementwiseArgs(
        x=rows.data_ptr(), other=address(other_rows), out=out.data_ptr(), num_rows=rows.shape[0], size=rows.shape[1],
        x_stride=stride, other_stride=other_stride, other_repeat=repeat, factor=factor, dtype=DTYPES[x.dtype],
        kind=_KINDS[kind],
    )  # fmt: skip
    _ELEMENTWISE.run(args)
    return out


def _repeat(x: Tensor, other: Tensor) -> int:
    """Return how many successive rows of x share a row of `other`. Raises ValueError if they do not fit together."""
    shape, last = (1,) * (x.dim() - other.dim()) + tuple(other.shape), x.dim() - 1
    shared = next((dim for dim, sizes in enumerate(zip(shape, x.shape, strict=False)) if sizes[0] != sizes[1]), last)
    expected = (*x.shape[:shared], *(1,) * (last - shared), x.shape[-1])
    if shape != expected:
        raise ValueError(f"{list(x.shape)} and {list(other.shape)} do not fit together")
    return math.prod(x.shape[shared:-1])
