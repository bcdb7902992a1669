"""Rotation of queries and keys, and storing of keys and values, by the native library."""

import ctypes

import torch
from torch import Tensor

from pagewick.kernels.cpu.binding import BAD_BLOCK_ID, DTYPES, NativeLibrary, is_plain
from pagewick.kernels.head_norm import HeadNorm
from pagewick.kernels.kv_cache import KVCache
from pagewick.kernels.reference_rope import check_dynamic_scaling


class HeadNormArgs(ctypes.Structure):
    """HeadNormArgs in csrc/rope.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        ("stride", ctypes.c_int64),
        *((name, ctypes.c_float) for name in ("eps", "offset")),
        ("is_layer_norm", ctypes.c_int32),
    )


class RopeStoreArgs(ctypes.Structure):
    """RopeStoreArgs in csrc/rope.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "cos", "sin", "slot_mapping", "q", "cache")),
        *((name, HeadNormArgs) for name in ("q_norm", "k_norm")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_heads", "num_kv_heads", "head_dim", "rotary_dim")),
        *((name, ctypes.c_int64) for name in ("qkv_stride", "angle_stride", "num_blocks", "block_size")),
        *((name, ctypes.c_int32) for name in ("dtype", "cache_dtype", "is_interleaved")),
    )


class RotaryAnglesArgs(ctypes.Structure):
    """RotaryAnglesArgs in csrc/rope.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("positions", "frequencies", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "num_frequencies")),
        ("scale", ctypes.c_float),
    )


class DynamicAnglesArgs(ctypes.Structure):
    """DynamicAnglesArgs in csrc/rope.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("positions", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("num_tokens", "rotary_dim", "original_length")),
        *((name, ctypes.c_double) for name in ("theta", "factor")),
    )


def has_rope_and_store(qkv: Tensor, cache: KVCache) -> bool:
    """Whether rope_and_store is native for these."""
    return cache.is_packed and qkv.dtype in DTYPES and is_plain(qkv)


