"""The native library of `csrc/`, bound with ctypes: loaded once, or a sentence that says why not.

PAGEWICK_NATIVE=0 turns it off; PAGEWICK_CPU_ISA=generic|avx2|avx512|neon forces an instruction set.
"""

import ctypes
import functools
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from pagewick.errors import ConfigError

LIBRARY_PATH = Path(__file__).parent / "libpagewick_cpu.so"
ABI_VERSION = 1  # kAbiVersion in csrc/kernels.h
INSTRUCTION_SETS = ("generic", "avx2", "avx512", "neon")
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # DType in csrc/kernels.h
MIN_HEAD_DIM, MAX_HEAD_DIM = 16, 256
BAD_LENGTHS, BAD_BLOCK_ID = 1, 2  # Status in csrc/kernels.h


class RmsNormArgs(ctypes.Structure):
    """RmsNormArgs in csrc/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "residual", "weight", "out", "new_residual")),
        *((name, ctypes.c_int64) for name in ("num_rows", "hidden_size", "x_stride", "residual_stride")),
        ("eps", ctypes.c_float),
        ("dtype", ctypes.c_int32),
    )


class AttentionArgs(ctypes.Structure):
    """AttentionArgs in csrc/kernels.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("q", "kv_cache", "block_tables", "context_lens")),
        *((name, ctypes.c_void_p) for name in ("cu_seqlens_q", "out")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_seqs", "num_heads", "num_kv_heads")),
        *((name, ctypes.c_int64) for name in ("head_dim", "num_blocks", "block_size", "max_blocks")),
        *((name, ctypes.c_int64) for name in ("block_table_stride", "q_stride", "sliding_window")),
        ("softmax_scale", ctypes.c_float),
        ("logit_soft_cap", ctypes.c_float),
        ("q_dtype", ctypes.c_int32),
        ("kv_dtype", ctypes.c_int32),
    )


