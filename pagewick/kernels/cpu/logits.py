"""Whole rows of logits, by the native library."""

import ctypes

import torch
from torch import Tensor

from pagewick.kernels.cpu.binding import NativeLibrary, is_plain


class ArgmaxArgs(ctypes.Structure):
    """ArgmaxArgs in csrc/logits.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "token_ids", "values")),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "stride")),
    )


class LogSoftmaxArgs(ctypes.Structure):
    """LogSoftmaxArgs in csrc/logits.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "max", "log_sum")),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "stride")),
    )


class SampleArgs(ctypes.Structure):
    """SampleArgs in csrc/logits.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "temperature", "top_k", "top_p", "uniform", "token_ids")),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "stride")),
    )


def has_rows(logits: Tensor) -> bool:
    """Whether the operations of this module are native for logits."""
    is_matrix = logits.dim() == 2 and logits.shape[1] > 0 and logits.stride(1) == 1
    return is_matrix and logits.dtype == torch.float32 and is_plain(logits)


def argmax_rows(
    library: NativeLibrary, logits: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """reference.argmax_rows for logits [N, V] float32, written into `out` [N] int64 and [N] float32 if given.

    Raises ValueError for tensors that do not fit together.
    """
    token_ids, values = out or (library.empty(logits.shape[:1], dtype) for dtype in (torch.int64, torch.float32))
    _check(logits, (token_ids,), torch.int64)
    _check(logits, (values,), torch.float32)
    args = ArgmaxArgs(logits.data_ptr(), token_ids.data_ptr(), values.data_ptr(), *logits.shape, logits.stride(0))
    library.run(library.operation("argmax_rows"), args)
    return token_ids, values


def log_softmax_stats(
    library: NativeLibrary, logits: Tensor, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """reference.log_softmax_stats for logits [N, V] float32, written into the two of `out` [N] float32 if given.

    The order of summation depends on V alone. Raises ValueError for tensors that do not fit together.
    """
    highest, log_sum = out or (library.empty(logits.shape[:1], torch.float32) for _ in range(2))
    _check(logits, (highest, log_sum), torch.float32)
    args = LogSoftmaxArgs(logits.data_ptr(), highest.data_ptr(), log_sum.data_ptr(), *logits.shape, logits.stride(0))
    library.run(library.operation("log_softmax_stats"), args)
    return highest, log_sum


def sample_tokens(
    library: NativeLibrary, logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, uniform: Tensor
) -> Tensor:
    """reference.sample_tokens for logits [N, V] float32; all parameters are [N], on the CPU.

    The order of summation depends on the row alone. Raises ValueError for tensors that do not fit together.
    """
    if not has_rows(logits):
        raise ValueError(f"logits {logits.dtype} {list(logits.shape)} must be float32 [N, V], rows in one piece")
    dtypes = torch.float32, torch.int64, torch.float64, torch.float64
    columns = [
        values.to(dtype).contiguous()
        for values, dtype in zip((temperature, top_k, top_p, uniform), dtypes, strict=True)
    ]
    if any(values.shape != logits.shape[:1] for values in columns):
        raise ValueError(f"parameters must be [{len(logits)}], not {[list(values.shape) for values in columns]}")
    out = library.empty(logits.shape[:1], torch.int64)
    args = SampleArgs(
        logits.data_ptr(),
        *(values.data_ptr() for values in columns),
        out.data_ptr(),
        *logits.shape,
        logits.stride(0),
    )
    library.run(library.operation("sample_tokens"), args)
    return out


def _check(logits: Tensor, results: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    if not has_rows(logits):
        raise ValueError(f"logits {logits.dtype} {list(logits.shape)} must be float32 [N, V], rows in one piece")
    for result in results:
        if result.shape != logits.shape[:1] or result.dtype != dtype or not result.is_contiguous():
            raise ValueError(f"out must be contiguous {dtype} [{len(logits)}]")
