"""Multi-head latent attention over a cache of latents: reference_mla.latent_attention.

Dimensions: T tokens, B sequences, H query heads, L elements of a latent, R elements of the rotated key.

All heads read the same latents, which serve as keys and as values, so that a tile's rows are the heads of a token (row
r is token r // H, head r % H), and a tile of latents is loaded once for both products. A score is the sum of two
products, over L and over R, because numbers of 8 bits have a scale for each part. DeepSeek-V2, arXiv:2405.04434.

Short and long sequences, splits, and the bits of a result are as in attention.py. Prompts, too, use the absorbed form:
3.4 times the operations of the expanded one with DeepSeek's sizes, but no memory for expanded keys and values.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference_mla
from pagewick.kernels.options import AttentionMetadata
from pagewick.kernels.triton.attention import (
    NO_WINDOW,
    SPLIT,
    Tile,
    attend_variant,
    bytes_of_fp8,
    max_short_tokens,
    merge_variant,
    split_slices,
)
from pagewick.kernels.triton.attention_kernels import find_sequence
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.online_softmax import (
    STORED,
    converted,
    decoded,
    dot_type,
    next_weights,
    pointer_type,
    row_of,
    value_type,
    with_sink,
)
from pagewick.kernels.triton.variant import TARGETS, TYPE_NAMES, Variant, Workload, target_of

# Sequences of more new tokens are long.
MAX_SHORT_TOKENS = 4
# L and R of DeepSeek V2, V3 and Kimi K2, and of MiniCPM 3; the last one is small enough for tests in the interpreter.
SIZES = ((512, 64), (256, 32), (32, 16))
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def attend_latents(
    q_latent, q_rope, cache, scales, table, first_row, num_rows, first_query, first_key, end_key, q_len, context_len,
    num_heads, block_stride, scale_stride, block_shift, scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STORED_AS: tl.constexpr, DOT: tl.constexpr, VALUE_DOT: tl.constexpr,
):  # fmt: skip
    """Attend with rows first_row .. of a sequence whose first new token is first_query to the latents first_key .. .

    Returns (acc [M, L], m [M], l [M], row of q and out [M], is_row [M]).
    """
    rows = first_row + tl.arange(0, BLOCK_M)
    is_row = rows < num_rows
    rows = tl.where(is_row, rows, 0)
    i, j = tl.arange(0, LATENT), tl.arange(0, ROPE)
    places = first_query.to(tl.int64) * num_heads + rows
    ql = converted(tl.load(q_latent + places[:, None] * LATENT + i[None, :], mask=is_row[:, None], other=0), DOT)
    qr = converted(tl.load(q_rope + places[:, None] * ROPE + j[None, :], mask=is_row[:, None], other=0), DOT)
    positions = context_len - q_len + rows // num_heads
    last_position = context_len - q_len + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // num_heads
    end = tl.minimum(end_key, last_position + 1)
    factor = scale * 1.4426950408889634
    acc = tl.zeros((BLOCK_M, LATENT), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(first_key, end, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        exists = n < end
        block_ids = tl.load(table + (n >> block_shift), mask=exists, other=0).to(tl.int64)
        offsets = n & ((1 << block_shift) - 1)
        address = (cache + block_ids * block_stride + offsets * (LATENT + ROPE))[:, None]
        stored = tl.load(address + i[None, :], mask=exists[:, None], other=0)
        latents = decoded(stored, STORED_AS, DOT)
        keys = decoded(tl.load(address + LATENT + j[None, :], mask=exists[:, None], other=0), STORED_AS, DOT)
        scores = tl.dot(ql, tl.trans(latents), input_precision="ieee")
        rotated = tl.dot(qr, tl.trans(keys), input_precision="ieee")
        if scales is not None:
            scale_address = scales + block_ids * scale_stride + offsets * 2
            latent_scales = tl.load(scale_address, mask=exists, other=0.0)
            rotated *= tl.load(scale_address + 1, mask=exists, other=0.0)[None, :]
            scores *= latent_scales[None, :]
        scores = tl.where(positions[:, None] >= n[None, :], scores + rotated, float("-inf"))
        weights, correction, m, total = next_weights(scores, factor, m, total)
        if scales is not None:
            weights *= latent_scales[None, :]
        values = latents if VALUE_DOT == DOT else decoded(stored, STORED_AS, VALUE_DOT)
        acc = tl.dot(weights.to(VALUE_DOT), values, acc * correction[:, None], input_precision="ieee")
    return acc, m, total, places, is_row


@triton.jit
def sink_of(sinks, heads, num_sinks):
    """Return the logit of each head's sink in base 2, -infinity for heads from num_sinks on."""
    return tl.load(sinks + heads, mask=heads < num_sinks, other=float("-inf")) * 1.4426950408889634


