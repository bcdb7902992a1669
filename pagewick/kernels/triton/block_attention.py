"""Attention to selected blocks of tokens: reference_blocks.block_attention.

A program has query heads of one token that read the same KV head, and goes through the keys that its token sees: those
of the selected blocks, in their order, then those behind the last complete block. Nothing is split, so that a token's
bits depend on its own sequence alone.

Dimensions: T tokens, B sequences, H query heads, KVH key/value heads, D elements of a head.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference_blocks
from pagewick.kernels.kv_cache import KVCache
from pagewick.kernels.options import AttentionMetadata, ScoreOptions, SelectedKeys
from pagewick.kernels.triton.compress import sequence_of
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.online_softmax import converted, dot_type, next_weights, with_sink
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload

# D of MiniMax-M3 and of Qwen4-Exp; the other one is small enough for tests in the interpreter.
DIMS = (32, 128, 256)
# Heads of a program: the fewest rows that tensor cores multiply.
HEADS = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Numbers that vary.
_NUMBERS = [
    "num_seqs", "group", "num_kv_heads", "ratio", "table_stride", "block_size", "slot_stride", "selection_stride",
]  # fmt: skip


@triton.jit(do_not_specialize=_NUMBERS)
def attend_blocks(
    q, cache, block_tables, context_lens, cu_seqlens_q, slots, counts, out,
    num_seqs, group, num_kv_heads, ratio, table_stride, block_stride, block_size, slot_stride, selection_stride, scale,
    DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Attend with heads of a token, those of tile program_id(2) of the `group` that read KV head program_id(1).

    selection_stride: from the slots of a KV head to those of the next one; 0: all have the same.
    """
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    seq = sequence_of(cu_seqlens_q, tl.program_id(0), num_seqs)
    num_seen = tl.load(context_lens + seq) - tl.load(cu_seqlens_q + seq + 1) + tl.program_id(0) + 1
    num_selected = tl.load(counts + token) * ratio
    # The position of a key behind the selected ones is its number and this.
    shift = num_seen // ratio * ratio - num_selected
    num_keys = num_seen - shift
    heads, d = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, DIM)
    is_row = heads < group
    rows = (token * num_kv_heads + kv_head) * group + tl.where(is_row, heads, 0)
    queries = converted(tl.load(q + rows[:, None] * DIM + d[None, :], mask=is_row[:, None], other=0), DOT)
    table = block_tables + seq.to(tl.int64) * table_stride
    numbers = slots + token * slot_stride + kv_head * selection_stride
    factor = scale * 1.4426950408889634
    acc = tl.zeros((BLOCK_M, DIM), tl.float32)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, num_keys, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        exists, is_selected = n < num_keys, n < num_selected
        number = tl.load(numbers + n // ratio, mask=is_selected, other=0)
        position = tl.where(is_selected, number * ratio + n % ratio, n + shift)
        block_ids = tl.load(table + position // block_size, mask=exists, other=0).to(tl.int64)
        place = (cache + block_ids * block_stride + (kv_head * block_size + position % block_size) * DIM)[:, None]
        keys = converted(tl.load(place + d[None, :], mask=exists[:, None], other=0), DOT)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee")
        scores = tl.where(exists[None, :], scores, float("-inf"))
        weights, correction, m, total = next_weights(scores, factor, m, total)
        place += num_kv_heads * block_size * DIM
        values = converted(tl.load(place + d[None, :], mask=exists[:, None], other=0), DOT)
        acc = tl.dot(weights.to(DOT), values, acc * correction[:, None], input_precision="ieee")
    mean = with_sink(acc, m, total, tl.full((BLOCK_M,), float("-inf"), tl.float32))
    tl.store(out + rows[:, None] * DIM + d[None, :], mean.to(out.dtype.element_ty), mask=is_row[:, None])


def _variant(dtype: torch.dtype, dim: int) -> Variant:
    """Tiles are chosen so that registers and shared memory suffice; no GPU was there to measure."""
    name, is_plain = TYPE_NAMES[dtype], dtype == torch.float32
    return Variant(
        name=f"blocks {name} {dim}",
        kernel=attend_blocks,
        signature={
            **dict.fromkeys(("q", "cache"), f"*{name}"),
            **dict.fromkeys(("block_tables", "context_lens", "cu_seqlens_q", "slots", "counts"), "*i32"),
            "out": f"*{name}", **dict.fromkeys(_NUMBERS, "i32"), "block_stride": "i32:16", "scale": "fp32",
        },
        constexprs={
            "DIM": dim, "BLOCK_M": HEADS, "BLOCK_N": 16 if is_plain or dim > 128 else 32, "DOT": dot_type(dtype),
        },
        num_warps=4,
        num_stages=1 if is_plain else 2,
        uses_tensor_cores=not is_plain,
        in_sample=(dtype, dim) == (torch.bfloat16, 128),
        fuses=False,
    )  # fmt: skip


_ATTEND = {(dtype, dim): _variant(dtype, dim) for dtype in _DTYPES for dim in DIMS}
VARIANTS = tuple(_ATTEND.values())


def workload(q_len: int, num_seqs: int, num_keys: int = 2048, num_heads: int = 64, num_kv_heads: int = 4) -> Workload:
    """Return the work of tokens that see num_keys tokens each, with heads of 128 numbers in bfloat16."""
    num_tokens, dim = q_len * num_seqs, 128
    num_bytes = 4 * dim * num_tokens * (num_heads + num_kv_heads * num_keys)
    shape = f"{num_seqs} x {q_len:,} tokens, {num_keys:,} selected, {num_heads}/{num_kv_heads} heads of {dim}"
    return Workload("block_attention", shape, num_bytes, 4 * num_tokens * num_heads * num_keys * dim)


# MiniMax-M3.
WORKLOADS = (workload(1, 1), workload(1, 64), workload(4096, 1))


def block_attention(
    q: Tensor,
    cache: KVCache,
    metadata: AttentionMetadata,
    scores: ScoreOptions,
    selected: SelectedKeys,
    ratio: int,
) -> Tensor:
    """reference_blocks.block_attention; see the module."""
    variant = _ATTEND.get((q.dtype, q.shape[2]))
    if variant is None or not _is_served(q, cache, selected):
        return by_definition(reference_blocks.block_attention, q, cache, metadata, scores, selected, ratio)
    num_tokens, num_heads, dim = q.shape
    out = torch.empty((num_tokens, num_heads, dim), dtype=q.dtype, device=q.device)
    group, slots = num_heads // cache.num_kv_heads, selected.slots
    arguments: dict[str, Any] = {
        "q": q.contiguous(), "cache": cache.data, "block_tables": metadata.block_tables,
        "context_lens": metadata.context_lens, "cu_seqlens_q": metadata.cu_seqlens_q, "slots": slots,
        "counts": selected.counts, "out": out,
    }  # fmt: skip
    variant.launch(
        (num_tokens, cache.num_kv_heads, triton.cdiv(group, HEADS)), num_seqs=len(metadata.context_lens), group=group,
        num_kv_heads=cache.num_kv_heads, ratio=ratio, table_stride=metadata.block_tables.stride(0),
        block_stride=cache.data.stride(0), block_size=cache.block_size, slot_stride=slots.stride(0),
        selection_stride=slots.stride(1) if slots.dim() == 3 and slots.shape[1] > 1 else 0,
        scale=scores.softmax_scale, **arguments,
    )  # fmt: skip
    return out


def _is_served(q: Tensor, cache: KVCache, selected: SelectedKeys) -> bool:
    data = cache.data
    return (
        not cache.is_packed
        and cache.scales is None
        and data.dtype == q.dtype
        and data[:1].is_contiguous()
        and data.stride(0) % 16 == 0
        and selected.slots.stride(-1) == 1
        and not (torch.is_grad_enabled() and q.requires_grad)
    )
