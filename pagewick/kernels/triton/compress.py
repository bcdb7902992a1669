"""Compressed entries: compress_rows of reference_compressed.py.

One launch stores the rows of new tokens; the next one has a program for each token, which makes the entry of the window
that ends there, if one does. It goes over the rows of the window, ROWS of them at a time, and keeps a softmax for each
number of the entry. Rows are read from the cache, so that an entry has the same bits however a prompt is cut.

Dimensions: T tokens, B sequences, D numbers of an entry, C numbers of a row, r tokens of a window.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference_compressed
from pagewick.kernels.options import AttentionMetadata, CompressOptions, Rotation
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload

# D of DeepSeek V4's attention and of its indexer; the last one is small enough for tests in the interpreter.
DIMS = (512, 128, 32)
# Rows of a window that a program has at once: those of a window of 4 tokens and of the one before it.
ROWS = 8
# Numbers of a row that a program stores.
BLOCK = 1024
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit(do_not_specialize=["block_size"])
def store_rows(rows, cache, slots, size, row_stride, block_size, block_stride, BLOCK: tl.constexpr):
    """Store BLOCK numbers of the row of token program_id(0): rows [T, C], cache [num_blocks, block_size, C]."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot >= 0:
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = columns < size
        row = tl.load(rows + token * row_stride + columns, mask=inside, other=0)
        place = slot // block_size * block_stride + slot % block_size * size
        tl.store(cache + place + columns, row, mask=inside)


@triton.jit
def sequence_of(cu_seqlens_q, token, num_seqs):
    """Return the sequence of a token of the batch."""
    seq, behind = 0, num_seqs
    while behind - seq > 1:
        middle = (seq + behind) // 2
        is_behind = tl.load(cu_seqlens_q + middle) > token
        seq = tl.where(is_behind, seq, middle)
        behind = tl.where(is_behind, middle, behind)
    return seq


# Numbers that vary.
_NUMBERS = ["num_seqs", "table_stride", "block_size", "num_entries", "ratio", "angle_stride"]


