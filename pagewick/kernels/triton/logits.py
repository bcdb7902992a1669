"""Rows of logits: the most likely token, the sum for log-probabilities, and masks; random numbers.

Definitions: argmax_rows, log_softmax_stats, mask_rows and philox_uniform of reference_sampling.py. A row is divided
into parts of PART numbers, one program each, whose results a second kernel puts together; the division depends on V
alone, so a row's result depends on that row alone, bit for bit.

Dimensions: N rows, V vocabulary, P parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.order import id_of, ordered
from pagewick.kernels.triton.variant import Variant, Workload

PART = 8192
BLOCK = 1024
# The largest number of parts that the second kernels take at once: of a vocabulary of 4 million tokens.
MAX_PARTS = 512


@triton.jit(do_not_specialize=["row_stride"])
def argmax_parts(logits_ptr, best_ptr, vocab_size, row_stride, num_parts, PART: tl.constexpr, BLOCK: tl.constexpr):
    """Write the greatest logit and its id (order.py) of part program_id(1) of a row of logits [N, V] to best [N, P]."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    best = tl.full((BLOCK,), -0x8000000000000000, tl.int64)
    for start in range(part * PART, tl.minimum(part * PART + PART, vocab_size), BLOCK):
        ids = start + tl.arange(0, BLOCK)
        inside = ids < vocab_size
        x = tl.load(logits_ptr + row * row_stride + ids, mask=inside, other=float("-inf"))
        best = tl.maximum(best, tl.where(inside, ordered(x, ids), -0x8000000000000000))
    tl.store(best_ptr + row * num_parts + part, tl.max(best, axis=0))


@triton.jit(do_not_specialize=["row_stride"])
def argmax_merge(best_ptr, logits_ptr, ids_ptr, values_ptr, row_stride, num_parts, MAX_PARTS: tl.constexpr):
    """Write the id [N] int64 and the value [N] of the greatest of best [N, P]."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, MAX_PARTS)
    inside = parts < num_parts
    best = tl.load(best_ptr + row * num_parts + parts, mask=inside, other=-0x8000000000000000)
    token_id = id_of(tl.max(best, axis=0))
    tl.store(ids_ptr + row, token_id.to(tl.int64))
    # A NaN keeps its bits.
    tl.store(values_ptr + row, tl.load(logits_ptr + row * row_stride + token_id))


@triton.jit(do_not_specialize=["row_stride"])
def log_sum_parts(
    logits_ptr, max_ptr, sum_ptr, vocab_size, row_stride, num_parts, PART: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the maximum m of each part (or NaN) and the sum of exp(logit - m) to max and sum [N, P] float32."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    end = tl.minimum(part * PART + PART, vocab_size)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    is_bad = tl.zeros((BLOCK,), tl.int32)
    for start in range(part * PART, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
        highest = tl.maximum(highest, x)
        is_bad |= (x != x).to(tl.int32)
    part_max = tl.max(highest, axis=0)
    # -inf from itself is NaN; a part of such logits has the sum 0.
    base = tl.where(part_max == float("-inf"), 0.0, part_max)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(part * PART, end, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
        total += tl.exp(x - base)
    has_bad = tl.max(is_bad, axis=0) != 0
    tl.store(max_ptr + row * num_parts + part, tl.where(has_bad, float("nan"), part_max))
    tl.store(sum_ptr + row * num_parts + part, tl.sum(total, axis=0))


@triton.jit
def log_sum_merge(max_ptr, sum_ptr, highest_ptr, log_sum_ptr, num_parts, MAX_PARTS: tl.constexpr):
    """Write the maximum and the logarithm of the sum [N] float32 of each row from its parts, [N, P] each."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, MAX_PARTS)
    inside = parts < num_parts
    part_max = tl.load(max_ptr + row * num_parts + parts, mask=inside, other=float("-inf"))
    part_sum = tl.load(sum_ptr + row * num_parts + parts, mask=inside, other=0.0)
    has_bad = tl.max((part_max != part_max).to(tl.int32), axis=0) != 0
    highest = tl.where(has_bad, float("nan"), tl.max(part_max, axis=0))
    # A row with +inf, or with -inf only, gives NaN, because infinity minus infinity does.
    scaled = tl.where(inside, part_sum * tl.exp(part_max - highest), 0.0)
    total = tl.where(highest == float("-inf"), float("nan"), tl.sum(scaled, axis=0))
    tl.store(highest_ptr + row, highest)
    tl.store(log_sum_ptr + row, tl.log(total))


