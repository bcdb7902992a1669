"""Whole rows of logits, by the native library."""

import ctypes

import torch
from torch import Tensor

from pagewick.kernels.cpu.binding import NativeLibrary, is_plain


class ArgmaxArgs(ctypes.Structure):
    """ArgmaxArgs in csrc/logits.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "token_ids")),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "stride")),
    )


class LogSoftmaxArgs(ctypes.Structure):
    """LogSoftmaxArgs in csrc/logits.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("logits", "max", "log_sum")),
        *((name, ctypes.c_int64) for name in ("num_rows", "vocab_size", "stride")),
    )


def has_rows(logits: Tensor) -> bool:
    """Whether the operations of this module are native for logits."""
    is_matrix = logits.dim() == 2 and logits.shape[1] > 0 and logits.stride(1) == 1
    return is_matrix and logits.dtype == torch.float32 and is_plain(logits)


def argmax_rows(library: NativeLibrary, logits: Tensor, *, out: Tensor | None = None) -> Tensor:
    """reference.argmax_rows for logits [N, V] float32, written into `out` [N] int64 if given.

    Raises ValueError for tensors that do not fit together.
    """
    out = library.empty(logits.shape[:1], torch.int64) if out is None else out
    _check(logits, (out,), torch.int64)
    args = ArgmaxArgs(logits.data_ptr(), out.data_ptr(), *logits.shape, logits.stride(0))
    library.run(library.operation("argmax_rows"), args)
    return out


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


def _check(logits: Tensor, results: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    if not has_rows(logits):
        raise ValueError(f"logits {logits.dtype} {list(logits.shape)} must be float32 [N, V], rows in one piece")
    for result in results:
        if result.shape != logits.shape[:1] or result.dtype != dtype or not result.is_contiguous():
            raise ValueError(f"out must be contiguous {dtype} [{len(logits)}]")