@triton.jit(do_not_specialize=_NUMBERS)
def compress_windows(
    cache, block_tables, context_lens, cu_seqlens_q, entries, entry_slots, bias, norm_weight, cos, sin,
    num_seqs, table_stride, block_size, block_stride, num_entries, entry_stride, ratio, angle_stride, norm_eps,
    DIM: tl.constexpr, KINDS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the entry of the window that ends with token program_id(0), if one does.

    KINDS: kinds of values of a row, 2 if windows overlap. num_entries: entries of a block.
    """
    token = tl.program_id(0)
    seq = sequence_of(cu_seqlens_q, token, num_seqs)
    end = tl.load(context_lens + seq) - tl.load(cu_seqlens_q + seq + 1) + token + 1
    slot = tl.load(entry_slots + token)
    if (slot < 0) | (end % ratio != 0):
        return
    d, width = tl.arange(0, DIM), KINDS * DIM
    table = block_tables + seq.to(tl.int64) * table_stride
    num_rows = KINDS * ratio
    m = tl.full((DIM,), float("-inf"), tl.float32)
    total = tl.zeros((DIM,), tl.float32)
    acc = tl.zeros((DIM,), tl.float32)
    for start in range(0, num_rows, ROWS):
        k = start + tl.arange(0, ROWS)
        positions = end - num_rows + k
        # The first window has none before it.
        exists = (k < num_rows) & (positions >= 0)
        places = tl.where(exists, positions, 0)
        block_ids = tl.load(table + places // block_size, mask=exists, other=0).to(tl.int64)
        # Values and gates of the entry of the next window come before those of a token's own.
        kind = tl.where(k >= num_rows - ratio, (KINDS - 1) * DIM, 0)
        address = cache + (block_ids * block_stride + places % block_size * (2 * width) + kind)[:, None] + d[None, :]
        values = tl.load(address, mask=exists[:, None], other=0).to(tl.float32)
        gates = tl.load(address + width, mask=exists[:, None], other=0).to(tl.float32)
        biases = bias + (k % ratio * width + kind)[:, None] + d[None, :]
        gates += tl.load(biases, mask=exists[:, None], other=0.0)
        gates = tl.where(exists[:, None], gates, float("-inf"))
        new_m = tl.maximum(m, tl.max(gates, 0))
        # No row yet: any number but -inf.
        base = tl.where(new_m == float("-inf"), 0.0, new_m)
        weights, correction = tl.exp(gates - base[None, :]), tl.exp(m - base)
        total = total * correction + tl.sum(weights, 0)
        acc = acc * correction + tl.sum(weights * values, 0)
        m = new_m
    entry = acc / total
    entry = entry * tl.rsqrt(tl.sum(entry * entry, 0) / DIM + norm_eps) * tl.load(norm_weight + d).to(tl.float32)
    first, second = tl.split(tl.reshape(entry, (DIM // 2, 2)))
    angles = token.to(tl.int64) * angle_stride + tl.arange(0, DIM // 2)
    cosines, sines = tl.load(cos + angles), tl.load(sin + angles)
    turned = tl.join(first * cosines - second * sines, second * cosines + first * sines)
    number = slot // ratio
    target = entries + number // num_entries * entry_stride + number % num_entries * DIM
    tl.store(target + d, tl.reshape(turned, (DIM,)).to(entries.dtype.element_ty))


def _store_variant(dtype: torch.dtype) -> Variant:
    number = f"*{TYPE_NAMES[dtype]}"
    strides = dict.fromkeys(("size", "row_stride", "block_stride"), "i32:16")
    return Variant(
        name=f"store_rows_{TYPE_NAMES[dtype]}",
        kernel=store_rows,
        signature={"rows": number, "cache": number, "slots": "*i64", "block_size": "i32", **strides},
        constexprs={"BLOCK": BLOCK},
        in_sample=dtype == torch.bfloat16,
    )


def _compress_variant(dtype: torch.dtype, dim: int, num_kinds: int) -> Variant:
    number = f"*{TYPE_NAMES[dtype]}"
    return Variant(
        name=f"compress_{TYPE_NAMES[dtype]}_{dim}{'_overlaps' if num_kinds == 2 else ''}",
        kernel=compress_windows,
        signature={
            **dict.fromkeys(("cache", "entries", "norm_weight"), number),
            **dict.fromkeys(("block_tables", "context_lens", "cu_seqlens_q"), "*i32"), "entry_slots": "*i64",
            **dict.fromkeys(("bias", "cos", "sin"), "*fp32"), **dict.fromkeys(_NUMBERS, "i32"),
            **dict.fromkeys(("block_stride", "entry_stride"), "i32:16"), "norm_eps": "fp32",
        },
        constexprs={"DIM": dim, "KINDS": num_kinds, "ROWS": ROWS},
        num_warps=max(1, dim // 64),
        in_sample=(dtype, dim, num_kinds) == (torch.bfloat16, DIMS[0], 2),
        # Else threads get sums that differ in their last bits: see Variant.
        fuses=False,
    )  # fmt: skip


_STORE = {dtype: _store_variant(dtype) for dtype in _DTYPES}
_COMPRESS = {key: _compress_variant(*key) for key in itertools.product(_DTYPES, DIMS, (1, 2))}
VARIANTS = (*_STORE.values(), *_COMPRESS.values())


def workload(num_tokens: int, ratio: int) -> Workload:
    """Return the work of new tokens of one sequence with DeepSeek V4's entries in bfloat16."""
    num_kinds = 2 if ratio == 4 else 1
    row = 2 * num_kinds * DIMS[0]
    num_windows = -(-num_tokens // ratio)
    num_bytes = 2 * (2 * num_tokens * row + num_windows * (num_kinds * ratio * 2 * DIMS[0] + DIMS[0]))
    shape = f"{num_tokens:,} tokens, {num_windows:,} entries of {ratio}, bf16"
    return Workload("compress_rows", shape, num_bytes, num_windows * num_kinds * ratio * DIMS[0] * 6, False)


WORKLOADS = (workload(4096, 4), workload(4096, 128))


def compress_rows(
    rows: Tensor,
    cache: Tensor,
    slot_mapping: Tensor,
    metadata: AttentionMetadata,
    entries: Tensor,
    entry_slots: Tensor,
    *,
    rotation: Rotation,
    options: CompressOptions,
) -> None:
    """reference_compressed.compress_rows."""
    key = cache.dtype, entries.shape[2], 2 if options.overlaps else 1
    if not (key in _COMPRESS and _is_served(rows, cache, entries, rotation, options)):
        by_definition(
            reference_compressed.compress_rows, rows, cache, slot_mapping, metadata, entries, entry_slots,
            rotation=rotation, options=options,
        )  # fmt: skip
        return
    num_tokens, size = rows.shape
    _STORE[cache.dtype].launch(
        (num_tokens, triton.cdiv(size, BLOCK)), rows=rows, cache=cache, slots=slot_mapping, size=size,
        row_stride=rows.stride(0), block_size=cache.shape[1], block_stride=cache.stride(0),
    )  # fmt: skip
    _COMPRESS[key].launch(
        (num_tokens,), cache=cache, block_tables=metadata.block_tables, context_lens=metadata.context_lens,
        cu_seqlens_q=metadata.cu_seqlens_q, entries=entries, entry_slots=entry_slots, bias=options.bias,
        norm_weight=options.norm_weight, cos=rotation.cos, sin=rotation.sin, num_seqs=len(metadata.context_lens),
        table_stride=metadata.block_tables.stride(0), block_size=cache.shape[1], block_stride=cache.stride(0),
        num_entries=entries.shape[1], entry_stride=entries.stride(0), ratio=options.ratio,
        angle_stride=rotation.cos.stride(0), norm_eps=options.norm_eps,
    )  # fmt: skip


def _is_served(rows: Tensor, cache: Tensor, entries: Tensor, rotation: Rotation, options: CompressOptions) -> bool:
    """Whether a variant for entries of this size serves these."""
    cos, sin, interleaved = rotation
    return (
        rows.dtype == cache.dtype == entries.dtype == options.norm_weight.dtype
        and all(each.stride()[1:] == (each.shape[2], 1) and each.stride(0) % 16 == 0 for each in (cache, entries))
        and rows.stride(1) == 1
        and interleaved
        and 2 * cos.shape[1] == entries.shape[2]
        and cos.stride() == sin.stride()
        and cos.stride(1) == 1
        and options.bias.is_contiguous()
    )