@triton.jit(do_not_specialize=["row_stride"])
def mask_parts(logits_ptr, masks_ptr, out_ptr, vocab_size, row_stride, mask_stride, BLOCK: tl.constexpr):
    """Write logits [N, V] to out [N, V], with -inf for tokens whose bit in masks [N, V / 8] is 0."""
    row = tl.program_id(0).to(tl.int64)
    ids = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = ids < vocab_size
    bits = tl.load(masks_ptr + row * mask_stride + (ids >> 3), mask=inside, other=0).to(tl.int32)
    is_allowed = ((bits >> (ids & 7)) & 1) != 0
    x = tl.load(logits_ptr + row * row_stride + ids, mask=inside & is_allowed, other=float("-inf"))
    tl.store(out_ptr + row * vocab_size + ids, x, mask=inside)


@triton.jit(do_not_specialize=["purpose", "num_rows"])
def philox_rows(seeds_ptr, choices_ptr, positions_ptr, out_ptr, purpose, num_rows, BLOCK: tl.constexpr):
    """Write a float64 in [0, 1) for each of seeds, choices and positions [N] int64: Philox4x32-10."""
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = rows < num_rows
    low: tl.constexpr = 0xFFFFFFFF
    seed = tl.load(seeds_ptr + rows, mask=inside, other=0)
    position = tl.load(positions_ptr + rows, mask=inside, other=0)
    c0, c1 = position & low, (position >> 32) & low
    c2 = tl.load(choices_ptr + rows, mask=inside, other=0) & low
    c3 = tl.zeros((BLOCK,), tl.int64) + purpose
    k0, k1 = seed & low, (seed >> 32) & low
    for _ in tl.static_range(10):
        # An int64 product wraps, which keeps all 64 bits of the unsigned product.
        product0, product1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1 = ((product1 >> 32) & low) ^ c1 ^ k0, product1 & low
        c2, c3 = ((product0 >> 32) & low) ^ c3 ^ k1, product0 & low
        k0, k1 = (k0 + 0x9E3779B9) & low, (k1 + 0xBB67AE85) & low
    number = (c0 >> 5) * 67108864 + (c1 >> 6)
    tl.store(out_ptr + rows, number.to(tl.float64) * 1.1102230246251565e-16, mask=inside)


_ROWS = {"vocab_size": "i32", "row_stride": "i32"}
_PARTS = {"PART": PART, "BLOCK": BLOCK}
_ARGMAX_PARTS = Variant(
    "argmax_parts", argmax_parts, {"logits_ptr": "*fp32", "best_ptr": "*i64", **_ROWS, "num_parts": "i32"}, _PARTS,
)  # fmt: skip
_ARGMAX_MERGE = Variant(
    "argmax_merge", argmax_merge,
    {"best_ptr": "*i64", "logits_ptr": "*fp32", "ids_ptr": "*i64", "values_ptr": "*fp32", "row_stride": "i32",
     "num_parts": "i32"}, {"MAX_PARTS": MAX_PARTS}, num_warps=1,
)  # fmt: skip
_LOG_SUM_PARTS = Variant(
    "log_sum_parts", log_sum_parts,
    {"logits_ptr": "*fp32", "max_ptr": "*fp32", "sum_ptr": "*fp32", **_ROWS, "num_parts": "i32"}, _PARTS,
    in_sample=True,
)  # fmt: skip
_LOG_SUM_MERGE = Variant(
    "log_sum_merge", log_sum_merge,
    {"max_ptr": "*fp32", "sum_ptr": "*fp32", "highest_ptr": "*fp32", "log_sum_ptr": "*fp32", "num_parts": "i32"},
    {"MAX_PARTS": MAX_PARTS}, num_warps=1,
)  # fmt: skip
_MASK_PARTS = Variant(
    "mask_parts", mask_parts,
    {"logits_ptr": "*fp32", "masks_ptr": "*u8", "out_ptr": "*fp32", **_ROWS, "mask_stride": "i32"}, {"BLOCK": BLOCK},
)  # fmt: skip
_PHILOX_ROWS = Variant(
    "philox_rows", philox_rows,
    {"seeds_ptr": "*i64", "choices_ptr": "*i64", "positions_ptr": "*i64", "out_ptr": "*fp64", "purpose": "i32",
     "num_rows": "i32"}, {"BLOCK": 128},
)  # fmt: skip
VARIANTS = (_ARGMAX_PARTS, _ARGMAX_MERGE, _LOG_SUM_PARTS, _LOG_SUM_MERGE, _MASK_PARTS, _PHILOX_ROWS)