def rope_and_store(
    library: NativeLibrary,
    qkv: Tensor,
    cache: KVCache,
    slot_mapping: Tensor,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
    q_norm: HeadNorm | None = None,
    k_norm: HeadNorm | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """reference.rope_and_store into a packed cache; the queries are written into `out` (contiguous) if given.

    Raises ValueError for tensors that do not fit together, IndexError for a slot outside the cache.
    """
    num_tokens = len(qkv)
    q = library.empty((num_tokens, num_heads, head_dim), qkv.dtype) if out is None else out
    _check_qkv(qkv, cache, slot_mapping, (num_heads, num_kv_heads, head_dim), q)
    rotary_dim, angle_stride = _check_angles(num_tokens, head_dim, cos, sin)
    args = RopeStoreArgs(
        qkv.data_ptr(), _address(cos), _address(sin), slot_mapping.data_ptr(), q.data_ptr(), cache.data.data_ptr(),
        _head_norm(qkv, q_norm, num_heads, head_dim), _head_norm(qkv, k_norm, num_kv_heads, head_dim),
        num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, qkv.stride(0), angle_stride, cache.num_blocks,
        cache.block_size, DTYPES[qkv.dtype], DTYPES[cache.dtype], int(interleaved),
    )  # fmt: skip
    if library.run(library.operation("rope_and_store"), args) == BAD_BLOCK_ID:
        raise IndexError(f"a slot is outside 0 .. {cache.num_blocks * cache.block_size - 1}")
    return q


def has_rotary_angles(positions: Tensor, frequencies: Tensor) -> bool:
    """Whether rotary_angles is native for these."""
    return positions.dtype == torch.int64 and frequencies.dtype == torch.float32 and frequencies.is_cpu


def rotary_angles(
    library: NativeLibrary,
    positions: Tensor,
    frequencies: Tensor,
    scale: float = 1.0,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """reference.rotary_angles, written into the two tensors of `out` (contiguous) if given.

    Computed in double precision of the float32 angle, so within 0.51 units in the last place before the scale.
    Raises ValueError for tensors that do not fit together.
    """
    if not has_rotary_angles(positions, frequencies) or positions.dim() != 1 or frequencies.dim() != 1:
        raise ValueError("positions must be [T] int64 and frequencies [R / 2] float32")
    if not positions.is_contiguous() or not frequencies.is_contiguous():
        raise ValueError("positions and frequencies must be contiguous")
    shape = (len(positions), len(frequencies))
    cos, sin = _angles_out(library, shape, out)
    args = RotaryAnglesArgs(positions.data_ptr(), frequencies.data_ptr(), cos.data_ptr(), sin.data_ptr(), *shape, scale)
    library.run(library.operation("rotary_angles"), args)
    return cos, sin


def dynamic_rotary_angles(
    library: NativeLibrary,
    positions: Tensor,
    theta: float,
    rotary_dim: int,
    factor: float,
    original_max_position: int,
    *,
    out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """reference.dynamic_rotary_angles, written into the two tensors of `out` (contiguous) if given.

    Cosine and sine are within 0.51 units in the last place of those of the float32 angle. Raises ValueError as it does,
    and for tensors that do not fit together.
    """
    check_dynamic_scaling(rotary_dim, factor, original_max_position)
    if positions.dtype != torch.int64 or positions.dim() != 1 or not positions.is_contiguous():
        raise ValueError("positions must be contiguous [T] int64")
    cos, sin = _angles_out(library, (len(positions), rotary_dim // 2), out)
    args = DynamicAnglesArgs(
        positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), len(positions), rotary_dim, original_max_position,
        theta, factor,
    )  # fmt: skip
    library.run(library.operation("dynamic_rotary_angles"), args)
    return cos, sin


def _angles_out(
    library: NativeLibrary, shape: tuple[int, int], out: tuple[Tensor, Tensor] | None
) -> tuple[Tensor, Tensor]:
    cos, sin = out or (library.empty(shape, torch.float32) for _ in range(2))
    for result in (cos, sin):
        if result.shape != shape or result.dtype != torch.float32 or not result.is_contiguous():
            raise ValueError(f"out must be contiguous float32 {list(shape)}")
    return cos, sin


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_qkv(qkv: Tensor, cache: KVCache, slot_mapping: Tensor, heads: tuple[int, int, int], q: Tensor) -> None:
    num_heads, num_kv_heads, head_dim = heads
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dtype not in DTYPES or qkv.dim() != 2 or qkv.shape[1] != width or qkv.stride(1) != 1:
        raise ValueError(f"qkv {qkv.dtype} {list(qkv.shape)} must be [T, {width}] of a native dtype, rows in one piece")
    if not cache.is_packed or cache.dtype not in DTYPES or not cache.data.is_contiguous():
        raise ValueError("the cache must be packed, contiguous and of a native dtype")
    if cache.num_kv_heads != num_kv_heads or cache.head_dim != head_dim:
        raise ValueError(
            f"a cache of {cache.num_kv_heads} heads of {cache.head_dim} does not fit {num_kv_heads} of {head_dim}"
        )
    if slot_mapping.shape != qkv.shape[:1] or slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous int64 [{len(qkv)}]")
    if q.shape != (len(qkv), num_heads, head_dim) or q.dtype != qkv.dtype or not q.is_contiguous():
        raise ValueError(f"out must be contiguous {qkv.dtype} {[len(qkv), num_heads, head_dim]}")


def _head_norm(qkv: Tensor, norm: HeadNorm | None, num_heads: int, head_dim: int) -> HeadNormArgs:
    if norm is None:
        return HeadNormArgs()
    for parameter in (norm.weight,) if norm.bias is None else (norm.weight, norm.bias):
        fits = parameter.shape in ((head_dim,), (num_heads, head_dim)) and parameter.shape == norm.weight.shape
        if not fits or parameter.dtype != qkv.dtype or not parameter.is_contiguous():
            raise ValueError(
                f"norm weights and biases must be contiguous {qkv.dtype} [{head_dim}] or [{num_heads}, {head_dim}]"
            )
    stride = head_dim if norm.weight.dim() == 2 else 0
    return HeadNormArgs(
        norm.weight.data_ptr(), _address(norm.bias), stride, norm.eps, norm.offset, int(norm.is_layer_norm)
    )


def _check_angles(num_tokens: int, head_dim: int, cos: Tensor | None, sin: Tensor | None) -> tuple[int, int]:
    """rotary_dim and the elements between rows."""
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError("cos and sin come together")
        return 0, 0
    rotary_dim = 2 * cos.shape[-1]
    fits = cos.shape == sin.shape == (num_tokens, rotary_dim // 2) and rotary_dim <= head_dim
    if not fits or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} must be float32 [{num_tokens}, R / 2]")
    if cos.stride() != sin.stride() or (rotary_dim > 2 and cos.stride(1) != 1):
        raise ValueError("rows of cos and sin must lie in one piece, both with the same stride")
    return rotary_dim, cos.stride(0)
