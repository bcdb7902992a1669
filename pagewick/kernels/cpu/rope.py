"""Rotation of queries and keys, and storing of keys and values, by the native library."""

import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.cpu.binding import BAD_BLOCK_ID, CACHE_DTYPES, DTYPES, Operation, address, empty, is_plain
from pagewick.kernels.cpu.structs import (
    DynamicAnglesArgs,
    HeadNormArgs,
    RopeStoreArgs,
    RotaryAnglesArgs,
    RotateHeadsArgs,
)
from pagewick.kernels.kv_cache import KVCache, has_layout
from pagewick.kernels.options import PLAIN_HEADS, HeadLayout, HeadNorm, HeadOptions, Rotation
from pagewick.kernels.reference_rope import check_dynamic_scaling

_ROPE_AND_STORE = Operation("rope_and_store", RopeStoreArgs)
_ROTATE_HEADS = Operation("rotate_heads", RotateHeadsArgs)
_ROTARY_ANGLES = Operation("rotary_angles", RotaryAnglesArgs)
_DYNAMIC_ROTARY_ANGLES = Operation("dynamic_rotary_angles", DynamicAnglesArgs)
# A struct of nulls and zeros.
_NO_NORM = HeadNormArgs(weight=None, bias=None, stride=0, eps=0.0, offset=0.0, is_layer_norm=0, is_after_rotation=0)


def rope_and_store(
    qkv: Tensor, cache: KVCache, slot_mapping: Tensor, layout: HeadLayout, options: HeadOptions = PLAIN_HEADS
) -> Tensor:
    """reference.rope_and_store into a packed cache, or into a plain one without scales.

    Raises ValueError for tensors that do not fit together, IndexError for a slot outside the cache.
    """
    if not ((cache.is_packed or _is_plain_cache(qkv, cache)) and is_plain(qkv)):
        return reference.rope_and_store(qkv, cache, slot_mapping, layout, options)
    num_tokens, (num_heads, num_kv_heads, head_dim) = len(qkv), layout
    _check_qkv(qkv, cache, slot_mapping, layout)
    rotation, q_norm, k_norm, v_norm, q_scales = options
    cos, sin, interleaved = rotation or (None, None, False)
    rotary_dim, angle_stride = (0, 0) if rotation is None else check_rotation(num_tokens, head_dim, rotation)
    if q_scales is not None and (q_scales.shape != slot_mapping.shape or not _is_float32_row(q_scales)):
        raise ValueError(f"q_scales {q_scales.dtype} {list(q_scales.shape)} must be contiguous float32 [{num_tokens}]")
    q = empty((num_tokens, num_heads, head_dim), qkv.dtype)
    args = RopeStoreArgs(
        qkv=qkv.data_ptr(), cos=address(cos), sin=address(sin), q_scales=address(q_scales),
        slot_mapping=slot_mapping.data_ptr(), q=q.data_ptr(), cache=cache.data.data_ptr(),
        q_norm=_head_norm(qkv, q_norm, num_heads, head_dim), k_norm=_head_norm(qkv, k_norm, num_kv_heads, head_dim),
        v_norm=_head_norm(qkv, v_norm, num_kv_heads, head_dim), num_tokens=num_tokens, num_heads=num_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, rotary_dim=rotary_dim, qkv_stride=qkv.stride(0),
        angle_stride=angle_stride, num_blocks=cache.num_blocks, block_size=cache.block_size,
        k_scale=cache.constant_scales[0], v_scale=cache.constant_scales[1], dtype=DTYPES[qkv.dtype],
        cache_dtype=CACHE_DTYPES[cache.dtype], is_interleaved=interleaved,
        is_plain=not cache.is_packed,
    )  # fmt: skip
    if _ROPE_AND_STORE.run(args) == BAD_BLOCK_ID:
        raise IndexError(f"a slot is outside 0 .. {cache.num_blocks * cache.block_size - 1}")
    return q


def rotate_heads(x: Tensor, rotation: Rotation) -> Tensor:
    """reference.rotate_heads for heads, and for angles, in one piece. Raises ValueError for angles that do not fit."""
    is_served = x.dtype in DTYPES and is_plain(x) and x.dim() == 3 and x.stride()[1:] == (x.shape[2], 1) and x.numel()
    cos, sin, _ = rotation
    if not is_served or cos.dtype != torch.float32 or cos.stride() != sin.stride() or cos.stride(-1) != 1:
        return reference.rotate_heads(x, rotation)
    num_tokens, num_heads, head_dim = x.shape
    rotary_dim, angle_stride = check_rotation(num_tokens, head_dim, rotation)
    out = empty(x.shape, x.dtype)
    args = RotateHeadsArgs(
        x=x.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(), out=out.data_ptr(),
        num_tokens=num_tokens, num_heads=num_heads, head_dim=head_dim, rotary_dim=rotary_dim, x_stride=x.stride(0),
        angle_stride=angle_stride, dtype=DTYPES[x.dtype], is_interleaved=rotation.interleaved,
    )  # fmt: skip
    _ROTATE_HEADS.run(args)
    return out