# Logits of 151,936 tokens are read once for the argmax, and read and written for a mask, with a bit for each token.
_NUM_TOKENS = 151936
WORKLOADS = tuple(
    Workload(operation, f"{rows} rows of {_NUM_TOKENS:,}", rows * num_bytes, rows * operations, on_tensor_cores=False)
    for operation, num_bytes, operations in (
        ("argmax_rows", 4 * _NUM_TOKENS, 8 * _NUM_TOKENS),
        ("log_softmax_stats", 4 * _NUM_TOKENS, 6 * _NUM_TOKENS),
        ("mask_rows", 8 * _NUM_TOKENS + _NUM_TOKENS // 8, 4 * _NUM_TOKENS),
    )
    for rows in (1, 256)
)


def num_parts_of(logits: Tensor) -> int:
    """Return into how many parts a row of logits is divided."""
    return -(-logits.shape[1] // PART)


def is_served(logits: Tensor) -> bool:
    """Whether the kernels serve logits [N, V]."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.shape[1]:
        return False
    return logits.stride(1) == 1 and num_parts_of(logits) <= MAX_PARTS


def argmax_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """reference.argmax_rows for logits [N, V] float32."""
    if not is_served(logits):
        return by_definition(reference.argmax_rows, logits)
    num_rows, num_parts = len(logits), num_parts_of(logits)
    best = torch.empty((num_rows, num_parts), dtype=torch.int64, device=logits.device)
    token_ids, values = best.new_empty(num_rows), logits.new_empty(num_rows)
    rows = {"logits_ptr": logits, "row_stride": logits.stride(0), "num_parts": num_parts, "best_ptr": best}
    _ARGMAX_PARTS.launch((num_rows, num_parts), **rows, vocab_size=logits.shape[1])
    _ARGMAX_MERGE.launch((num_rows,), **rows, ids_ptr=token_ids, values_ptr=values)
    return token_ids, values


def argmax_allowed(logits: Tensor, masks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """reference.argmax_allowed for logits [N, V] float32."""
    return *argmax_rows(mask_rows(logits, masks)), argmax_rows(logits)[1]


def log_softmax_stats(logits: Tensor) -> tuple[Tensor, Tensor]:
    """reference.log_softmax_stats for logits [N, V] float32."""
    if not is_served(logits):
        return by_definition(reference.log_softmax_stats, logits)
    num_rows, num_parts = len(logits), num_parts_of(logits)
    # Halves of one tensor would begin at any multiple of 4 bytes, for which Triton compiles variants of their own.
    part_max, part_sum = (logits.new_empty(num_rows, num_parts) for _ in range(2))
    highest, log_sum = (logits.new_empty(num_rows) for _ in range(2))
    parts = {"max_ptr": part_max, "sum_ptr": part_sum, "num_parts": num_parts}
    _LOG_SUM_PARTS.launch(
        (num_rows, num_parts), logits_ptr=logits, vocab_size=logits.shape[1], row_stride=logits.stride(0), **parts
    )
    _LOG_SUM_MERGE.launch((num_rows,), highest_ptr=highest, log_sum_ptr=log_sum, **parts)
    return highest, log_sum


def mask_rows(logits: Tensor, masks: Tensor) -> Tensor:
    """reference.mask_rows for logits [N, V] float32."""
    fits = masks.dtype == torch.uint8 and masks.shape == (len(logits), -(-logits.shape[-1] // 8))
    if not (fits and is_served(logits) and masks.stride(1) == 1):
        return by_definition(reference.mask_rows, logits, masks)
    out = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    _MASK_PARTS.launch(
        (len(logits), -(-logits.shape[1] // BLOCK)), logits_ptr=logits, masks_ptr=masks, out_ptr=out,
        vocab_size=logits.shape[1], row_stride=logits.stride(0), mask_stride=masks.stride(0),
    )  # fmt: skip
    return out


def philox_uniform(seed: Tensor, choice_index: Tensor, position: Tensor, purpose: int) -> Tensor:
    """reference.philox_uniform, with the same bits."""
    columns = [column.long().contiguous() for column in (seed, choice_index, position)]
    if any(column.shape != (len(seed),) for column in columns) or not 0 <= purpose < 2**31:
        return by_definition(reference.philox_uniform, seed, choice_index, position, purpose)
    out = torch.empty(len(seed), dtype=torch.float64, device=seed.device)
    _PHILOX_ROWS.launch(
        (-(-len(seed) // 128),), seeds_ptr=columns[0], choices_ptr=columns[1], positions_ptr=columns[2], out_ptr=out,
        purpose=purpose, num_rows=len(seed),
    )  # fmt: skip
    return out
