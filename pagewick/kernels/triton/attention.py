"""Paged attention over plain caches: reference.paged_attention.

Dimensions: T tokens, B sequences, H query heads, KVH key/value heads, G = H / KVH, D head size.

The rows of a tile are the queries of one sequence that read one KV head: row r is token r // G and its query head
r % G of the group, so that G heads share every key that is loaded, whatever G is. Two kernels divide the sequences
between them by their number of new tokens, and by nothing else:

    short    up to MAX_SHORT_ROWS rows: a step of decoding, or drafts to verify. Bound by bandwidth, so that programs
             split the keys, SPLIT of them each; merge_splits merges them in order.
    long     the rest, prompts: a tile of queries goes over all keys that it sees. Bound by tensor cores.

A token's bits depend on its own sequence and on whether that is short, not on the batch (online_softmax.py). But the
batch decides how a prompt is cut into chunks; where results must not depend on that, every sequence is long. With
bfloat16 and float16, queries, keys, values and the weights of the values are rounded to that dtype for products.
Numbers of 8 or 4 bits are multiplied with the scales of their keys after the product, and the weights with those of
values; with float16, that second product is one of bfloat16 (value_type). Over numbers of 4 bits, which are rotated, a
tile of queries is rotated before its first product, and its sums after the last one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from pagewick.kernels import batch_invariance, reference
from pagewick.kernels.kv_cache import INT4, KVCache
from pagewick.kernels.options import AttentionMetadata, ScoreOptions
from pagewick.kernels.triton.attention_kernels import attend_long, attend_short
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.online_softmax import (
    MERGE_TILE,
    STORED,
    dot_type,
    merge_splits,
    pointer_type,
    value_type,
)
from pagewick.kernels.triton.variant import TARGETS, TYPE_NAMES, Variant, Workload, target_of

# Keys of a split. Eight KV heads and 8,192 keys make 256 programs for one sequence, more than a GPU's multiprocessors.
SPLIT = 256
MAX_SHORT_ROWS = 16
# Bytes for the results of splits. A batch that needs more is attended in several launches.
PARTS_BYTES = 256 * 2**20
# Without a window, queries see this number of tokens.
NO_WINDOW = 2**30
HEAD_DIMS = (16, 32, 64, 80, 96, 112, 128, 160, 192, 256, 512)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_STORED = {**STORED, INT4: "int4"}
# Queries, cache and head size of a variant that would spill registers, whatever its tile.
_SPILLS = (torch.float32, "int4", 512)


class Tile(NamedTuple):
    """num_rows, num_keys: of a tile; how it is compiled: see Variant."""

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int


class Key(NamedTuple):
    """The conditions by which a variant is chosen. stored: as decoded says; "": in the dtype of the queries.

    has_ends: whether tokens see later ones (key_ends), which no model with a cap has.
    """

    is_long: bool
    target: str
    dtype: torch.dtype
    stored: str
    head_dim: int
    has_cap: bool
    has_ends: bool = False


def _tile(key: Key, block_dim: int) -> Tile:
    """Return the tile of a variant. Chosen so that registers and shared memory suffice; no GPU was there to measure.

    It is the same with ends and without, so that a token has the same bits beside an image.
    """
    if block_dim == 512:
        return _widest_tile(key)
    is_wide, is_hopper = block_dim > 128, key.target == "sm_90"
    num_stages = 2 if is_wide or key.target in ("sm_89", "gfx942") else 3
    if key.dtype == torch.float32 and key.stored:
        # A tile that is converted while the one before it is multiplied would need more registers than there are.
        num_warps = 16 if is_wide and not key.is_long and key.target == "sm_89" else 8
        # Nor does a thread of 8 warps have enough for the rotation of 128 numbers in each row.
        num_warps = 16 if block_dim >= 128 and key.stored == "int4" else num_warps
        return Tile(32 if key.is_long and block_dim < 128 else MAX_SHORT_ROWS, 16, num_warps, 1)
    if key.dtype == torch.float32:
        return Tile(32, 16, 8, 2) if key.is_long else Tile(MAX_SHORT_ROWS, 16, 4, 2)
    if not key.is_long:
        # With Triton 3.6, which keeps more of a converted tile in registers, 32 keys of int8 would not fit.
        num_keys = 16 if is_wide and key.stored == "int8" and key.target in ("sm_80", "sm_89") else 32
        return Tile(MAX_SHORT_ROWS, num_keys if is_wide or key.stored else 64, 4, num_stages)
    if is_hopper:
        num_keys = 16 if key.stored else 32
        # Rotating a tile of 128 wide rows would need more registers than there are.
        num_rows = 64 if is_wide and key.stored == "int4" else 128
        return Tile(num_rows, num_keys if is_wide else 64, 8, num_stages)
    if key.stored and block_dim == 64 and key.has_cap and key.target == "sm_80":
        # With 32 keys, the assembler makes room for two programs and spills registers for it.
        return Tile(64, 64, 8, 2)
    if key.stored:
        # With Triton 3.6, 64 wide rows could not be rotated without spills.
        num_rows = 32 if is_wide and key.stored == "int4" else 64
        return Tile(num_rows, 16 if is_wide else 32, 8, 1 if is_wide and key.target == "sm_80" else 2)
    return Tile(64 if is_wide else 128, 64 if block_dim <= 64 else 32, 8, num_stages)


def _widest_tile(key: Key) -> Tile:
    """Return the tile of a variant for heads of more than 256 numbers, by the same measure.

    64 rows of the result in float32 would be half of the registers of a program of 8 warps, so that no tile has enough
    rows for the products of warpgroups on sm_90.
    """
    if key.dtype == torch.float32:
        if key.target == "gfx942":
            return Tile(MAX_SHORT_ROWS, 16, 4, 1)
        return Tile(MAX_SHORT_ROWS, 16, 8, 1 if key.stored else 2)
    num_keys = 32 if key.target in ("sm_80", "sm_90") and not key.stored else 16
    if not key.is_long:
        return Tile(MAX_SHORT_ROWS, num_keys, 8, 1 if key.stored else 2)
    if key.target == "gfx942":
        return Tile(32, 16, 4, 1) if key.stored else Tile(64, 16, 8, 2)
    return Tile(32, num_keys, 8, 2)


_SHARED_SIGNATURE = {
    "block_tables": "*i32", "context_lens": "*i32", "cu_seqlens_q": "*i32", "sinks": "*fp32", "num_kv_heads": "i32",
    "group": "i32", "q_stride": "i32:16", "table_stride": "i32", "block_stride": "i32:16", "scale_stride": "i32",
    "block_shift": "i32", "window": "i32", "is_chunked": "i32", "num_sinks": "i32", "max_short": "i32",
    "scale": "fp32", "cap": "fp32",
}  # fmt: skip
_SHORT_SIGNATURE = {
    "parts": "*fp32", "stats": "*fp32", "num_tiles": "i32", "first_seq": "i32", "row_unit": "i32", "num_splits": "i32",
}  # fmt: skip
# Compiled in every run of the tests: is_long, dtype, stored, head_dim, has_cap, has_ends.
_SAMPLE = {
    (False, torch.bfloat16, "", 128, False, False),
    (True, torch.bfloat16, "", 128, False, False),
    (False, torch.float16, "fp8_e4m3", 80, True, False),
    (True, torch.float32, "int8", 256, False, False),
    (False, torch.bfloat16, "int4", 128, False, False),
    (True, torch.bfloat16, "int4", 128, False, False),
    # Gemma 3 and 4.
    (True, torch.bfloat16, "", 256, False, True),
    (False, torch.bfloat16, "", 512, False, False),
    (True, torch.bfloat16, "", 512, False, True),
}


def _variant(key: Key) -> Variant:
    name = TYPE_NAMES[key.dtype]
    block_dim = triton.next_power_of_2(key.head_dim)
    tile = _tile(key, block_dim)
    cache = pointer_type(key.dtype, key.stored)
    signature = {"q": f"*{name}", "cache": cache, "out": f"*{name}", **_SHARED_SIGNATURE}
    constexprs = {
        "HEAD_DIM": key.head_dim, "BLOCK_D": block_dim, "BLOCK_M": tile.num_rows, "BLOCK_N": tile.num_keys,
        "STORED_AS": key.stored, "HAS_CAP": key.has_cap, "DOT": dot_type(key.dtype),
        "VALUE_DOT": value_type(key.dtype, key.stored),
    }  # fmt: skip
    if key.has_ends:
        signature["key_ends"] = "*i32"
    else:
        constexprs["key_ends"] = None
    return attend_variant(
        key, tile, attend_long if key.is_long else attend_short, signature, constexprs, _SHORT_SIGNATURE,
        label=f"{name} {key.stored or name} {key.head_dim}{' cap' if key.has_cap else ''}"
        f"{' ends' if key.has_ends else ''}",
        in_sample=(key.is_long, *key[2:]) in _SAMPLE,
    )  # fmt: skip


def attend_variant(
    key: Any, tile: Tile, kernel: Any, signature: dict[str, str], constexprs: dict[str, Any],
    short_signature: dict[str, str], *, label: str, in_sample: bool,
) -> Variant:  # fmt: skip
    """Return a variant of a kernel that attends, by a Key of this module or of mla; adds the arguments both share."""
    if key.stored:
        signature["scales"] = "*fp32"
    else:
        constexprs["scales"] = None
    if key.is_long:
        signature["num_seqs"] = "i32"
    else:
        signature |= short_signature
        constexprs["SPLIT"] = SPLIT
    return Variant(
        name=f"{'long' if key.is_long else 'short'} {label} {key.target}",
        kernel=kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        uses_tensor_cores=key.dtype != torch.float32,
        in_sample=in_sample,
        targets=(key.target,),
        fuses=False,
    )


def merge_variant(dtype: torch.dtype, width: int, *, has_ends: bool = False) -> Variant:
    """Return the variant of merge_splits for results [T, H, width]."""
    ends, no_ends = ({"key_ends": "*i32"}, {}) if has_ends else ({}, {"key_ends": None})
    return Variant(
        name=f"merge {TYPE_NAMES[dtype]} {width}{' ends' if has_ends else ''}",
        kernel=merge_splits,
        signature={
            **ends,
            "parts": "*fp32", "stats": "*fp32", "context_lens": "*i32", "cu_seqlens_q": "*i32", "sinks": "*fp32",
            "out": f"*{TYPE_NAMES[dtype]}", "max_short": "i32", "num_heads": "i32", "window": "i32",
            "is_chunked": "i32", "num_sinks": "i32", "first_seq": "i32", "row_unit": "i32", "num_splits": "i32",
        },
        constexprs={
            **no_ends, "WIDTH": width, "BLOCK_D": triton.next_power_of_2(width), "SPLIT": SPLIT, "TILE": MERGE_TILE,
        },
        in_sample=(dtype, width) in ((torch.bfloat16, 128), (torch.bfloat16, 512)) and not has_ends,
        fuses=False,
    )  # fmt: skip


_ATTEND = {
    key: _variant(key)
    for key in (
        Key(is_long, target, dtype, stored, head_dim, has_cap, has_ends)
        for is_long in (False, True)
        for target in TARGETS
        for dtype in _DTYPES
        for stored in ("", *_STORED.values())
        for head_dim in HEAD_DIMS
        for has_cap, has_ends in ((False, False), (True, False), (False, True))
    )
    if (key.dtype, key.stored, key.head_dim) != _SPILLS
}
_MERGE = {
    (dtype, width, has_ends): merge_variant(dtype, width, has_ends=has_ends)
    for dtype in _DTYPES
    for width in HEAD_DIMS
    for has_ends in (False, True)
}
VARIANTS = (*_ATTEND.values(), *_MERGE.values())


def workload(q_len: int, num_seqs: int, context_len: int, num_heads: int, num_kv_heads: int, head_dim: int) -> Workload:
    """Return the work of a batch of sequences of equal lengths with bfloat16 everywhere."""
    num_seen = context_len - (q_len - 1) / 2
    numbers = num_seqs * head_dim * (2 * q_len * num_heads + 2 * context_len * num_kv_heads)
    operations = int(4 * num_seqs * q_len * num_seen * num_heads * head_dim)
    shape = f"{num_seqs} x {q_len} tokens, contexts of {context_len}, {num_heads} / {num_kv_heads} heads of {head_dim}"
    return Workload("paged_attention", shape, 2 * numbers, operations)


# Llama 3.1 8B, Qwen3-0.6B, and a layer of Gemma 4 31B without a window.
WORKLOADS = (
    workload(1, 1, 8192, 32, 8, 128),
    workload(1, 64, 4096, 32, 8, 128),
    workload(8192, 1, 8192, 32, 8, 128),
    workload(1, 256, 1024, 16, 8, 128),
    workload(1, 64, 4096, 32, 4, 512),
    workload(8192, 1, 8192, 32, 4, 512),
)


def paged_attention(q: Tensor, cache: KVCache, metadata: AttentionMetadata, scores: ScoreOptions) -> Tensor:
    """reference.paged_attention; see the module."""
    has_cap, has_ends = bool(scores.logit_soft_cap), metadata.key_ends is not None
    if not _is_served(q, cache) or (has_cap and has_ends):
        return by_definition(reference.paged_attention, q, cache, metadata, scores)
    num_tokens, num_heads, head_dim = q.shape
    out = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    if num_tokens == 0:
        return out
    if q.stride(2) != 1 or q.stride(1) != head_dim or q.stride(0) % 16:
        q = q.contiguous()
    group = num_heads // cache.num_kv_heads
    max_short = max_short_tokens(group)
    sinks = scores.sinks
    shared = {
        "q": q, "cache": bytes_of_fp8(cache.data), "out": out, "block_tables": metadata.block_tables,
        "context_lens": metadata.context_lens, "cu_seqlens_q": metadata.cu_seqlens_q,
        "sinks": torch.empty(1, device=q.device) if sinks is None else sinks, "num_kv_heads": cache.num_kv_heads,
        "group": group, "q_stride": q.stride(0), "table_stride": metadata.block_tables.stride(0),
        "block_stride": cache.data.stride(0), "scale_stride": 0 if cache.scales is None else cache.scales.stride(0),
        "block_shift": cache.block_size.bit_length() - 1, "window": scores.sliding_window or NO_WINDOW,
        "is_chunked": int(scores.is_chunked),
        "num_sinks": 0 if sinks is None else num_heads, "max_short": max_short, "scale": scores.softmax_scale,
        "cap": scores.logit_soft_cap or 0.0,
    }  # fmt: skip
    if cache.scales is not None:
        shared["scales"] = cache.scales
    if has_ends:
        shared["key_ends"] = metadata.key_ends
    key = Key(False, target_of(q.device), q.dtype, _STORED.get(cache.dtype, ""), head_dim, has_cap, has_ends)
    if max_short:
        _attend_short(shared, _ATTEND[key], _MERGE[q.dtype, head_dim, has_ends])
    if (metadata.max_query_len or num_tokens) > max_short:
        long = _ATTEND[key._replace(is_long=True)]
        num_seqs = len(metadata.context_lens)
        num_tiles = num_tokens * group // long.constexprs["BLOCK_M"] + num_seqs
        long.launch((num_tiles, cache.num_kv_heads), num_seqs=num_seqs, **shared)
    return out


def max_short_tokens(rows_of_token: int, limit: int = MAX_SHORT_ROWS) -> int:
    """Return how many new tokens a short sequence has at most.

    None is short if results must not depend on the batch, which decides how a prompt is cut into chunks: both kernels
    add in orders of their own.
    """
    return 0 if batch_invariance.is_required() else max(1, limit // rows_of_token)


def _attend_short(shared: dict[str, Any], attend: Variant, merge: Variant) -> None:
    """Attend with the short sequences of a batch."""
    out, max_short, group = shared["out"], shared["max_short"], shared["group"]
    num_seqs, num_tiles = len(shared["context_lens"]), -(-max_short * group // attend.constexprs["BLOCK_M"])
    num_splits = -(-(shared["block_tables"].shape[1] << shared["block_shift"]) // SPLIT)
    for part in split_slices(out, num_seqs, num_splits, max_short):
        own = part.arguments(num_splits)
        attend.launch(
            (part.num_seqs, num_tiles * shared["num_kv_heads"], num_splits), num_tiles=num_tiles, **own, **shared
        )
        if num_splits > 1:
            names = ("context_lens", "cu_seqlens_q", "sinks", "out", "max_short", "window", "is_chunked", "num_sinks")
            arguments = {name: shared[name] for name in (*names, *(["key_ends"] if "key_ends" in shared else []))}
            merge.launch((part.num_seqs, out.shape[1]), num_heads=out.shape[1], **own, **arguments)


class Slice(NamedTuple):
    """Sequences that are attended in one launch, and memory for the results of their splits (merge_splits)."""

    first_seq: int
    num_seqs: int
    row_unit: int
    parts: Tensor
    stats: Tensor

    def arguments(self, num_splits: int) -> dict[str, Any]:
        """Return the arguments that kernels take from it."""
        return {
            "first_seq": self.first_seq, "row_unit": self.row_unit, "num_splits": num_splits, "parts": self.parts,
            "stats": self.stats,
        }  # fmt: skip


def split_slices(out: Tensor, num_seqs: int, num_splits: int, max_short: int) -> Iterator[Slice]:
    """Divide a batch so that the results of its splits need at most PARTS_BYTES, or one sequence at a time.

    out: the batch's results [T, H, D].
    """
    num_tokens, num_heads, width = out.shape
    row_bytes = 4 * num_heads * num_splits * (width + 2)
    if num_splits == 1:
        nothing = torch.empty(1, device=out.device)
        yield Slice(0, num_seqs, 0, nothing, nothing)
        return
    if num_tokens <= num_seqs * max_short and num_tokens * row_bytes <= PARTS_BYTES:
        num_rows, row_unit, step = num_tokens, 0, num_seqs
    else:
        # The tokens of prompts get no rows.
        step = min(num_seqs, max(1, PARTS_BYTES // (max_short * row_bytes)))
        num_rows, row_unit = step * max_short, max_short
    parts = torch.empty(num_rows, num_heads, num_splits, width, device=out.device)
    stats = torch.empty(num_rows, num_heads, num_splits, 2, device=out.device)
    for first in range(0, num_seqs, step):
        yield Slice(first, min(step, num_seqs - first), row_unit, parts, stats)


def _is_served(q: Tensor, cache: KVCache) -> bool:
    """Whether there is a variant for these."""
    return (
        not cache.is_packed
        and q.shape[2] in HEAD_DIMS
        and (cache.dtype == q.dtype or cache.dtype in _STORED)
        and (q.dtype, _STORED.get(cache.dtype), q.shape[2]) != _SPILLS
        and cache.data.stride(0) % 16 == 0
        and cache.block_size.bit_count() == 1
        and not (torch.is_grad_enabled() and q.requires_grad)
    )


def bytes_of_fp8(data: Tensor) -> Tensor:
    """Return numbers of a cache in the dtype in which kernels read them."""
    return data.view(torch.uint8) if data.dtype.is_floating_point and data.dtype.itemsize == 1 else data
