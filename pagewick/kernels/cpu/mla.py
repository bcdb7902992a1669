"""Multi-head latent attention, and storing of latents, by the native library."""

import torch
from torch import Tensor

from pagewick.kernels import reference_mla
from pagewick.kernels.cpu.binding import (
    BAD_BLOCK_ID,
    BAD_LENGTHS,
    CACHE_DTYPES,
    DTYPES,
    Operation,
    address,
    check_metadata,
    check_sinks,
    empty,
    is_plain,
)
from pagewick.kernels.cpu.rope import check_rotation
from pagewick.kernels.cpu.structs import LatentAttentionArgs, StoreLatentArgs
from pagewick.kernels.kv_cache import INT4, has_layout
from pagewick.kernels.options import AttentionMetadata, Rotation

_STORE_LATENT = Operation("store_latent", StoreLatentArgs)
_LATENT_ATTENTION = Operation("latent_attention", LatentAttentionArgs)
_CACHE_DTYPES = {dtype: number for dtype, number in CACHE_DTYPES.items() if dtype != INT4}


def rope_and_store_latent(
    q: Tensor,
    latents: Tensor | None,
    cache: Tensor,
    slot_mapping: Tensor,
    *,
    norm_weight: Tensor,
    norm_eps: float,
    rotation: Rotation,
    scales: Tensor | None = None,
) -> Tensor:
    """reference_mla.rope_and_store_latent.

    Raises ValueError for tensors that do not fit together, IndexError for a slot outside the cache.
    """
    if not _is_served(q, cache):
        return reference_mla.rope_and_store_latent(
            q,
            latents,
            cache,
            slot_mapping,
            norm_weight=norm_weight,
            norm_eps=norm_eps,
            rotation=rotation,
            scales=scales,
        )
    cos, sin, interleaved = rotation
    latent_dim, rope_dim = len(norm_weight), 2 * cos.shape[-1]
    if q.dim() != 3 or q.shape[2] < rope_dim or q.stride()[1:] != (q.shape[2], 1) or q.dtype not in DTYPES:
        raise ValueError(
            f"q {q.dtype} {list(q.shape)} must be [T, H, N + {rope_dim}] of a native dtype, heads together"
        )
    num_tokens, num_heads, head_dim = q.shape
    if latents is not None:
        _check_latents(latents, q, latent_dim, rope_dim)
    if norm_weight.dtype != q.dtype or norm_weight.dim() != 1 or not norm_weight.is_contiguous():
        raise ValueError(f"norm_weight must be contiguous {q.dtype} [L], not {norm_weight.dtype}")
    check_rotation(num_tokens, rope_dim, rotation)
    _check_cache(cache, scales, latent_dim + rope_dim)
    if slot_mapping.shape != (num_tokens,) or slot_mapping.dtype != torch.int64 or not slot_mapping.is_contiguous():
        raise ValueError(f"slot_mapping must be contiguous int64 [{num_tokens}]")
    out = empty((num_tokens, num_heads, rope_dim), q.dtype)
    args = StoreLatentArgs(
        q=q.data_ptr(), latents=address(latents), norm=norm_weight.data_ptr(), cos=cos.data_ptr(),
        sin=sin.data_ptr(), slot_mapping=slot_mapping.data_ptr(), q_rope=out.data_ptr(), cache=cache.data_ptr(),
        num_tokens=num_tokens, num_heads=num_heads, nope_dim=head_dim - rope_dim, latent_dim=latent_dim,
        rope_dim=rope_dim, q_stride=q.stride(0), latent_stride=0 if latents is None else latents.stride(0),
        angle_stride=cos.stride(0), num_blocks=cache.shape[0], block_size=cache.shape[1], norm_eps=norm_eps,
        dtype=DTYPES[q.dtype], cache_dtype=_CACHE_DTYPES[cache.dtype], is_interleaved=interleaved,
        has_key=latents is not None and latents.shape[1] > latent_dim,
    )  # fmt: skip
    if _STORE_LATENT.run(args) == BAD_BLOCK_ID:
        raise IndexError(f"a slot is outside 0 .. {cache.shape[0] * cache.shape[1] - 1}")
    return out