class NativeLibrary:
    """The loaded library. Operations take CPU tensors and give the results of `reference`."""

    def __init__(self, handle: ctypes.CDLL) -> None:
        handle.pw_isa.restype = ctypes.c_char_p
        handle.pw_select_isa.argtypes = [ctypes.c_char_p]
        handle.pw_rms_norm.argtypes = [ctypes.POINTER(RmsNormArgs)]
        handle.pw_rms_norm.restype = None
        handle.pw_paged_attention.argtypes = [ctypes.POINTER(AttentionArgs)]
        self._handle = handle
        self._rms_norm = handle.pw_rms_norm
        self._paged_attention = handle.pw_paged_attention
        self.set_num_threads(torch.get_num_threads())

    @property
    def isa(self) -> str:
        """The instruction set in use."""
        name: bytes = self._handle.pw_isa()
        return name.decode()

    def supported_isas(self) -> list[str]:
        """The instruction sets that both this build and this processor have."""
        current = self.isa
        supported = [name for name in INSTRUCTION_SETS if not self._handle.pw_select_isa(name.encode())]
        self._handle.pw_select_isa(current.encode())
        return supported

    def select_isa(self, name: str) -> None:
        """Use another instruction set, but not while an operation runs. Raises ConfigError if it is not there."""
        if self._handle.pw_select_isa(name.encode()):
            choices = ", ".join(self.supported_isas())
            raise ConfigError(f"instruction set {name!r} is not available here; choose from: {choices}")

    def set_num_threads(self, num_threads: int) -> None:
        """Threads of an operation, the caller included. Raises ValueError below 1."""
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, not {num_threads}")
        self._handle.pw_set_num_threads(num_threads)

    def has_rms_norm(self, x: Tensor, weight: Tensor) -> bool:
        """Whether rms_norm and add_rms_norm are native for these tensors."""
        return x.dtype in DTYPES and weight.dtype == x.dtype and x.numel() > 0 and _is_plain(x)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
        """reference.rms_norm for x [..., H], written into `out` (contiguous) if given.

        Raises ValueError for tensors that do not fit together.
        """
        out = torch.empty(x.shape, dtype=x.dtype) if out is None else out
        _check_norm(x, weight, out)
        rows, stride = _as_rows(x)
        self._rms_norm(
            RmsNormArgs(
                rows.data_ptr(),
                None,
                weight.data_ptr(),
                out.data_ptr(),
                None,
                rows.shape[0],
                rows.shape[1],
                stride,
                0,
                eps,
                DTYPES[x.dtype],
            )
        )
        return out

    def add_rms_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, out: Sequence[Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """reference.add_rms_norm, written into the two tensors of `out` (contiguous) if given.

        Raises ValueError for tensors that do not fit together.
        """
        if residual.shape != x.shape:
            raise ValueError(f"residual {list(residual.shape)} and x {list(x.shape)} differ in shape")
        normed, new_residual = out or (torch.empty(x.shape, dtype=x.dtype) for _ in range(2))
        _check_norm(x, weight, normed)
        _check_norm(residual, weight, new_residual)
        rows, stride = _as_rows(x)
        residual_rows, residual_stride = _as_rows(residual)
        self._rms_norm(
            RmsNormArgs(
                rows.data_ptr(),
                residual_rows.data_ptr(),
                weight.data_ptr(),
                normed.data_ptr(),
                new_residual.data_ptr(),
                rows.shape[0],
                rows.shape[1],
                stride,
                residual_stride,
                eps,
                DTYPES[x.dtype],
            )
        )
        return normed, new_residual

    def has_paged_attention(self, q: Tensor, kv_cache: Tensor) -> bool:
        """Whether paged_attention is native for these tensors."""
        head_dim = q.shape[-1]
        return (
            q.dtype in DTYPES
            and kv_cache.dtype in DTYPES
            and head_dim % 8 == 0
            and MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM
            and _is_plain(q)
        )

    def paged_attention(
        self,
        q: Tensor,
        kv_cache: Tensor,
        block_tables: Tensor,
        context_lens: Tensor,
        cu_seqlens_q: Tensor,
        *,
        softmax_scale: float,
        sliding_window: int | None = None,
        logit_soft_cap: float | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """reference.paged_attention, written into `out` [T, H, D] (contiguous) if given.

        Raises ValueError for tensors that do not fit together, lengths that contradict each other and
        block ids outside the cache.
        """
        out = torch.empty(q.shape, dtype=q.dtype) if out is None else out
        _check_attention(q, kv_cache, block_tables, context_lens, cu_seqlens_q, out)
        if sliding_window is not None and sliding_window < 1:
            raise ValueError(f"sliding_window must be at least 1, not {sliding_window}")
        num_tokens, num_heads, head_dim = q.shape
        if q.stride(2) != 1 or q.stride(1) != head_dim:
            q = q.contiguous()
        status = self._paged_attention(
            AttentionArgs(
                q.data_ptr(),
                kv_cache.data_ptr(),
                block_tables.data_ptr(),
                context_lens.data_ptr(),
                cu_seqlens_q.data_ptr(),
                out.data_ptr(),
                num_tokens,
                context_lens.shape[0],
                num_heads,
                kv_cache.shape[2],
                head_dim,
                kv_cache.shape[0],
                kv_cache.shape[3],
                block_tables.shape[1],
                block_tables.stride(0),
                q.stride(0),
                sliding_window or 0,
                softmax_scale,
                logit_soft_cap or 0.0,
                DTYPES[q.dtype],
                DTYPES[kv_cache.dtype],
            )
        )
        if status == BAD_LENGTHS:
            raise ValueError("context_lens, cu_seqlens_q, block_tables and q contradict each other")
        if status == BAD_BLOCK_ID:
            raise ValueError(f"block_tables name a block outside the cache of {kv_cache.shape[0]} blocks")
        return out


def library() -> NativeLibrary | None:
    """The native library, or None where it is off. Raises ConfigError for a wrong PAGEWICK_CPU_ISA."""
    return _loaded()[0]


def status() -> str:
    """One sentence: the instruction set in use, or why the library is off and what to do about it."""
    native, reason = _loaded()
    return f"native kernels: {native.isa}" if native else f"native kernels off: {reason}"


def load() -> tuple[NativeLibrary | None, str]:
    """Load the library as the environment says: the library, or None and the reason. Raises as library() does."""
    if os.environ.get("PAGEWICK_NATIVE") == "0":
        return None, "PAGEWICK_NATIVE=0"
    if not LIBRARY_PATH.exists():
        return None, f"{LIBRARY_PATH.name} not built; run `make install`"
    try:
        handle = ctypes.CDLL(str(LIBRARY_PATH))
        version = handle.pw_abi_version()
    except (OSError, AttributeError) as error:
        return None, f"{LIBRARY_PATH.name} does not load ({error}); run `make install`"
    if version != ABI_VERSION:
        return None, f"{LIBRARY_PATH.name} was built from other sources; run `make install`"
    native = NativeLibrary(handle)
    if isa := os.environ.get("PAGEWICK_CPU_ISA"):
        try:
            native.select_isa(isa)
        except ConfigError as error:
            raise ConfigError(f"PAGEWICK_CPU_ISA: {error}") from None
    return native, ""


_loaded = functools.cache(load)


def _is_plain(x: Tensor) -> bool:
    """Whether x needs no gradient: native operations have none."""
    return not (x.requires_grad and torch.is_grad_enabled())


def _as_rows(x: Tensor) -> tuple[Tensor, int]:
    """x as [rows, H] with unit stride inside a row, and the elements between rows."""
    if x.dim() == 2 and x.stride(1) == 1:
        return x, x.stride(0)
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    return rows, rows.shape[1]


def _check_norm(x: Tensor, weight: Tensor, out: Tensor) -> None:
    if weight.shape != x.shape[-1:] or not weight.is_contiguous():
        raise ValueError(f"weight {list(weight.shape)} must be contiguous and fit x {list(x.shape)}")
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        raise ValueError(f"x and weight must share a native dtype, not {x.dtype} and {weight.dtype}")
    _check_out(x, out)


def _check_out(like: Tensor, out: Tensor) -> None:
    if out.shape != like.shape or out.dtype != like.dtype or not out.is_contiguous():
        raise ValueError(f"out must be contiguous {like.dtype} {list(like.shape)}")


def _check_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    out: Tensor,
) -> None:
    if q.dim() != 3 or kv_cache.dim() != 5 or kv_cache.shape[1] != 2 or not kv_cache.is_contiguous():
        raise ValueError(
            "expected q [T, H, D] and a contiguous kv_cache [num_blocks, 2, KVH, block_size, D], "
            f"not {list(q.shape)} and {list(kv_cache.shape)}"
        )
    if q.shape[2] != kv_cache.shape[4] or q.shape[1] % kv_cache.shape[2]:
        raise ValueError(f"heads of q {list(q.shape)} and kv_cache {list(kv_cache.shape)} do not fit")
    if q.dtype not in DTYPES or kv_cache.dtype not in DTYPES:
        raise ValueError(f"no native attention for {q.dtype} over {kv_cache.dtype}")
    head_dim = q.shape[2]
    if head_dim % 8 or not MIN_HEAD_DIM <= head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"no native attention for a head size of {head_dim}")
    num_seqs = context_lens.shape[0]
    if block_tables.dim() != 2 or len(block_tables) != num_seqs or cu_seqlens_q.shape != (num_seqs + 1,):
        raise ValueError("expected block_tables [B, max_blocks], context_lens [B] and cu_seqlens_q [B + 1]")
    for name, tensor in (
        ("block_tables", block_tables),
        ("context_lens", context_lens),
        ("cu_seqlens_q", cu_seqlens_q),
    ):
        if tensor.dtype != torch.int32 or tensor.stride(-1) != 1 or not tensor.is_cpu:
            raise ValueError(f"{name} must be int32 on the CPU with adjacent elements")
    _check_out(q, out)
