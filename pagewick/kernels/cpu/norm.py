"""Normalisation by the native library."""

import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import DTYPES, Operation, address, as_rows, empty, is_plain
from pagewick.kernels.cpu.structs import NormArgs

_RMS_NORM = Operation("rms_norm", NormArgs)
_LAYER_NORM = Operation("layer_norm", NormArgs)


def rms_norm(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, out: Tensor | None = None) -> Tensor:
    """reference.rms_norm for x [..., H]. Raises ValueError for tensors that do not fit together."""
    if not _is_served(x, weight) or (out is not None and not _has_rows(out)):
        return reference.rms_norm(x, weight, eps, weight_offset, out)
    return _run(_RMS_NORM, x, None, weight, None, eps, weight_offset, out)[0]


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """reference.layer_norm for x [..., H]. Raises ValueError for tensors that do not fit together."""
    if not _is_served(x, weight):
        return reference.layer_norm(x, weight, bias, eps)
    return _run(_LAYER_NORM, x, None, weight, bias, eps)[0]


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """reference.add_rms_norm. Raises ValueError for tensors that do not fit together."""
    if not _is_served(x, weight):
        return reference.add_rms_norm(x, residual, weight, eps, weight_offset)
    return _run(_RMS_NORM, x, residual, weight, None, eps, weight_offset)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """reference.add_layer_norm. Raises ValueError for tensors that do not fit together."""
    if not _is_served(x, weight):
        return reference.add_layer_norm(x, residual, weight, bias, eps)
    return _run(_LAYER_NORM, x, residual, weight, bias, eps)


OPERATIONS = dict.fromkeys((rms_norm, layer_norm, add_rms_norm, add_layer_norm), DTYPES)


def _is_served(x: Tensor, weight: Tensor) -> bool:
    return weight.dtype == x.dtype and x.numel() > 0 and is_plain(x)


def _has_rows(out: Tensor) -> bool:
    return out.is_contiguous() or (out.dim() == 2 and out.stride(1) == 1)


def _run(
    operation: Operation[NormArgs],
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the norm, in `out` if that is given, and the new residual, which is x where there is no residual."""
    has_wide_residual = operation is _RMS_NORM and residual is not None and residual.dtype == torch.float32 != x.dtype
    if residual is not None and (residual.shape != x.shape or not (residual.dtype == x.dtype or has_wide_residual)):
        raise ValueError(f"residual {list(residual.shape)} and x {list(x.shape)} differ in shape or dtype")
    for parameter in (weight,) if bias is None else (weight, bias):
        if parameter.shape != x.shape[-1:] or not parameter.is_contiguous():
            raise ValueError(f"weight or bias {list(parameter.shape)} must be contiguous and fit x {list(x.shape)}")
        if x.dtype not in DTYPES or parameter.dtype != x.dtype:
            raise ValueError(f"x, weight and bias must share a native dtype, not {x.dtype} and {parameter.dtype}")
    if out is not None and (out.shape != x.shape or out.dtype != x.dtype):
        raise ValueError(f"out {list(out.shape)} and x {list(x.shape)} differ in shape or dtype")
    out = empty(x.shape, x.dtype) if out is None else out
    new_residual = None if residual is None else empty(x.shape, residual.dtype)
    rows, stride = as_rows(x)
    residual_rows, residual_stride = (None, 0) if residual is None else as_rows(residual)
    args = NormArgs(
        x=rows.data_ptr(), residual=address(residual_rows), weight=weight.data_ptr(), bias=address(bias),
        out=out.data_ptr(), new_residual=address(new_residual), num_rows=rows.shape[0], hidden_size=rows.shape[1],
        x_stride=stride, residual_stride=residual_stride, out_stride=as_rows(out)[1], eps=eps,
        weight_offset=weight_offset, has_wide_residual=has_wide_residual, dtype=DTYPES[x.dtype],
    )  # fmt: skip
    operation.run(args)
    return out, x if new_residual is None else new_residual
