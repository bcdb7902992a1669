"""Norm of latents and rotation of their keys, storing of both, and rotation of queries, in one pass.

Definition: rope_and_store_latent of reference_mla.py, with quantize_vectors of reference_kv.py for 8-bit caches. A
token's result depends on that token alone, bit for bit. A slot outside the cache is not noticed.

Dimensions: T tokens, H query heads, L elements of a latent, R rotated elements of a query head and of the key.
"""

from __future__ import annotations

import itertools

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference_mla
from pagewick.kernels.options import Rotation
from pagewick.kernels.triton.cache_numbers import FORMATS, quantize_rows
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.mla import SIZES
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload

# Heads of a program.
BLOCK_H = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def _turned(rows_ptr, dims, partners, inside, cos, sin, is_first):
    """Return rows [n, R], rotated, in float32. Each number is rotated with that at `partners`."""
    x = tl.load(rows_ptr + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(rows_ptr + partners[None, :], mask=inside, other=0.0).to(tl.float32)
    return x * cos[None, :] + tl.where(is_first[None, :], -partner, partner) * sin[None, :]


@triton.jit
def _store(x, place_ptr, scale_ptr, dims, FORMAT: tl.constexpr):
    """Store a row x [1, n] in a cache, and its scale."""
    if FORMAT == "plain":
        tl.store(place_ptr + dims[None, :], x.to(place_ptr.dtype.element_ty))
    else:
        numbers, scales = quantize_rows(x, tl.zeros((1,), tl.float32), FORMAT)
        tl.store(place_ptr + dims[None, :], numbers)
        tl.store(scale_ptr + tl.arange(0, 1), scales)


@triton.jit(do_not_specialize=["eps", "interleaved"])
def latent_store(
    q_ptr, latents_ptr, weight_ptr, out_ptr, cos_ptr, sin_ptr, slots_ptr, cache_ptr, scales_ptr, num_heads,
    q_stride_token, q_stride_head, latents_stride, angle_stride, block_size, cache_stride_block, scales_stride_block,
    eps, interleaved, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_H: tl.constexpr, FORMAT: tl.constexpr,
):  # fmt: skip
    """Process token program_id(0): query heads in the first programs of dimension 1, its latent and key in the last.

    q: the rotated parts [T, H, R]. latents: [T, L + R]. out: [T, H, R]. cos, sin: [T, R / 2] float32. slots: [T] int64.
    """
    token, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    half: tl.constexpr = ROPE // 2
    dims = tl.arange(0, ROPE)
    in_first_half = dims < half
    is_first = tl.where(interleaved != 0, dims % 2 == 0, in_first_half)
    partners = tl.where(interleaved != 0, dims ^ 1, tl.where(in_first_half, dims + half, dims - half))
    angles = tl.where(interleaved != 0, dims // 2, tl.where(in_first_half, dims, dims - half)) + token * angle_stride
    cos, sin = tl.load(cos_ptr + angles), tl.load(sin_ptr + angles)
    if tile < tl.cdiv(num_heads, BLOCK_H):
        heads = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (heads < num_heads)[:, None] & (dims >= 0)[None, :]
        rows_ptr = q_ptr + token * q_stride_token + heads[:, None].to(tl.int64) * q_stride_head
        q = _turned(rows_ptr, dims, partners, inside, cos, sin, is_first)
        places = out_ptr + (token * num_heads + heads[:, None]) * ROPE + dims[None, :]
        tl.store(places, q.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots_ptr + token)
        if slot >= 0:
            dtype = latents_ptr.dtype.element_ty
            row_ptr = latents_ptr + token * latents_stride
            columns = tl.arange(0, LATENT)
            latent = tl.load(row_ptr + columns[None, :]).to(tl.float32)
            weight = tl.load(weight_ptr + columns[None, :]).to(tl.float32)
            # Rounded like the definition's: the GPU's own function is an approximation, and scales depend on all bits.
            size = tl.math.sqrt_rn(tl.sum(latent * latent, axis=1) / LATENT + eps)
            normed = latent * tl.math.div_rn(tl.full((1,), 1.0, tl.float32), size)[:, None] * weight
            is_key = tl.full((1, ROPE), 1, tl.int1)
            key = _turned(row_ptr + LATENT + tl.zeros((1, 1), tl.int64), dims, partners, is_key, cos, sin, is_first)
            block_id, offset = slot // block_size, slot % block_size
            place_ptr = cache_ptr + block_id * cache_stride_block + offset * (LATENT + ROPE)
            # Without scales there is no pointer.
            scale_ptr = place_ptr if FORMAT == "plain" else scales_ptr + block_id * scales_stride_block + offset * 2
            _store(normed.to(dtype).to(tl.float32), place_ptr, scale_ptr, columns, FORMAT)
            _store(key.to(dtype).to(tl.float32), place_ptr + LATENT, scale_ptr + 1, dims, FORMAT)


def _variant(dtype: torch.dtype, cache_dtype: torch.dtype, sizes: tuple[int, int]) -> Variant:
    number, cache_format = f"*{TYPE_NAMES[dtype]}", FORMATS.get(cache_dtype, "plain")
    signature = dict.fromkeys(("q_ptr", "latents_ptr", "weight_ptr", "out_ptr"), number)
    signature |= dict.fromkeys(("cos_ptr", "sin_ptr"), "*fp32") | {"slots_ptr": "*i64"}
    signature["cache_ptr"] = f"*{TYPE_NAMES[cache_dtype]}" if cache_format == "plain" else "*u8"
    signature |= {} if cache_format == "plain" else {"scales_ptr": "*fp32"}
    signature |= dict.fromkeys(("num_heads", "angle_stride", "block_size", "interleaved"), "i32") | {"eps": "fp32"}
    signature |= dict.fromkeys(("q_stride_token", "q_stride_head", "latents_stride"), "i32:16")
    signature |= dict.fromkeys(("cache_stride_block", "scales_stride_block"), "i64")
    constexprs = {"LATENT": sizes[0], "ROPE": sizes[1], "BLOCK_H": BLOCK_H, "FORMAT": cache_format}
    return Variant(
        name=f"latent_{TYPE_NAMES[dtype]}_into_{TYPE_NAMES[cache_dtype]}_{sizes[0]}",
        kernel=latent_store,
        signature=signature,
        constexprs=constexprs | ({"scales_ptr": None} if cache_format == "plain" else {}),
        num_warps=4,
        in_sample=(dtype, cache_dtype, sizes) == (torch.bfloat16, torch.float8_e4m3fn, SIZES[0]),
        # Else the threads of a row get sums that differ in their last bits: see Variant.
        fuses=False,
    )


_VARIANTS = {key: _variant(*key) for key in itertools.product(_DTYPES, (*_DTYPES, *FORMATS), SIZES)}
VARIANTS = tuple(_VARIANTS.values())

# DeepSeek V3: 128 heads with 64 rotated numbers each; latents of 512 numbers and a key of 64.
WORKLOADS = tuple(
    Workload("rope_and_store_latent", f"{tokens} tokens, 128 heads, bf16", 2 * 2 * tokens * (128 * 64 + 576),
             4 * tokens * (128 * 64 + 576), on_tensor_cores=False)
    for tokens in (1, 256, 4096)
)  # fmt: skip


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
    """reference_mla.rope_and_store_latent."""
    sizes = len(norm_weight), 2 * rotation.cos.shape[-1]
    variant = _VARIANTS.get((q.dtype, cache.dtype, sizes))
    if latents is not None and latents.shape[1] == sizes[0]:
        latents = F.pad(latents, (0, sizes[1]))
    tensors = (q, norm_weight if latents is None else latents, norm_weight)
    if variant is None or not _is_served(tensors, cache, scales):
        return by_definition(
            reference_mla.rope_and_store_latent, q, latents, cache, slot_mapping, norm_weight=norm_weight,
            norm_eps=norm_eps, rotation=rotation, scales=scales,
        )  # fmt: skip
    num_tokens, num_heads, _ = q.shape
    rotated = q[..., -sizes[1] :]
    out = torch.empty(rotated.shape, dtype=q.dtype, device=q.device)
    cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
    # Without latents, the programs that store them are left out.
    num_stored = 0 if latents is None else 1
    variant.launch(
        (num_tokens, -(-num_heads // BLOCK_H) + num_stored), q_ptr=rotated, latents_ptr=tensors[1],
        weight_ptr=norm_weight,
        out_ptr=out, cos_ptr=cos, sin_ptr=sin, slots_ptr=slot_mapping.contiguous(),
        cache_ptr=cache if scales is None else cache.view(torch.uint8), num_heads=num_heads,
        q_stride_token=q.stride(0), q_stride_head=q.stride(1),
        latents_stride=0 if latents is None else latents.stride(0), angle_stride=cos.stride(0),
        block_size=cache.shape[1], cache_stride_block=cache.stride(0),
        scales_stride_block=0 if scales is None else scales.stride(0), eps=norm_eps,
        interleaved=int(rotation.interleaved), **({} if scales is None else {"scales_ptr": scales}),
    )  # fmt: skip
    return out


def _is_served(tensors: tuple[Tensor, Tensor, Tensor], cache: Tensor, scales: Tensor | None) -> bool:
    is_alike = all(each.dtype == tensors[0].dtype and each.stride(-1) == 1 for each in tensors)
    is_dense = cache.stride()[1:] == (cache.shape[2], 1) and (scales is None or scales.stride()[1:] == (2, 1))
    return is_alike and is_dense and (scales is None) == (cache.dtype not in FORMATS)