# Numbers that vary; those that do not are multiples of 16.
_NUMBERS = [
    "num_seqs", "num_heads", "table_stride", "scale_stride", "block_shift", "num_sinks", "max_short", "first_seq",
    "row_unit", "num_splits",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def attend_short_latents(
    q_latent, q_rope, cache, scales, block_tables, context_lens, cu_seqlens_q, sinks, out, parts, stats,
    num_heads, table_stride, block_stride, scale_stride, block_shift, num_sinks, max_short, first_seq, row_unit,
    num_splits, scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
    STORED_AS: tl.constexpr, DOT: tl.constexpr, VALUE_DOT: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of a short sequence to a split of its latents; see attention.attend_short."""
    seq, tile, split = first_seq + tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - begin
    context_len = tl.load(context_lens + seq)
    num_rows, first_row, first_key = q_len * num_heads, tile * BLOCK_M, split * SPLIT
    if (q_len > max_short) | (first_row >= num_rows) | (first_key >= context_len):
        return
    acc, m, total, places, is_row = attend_latents(
        q_latent, q_rope, cache, scales, block_tables + seq.to(tl.int64) * table_stride, first_row, num_rows, begin,
        first_key, first_key + SPLIT, q_len, context_len, num_heads, block_stride, scale_stride, block_shift, scale,
        LATENT, ROPE, BLOCK_M, BLOCK_N, STORED_AS, DOT, VALUE_DOT,
    )  # fmt: skip
    i = tl.arange(0, LATENT)
    if num_splits == 1:
        mean = with_sink(acc, m, total, sink_of(sinks, places % num_heads, num_sinks))
        tl.store(out + places[:, None] * LATENT + i[None, :], mean.to(out.dtype.element_ty), mask=is_row[:, None])
    else:
        shift = row_of(begin, 0, seq - first_seq, row_unit) - begin
        row = (places + shift.to(tl.int64) * num_heads) * num_splits + split
        tl.store(parts + row[:, None] * LATENT + i[None, :], acc, mask=is_row[:, None])
        tl.store(stats + 2 * row, m, mask=is_row)
        tl.store(stats + 2 * row + 1, total, mask=is_row)


@triton.jit(do_not_specialize=_NUMBERS)
def attend_long_latents(
    q_latent, q_rope, cache, scales, block_tables, context_lens, cu_seqlens_q, sinks, out,
    num_seqs, num_heads, table_stride, block_stride, scale_stride, block_shift, num_sinks, max_short, scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STORED_AS: tl.constexpr, DOT: tl.constexpr, VALUE_DOT: tl.constexpr,
):  # fmt: skip
    """Attend with a tile of a long sequence to all latents that it sees; see attention.attend_long."""
    tile = tl.program_id(0)
    seq = find_sequence(cu_seqlens_q, tile, num_seqs, num_heads, BLOCK_M)
    begin = tl.load(cu_seqlens_q + seq)
    q_len = tl.load(cu_seqlens_q + seq + 1) - begin
    context_len = tl.load(context_lens + seq)
    num_rows = q_len * num_heads
    first_row = (tile - (begin * num_heads // BLOCK_M + seq)) * BLOCK_M
    if (q_len <= max_short) | (first_row >= num_rows):
        return
    acc, m, total, places, is_row = attend_latents(
        q_latent, q_rope, cache, scales, block_tables + seq.to(tl.int64) * table_stride, first_row, num_rows, begin,
        0, context_len, q_len, context_len, num_heads, block_stride, scale_stride, block_shift, scale,
        LATENT, ROPE, BLOCK_M, BLOCK_N, STORED_AS, DOT, VALUE_DOT,
    )  # fmt: skip
    i = tl.arange(0, LATENT)
    mean = with_sink(acc, m, total, sink_of(sinks, places % num_heads, num_sinks))
    tl.store(out + places[:, None] * LATENT + i[None, :], mean.to(out.dtype.element_ty), mask=is_row[:, None])


class Key(NamedTuple):
    """The conditions by which a variant is chosen. stored: as decoded says; "": in the dtype of the queries."""

    is_long: bool
    target: str
    dtype: torch.dtype
    stored: str
    sizes: tuple[int, int]


def _tile(key: Key) -> Tile:
    """Return the tile of a variant. Chosen so that registers and shared memory suffice; no GPU was there to measure."""
    if key.dtype == torch.float32:
        return Tile(16, 16, 8, 1)
    is_hopper, num_stages = key.target == "sm_90", 1 if key.target in ("sm_89", "gfx942") else 2
    if not key.is_long:
        return Tile(16, 32 if is_hopper and not key.stored else 16, 4, num_stages)
    if is_hopper and key.stored:
        return Tile(16, 16, 8, num_stages)
    if key.target == "gfx942":
        return Tile(32, 16, 4, 1)
    if key.stored and key.target == "sm_89" and key.sizes[0] == 512:
        return Tile(16, 16, 8, 1)
    # Triton 3.6 would spill registers for the second stage of small latents.
    return Tile(32, 16, 8, 1 if key.stored or key.sizes[0] == 256 else num_stages)


_SIGNATURE = {
    "block_tables": "*i32", "context_lens": "*i32", "cu_seqlens_q": "*i32", "sinks": "*fp32", "num_heads": "i32",
    "table_stride": "i32", "block_stride": "i32:16", "scale_stride": "i32", "block_shift": "i32", "num_sinks": "i32",
    "max_short": "i32", "scale": "fp32",
}  # fmt: skip
_SHORT_SIGNATURE = {
    "parts": "*fp32", "stats": "*fp32", "first_seq": "i32", "row_unit": "i32", "num_splits": "i32",
}  # fmt: skip
# Compiled in every run of the tests: is_long, dtype, stored.
_SAMPLE = {(False, torch.bfloat16, ""), (True, torch.bfloat16, "")}


def _variant(key: Key) -> Variant:
    name, tile = TYPE_NAMES[key.dtype], _tile(key)
    signature = dict.fromkeys(("q_latent", "q_rope", "out"), f"*{name}")
    signature |= {"cache": pointer_type(key.dtype, key.stored), **_SIGNATURE}
    constexprs = {
        "LATENT": key.sizes[0], "ROPE": key.sizes[1], "BLOCK_M": tile.num_rows, "BLOCK_N": tile.num_keys,
        "STORED_AS": key.stored, "DOT": dot_type(key.dtype), "VALUE_DOT": value_type(key.dtype, key.stored),
    }  # fmt: skip
    return attend_variant(
        key, tile, attend_long_latents if key.is_long else attend_short_latents, signature, constexprs,
        _SHORT_SIGNATURE, label=f"latents {name} {key.stored or name} {key.sizes[0]}",
        in_sample=key.sizes == SIZES[0] and (key.is_long, key.dtype, key.stored) in _SAMPLE,
    )  # fmt: skip


_ATTEND = {
    key: _variant(key)
    for key in (
        Key(is_long, target, dtype, stored, sizes)
        for is_long in (False, True)
        for target in TARGETS
        for dtype in _DTYPES
        for stored in ("", *STORED.values())
        for sizes in SIZES
    )
    # Accumulators of 512 elements in float32 do not fit the registers there.
    if (key.target, key.dtype) != ("gfx942", torch.float32)
}
_MERGE = {(dtype, latent): merge_variant(dtype, latent) for dtype in _DTYPES for latent, _ in SIZES}
VARIANTS = (*_ATTEND.values(), *_MERGE.values())


def workload(q_len: int, num_seqs: int, context_len: int, num_heads: int) -> Workload:
    """Return the work of a batch of sequences of equal lengths with DeepSeek's sizes and bfloat16 everywhere."""
    latent_dim, rope_dim = SIZES[0]
    num_seen = context_len - (q_len - 1) / 2
    rows = num_seqs * q_len * num_heads
    numbers = rows * (2 * latent_dim + rope_dim) + num_seqs * context_len * (latent_dim + rope_dim)
    shape = f"{num_seqs} x {q_len} tokens, contexts of {context_len}, {num_heads} heads"
    return Workload("latent_attention", shape, 2 * numbers, int(2 * rows * num_seen * (2 * latent_dim + rope_dim)))


# DeepSeek V3 on one GPU and, with a share of the heads, on eight.
WORKLOADS = (workload(1, 64, 4096, 128), workload(1, 64, 4096, 16), workload(4096, 1, 4096, 16))


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
    """reference_mla.latent_attention; see the module."""
    key = Key(
        False,
        target_of(q_latent.device),
        q_latent.dtype,
        STORED.get(cache.dtype, ""),
        (q_latent.shape[2], q_rope.shape[2]),
    )
    if not _is_served(key, q_latent, cache):
        return by_definition(
            reference_mla.latent_attention, q_latent, q_rope, cache, metadata, softmax_scale=softmax_scale,
            scales=scales, sinks=sinks,
        )  # fmt: skip
    num_tokens, num_heads, latent_dim = q_latent.shape
    out = torch.empty((num_tokens, num_heads, latent_dim), dtype=q_latent.dtype, device=q_latent.device)
    if num_tokens == 0:
        return out
    max_short = max_short_tokens(1, MAX_SHORT_TOKENS)
    shared = {
        "q_latent": q_latent.contiguous(), "q_rope": q_rope.contiguous(), "cache": bytes_of_fp8(cache), "out": out,
        "block_tables": metadata.block_tables, "context_lens": metadata.context_lens,
        "cu_seqlens_q": metadata.cu_seqlens_q, "num_heads": num_heads,
        "sinks": torch.empty(1, device=q_latent.device) if sinks is None else sinks,
        "num_sinks": 0 if sinks is None else num_heads,
        "table_stride": metadata.block_tables.stride(0), "block_stride": cache.stride(0),
        "scale_stride": 0 if scales is None else scales.stride(0), "block_shift": cache.shape[1].bit_length() - 1,
        "max_short": max_short, "scale": softmax_scale,
    }  # fmt: skip
    if scales is not None:
        shared["scales"] = scales
    if max_short:
        _attend_short(shared, _ATTEND[key], _MERGE[q_latent.dtype, latent_dim])
    if (metadata.max_query_len or num_tokens) > max_short:
        long = _ATTEND[key._replace(is_long=True)]
        num_seqs = len(metadata.context_lens)
        num_tiles = num_tokens * num_heads // long.constexprs["BLOCK_M"] + num_seqs
        long.launch((num_tiles,), num_seqs=num_seqs, **shared)
    return out


def _attend_short(shared: dict[str, Any], attend: Variant, merge: Variant) -> None:
    """Attend with the short sequences of a batch."""
    out = shared["out"]
    num_seqs, num_heads = len(shared["context_lens"]), out.shape[1]
    num_tiles = -(-MAX_SHORT_TOKENS * num_heads // attend.constexprs["BLOCK_M"])
    num_splits = -(-(shared["block_tables"].shape[1] << shared["block_shift"]) // SPLIT)
    for part in split_slices(out, num_seqs, num_splits, MAX_SHORT_TOKENS):
        own = part.arguments(num_splits)
        attend.launch((part.num_seqs, num_tiles, num_splits), **own, **shared)
        if num_splits > 1:
            names = ("context_lens", "cu_seqlens_q", "sinks", "out", "num_sinks", "max_short")
            arguments = {name: shared[name] for name in names}
            grid = (part.num_seqs, num_heads)
            no_window = {"window": NO_WINDOW, "is_chunked": 0}
            merge.launch(grid, num_heads=num_heads, **no_window, **own, **arguments)


def _is_served(key: Key, q_latent: Tensor, cache: Tensor) -> bool:
    """Whether there is a variant for these."""
    return (
        key in _ATTEND
        and (cache.dtype == q_latent.dtype or cache.dtype in STORED)
        and cache.stride(0) % 16 == 0
        and cache.shape[1].bit_count() == 1
        and not (torch.is_grad_enabled() and q_latent.requires_grad)
    )