def rotary_angles(positions: Tensor, frequencies: Tensor, scale: float = 1.0, shift: int = 0) -> tuple[Tensor, Tensor]:
    """reference.rotary_angles, computed from the float32 angle in double precision.

    The error is below 0.51 units in the last place of 1.

    Raises ValueError for tensors that do not fit together.
    """
    if frequencies.dtype != torch.float32 or not frequencies.is_cpu:
        return reference.rotary_angles(positions, frequencies, scale, shift)
    if positions.dtype != torch.int64 or positions.dim() != 1 or frequencies.dim() != 1:
        raise ValueError("positions must be [T] int64 and frequencies [R / 2] float32")
    if not positions.is_contiguous() or not frequencies.is_contiguous():
        raise ValueError("positions and frequencies must be contiguous")
    cos, sin = _empty_angles(len(positions), len(frequencies))
    args = RotaryAnglesArgs(
        positions=positions.data_ptr(), frequencies=frequencies.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(),
        num_tokens=len(positions), num_frequencies=len(frequencies), scale=scale, shift=shift,
    )  # fmt: skip
    _ROTARY_ANGLES.run(args)
    return cos, sin


def dynamic_rotary_angles(
    positions: Tensor, theta: float, rotary_dim: int, factor: float, original_max_position: int
) -> tuple[Tensor, Tensor]:
    """reference.dynamic_rotary_angles.

    Cosine and sine are within 0.51 units in the last place of those of the float32 angle. Raises ValueError as it does,
    and for tensors that do not fit together.
    """
    check_dynamic_scaling(rotary_dim, factor, original_max_position)
    if positions.dtype != torch.int64 or positions.dim() != 1 or not positions.is_contiguous():
        raise ValueError("positions must be contiguous [T] int64")
    cos, sin = _empty_angles(len(positions), rotary_dim // 2)
    args = DynamicAnglesArgs(
        positions=positions.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(), num_tokens=len(positions),
        rotary_dim=rotary_dim, original_length=original_max_position, theta=theta, factor=factor,
    )  # fmt: skip
    _DYNAMIC_ROTARY_ANGLES.run(args)
    return cos, sin


OPERATIONS = {
    rope_and_store: DTYPES,
    rotate_heads: DTYPES,
    rotary_angles: (torch.int64,),
    dynamic_rotary_angles: (torch.int64,),
}


def _empty_angles(num_tokens: int, num_angles: int) -> tuple[Tensor, Tensor]:
    shape = (num_tokens, num_angles)
    return empty(shape, torch.float32), empty(shape, torch.float32)


def _is_plain_cache(qkv: Tensor, cache: KVCache) -> bool:
    """Whether a cache that is not packed is one that the library can write to."""
    dtypes = DTYPES.keys() >= {qkv.dtype, cache.dtype}
    return dtypes and not cache.is_packed and cache.data.is_cpu and cache.data.is_contiguous() and bool(qkv.numel())


def _check_qkv(qkv: Tensor, cache: KVCache, slot_mapping: Tensor, layout: HeadLayout) -> None:
    num_heads, num_kv_heads, head_dim = layout
    width = (num_heads + 2 * num_kv_heads) * head_dim
    if qkv.dtype not in DTYPES or qkv.dim() != 2 or qkv.shape[1] != width or qkv.stride(1) != 1:
        raise ValueError(f"qkv {qkv.dtype} {list(qkv.shape)} must be [T, {width}] of a native dtype, rows in one piece")
    if cache.dtype not in CACHE_DTYPES or not has_layout(cache.data, cache.scales):
        raise ValueError("the cache must be contiguous and of a native dtype")
    if num_kv_heads not in (0, cache.num_kv_heads) or cache.head_dim != head_dim:
        raise ValueError(
            f"a cache of {cache.num_kv_heads} heads of {cache.head_dim} does not fit {num_kv_heads} of {head_dim}"
        )
    if slot_mapping.shape != qkv.shape[:1] or slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous int64 [{len(qkv)}]")


def _is_float32_row(values: Tensor) -> bool:
    return values.dtype == torch.float32 and values.is_contiguous()


def _head_norm(qkv: Tensor, norm: HeadNorm | None, num_heads: int, head_dim: int) -> HeadNormArgs:
    if norm is None:
        return _NO_NORM
    for parameter in (norm.weight,) if norm.bias is None else (norm.weight, norm.bias):
        fits = parameter.shape in ((head_dim,), (num_heads, head_dim)) and parameter.shape == norm.weight.shape
        if not fits or parameter.dtype != qkv.dtype or not parameter.is_contiguous():
            raise ValueError(
                f"norm weights and biases must be contiguous {qkv.dtype} [{head_dim}] or [{num_heads}, {head_dim}]"
            )
    stride = head_dim if norm.weight.dim() == 2 else 0
    return HeadNormArgs(
        weight=norm.weight.data_ptr(), bias=address(norm.bias), stride=stride, eps=norm.eps, offset=norm.offset,
        is_layer_norm=norm.is_layer_norm, is_after_rotation=norm.is_after_rotation,
    )  # fmt: skip


def check_rotation(num_tokens: int, head_dim: int, rotation: Rotation) -> tuple[int, int]:
    """Return rotary_dim and the number of elements from one row to the next. Raises ValueError for a wrong shape."""
    cos, sin, _ = rotation
    rotary_dim = 2 * cos.shape[-1]
    fits = cos.shape == sin.shape == (num_tokens, rotary_dim // 2) and rotary_dim <= head_dim
    if not fits or cos.dtype != torch.float32 or sin.dtype != torch.float32:
        raise ValueError(f"cos {list(cos.shape)} and sin {list(sin.shape)} must be float32 [{num_tokens}, R / 2]")
    if cos.stride() != sin.stride() or (rotary_dim > 2 and cos.stride(1) != 1):
        raise ValueError("rows of cos and sin must lie in one piece, both with the same stride")
    return rotary_dim, cos.stride(0)
