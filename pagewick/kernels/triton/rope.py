"""Norms of heads, rotation of queries and keys, and storing of keys and values into blocks, in one pass.

Definitions: rope_and_store and store_kv of reference.py, with turn_heads of reference_rope.py and, for 8-bit caches,
quantize_vectors of reference_kv.py. Rotary embeddings: Su et al. 2021, arXiv:2104.09864. A head's result depends on
that head alone, bit for bit. A slot outside the cache is not noticed.

Dimensions: T tokens, H query heads, KVH key/value heads, D head size, R the rotated part of a head.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.kv_cache import INT4, KVCache
from pagewick.kernels.options import PLAIN_HEADS, HeadLayout, HeadNorm, HeadOptions
from pagewick.kernels.reference_kv import rotation_size
from pagewick.kernels.triton.cache_numbers import HEAD_FORMATS, quantize_rows, rotate_rows
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload

# The largest D that a variant serves, and how many numbers a program has: it takes as many heads as that allows.
BLOCKS = (32, 64, 128, 256, 512)
_TILE = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# The sizes of matrices that rotate heads before they are stored in 4 bits.
_ROTATIONS = (8, 16, 32, 64, 128, 256, 512)
# The bits of a norm's kind. No bit: heads stay as they are.
_IS_NORMED, _IS_CENTRED, _HAS_BIAS = 1, 2, 4
_VARYING = [f"{name}_{field}" for field in ("eps", "offset") for name in "qkv"]
_VARYING += ["k_scale", "v_scale", "q_kind", "k_kind", "v_kind", "interleaved", "has_q_scales"]


@triton.jit
def _moments(x, inside, head_dim, kind):
    """Return the mean and the variance of rows x [BLOCK_H, BLOCK_D]; an RMS norm takes 0 for the mean."""
    mean = tl.sum(x, axis=1) / head_dim * ((kind >> 1) & 1)
    centred = tl.where(inside, x - mean[:, None], 0.0)
    return mean, tl.sum(centred * centred, axis=1) / head_dim


@triton.jit
def _normed(
    x, mean, variance, heads, dims, places, inside, weight_ptr, bias_ptr, weight_stride, eps, offset, head_dim, kind
):  # fmt: skip
    """Return (x - mean) / sqrt(variance + eps) * (weight + offset) + bias for x, the numbers of heads at `places`."""
    weights = heads[:, None] * weight_stride + places[None, :]
    has_weights = inside & (dims[None, :] < head_dim * (kind & 1))
    has_biases = inside & (dims[None, :] < head_dim * ((kind >> 2) & 1))
    weight = tl.load(weight_ptr + weights, mask=has_weights, other=0.0).to(tl.float32)
    bias = tl.load(bias_ptr + weights, mask=has_biases, other=0.0).to(tl.float32)
    normed = (x - mean[:, None]) * tl.rsqrt(variance + eps)[:, None] * (weight + offset) + bias
    return tl.where((kind & 1) != 0, normed, x)


@triton.jit
def _turned(
    heads_ptr, heads, dims, inside, partners, weight_ptr, bias_ptr, weight_stride, eps, offset, cos, sin, is_first,
    stride_head, head_dim, kind, NORM: tl.constexpr,
):  # fmt: skip
    """Return heads [BLOCK_H, BLOCK_D] of one token, normed and rotated, in float32. NORM: see rope_store.

    Each number is rotated with that at `partners`; both come from memory, where the second is in the cache already.
    """
    rows = heads_ptr + heads[:, None].to(tl.int64) * stride_head
    x = tl.load(rows + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(rows + partners[None, :], mask=inside, other=0.0).to(tl.float32)
    if NORM == "first":
        mean, variance = _moments(x, inside, head_dim, kind)
        x = _normed(
            x, mean, variance, heads, dims, dims, inside, weight_ptr, bias_ptr, weight_stride, eps, offset, head_dim,
            kind,
        )  # fmt: skip
        partner = _normed(
            partner, mean, variance, heads, dims, partners, inside, weight_ptr, bias_ptr, weight_stride, eps, offset,
            head_dim, kind,
        )  # fmt: skip
    x = x * cos[None, :] + tl.where(is_first[None, :], -partner, partner) * sin[None, :]
    if NORM == "last":
        mean, variance = _moments(x, inside, head_dim, kind)
        x = _normed(
            x, mean, variance, heads, dims, dims, inside, weight_ptr, bias_ptr, weight_stride, eps, offset, head_dim,
            kind,
        )  # fmt: skip
    return x


@triton.jit
def _store(
    x, heads, dims, inside, which, token, constant, slots_ptr, cache_ptr, scales_ptr, num_kv_heads, head_dim,
    block_size, cache_stride_block, cache_stride_which, cache_stride_head, cache_stride_offset, scales_stride_block,
    scales_stride_which, scales_stride_head, FORMAT: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """Store rows x [BLOCK_H, BLOCK_D] as keys (which = 0) or values (1) of one token."""
    slot = tl.load(slots_ptr + token)
    if slot >= 0:
        block_id, offset = slot // block_size, slot % block_size
        place = block_id * cache_stride_block + which * cache_stride_which + offset * cache_stride_offset
        places = cache_ptr + place + heads[:, None] * cache_stride_head + dims[None, :]
        if FORMAT == "plain":
            tl.store(places, x.to(cache_ptr.dtype.element_ty), mask=inside)
        else:
            if FORMAT == "int4":
                x = rotate_rows(x, x.shape[0], x.shape[1], ROTATION)
            numbers, scales = quantize_rows(x, tl.zeros(heads.shape, tl.float32) + constant, FORMAT)
            if FORMAT == "int4":
                low, high = tl.split(tl.reshape(numbers, (x.shape[0], x.shape[1] // 2, 2)))
                pairs = tl.arange(0, x.shape[1] // 2)
                is_pair = (heads < num_kv_heads)[:, None] & (pairs < head_dim // 2)[None, :]
                rows = cache_ptr + place + heads[:, None] * cache_stride_head
                tl.store(rows + pairs[None, :], low | (high << 4), mask=is_pair)
            else:
                tl.store(places, numbers, mask=inside)
            place = block_id * scales_stride_block + which * scales_stride_which + offset
            tl.store(scales_ptr + place + heads * scales_stride_head, scales, mask=heads < num_kv_heads)


@triton.jit(do_not_specialize=_VARYING)
def rope_store(
    q_ptr, k_ptr, v_ptr, out_ptr, cos_ptr, sin_ptr, q_scales_ptr, slots_ptr, cache_ptr, scales_ptr, q_weight_ptr,
    q_bias_ptr, k_weight_ptr, k_bias_ptr, v_weight_ptr, v_bias_ptr, num_heads, num_kv_heads, head_dim, rotary_dim,
    block_size, q_stride_token, q_stride_head, k_stride_token, k_stride_head, v_stride_token, v_stride_head,
    angle_stride, cache_stride_block, cache_stride_which, cache_stride_head, cache_stride_offset, scales_stride_block,
    scales_stride_which, scales_stride_head, q_weight_stride, k_weight_stride, v_weight_stride, q_eps, k_eps, v_eps,
    q_offset, k_offset, v_offset, k_scale, v_scale, q_kind, k_kind, v_kind, interleaved, has_q_scales,
    BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr, NORM: tl.constexpr, FORMAT: tl.constexpr, ROTATION: tl.constexpr,
):  # fmt: skip
    """Process token program_id(0): query heads in the first programs of dimension 1, then as many keys and values.

    q [T, H, D], k, v [T, KVH, D]: heads in one piece. out: [T, H, D]. cos, sin: [T, R / 2] float32. slots: [T] int64.
    q_scales: [T] float32, read with has_q_scales. NORM: "first", "last" or "none": whether queries and keys are normed
    before or after their rotation. q_kind, k_kind, v_kind: bits of 1 for a norm, 2 for a layer norm, 4 for a bias.
    ROTATION: the size of the Hadamard matrices that rotate numbers of 4 bits.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    num_query_tiles = tl.cdiv(num_heads, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    half = rotary_dim // 2
    rotates = dims < rotary_dim
    in_first_half = dims < half
    is_first = tl.where(interleaved != 0, dims % 2 == 0, in_first_half)
    partners = tl.where(interleaved != 0, dims ^ 1, tl.where(in_first_half, dims + half, dims - half))
    partners = tl.where(rotates, partners, dims)
    angles = tl.where(interleaved != 0, dims // 2, tl.where(in_first_half, dims, dims - half)) + token * angle_stride
    cos = tl.load(cos_ptr + angles, mask=rotates, other=1.0)
    sin = tl.load(sin_ptr + angles, mask=rotates, other=0.0)
    if tile < num_query_tiles:
        heads = tile * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (heads < num_heads)[:, None] & (dims < head_dim)[None, :]
        q = _turned(
            q_ptr + token * q_stride_token, heads, dims, inside, partners, q_weight_ptr, q_bias_ptr, q_weight_stride,
            q_eps, q_offset, cos, sin, is_first, q_stride_head, head_dim, q_kind, NORM,
        )  # fmt: skip
        q *= tl.load(q_scales_ptr + token, mask=has_q_scales != 0, other=1.0)
        places = out_ptr + (token * num_heads + heads[:, None]) * head_dim + dims[None, :]
        tl.store(places, q.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        heads = (tile - num_query_tiles) * BLOCK_H + tl.arange(0, BLOCK_H)
        inside = (heads < num_kv_heads)[:, None] & (dims < head_dim)[None, :]
        k = _turned(
            k_ptr + token * k_stride_token, heads, dims, inside, partners, k_weight_ptr, k_bias_ptr, k_weight_stride,
            k_eps, k_offset, cos, sin, is_first, k_stride_head, head_dim, k_kind, NORM,
        )  # fmt: skip
        k = tl.where(inside, k.to(k_ptr.dtype.element_ty).to(tl.float32), 0.0)
        _store(
            k, heads, dims, inside, 0, token, k_scale, slots_ptr, cache_ptr, scales_ptr, num_kv_heads, head_dim,
            block_size, cache_stride_block, cache_stride_which, cache_stride_head, cache_stride_offset,
            scales_stride_block, scales_stride_which, scales_stride_head, FORMAT, ROTATION,
        )  # fmt: skip
        rows = v_ptr + token * v_stride_token + heads[:, None].to(tl.int64) * v_stride_head
        v = tl.load(rows + dims[None, :], mask=inside, other=0.0).to(tl.float32)
        if NORM != "none":
            mean, variance = _moments(v, inside, head_dim, v_kind)
            v = _normed(
                v, mean, variance, heads, dims, dims, inside, v_weight_ptr, v_bias_ptr, v_weight_stride, v_eps,
                v_offset, head_dim, v_kind,
            )  # fmt: skip
            v = tl.where(inside, v.to(v_ptr.dtype.element_ty).to(tl.float32), 0.0)
        _store(
            v, heads, dims, inside, 1, token, v_scale, slots_ptr, cache_ptr, scales_ptr, num_kv_heads, head_dim,
            block_size, cache_stride_block, cache_stride_which, cache_stride_head, cache_stride_offset,
            scales_stride_block, scales_stride_which, scales_stride_head, FORMAT, ROTATION,
        )  # fmt: skip


def _variant(dtype: torch.dtype, cache_dtype: torch.dtype, block: int, norm: str, rotation: int) -> Variant:
    number, cache_format = f"*{TYPE_NAMES[dtype]}", HEAD_FORMATS.get(cache_dtype, "plain")
    signature = dict.fromkeys(("q_ptr", "k_ptr", "v_ptr", "out_ptr"), number)
    signature |= {} if norm == "none" else dict.fromkeys(_NORM_POINTERS, number)
    signature |= dict.fromkeys(("cos_ptr", "sin_ptr", "q_scales_ptr", "scales_ptr"), "*fp32") | {"slots_ptr": "*i64"}
    signature["cache_ptr"] = "*u8" if cache_dtype in HEAD_FORMATS else f"*{TYPE_NAMES[cache_dtype]}"
    if cache_format == "plain":
        del signature["scales_ptr"]
    signature |= {name: "fp32" if name in _VARYING[:8] else "i32" for name in _VARYING}
    numbers = [name for name in rope_store.arg_names if name.islower() and not name.endswith("_ptr")]
    signature |= {name: "i32" for name in numbers if name not in signature}
    signature |= {name: "i32:16" for name in numbers if name.startswith(("q_stride", "k_stride", "v_stride"))}
    signature |= dict.fromkeys(("cache_stride_block", "scales_stride_block"), "i64")
    absent = {"scales_ptr": None, **dict.fromkeys(_NORM_POINTERS)}
    sizes = {"BLOCK_H": _TILE // block, "BLOCK_D": block, "NORM": norm, "FORMAT": cache_format, "ROTATION": rotation}
    kind = {"none": "", "first": "norm_", "last": "late_norm_"}[norm]
    stored = f"int4_{rotation}" if rotation else TYPE_NAMES[cache_dtype]
    return Variant(
        name=f"{kind}rope_{TYPE_NAMES[dtype]}_into_{stored}_{block}",
        kernel=rope_store,
        signature=signature,
        constexprs={name: None for name in absent if name not in signature} | sizes,
        num_warps=4,
        in_sample=(dtype, cache_dtype, block, norm) in _SAMPLE and rotation in (0, block),
        # Else the threads of a row get sums that differ in their last bits: see Variant.
        fuses=False,
    )


_NORM_POINTERS = tuple(f"{name}_{field}_ptr" for name in "qkv" for field in ("weight", "bias"))
_SAMPLE = {
    (torch.bfloat16, torch.float8_e4m3fn, 128, "first"),
    # Gemma 4, and Hunyuan.
    (torch.bfloat16, torch.float8_e4m3fn, 512, "first"),
    (torch.bfloat16, torch.bfloat16, 128, "last"),
    (torch.bfloat16, INT4, 128, "none"),
}
_VARIANTS = {
    key: _variant(*key)
    for dtype, cache_dtype, block, norm in itertools.product(
        _DTYPES, (*_DTYPES, *HEAD_FORMATS), BLOCKS, ("none", "first", "last")
    )
    for rotation in ([size for size in _ROTATIONS if size <= block] if cache_dtype == INT4 else [0])
    for key in [(dtype, cache_dtype, block, norm, rotation)]
}
VARIANTS = tuple(_VARIANTS.values())

# Llama 3.1 8B: 32 query heads and 8 key/value heads of 128. Everything is read once and written once.
WORKLOADS = tuple(
    Workload("rope_and_store", f"{tokens} tokens, 32 + 8 heads of 128, bf16", 2 * tokens * 48 * 128 * 2,
             6 * tokens * 40 * 128, on_tensor_cores=False)
    for tokens in (1, 256, 8192)
)  # fmt: skip


def rope_and_store(
    qkv: Tensor, cache: KVCache, slot_mapping: Tensor, layout: HeadLayout, options: HeadOptions = PLAIN_HEADS
) -> Tensor:
    """reference.rope_and_store into a plain cache."""
    num_heads, num_kv_heads, head_dim = layout
    heads = qkv.view(len(qkv), num_heads + 2 * num_kv_heads, head_dim) if qkv.stride(-1) == 1 else None
    if heads is None or not _is_served(heads, cache, options):
        return by_definition(reference.rope_and_store, qkv, cache, slot_mapping, layout, options)
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    return _run(q, k, v, cache, slot_mapping, options)


def store_kv(k: Tensor, v: Tensor, cache: KVCache, slot_mapping: Tensor) -> None:
    """reference.store_kv into a plain cache."""
    if not (_is_served(k, cache, PLAIN_HEADS) and v.dtype == k.dtype):
        by_definition(reference.store_kv, k, v, cache, slot_mapping)
        return
    _run(k[:, :0], k, v if v.stride(-1) == 1 else v.contiguous(), cache, slot_mapping, PLAIN_HEADS)


def _is_served(heads: Tensor, cache: KVCache, options: HeadOptions) -> bool:
    """Whether a variant serves heads [T, heads, D]; queries and keys are both normed first, or both last."""
    if cache.is_packed or cache.data.stride(-1) != 1:
        return False
    if heads.dtype not in _DTYPES or heads.stride(-1) != 1:
        return False
    norms = [norm for norm in (options.q_norm, options.k_norm, options.v_norm) if norm is not None]
    are_known = all(norm.weight.dtype == heads.dtype for norm in norms)
    return heads.shape[-1] <= BLOCKS[-1] and are_known and len(_orders(options)) < 2


def _orders(options: HeadOptions) -> set[str]:
    """Return where the norms of queries and keys have their place: see rope_store."""
    norms = [norm for norm in (options.q_norm, options.k_norm) if norm is not None]
    return {"last" if norm.is_after_rotation else "first" for norm in norms}


def _run(q: Tensor, k: Tensor, v: Tensor, cache: KVCache, slots: Tensor, options: HeadOptions) -> Tensor:
    """Process q [T, H, D], k and v [T, KVH, D]; return the new q."""
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty(q.shape, dtype=k.dtype, device=k.device)
    rotation = options.rotation
    # A kernel needs some pointer also where nothing is read from it.
    slots = slots.contiguous()
    cos = sin = q_scales = slots.view(torch.float32)
    if options.q_scales is not None:
        q_scales = options.q_scales.contiguous()
    if rotation is not None:
        cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
    block = next(block for block in BLOCKS if block >= head_dim)
    norm = next(iter(_orders(options)), "none" if options.v_norm is None else "first")
    variant = _VARIANTS[k.dtype, cache.dtype, block, norm, rotation_size(head_dim) if cache.dtype == INT4 else 0]
    numbers = cache.data if cache.dtype not in HEAD_FORMATS else cache.data.view(torch.uint8)
    scales = {} if cache.scales is None else {"scales_ptr": cache.scales}
    strides, scale_strides = numbers.stride(), (0, 0, 0) if cache.scales is None else cache.scales.stride()
    num_tiles = -(-num_heads // variant.constexprs["BLOCK_H"]) + -(-k.shape[1] // variant.constexprs["BLOCK_H"])
    variant.launch(
        (num_tokens, num_tiles), q_ptr=q, k_ptr=k, v_ptr=v, out_ptr=out, cos_ptr=cos, sin_ptr=sin,
        q_scales_ptr=q_scales, cache_ptr=numbers, slots_ptr=slots, num_heads=num_heads, num_kv_heads=k.shape[1],
        head_dim=head_dim,
        rotary_dim=0 if rotation is None else 2 * cos.shape[1], block_size=cache.block_size,
        q_stride_token=q.stride(0), q_stride_head=q.stride(1), k_stride_token=k.stride(0), k_stride_head=k.stride(1),
        v_stride_token=v.stride(0), v_stride_head=v.stride(1),
        angle_stride=0 if rotation is None else cos.stride(0),
        cache_stride_block=strides[0], cache_stride_which=strides[1], cache_stride_head=strides[2],
        cache_stride_offset=strides[3], scales_stride_block=scale_strides[0], scales_stride_which=scale_strides[1],
        scales_stride_head=scale_strides[2],
        k_scale=cache.constant_scales[0], v_scale=cache.constant_scales[1],
        interleaved=int(rotation is not None and rotation.interleaved), has_q_scales=int(options.q_scales is not None),
        **scales, **_norms(options),
    )  # fmt: skip
    return out


def _norms(options: HeadOptions) -> dict[str, Tensor | int | float]:
    """Return the arguments that say how heads are normed."""
    given = {"q": options.q_norm, "k": options.k_norm, "v": options.v_norm}
    some = next((norm.weight for norm in given.values() if norm is not None), None)
    arguments: dict[str, Tensor | int | float] = {}
    for name, norm in given.items():
        arguments |= _norm(name, norm)
        if some is not None:
            # A kernel needs some pointer also where nothing is read from it.
            arguments.setdefault(f"{name}_weight_ptr", some)
            arguments.setdefault(f"{name}_bias_ptr", some)
    return arguments


def _norm(name: str, norm: HeadNorm | None) -> dict[str, Tensor | int | float]:
    if norm is None:
        return {f"{name}_kind": 0, f"{name}_weight_stride": 0, f"{name}_eps": 1.0, f"{name}_offset": 0.0}
    weight, bias = norm.weight.contiguous(), {} if norm.bias is None else {f"{name}_bias_ptr": norm.bias.contiguous()}
    return {
        f"{name}_kind": _IS_NORMED + norm.is_layer_norm * _IS_CENTRED + (norm.bias is not None) * _HAS_BIAS,
        f"{name}_weight_ptr": weight,
        f"{name}_weight_stride": weight.shape[-1] if weight.dim() == 2 else 0,
        f"{name}_eps": norm.eps,
        f"{name}_offset": norm.offset,
        **bias,
    }
