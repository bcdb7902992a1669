"""The choice of the tokens that sparse attention sees: store_index_keys and select_keys of reference_index.py.

Scores come first, and then the choice among them (selection.py). A program scores a tile of keys for some successive
tokens of a sequence, one after the other: the keys stay where they are, and a product of keys and a token's heads needs
only be summed over the heads, which are its columns. Each score is computed in one way, whatever is beside it, so that
a token's result has the same bits in every batch. A token that sees no more than top_k keys gets no scores.

Scores are there for as many tokens at once as SCORES_BYTES has room for; the next tokens use the same memory. Results
differ from the definition's where two scores are equal but for the order of additions.

Dimensions: T tokens, B sequences, H index heads of I elements, of which the first R are rotated.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference_index
from pagewick.kernels.options import AttentionMetadata, Rotation, SelectedKeys
from pagewick.kernels.triton import selection
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.online_softmax import converted, dot_type
from pagewick.kernels.triton.variant import TARGETS, TYPE_NAMES, Variant, Workload, target_of

# I of DeepSeek-V3.2, GLM-5 and A.X K2; the other is small enough for tests in the interpreter.
DIMS = (32, 128)
# Room for heads in a tile: the first that suffices is taken.
HEADS = (32, 64)
# Bytes for scores and for the choice among them.
SCORES_BYTES = 256 * 2**20
# Successive tokens of a program.
TOKENS = 16
# Sizes of rows that are only stored: the keys of DeepSeek V4 are its values, too.
STORED_DIMS = (*DIMS, 512)
# Rows of scores begin at multiples of this number.
_SCORE_UNIT = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit(do_not_specialize=["num_rows", "num_heads", "rope_dim", "angle_stride", "block_size", "interleaved"])
def turn_index_rows(
    x, out, cos, sin, slots, num_rows, num_heads, rope_dim, token_stride, head_stride, angle_stride, block_size,
    block_stride, interleaved, DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rotate rows of x [T, H, I] to out, where they follow each other, or, if there are slots [T], to a cache."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    tokens, heads = rows // num_heads, rows % num_heads
    half = rope_dim // 2
    in_first_half = dims < half
    is_first = tl.where(interleaved != 0, dims % 2 == 0, in_first_half)
    partners = tl.where(interleaved != 0, dims ^ 1, tl.where(in_first_half, dims + half, dims - half))
    angles = tl.where(interleaved != 0, dims // 2, tl.where(in_first_half, dims, dims - half))
    is_row = rows < num_rows
    inside = is_row[:, None] & (dims >= 0)[None, :]
    turns = is_row[:, None] & (dims < rope_dim)[None, :]
    angles = tokens[:, None] * angle_stride + angles[None, :]
    source = x + (tokens * token_stride + heads * head_stride)[:, None]
    numbers = tl.load(source + dims[None, :], mask=inside, other=0.0).to(tl.float32)
    partner = tl.load(source + partners[None, :], mask=turns, other=0.0).to(tl.float32)
    turned = numbers * tl.load(cos + angles, mask=turns, other=1.0)
    turned += tl.where(is_first[None, :], -partner, partner) * tl.load(sin + angles, mask=turns, other=0.0)
    if slots is None:
        target = out + rows[:, None] * DIM
    else:
        slot = tl.load(slots + tokens, mask=is_row, other=-1)
        inside &= (slot >= 0)[:, None]
        target = out + (slot // block_size * block_stride + slot % block_size * DIM)[:, None]
    tl.store(target + dims[None, :], turned.to(out.dtype.element_ty), mask=inside)


@triton.jit
def first_of(cu_seqlens_q, seq, first_token, num_tokens):
    """Return where a sequence begins among num_tokens tokens from first_token on: 0 to num_tokens."""
    return tl.minimum(tl.maximum(tl.load(cu_seqlens_q + seq) - first_token, 0), num_tokens)


@triton.jit
def sequence_of_tile(cu_seqlens_q, tile, num_seqs, first_token, num_tokens, TOKENS: tl.constexpr):
    """Return the sequence of a tile: the last one whose first tile does not come after it.

    The tiles of sequence b, which begins with token t of num_tokens, are those from t // TOKENS + b on: at most one
    more than it needs.
    """
    seq, behind = 0, num_seqs
    while behind - seq > 1:
        middle = (seq + behind) // 2
        first_tile = first_of(cu_seqlens_q, middle, first_token, num_tokens) // TOKENS + middle
        seq = tl.where(first_tile <= tile, middle, seq)
        behind = tl.where(first_tile <= tile, behind, middle)
    return seq


# Numbers that vary.
_NUMBERS = [
    "num_seqs", "num_heads", "first_token", "num_tokens", "weight_stride", "table_stride", "block_shift",
    "score_stride", "top_k", "ratio",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def score_keys(
    q, weights, cache, block_tables, context_lens, cu_seqlens_q, scores,
    num_seqs, num_heads, first_token, num_tokens, weight_stride, table_stride, block_stride, block_shift, score_stride,
    top_k, ratio,
    DIM: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Score BLOCK_N keys for up to TOKENS tokens of a sequence, of the num_tokens tokens from first_token on.

    q: [T, H, I], rotated. weights: [T, H] float32. scores: [num_tokens, score_stride], of which a token that sees more
    than top_k keys, one for `ratio` tokens, gets as many as it sees.
    """
    # Programs run in the order of the first number: those of a tile of tokens read the same queries.
    first_key, tile = tl.program_id(0) * BLOCK_N, tl.program_id(1)
    seq = sequence_of_tile(cu_seqlens_q, tile, num_seqs, first_token, num_tokens, TOKENS)
    begin = first_of(cu_seqlens_q, seq, first_token, num_tokens)
    start = begin + (tile - (begin // TOKENS + seq)) * TOKENS
    end = tl.minimum(start + TOKENS, first_of(cu_seqlens_q, seq + 1, first_token, num_tokens))
    # A token's position is its number and this.
    shift = tl.load(context_lens + seq) - tl.load(cu_seqlens_q + seq + 1) + first_token
    start = tl.maximum(start, (tl.maximum(first_key, top_k) + 1) * ratio - 1 - shift)
    if start >= end:
        return
    n, dims, heads = first_key + tl.arange(0, BLOCK_N), tl.arange(0, DIM), tl.arange(0, BLOCK_H)
    exists, is_head = n < (end + shift) // ratio, heads < num_heads
    table = block_tables + seq.to(tl.int64) * table_stride
    block_ids = tl.load(table + (n >> block_shift), mask=exists, other=0).to(tl.int64)
    address = cache + block_ids * block_stride + (n & ((1 << block_shift) - 1)) * DIM
    keys = converted(tl.load(address[:, None] + dims[None, :], mask=exists[:, None], other=0), DOT)
    for token in range(start, end):
        row = first_token + token
        places = (row * num_heads.to(tl.int64) + heads)[:, None] * DIM + dims[None, :]
        queries = converted(tl.load(q + places, mask=is_head[:, None], other=0), DOT)
        weight = tl.load(weights + row * weight_stride.to(tl.int64) + heads, mask=is_head, other=0.0)
        products = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        # Not a maximum, in which NaN would be lost.
        products = tl.where((products < 0) | (heads >= num_heads)[None, :], 0.0, products)
        total = tl.sum(products * weight[None, :], 1)
        tl.store(scores + token * score_stride.to(tl.int64) + n, total, mask=n < (token + 1 + shift) // ratio)


class Key(NamedTuple):
    """The conditions by which a variant of score_keys is chosen. heads: that it has room for."""

    target: str
    dtype: torch.dtype
    dim: int
    heads: int


def _turn_variant(dtype: torch.dtype, out_dtype: torch.dtype, dim: int, *, has_slots: bool) -> Variant:
    pointers = {"x": f"*{TYPE_NAMES[dtype]}", "out": f"*{TYPE_NAMES[out_dtype]}", "cos": "*fp32", "sin": "*fp32"}
    varying = ("num_rows", "num_heads", "rope_dim", "angle_stride", "block_size", "interleaved")
    strides = ("token_stride", "head_stride", "block_stride")
    # A program that rotates has 2,048 numbers at most.
    constexprs = {"DIM": dim, "ROWS": min(16, 2048 // dim)}
    return Variant(
        name=f"{'store' if has_slots else 'turn'} {TYPE_NAMES[dtype]} into {TYPE_NAMES[out_dtype]} {dim}",
        kernel=turn_index_rows,
        signature={
            **pointers, **({"slots": "*i64"} if has_slots else {}), **dict.fromkeys(varying, "i32"),
            **dict.fromkeys(strides, "i32:16"),
        },
        constexprs=constexprs if has_slots else {**constexprs, "slots": None},
        in_sample=(dtype, out_dtype, dim, has_slots) == (torch.bfloat16, torch.bfloat16, 128, True),
        fuses=False,
    )  # fmt: skip


def _score_variant(key: Key) -> Variant:
    """Tiles are chosen so that registers and shared memory suffice; no GPU was there to measure."""
    is_plain = key.dtype == torch.float32
    name = TYPE_NAMES[key.dtype]
    pointers = {"q": f"*{name}", "weights": "*fp32", "cache": f"*{name}", "scores": "*fp32"}
    return Variant(
        name=f"score {name} {key.dim} {key.heads} {key.target}",
        kernel=score_keys,
        signature={
            **pointers, **dict.fromkeys(("block_tables", "context_lens", "cu_seqlens_q"), "*i32"),
            **dict.fromkeys(_NUMBERS, "i32"), "block_stride": "i32:16",
        },
        constexprs={
            "DIM": key.dim, "TOKENS": TOKENS, "BLOCK_H": key.heads, "BLOCK_N": 16 if is_plain else 128,
            "DOT": dot_type(key.dtype),
        },
        num_warps=8 if is_plain else 4,
        num_stages=1 if is_plain else 2,
        uses_tensor_cores=not is_plain,
        in_sample=key[1:] == (torch.bfloat16, 128, 64),
        targets=(key.target,),
        fuses=False,
    )  # fmt: skip


_TURN = {
    (*dtypes, dim, has_slots): _turn_variant(*dtypes, dim, has_slots=has_slots)
    for dtypes in itertools.product(_DTYPES, _DTYPES)
    for has_slots, dims in ((False, DIMS), (True, STORED_DIMS))
    for dim in dims
}
_SCORE = {key: _score_variant(key) for key in map(Key._make, itertools.product(TARGETS, _DTYPES, DIMS, HEADS))}
VARIANTS = (*_TURN.values(), *_SCORE.values(), *selection.VARIANTS)


def workload(q_len: int, num_seqs: int, context_len: int, num_heads: int = 64, top_k: int = 2048) -> Workload:
    """Return the work of a batch of sequences of equal lengths with heads of 128 numbers in bfloat16."""
    num_seen, dim, num_tokens = context_len - (q_len - 1) / 2, DIMS[1], num_seqs * q_len
    num_bytes = 2 * dim * (num_tokens * num_heads + num_seqs * context_len) + 4 * num_tokens * (num_heads + top_k)
    shape = f"{num_seqs} x {q_len} tokens, {top_k:,} of {context_len:,}, {num_heads} heads of {dim}"
    return Workload("select_keys", shape, num_bytes, int(2 * num_tokens * num_seen * num_heads * dim))


# DeepSeek-V3.2.
WORKLOADS = (workload(1, 1, 131072), workload(1, 64, 8192), workload(4096, 1, 32768))


def store_index_keys(keys: Tensor, cache: Tensor, slot_mapping: Tensor, *, rotation: Rotation) -> None:
    """reference_index.store_index_keys."""
    if not (_is_turned(keys, cache.dtype, rotation, has_slots=True) and _is_dense(cache)):
        by_definition(reference_index.store_index_keys, keys, cache, slot_mapping, rotation=rotation)
        return
    _turn(keys.unsqueeze(1), cache, rotation, cache.shape[1], cache.stride(0), slots=slot_mapping.contiguous())


def select_keys(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    metadata: AttentionMetadata,
    tables: Tensor | None,
    *,
    rotation: Rotation,
    top_k: int,
    ratio: int = 1,
) -> SelectedKeys:
    """reference_index.select_keys; slots behind a token's count are left as they are."""
    if not (_is_turned(q, cache.dtype, rotation) and _is_scored(q, weights, cache, tables)):
        return by_definition(
            reference_index.select_keys,
            q,
            weights,
            cache,
            metadata,
            tables,
            rotation=rotation,
            top_k=top_k,
            ratio=ratio,
        )
    num_tokens, block_size = len(q), cache.shape[1]
    tokens = selection.numbered(metadata, num_tokens, top_k, ratio)
    num_keys = metadata.block_tables.shape[1] * block_size
    score_stride = -(-num_keys // _SCORE_UNIT) * _SCORE_UNIT
    if num_keys <= top_k:
        # No score is read.
        selection.Choice(1, score_stride, q.device).run(tokens, 0, num_tokens, tables, block_size)
        return tokens.selected
    q = turned(q, cache.dtype, rotation)
    num_rows = max(1, min(num_tokens, SCORES_BYTES // selection.row_bytes(score_stride)))
    choice = selection.Choice(num_rows, score_stride, q.device)
    for first in range(0, num_tokens, num_rows):
        number = min(num_rows, num_tokens - first)
        score(q, weights, cache, metadata, choice.scores[:number], first_token=first, top_k=top_k, ratio=ratio)
        choice.run(tokens, first, number, tables, block_size)
    return tokens.selected


def turned(q: Tensor, dtype: torch.dtype, rotation: Rotation) -> Tensor:
    """Return queries [T, H, I], rotated, and rounded once to a dtype."""
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    _turn(q, out, rotation, 1, 0)
    return out


def _turn(x: Tensor, out: Tensor, rotation: Rotation, block_size: int, block_stride: int, **slots: Tensor) -> None:
    num_tokens, num_heads, dim = x.shape
    cos, sin = rotation.cos.contiguous(), rotation.sin.contiguous()
    num_rows = num_tokens * num_heads
    variant = _TURN[x.dtype, out.dtype, dim, bool(slots)]
    variant.launch(
        (-(-num_rows // variant.constexprs["ROWS"]),), x=x, out=out, cos=cos, sin=sin, num_rows=num_rows,
        num_heads=num_heads, rope_dim=2 * cos.shape[-1], token_stride=x.stride(0), head_stride=x.stride(1),
        angle_stride=cos.stride(0), block_size=block_size, block_stride=block_stride,
        interleaved=int(rotation.interleaved), **slots,
    )  # fmt: skip


def score(
    q: Tensor, weights: Tensor, cache: Tensor, metadata: AttentionMetadata, scores: Tensor, *, first_token: int,
    top_k: int, ratio: int = 1,
) -> None:  # fmt: skip
    """Score the keys of the tokens from first_token on that see more than top_k keys, as many as scores has rows.

    q: [T, H, I] as `turned` returns them. scores: [N, keys] float32, of which a token that sees n gets the first n.
    """
    num_heads, dim = q.shape[1:]
    heads = next(room for room in HEADS if room >= num_heads)
    variant = _SCORE[Key(target_of(q.device), q.dtype, dim, heads)]
    num_seqs, num_keys = len(metadata.context_lens), metadata.block_tables.shape[1] * cache.shape[1]
    # The second number has a limit of 65,535, which tiles of a million keys in float32 would exceed.
    grid = -(-num_keys // variant.constexprs["BLOCK_N"]), len(scores) // TOKENS + num_seqs
    arguments: dict[str, Any] = {
        "q": q, "weights": weights, "cache": cache, "block_tables": metadata.block_tables,
        "context_lens": metadata.context_lens, "cu_seqlens_q": metadata.cu_seqlens_q, "scores": scores,
    }  # fmt: skip
    variant.launch(
        grid, num_seqs=num_seqs, num_heads=num_heads, first_token=first_token, num_tokens=len(scores),
        weight_stride=weights.stride(0), table_stride=metadata.block_tables.stride(0), block_stride=cache.stride(0),
        block_shift=cache.shape[1].bit_length() - 1, score_stride=scores.stride(0), top_k=top_k, ratio=ratio,
        **arguments,
    )  # fmt: skip


def _is_turned(x: Tensor, dtype: torch.dtype, rotation: Rotation, *, has_slots: bool = False) -> bool:
    """Whether there is a variant that rotates rows [..., I]."""
    is_dense = x.stride(-1) == 1 and all(stride % 16 == 0 for stride in x.stride()[:-1])
    return is_dense and (x.dtype, dtype, x.shape[-1], has_slots) in _TURN and 2 * rotation.cos.shape[-1] <= x.shape[-1]


def can_read(q: Tensor, cache: Tensor, rotation: Rotation) -> bool:
    """Whether there is a variant that rotates queries for a cache, and the cache is one that scores are made from."""
    return _is_turned(q, cache.dtype, rotation) and _is_dense(cache) and cache.shape[1].bit_count() == 1


def _is_dense(cache: Tensor) -> bool:
    return cache.stride()[1:] == (cache.shape[2], 1) and cache.stride(0) % 16 == 0


def _is_scored(q: Tensor, weights: Tensor, cache: Tensor, tables: Tensor | None) -> bool:
    return (
        q.shape[1] <= HEADS[-1]
        and weights.dtype == torch.float32
        and weights.stride(1) == 1
        and (tables is None or tables.stride(1) == 1)
        and _is_dense(cache)
        and cache.shape[1].bit_count() == 1
    )