def latent_attention(
    q_latent: Tensor,
    q_rope: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    *,
    softmax_scale: float,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """reference_mla.latent_attention.

    With a bfloat16 cache, queries and the probabilities that weigh the latents are rounded to bfloat16; so are, over
    8-bit numbers, queries, probabilities and latents where the processor multiplies bfloat16. The bits of a
    query's output depend on that query and the latents that it sees, and on the instruction set, alone.
    Raises ValueError for tensors that do not fit together, lengths that contradict each other and block ids outside
    the cache.
    """
    if not _is_served(q_latent, cache):
        return reference_mla.latent_attention(
            q_latent, q_rope, cache, metadata, softmax_scale=softmax_scale, scales=scales, sinks=sinks
        )
    _check_attention(q_latent, q_rope, metadata)
    _check_cache(cache, scales, q_latent.shape[2] + q_rope.shape[2])
    if softmax_scale <= 0:
        raise ValueError(f"softmax_scale must be above 0, not {softmax_scale}")
    check_sinks(sinks, q_latent.shape[1])
    out = empty(q_latent.shape, q_latent.dtype)
    block_tables, context_lens, cu_seqlens_q, *_ = metadata
    args = LatentAttentionArgs(
        q_latent=q_latent.data_ptr(), q_rope=q_rope.data_ptr(), cache=cache.data_ptr(),
        block_tables=block_tables.data_ptr(), context_lens=context_lens.data_ptr(),
        cu_seqlens_q=cu_seqlens_q.data_ptr(), sinks=address(sinks), out=out.data_ptr(), num_tokens=q_latent.shape[0],
        num_seqs=len(context_lens), num_heads=q_latent.shape[1], latent_dim=q_latent.shape[2],
        rope_dim=q_rope.shape[2], num_blocks=cache.shape[0], block_size=cache.shape[1],
        max_blocks=block_tables.shape[1], block_table_stride=block_tables.stride(0), softmax_scale=softmax_scale,
        dtype=DTYPES[q_latent.dtype], cache_dtype=_CACHE_DTYPES[cache.dtype],
    )  # fmt: skip
    status = _LATENT_ATTENTION.run(args)
    if status == BAD_LENGTHS:
        raise ValueError("context_lens, cu_seqlens_q, block_tables and q_latent contradict each other")
    if status == BAD_BLOCK_ID:
        raise ValueError(f"block_tables name a block outside the cache of {len(cache)} blocks")
    return out


OPERATIONS = dict.fromkeys((rope_and_store_latent, latent_attention), DTYPES)


def _is_served(x: Tensor, cache: Tensor) -> bool:
    return cache.dtype in _CACHE_DTYPES and is_plain(x)


def _check_latents(latents: Tensor, q: Tensor, latent_dim: int, rope_dim: int) -> None:
    shapes = [len(q), latent_dim + rope_dim], [len(q), latent_dim]
    if list(latents.shape) not in shapes or latents.dtype != q.dtype or latents.stride(1) != 1:
        raise ValueError(
            f"latents {latents.dtype} {list(latents.shape)} must be {q.dtype} {shapes[0]}, or {shapes[1]} without keys"
        )


def _check_cache(cache: Tensor, scales: Tensor | None, size: int) -> None:
    if cache.dim() != 3 or cache.shape[2] != size or cache.dtype not in _CACHE_DTYPES or not has_layout(cache, scales):
        raise ValueError(
            f"cache {cache.dtype} {list(cache.shape)} must be contiguous [num_blocks, block_size, {size}] "
            "of a native dtype"
        )


def _check_attention(q_latent: Tensor, q_rope: Tensor, metadata: AttentionMetadata) -> None:
    if q_latent.dim() != 3 or q_rope.shape[:-1] != q_latent.shape[:-1] or q_latent.shape[2] == 0:
        raise ValueError(
            f"q_latent {list(q_latent.shape)} and q_rope {list(q_rope.shape)} must be [T, H, L] and [T, H, R]"
        )
    if q_latent.dtype not in DTYPES or q_rope.dtype != q_latent.dtype:
        raise ValueError(f"no native latent attention for {q_latent.dtype} and {q_rope.dtype}")
    if not q_latent.is_contiguous() or not q_rope.is_contiguous():
        raise ValueError("q_latent and q_rope must be contiguous")
    check_metadata(metadata)
