"""Attention to a window of keys and to compressed entries: reference_compressed.window_attention.

Dimensions: T tokens, B sequences, H query heads, D elements of a key.

All heads of a token read the same keys, which are their own values, and in most layers each token sees other entries
than the next one. So a tile's rows are heads of one token, whose keys come first and whose entries follow, in their
order; a tile of keys is loaded once for both products. Two kernels divide the sequences between them by their number of
new tokens, and by nothing else, as in attention.py:

    short    up to MAX_SHORT_TOKENS tokens: the first program of a tile attends to the window, and each of the others to
             SPLIT entries; merge_entries merges them in order.
    long     the rest, prompts: a program attends to all that its token sees.

A token's bits depend on its own sequence and on whether that is short, not on the batch. Where results must not depend
on how a prompt is cut, every sequence is long.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from pagewick.kernels import reference_compressed
from pagewick.kernels.options import AttentionMetadata, Entries, ScoreOptions
from pagewick.kernels.triton.attention import Tile, max_short_tokens, split_slices
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.online_softmax import MERGE_TILE, dot_type
from pagewick.kernels.triton.variant import TARGETS, TYPE_NAMES, Variant, Workload, target_of
from pagewick.kernels.triton.window_kernels import attend_long_window, attend_short_window, merge_entries

# Sequences of more new tokens are long.
MAX_SHORT_TOKENS = 4
# Entries of a split: as many as a window of DeepSeek V4 has tokens.
SPLIT = 128
# D of DeepSeek V4; the other one is small enough for tests in the interpreter.
DIMS = (512, 32)
# How a token sees entries: none; all whose windows have ended; those that an indexer selected.
KINDS = ("none", "all", "selected")
# Heads of a narrow tile.
NARROW = 16
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Key(NamedTuple):
    """The conditions by which a variant is chosen. kind: of KINDS; is_wide: a tile has more than NARROW heads."""

    is_long: bool
    target: str
    dtype: torch.dtype
    dim: int
    kind: str
    is_wide: bool = False


def _tile(key: Key) -> Tile:
    """Return the tile of a variant. Chosen so that registers and shared memory suffice; no GPU was there to measure.

    As in attention.py, 64 rows of a result of 512 numbers leave NVIDIA's GPUs too few registers for the rest.
    """
    is_amd = key.target == "gfx942"
    if key.dtype == torch.float32:
        return Tile(NARROW, 16, 4, 1) if is_amd else Tile(NARROW, 16, 8, 2)
    if not key.is_wide:
        return Tile(NARROW, 16, 8, 2)
    return Tile(64, 16, 8, 2) if is_amd else Tile(32, 16 if key.target == "sm_89" else 32, 8, 2)


_SIGNATURE = {
    **dict.fromkeys(("block_tables", "context_lens", "cu_seqlens_q"), "*i32"), "sinks": "*fp32", "num_heads": "i32",
    "window": "i32", "table_stride": "i32", "block_stride": "i32:16", "block_size": "i32", "entry_table_stride": "i32",
    "entry_stride": "i32:16", "of_block": "i32", "slot_stride": "i32", "ratio": "i32", "max_short": "i32",
    "scale": "fp32",
}  # fmt: skip
_PARTS = {"parts": "*fp32", "stats": "*fp32", "first_seq": "i32", "row_unit": "i32", "num_splits": "i32"}
_OF_KIND = {
    "none": {}, "all": {"entry_tables": "*i32"}, "selected": {"slots": "*i32", "counts": "*i32"},
}  # fmt: skip


def _variant(key: Key) -> Variant:
    name, tile = TYPE_NAMES[key.dtype], _tile(key)
    pointers = {**dict.fromkeys(("q", "cache", "out"), f"*{name}"), **_OF_KIND[key.kind]}
    if key.kind != "none":
        pointers["entries"] = f"*{name}"
    absent = {each: None for each in ("entries", "entry_tables", "slots", "counts") if each not in pointers}
    form = f"{'long' if key.is_long else 'short'}{' wide' if key.is_wide else ''}"
    return Variant(
        name=f"{form} {name} {key.dim} {key.kind} {key.target}",
        kernel=attend_long_window if key.is_long else attend_short_window,
        signature={
            **pointers, **_SIGNATURE, **({"num_seqs": "i32"} if key.is_long else {**_PARTS, "num_tiles": "i32"}),
        },
        constexprs={
            **absent, "DIM": key.dim, "BLOCK_M": tile.num_rows, "BLOCK_N": tile.num_keys, "KIND": key.kind,
            "DOT": dot_type(key.dtype), **({} if key.is_long else {"SPLIT": SPLIT}),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        uses_tensor_cores=key.dtype != torch.float32,
        in_sample=key[2:5] == (torch.bfloat16, DIMS[0], "selected") and key.is_long == key.is_wide,
        targets=(key.target,),
        fuses=False,
    )  # fmt: skip


def _merge_variant(dtype: torch.dtype, dim: int, kind: str) -> Variant:
    counts = {"counts": "*i32"} if kind == "selected" else {}
    return Variant(
        name=f"merge {TYPE_NAMES[dtype]} {dim} {kind}",
        kernel=merge_entries,
        signature={
            **counts, **_PARTS, "context_lens": "*i32", "cu_seqlens_q": "*i32", "sinks": "*fp32",
            "out": f"*{TYPE_NAMES[dtype]}", "num_heads": "i32", "ratio": "i32", "max_short": "i32",
        },
        constexprs={
            **({} if counts else {"counts": None}), "DIM": dim, "SPLIT": SPLIT, "KIND": kind, "TILE": MERGE_TILE,
        },
        in_sample=(dtype, dim, kind) == (torch.bfloat16, DIMS[0], "selected"),
        fuses=False,
    )  # fmt: skip


_ATTEND = {
    key: _variant(key)
    for key in (
        Key(is_long, target, dtype, dim, kind, is_wide)
        for is_long in (False, True)
        for target in TARGETS
        for dtype in _DTYPES
        for dim in DIMS
        for kind in KINDS
        for is_wide in (False, True)
    )
    # Steps of decoding are divided among more programs; float32 has no room for more heads.
    if not key.is_wide or (key.is_long and key.dtype != torch.float32)
}
_MERGE = {
    (dtype, dim, kind): _merge_variant(dtype, dim, kind) for dtype in _DTYPES for dim in DIMS for kind in KINDS[1:]
}
VARIANTS = (*_ATTEND.values(), *_MERGE.values())


def workload(q_len: int, num_seqs: int, num_entries: int, kind: str, num_heads: int = 64) -> Workload:
    """Return the work of a batch of sequences with windows of 128 tokens and keys of 512 numbers in bfloat16.

    num_entries: that each token sees. Entries are read once for a sequence, or, selected, once for a token.
    """
    rows, num_keys = num_seqs * q_len * num_heads, 128 + num_entries
    num_read = num_seqs * (127 + q_len + num_entries * (q_len if kind == "selected" else 1))
    shape = f"{num_seqs} x {q_len:,} tokens, 128 keys and {num_entries:,} entries ({kind}), {num_heads} heads of 512"
    return Workload("window_attention", shape, 2 * DIMS[0] * (2 * rows + num_read), 4 * rows * num_keys * DIMS[0])


# DeepSeek V4: the two kinds of layers with entries, behind contexts of 131,072 tokens.
WORKLOADS = (
    workload(1, 1, 1024, "all"),
    workload(1, 64, 1024, "all"),
    workload(1, 64, 512, "selected"),
    workload(4096, 1, 1024, "all"),
    workload(4096, 1, 512, "selected"),
)


def window_attention(
    q: Tensor, cache: Tensor, metadata: AttentionMetadata, scores: ScoreOptions, entries: Entries | None = None
) -> Tensor:
    """reference_compressed.window_attention; see the module."""
    kind = "none" if entries is None else "all" if entries.selected is None else "selected"
    num_tokens, num_heads, dim = q.shape
    key = Key(False, target_of(q.device), q.dtype, dim, kind)
    if not (key in _ATTEND and _is_served(q, cache, scores, entries)):
        return by_definition(reference_compressed.window_attention, q, cache, metadata, scores, entries)
    out = torch.empty((num_tokens, num_heads, dim), dtype=q.dtype, device=q.device)
    max_short = max_short_tokens(1, MAX_SHORT_TOKENS)
    shared = {
        "q": q.contiguous(), "cache": cache, "out": out, "block_tables": metadata.block_tables,
        "context_lens": metadata.context_lens, "cu_seqlens_q": metadata.cu_seqlens_q, "sinks": scores.sinks,
        "num_heads": num_heads, "window": scores.sliding_window, "table_stride": metadata.block_tables.stride(0),
        "block_stride": cache.stride(0), "block_size": cache.shape[1], "max_short": max_short,
        "scale": scores.softmax_scale, **_arguments_of(entries),
    }  # fmt: skip
    longest = min(num_tokens, metadata.max_query_len or num_tokens)
    if max_short:
        _attend_short(shared, key, min(max_short, longest), _most_entries(entries))
    if longest > max_short:
        is_wide = num_heads > NARROW and q.dtype != torch.float32
        long = _ATTEND[key._replace(is_long=True, is_wide=is_wide)]
        grid = num_tokens, triton.cdiv(num_heads, long.constexprs["BLOCK_M"])
        long.launch(grid, num_seqs=len(metadata.context_lens), **shared)
    return out


def _arguments_of(entries: Entries | None) -> dict[str, Any]:
    """Return the arguments of kernels that say which entries there are."""
    if entries is None:
        return dict.fromkeys(("entry_table_stride", "entry_stride", "slot_stride"), 0) | {"of_block": 1, "ratio": 1}
    found: dict[str, Any] = {
        "entries": entries.cache, "entry_stride": entries.cache.stride(0), "of_block": entries.cache.shape[1],
        "ratio": entries.ratio, "entry_table_stride": entries.block_tables.stride(0), "slot_stride": 0,
    }  # fmt: skip
    if (selected := entries.selected) is None:
        return found | {"entry_tables": entries.block_tables}
    return found | {"slots": selected.slots, "counts": selected.counts, "slot_stride": selected.slots.stride(0)}


def _most_entries(entries: Entries | None) -> int:
    """Return how many entries a token sees at most, by the sizes of tensors alone."""
    if entries is None:
        return 0
    selected, of_block = entries.selected, entries.cache.shape[1]
    return entries.block_tables.shape[1] * of_block if selected is None else selected.slots.shape[1]


def _attend_short(shared: dict[str, Any], key: Key, most_tokens: int, most_entries: int) -> None:
    """Attend with the short sequences of a batch, which have at most most_tokens new tokens."""
    attend, out = _ATTEND[key], shared["out"]
    num_heads, num_tiles = out.shape[1], triton.cdiv(out.shape[1], attend.constexprs["BLOCK_M"])
    num_splits = 1 + triton.cdiv(most_entries, SPLIT)
    for part in split_slices(out, len(shared["context_lens"]), num_splits, most_tokens):
        own = part.arguments(num_splits)
        attend.launch((part.num_seqs, most_tokens * num_tiles, num_splits), num_tiles=num_tiles, **own, **shared)
        if num_splits > 1:
            names = ("context_lens", "cu_seqlens_q", "sinks", "out", "num_heads", "ratio", "max_short", "counts")
            arguments = {name: shared[name] for name in names if name in shared}
            _MERGE[key.dtype, key.dim, key.kind].launch((part.num_seqs, most_tokens, num_heads), **own, **arguments)


def _is_served(q: Tensor, cache: Tensor, scores: ScoreOptions, entries: Entries | None) -> bool:
    """Whether a variant for keys of this size serves these."""
    caches = [cache] if entries is None else [cache, entries.cache]
    selected = None if entries is None else entries.selected
    return (
        all(each.dtype == q.dtype and _is_dense(each) for each in caches)
        and scores.logit_soft_cap is None
        and not scores.is_chunked
        and (selected is None or selected.slots.stride(1) == 1)
        and not (torch.is_grad_enabled() and q.requires_grad)
    )


def _is_dense(cache: Tensor) -> bool:
    return cache.stride()[1:] == (cache.shape[2], 1) and cache.stride(0) % 16 == 0
