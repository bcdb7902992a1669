"""The choice of the blocks of tokens that each head sees: reference_index.select_blocks.

As in index.py, scores come first, and then the choice among them. A program scores a block for some successive tokens
of a sequence, one after the other, and a token's scores have the same bits in every batch. There are few blocks, so one
program chooses for a token and head, and takes the best block as often as blocks are wanted.

Dimensions: T tokens, B sequences, H index heads of I elements.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference_index
from pagewick.kernels.block_choice import BlockChoice
from pagewick.kernels.options import AttentionMetadata, Rotation, SelectedKeys
from pagewick.kernels.triton import index
from pagewick.kernels.triton.compress import sequence_of
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.index import SCORES_BYTES, TOKENS, first_of, sequence_of_tile
from pagewick.kernels.triton.online_softmax import converted, dot_type
from pagewick.kernels.triton.selection import keys_of
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant

# Tokens of a block in MiniMax-M3; the other number is small enough for tests in the interpreter.
SIZES = (16, 128)
# Room for the blocks of a sequence: the first that suffices is taken.
ROOMS = (64, 1024, 8192)
# Room for heads in a tile.
HEADS = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Numbers that vary.
_OF_SCORES = [
    "num_seqs", "num_heads", "first_token", "num_tokens", "table_stride", "block_shift", "num_blocks",
]  # fmt: skip
_OF_CHOICE = ["num_seqs", "num_heads", "first_token", "num_blocks", "size", "top_k", "num_local"]


@triton.jit(do_not_specialize=_OF_SCORES)
def score_blocks(
    q, cache, block_tables, context_lens, cu_seqlens_q, scores,
    num_seqs, num_heads, first_token, num_tokens, table_stride, block_stride, block_shift, num_blocks,
    DIM: tl.constexpr, SIZE: tl.constexpr, TOKENS: tl.constexpr, BLOCK_H: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Score block program_id(1) for up to TOKENS tokens of a sequence, of the num_tokens from first_token on.

    q: [T, H, I], rotated. scores: [num_tokens, H, num_blocks], of which a token gets those of its complete blocks.
    """
    tile, block = tl.program_id(0), tl.program_id(1)
    seq = sequence_of_tile(cu_seqlens_q, tile, num_seqs, first_token, num_tokens, TOKENS)
    begin = first_of(cu_seqlens_q, seq, first_token, num_tokens)
    start = begin + (tile - (begin // TOKENS + seq)) * TOKENS
    end = tl.minimum(start + TOKENS, first_of(cu_seqlens_q, seq + 1, first_token, num_tokens))
    # A token's position is its number and this.
    shift = tl.load(context_lens + seq) - tl.load(cu_seqlens_q + seq + 1) + first_token
    start = tl.maximum(start, (block + 1) * SIZE - 1 - shift)
    if start >= end:
        return
    n, dims, heads = block * SIZE + tl.arange(0, SIZE), tl.arange(0, DIM), tl.arange(0, BLOCK_H)
    is_head = heads < num_heads
    table = block_tables + seq.to(tl.int64) * table_stride
    block_ids = tl.load(table + (n >> block_shift)).to(tl.int64)
    address = cache + block_ids * block_stride + (n & ((1 << block_shift) - 1)) * DIM
    keys = converted(tl.load(address[:, None] + dims[None, :]), DOT)
    for token in range(start, end):
        row = (first_token + token) * num_heads.to(tl.int64) + heads
        queries = converted(tl.load(q + row[:, None] * DIM + dims[None, :], mask=is_head[:, None], other=0), DOT)
        products = tl.dot(keys, tl.trans(queries), input_precision="ieee")
        best = tl.max(tl.where(products == products, products, float("-inf")), 0)
        place = (token * num_heads.to(tl.int64) + heads) * num_blocks + block
        tl.store(scores + place, best, mask=is_head)


@triton.jit(do_not_specialize=_OF_CHOICE)
def choose_blocks(
    scores, context_lens, cu_seqlens_q, slots, counts, num_seqs, num_heads, first_token, num_blocks, size, top_k,
    num_local, ROOM: tl.constexpr,
):  # fmt: skip
    """Choose for token first_token + program_id(0) and head program_id(1). slots: [T, H, top_k]; counts: [T]."""
    token, head = first_token + tl.program_id(0), tl.program_id(1)
    seq = sequence_of(cu_seqlens_q, token, num_seqs)
    num_seen = tl.load(context_lens + seq) - tl.load(cu_seqlens_q + seq + 1) + token + 1
    num_complete = num_seen // size
    # An incomplete block is the first of those that every token sees.
    has_tail = tl.where(num_seen % size > 0, 1, 0)
    count = tl.minimum(num_complete, top_k - has_tail)
    blocks = tl.arange(0, ROOM)
    row = tl.program_id(0).to(tl.int64) * num_heads + head
    found = tl.load(scores + row * num_blocks + blocks, mask=blocks < num_complete, other=0.0)
    # As signed numbers, of which the least is that of no score: NaN does not occur.
    keys = keys_of(found) ^ -0x80000000
    keys = tl.where(blocks >= num_complete - (num_local - has_tail), 0x7FFFFFFF, keys)
    keys = tl.where(blocks < num_complete, keys, -0x80000000)
    is_chosen = blocks < 0
    for _ in range(count):
        best = tl.argmax(keys, 0, tie_break_left=True)
        is_chosen |= blocks == best
        keys = tl.where(blocks == best, -0x80000000, keys)
    places = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    target = slots + (token.to(tl.int64) * num_heads + head) * top_k
    tl.store(target + places, blocks, mask=is_chosen)
    if head == 0:
        tl.store(counts + token, count)


def _score_variant(dtype: torch.dtype, dim: int, size: int) -> Variant:
    """Tiles are chosen so that registers and shared memory suffice; no GPU was there to measure."""
    name, is_plain = TYPE_NAMES[dtype], dtype == torch.float32
    return Variant(
        name=f"score blocks {name} {dim} {size}",
        kernel=score_blocks,
        signature={
            **dict.fromkeys(("q", "cache"), f"*{name}"),
            **dict.fromkeys(("block_tables", "context_lens", "cu_seqlens_q"), "*i32"), "scores": "*fp32",
            **dict.fromkeys(_OF_SCORES, "i32"), "block_stride": "i32:16",
        },
        constexprs={"DIM": dim, "SIZE": size, "TOKENS": TOKENS, "BLOCK_H": HEADS, "DOT": dot_type(dtype)},
        num_warps=8 if is_plain else 4,
        num_stages=1,
        uses_tensor_cores=not is_plain,
        in_sample=(dtype, dim, size) == (torch.bfloat16, 128, 128),
        fuses=False,
    )  # fmt: skip


_SCORE = {
    (dtype, dim, size): _score_variant(dtype, dim, size)
    for dtype in _DTYPES
    for dim in index.DIMS
    for size in SIZES
    # The keys of a block in float32 have no room.
    if dtype != torch.float32 or dim * size <= 4096
}
_CHOOSE = {
    room: Variant(
        f"choose blocks {room}", choose_blocks,
        {"scores": "*fp32", **dict.fromkeys(("context_lens", "cu_seqlens_q", "slots", "counts"), "*i32"),
         **dict.fromkeys(_OF_CHOICE, "i32")},
        {"ROOM": room}, num_warps=max(1, min(8, room // 256)), in_sample=room == ROOMS[1],
    )
    for room in ROOMS
}  # fmt: skip
VARIANTS = (*_SCORE.values(), *_CHOOSE.values())


def select_blocks(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, *, rotation: Rotation, choice: BlockChoice
) -> SelectedKeys:
    """reference_index.select_blocks; slots behind a token's count are left as they are."""
    num_tokens, num_heads, dim = q.shape
    score = _SCORE.get((cache.dtype, dim, choice.size))
    num_blocks = metadata.block_tables.shape[1] * cache.shape[1] // choice.size
    room = next((room for room in ROOMS if room >= num_blocks), None)
    if score is None or room is None or num_heads > HEADS or not index.can_read(q, cache, rotation):
        return by_definition(reference_index.select_blocks, q, cache, metadata, rotation=rotation, choice=choice)
    turned = index.turned(q, cache.dtype, rotation)
    slots = torch.empty(num_tokens, num_heads, choice.top_k, dtype=torch.int32, device=q.device)
    counts = torch.empty(num_tokens, dtype=torch.int32, device=q.device)
    num_rows = max(1, min(num_tokens, SCORES_BYTES // (4 * num_heads * max(1, num_blocks))))
    scores = torch.empty(num_rows, num_heads, num_blocks, device=q.device)
    lengths: dict[str, Any] = {"context_lens": metadata.context_lens, "cu_seqlens_q": metadata.cu_seqlens_q}
    numbers = {"num_seqs": len(metadata.context_lens), "num_heads": num_heads, "num_blocks": num_blocks}
    for first in range(0, num_tokens, num_rows):
        number = min(num_rows, num_tokens - first)
        score.launch(
            (number // TOKENS + numbers["num_seqs"], num_blocks), q=turned, cache=cache,
            block_tables=metadata.block_tables, scores=scores, first_token=first, num_tokens=number,
            table_stride=metadata.block_tables.stride(0), block_stride=cache.stride(0),
            block_shift=cache.shape[1].bit_length() - 1, **lengths, **numbers,
        )  # fmt: skip
        _CHOOSE[room].launch(
            (number, num_heads), scores=scores, slots=slots, counts=counts, first_token=first, size=choice.size,
            top_k=choice.top_k, num_local=choice.num_local, **lengths, **numbers,
        )  # fmt: skip
    return SelectedKeys(slots, counts, torch.arange(num_tokens + 1, dtype=torch.int32, device=q.device))
