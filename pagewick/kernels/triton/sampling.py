"""Drawing of tokens from rows of logits, exact with top_k and top_p, without sorting or waiting for the host.

Definition: sample_tokens of reference_sampling.py. The inverse of the cumulative distribution of the tokens by falling
logit picks the token, so the one random number of a row decides, as on a CPU. As in kernels/cpu/csrc/sampling.cpp,
tokens are counted and their weights summed in buckets of similar weight; only the buckets in which top_k, top_p and the
drawn token fall are looked into. Tokens that min_p excludes are in no bucket. Weights are whole multiples of 2^-42 of
the greatest one and are summed as integers: the sums are the same in any order, and a row's token depends on that row
alone. Tokens with less weight than that, which 10^12 draws would not draw, are left out. The definition rounds
probabilities elsewhere, so a random number within about 10^-6 of a boundary between two tokens may give the other one.

Dimensions: N rows, V vocabulary, P parts of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference
from pagewick.kernels.options import DrawOptions
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.logits import BLOCK, PART, argmax_rows, is_served, mask_rows, num_parts_of
from pagewick.kernels.triton.order import id_of, ordered, value_of
from pagewick.kernels.triton.variant import TARGETS, Variant, Workload, target_of

# Buckets for 42 halvings of the greatest weight, and how many tokens of one are ordered, each against RANKED_BLOCK at a
# time.
NUM_BUCKETS = 4096
NUM_RANKED = 512
RANKED_BLOCK = 4
# Sums of weights stay below 2^63.
MAX_VOCAB = 2**20
# The dtypes of the columns of DrawOptions.
_DRAW_DTYPES = (torch.float32, torch.float64, torch.int64, torch.float64, torch.float64)


@triton.jit
def _halvings(logits, highest, temperature):
    """Return how many times the greatest weight is halved to give that of each logit."""
    return tl.math.div_rn(highest - logits, tl.zeros_like(logits) + temperature) * 1.4426950408889634


@triton.jit
def _bucket_of(halvings):
    """Return the bucket of each token, -1 for those that are left out."""
    return tl.where(halvings < 42.0, (tl.minimum(halvings, 42.0) * 97.0).to(tl.int32), -1)


@triton.jit
def _weight_of(halvings):
    """Return weights as multiples of 2^-42, at least 1."""
    return tl.maximum((tl.exp2(-tl.minimum(halvings, 42.0)) * 4398046511104.0).to(tl.int64), 1)


@triton.jit
def _least_logit(highest, temperature, min_p):
    """Return the least number of float32 that min_p (float64) does not exclude as a logit; -inf where it is 0."""
    exact = highest.to(tl.float64) + temperature.to(tl.float64) * tl.log(min_p)
    least = exact.to(tl.float32)
    bits = least.to(tl.int32, bitcast=True)
    # The next greater number: the bits of negative ones fall.
    following = tl.where(least == 0, 1, tl.where(least > 0, bits + 1, bits - 1)).to(tl.float32, bitcast=True)
    return tl.where(min_p > 0, tl.where(least.to(tl.float64) < exact, following, least), float("-inf"))


@triton.jit(do_not_specialize=["row_stride"])
def weigh_parts(
    logits_ptr, highest_ptr, temperature_ptr, min_p_ptr, buckets_ptr, vocab_size, row_stride, PART: tl.constexpr,
    BLOCK: tl.constexpr, NUM_BUCKETS: tl.constexpr,
):  # fmt: skip
    """Add the tokens of part program_id(1) of a row of logits [N, V] to buckets [N, 2 * NUM_BUCKETS + 4] int64.

    A row of these has the number of tokens of each bucket, then the mass of each, and for draw_rows three zeros and
    the lower bound of the order of tokens that min_p leaves.
    """
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0:
        highest = tl.load(highest_ptr + row)
        least_logit = _least_logit(highest, temperature, tl.load(min_p_ptr + row))
        if part == 0:
            # The greatest id comes last among equal logits.
            lower_bound = ordered(least_logit, tl.full((), 0x7FFFFFFF, tl.int32))
            tl.store(buckets_ptr + row * (2 * NUM_BUCKETS + 4) + 2 * NUM_BUCKETS + 3, lower_bound)
        for start in range(part * PART, tl.minimum(part * PART + PART, vocab_size), BLOCK):
            ids = start + tl.arange(0, BLOCK)
            x = tl.load(logits_ptr + row * row_stride + ids, mask=ids < vocab_size, other=float("-inf"))
            halvings = _halvings(x, highest, temperature)
            buckets = tl.where(x >= least_logit, _bucket_of(halvings), -1)
            places = buckets_ptr + row * (2 * NUM_BUCKETS + 4) + buckets
            # Atomic sums of integers have the same result in any order.
            tl.atomic_add(places, tl.full((BLOCK,), 1, tl.int64), mask=buckets >= 0, sem="relaxed")
            tl.atomic_add(places + NUM_BUCKETS, _weight_of(halvings), mask=buckets >= 0, sem="relaxed")


@triton.jit
def _buckets_before(counts_ptr, masses_ptr, wanted_count, wanted_mass, BLOCK: tl.constexpr, NUM_BUCKETS: tl.constexpr):
    """Return how many buckets of a row lie before a place, and how many tokens and what mass they have."""
    bucket, count, mass = tl.zeros((), tl.int32), tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    passed_count, passed_mass = tl.zeros((), tl.int64), tl.zeros((), tl.int64)
    for first in range(0, NUM_BUCKETS, BLOCK):
        places = first + tl.arange(0, BLOCK)
        counts, masses = tl.load(counts_ptr + places), tl.load(masses_ptr + places)
        through = (passed_count + tl.cumsum(counts, axis=0) < wanted_count) & (
            passed_mass + tl.cumsum(masses, axis=0) < wanted_mass
        )
        bucket += tl.sum(through.to(tl.int32), axis=0)
        count += tl.sum(tl.where(through, counts, 0), axis=0)
        mass += tl.sum(tl.where(through, masses, 0), axis=0)
        passed_count += tl.sum(counts, axis=0)
        passed_mass += tl.sum(masses, axis=0)
    return bucket, count, mass


@triton.jit
def _members(row_ptr, start, vocab_size, highest, temperature, bucket, least, greatest, BLOCK: tl.constexpr):
    """Return for BLOCK tokens from `start` their order, their weights, and which are in a bucket and between bounds."""
    ids = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + ids, mask=ids < vocab_size, other=float("-inf"))
    halvings = _halvings(x, highest, temperature)
    order = ordered(x, ids)
    are_members = (_bucket_of(halvings) == bucket) & (order >= least) & (order <= greatest)
    return order, _weight_of(halvings), are_members


@triton.jit
def _narrowed(
    row_ptr, vocab_size, highest, temperature, bucket, least, size, count, mass, wanted_count, wanted_mass,
    BLOCK: tl.constexpr, NUM_RANKED: tl.constexpr,
):  # fmt: skip
    """Return bounds of the order between which a place lies, with at most NUM_RANKED tokens of a bucket.

    Also the number of these tokens, and how many tokens and what mass lie before them. size: the tokens of the bucket.
    count, mass: those before the bucket. The bounds of a large bucket are halved; few logits are so close together.
    """
    greatest = tl.full((), 0x7FFFFFFFFFFFFFFF, tl.int64)
    if size > NUM_RANKED:
        lowest = tl.full((BLOCK,), 0x7FFFFFFFFFFFFFFF, tl.int64)
        uppermost = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
        for start in range(0, vocab_size, BLOCK):
            order, _weights, are_members = _members(
                row_ptr, start, vocab_size, highest, temperature, bucket, least, greatest, BLOCK
            )
            lowest = tl.minimum(lowest, tl.where(are_members, order, 0x7FFFFFFFFFFFFFFF))
            uppermost = tl.maximum(uppermost, tl.where(are_members, order, -0x7FFFFFFFFFFFFFFF))
        least, greatest = tl.min(lowest, axis=0), tl.max(uppermost, axis=0)
    while (size > NUM_RANKED) & (least < greatest):
        middle = (least >> 1) + (greatest >> 1) + (least & greatest & 1)
        upper_counts, upper_masses = tl.zeros((BLOCK,), tl.int64), tl.zeros((BLOCK,), tl.int64)
        for start in range(0, vocab_size, BLOCK):
            _order, weights, are_upper = _members(
                row_ptr, start, vocab_size, highest, temperature, bucket, middle + 1, greatest, BLOCK
            )
            upper_counts += are_upper.to(tl.int64)
            upper_masses += tl.where(are_upper, weights, 0)
        upper_count, upper_mass = tl.sum(upper_counts, axis=0), tl.sum(upper_masses, axis=0)
        if (count + upper_count >= wanted_count) | (mass + upper_mass >= wanted_mass):
            least = middle + 1
            size = upper_count
        else:
            greatest = middle
            size -= upper_count
            count += upper_count
            mass += upper_mass
    return least, greatest, size, count, mass


@triton.jit
def _gather(
    row_ptr, order_ptr, num_found_ptr, vocab_size, highest, temperature, bucket, least, greatest, BLOCK: tl.constexpr,
    NUM_RANKED: tl.constexpr,
):  # fmt: skip
    """Write the order of the tokens of a bucket that lie between bounds to order [NUM_RANKED] int64, in any order.

    num_found: an int64, which is 0 before.
    """
    for start in range(0, vocab_size, BLOCK):
        order, _weights, are_members = _members(
            row_ptr, start, vocab_size, highest, temperature, bucket, least, greatest, BLOCK
        )
        counters = num_found_ptr + tl.zeros((BLOCK,), tl.int32)
        places = tl.atomic_add(counters, tl.full((BLOCK,), 1, tl.int64), mask=are_members, sem="relaxed")
        tl.store(order_ptr + places, order, mask=are_members & (places < NUM_RANKED))
    tl.debug_barrier()


@triton.jit
def _first_place(
    order_ptr, size, count, mass, highest, temperature, wanted_count, wanted_mass, NUM_RANKED: tl.constexpr,
    RANKED_BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the first place among `size` tokens with a count or a mass: its order, and count and mass through it.

    Each token is compared with all others. Without such a place the order is the least integer but one.
    """
    ranks = tl.arange(0, NUM_RANKED)
    found = tl.load(order_ptr + ranks, mask=ranks < size, other=-0x7FFFFFFFFFFFFFFF)
    counts = tl.zeros((NUM_RANKED,), tl.int64) + count
    masses = tl.zeros((NUM_RANKED,), tl.int64) + mass
    for start in range(0, tl.minimum(size, NUM_RANKED).to(tl.int32), RANKED_BLOCK):
        places = start + tl.arange(0, RANKED_BLOCK)
        others = tl.load(order_ptr + places, mask=places < size, other=-0x7FFFFFFFFFFFFFFF)
        weights = tl.where(places < size, _weight_of(_halvings(value_of(others), highest, temperature)), 0)
        is_before = others[None, :] >= found[:, None]
        counts += tl.sum((is_before & (places < size)[None, :]).to(tl.int32), axis=1)
        masses += tl.sum(tl.where(is_before, weights[None, :], 0), axis=1)
    # The next tokens are gathered in the same memory.
    tl.debug_barrier()
    is_there = ((counts >= wanted_count) | (masses >= wanted_mass)) & (ranks < size)
    first = tl.max(tl.where(is_there, found, -0x7FFFFFFFFFFFFFFF), axis=0)
    is_first = (found == first) & (ranks < size)
    return first, tl.sum(tl.where(is_first, counts, 0), axis=0), tl.sum(tl.where(is_first, masses, 0), axis=0)


@triton.jit(do_not_specialize=["row_stride"])
def draw_rows(
    logits_ptr, highest_ptr, best_ptr, temperature_ptr, top_k_ptr, top_p_ptr, uniform_ptr, buckets_ptr, order_ptr,
    ids_ptr, vocab_size, row_stride, BLOCK: tl.constexpr, NUM_BUCKETS: tl.constexpr,
    NUM_RANKED: tl.constexpr, RANKED_BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the token id [N] int64 that is drawn from row program_id(0) of logits [N, V]; at temperature 0, best [N].

    buckets: as weigh_parts left them. order: [N, NUM_RANKED] int64, memory for this kernel.

    Three places in the order of tokens are found one after the other: the last one that top_k keeps, the last one that
    top_p keeps of these, and the drawn one. Each is the first place with a given number of tokens or a given mass.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperature_ptr + row)
    token_id = tl.load(best_ptr + row)
    if temperature > 0:
        row_ptr, order_row = logits_ptr + row * row_stride, order_ptr + row * NUM_RANKED
        counts_row = buckets_ptr + row * (2 * NUM_BUCKETS + 4)
        masses_row = counts_row + NUM_BUCKETS
        highest = tl.load(highest_ptr + row)
        _bucket, kept_count, kept_mass = _buckets_before(
            counts_row, masses_row, 0x7FFFFFFFFFFFFFFF, 0x7FFFFFFFFFFFFFFF, BLOCK, NUM_BUCKETS
        )
        for stage in range(3):
            top_k, top_p, uniform = tl.load(top_k_ptr + row), tl.load(top_p_ptr + row), tl.load(uniform_ptr + row)
            cut = top_p * kept_mass.to(tl.float64)
            whole = cut.to(tl.int64)
            share = tl.maximum(whole + (whole.to(tl.float64) < cut).to(tl.int64), 1)
            passed = tl.minimum((uniform * kept_mass.to(tl.float64)).to(tl.int64) + 1, kept_mass)
            wanted_count = tl.where(stage == 0, top_k, kept_count)
            wanted_mass = tl.where(stage == 0, kept_mass, tl.where(stage == 1, share, passed))
            is_needed = tl.where(stage == 0, (top_k > 0) & (top_k < kept_count), (stage == 2) | (top_p < 1.0))
            if is_needed:
                bucket, count, mass = _buckets_before(
                    counts_row, masses_row, wanted_count, wanted_mass, BLOCK, NUM_BUCKETS
                )
                size = tl.load(counts_row + tl.minimum(bucket, NUM_BUCKETS - 1))
                lower_bound = tl.load(counts_row + 2 * NUM_BUCKETS + 3)
                least, greatest, size, count, mass = _narrowed(
                    row_ptr, vocab_size, highest, temperature, bucket, lower_bound, size, count, mass, wanted_count,
                    wanted_mass, BLOCK, NUM_RANKED,
                )  # fmt: skip
                _gather(
                    row_ptr, order_row, counts_row + 2 * NUM_BUCKETS + stage, vocab_size, highest, temperature, bucket,
                    least, greatest, BLOCK, NUM_RANKED,
                )  # fmt: skip
                first, count, mass = _first_place(
                    order_row, size, count, mass, highest, temperature, wanted_count, wanted_mass, NUM_RANKED,
                    RANKED_BLOCK,
                )  # fmt: skip
                # Logits that are not numbers have no buckets, and leave the most likely token.
                if first > -0x7FFFFFFFFFFFFFFF:
                    token_id, kept_count, kept_mass = id_of(first).to(tl.int64), count, mass
    tl.store(ids_ptr + row, token_id)


_ROW_POINTERS = {"logits_ptr": "*fp32", "highest_ptr": "*fp32", "temperature_ptr": "*fp32"}
_BUCKETS = {"buckets_ptr": "*i64"}
_SIZES = {"vocab_size": "i32", "row_stride": "i32"}
_WEIGH_PARTS = Variant(
    "weigh_parts", weigh_parts, {**_ROW_POINTERS, "min_p_ptr": "*fp64", **_BUCKETS, **_SIZES},
    {"PART": PART, "BLOCK": BLOCK, "NUM_BUCKETS": NUM_BUCKETS},
)  # fmt: skip


def _draw_variant(name: str, block: int, num_warps: int, targets: tuple[str, ...]) -> Variant:
    columns = {"top_k_ptr": "*i64", "top_p_ptr": "*fp64", "uniform_ptr": "*fp64"}
    return Variant(
        name=name,
        kernel=draw_rows,
        signature={**_ROW_POINTERS, **_BUCKETS, **_SIZES, **columns}
        | dict.fromkeys(("best_ptr", "order_ptr", "ids_ptr"), "*i64"),
        constexprs={
            "BLOCK": block,
            "NUM_BUCKETS": NUM_BUCKETS,
            "NUM_RANKED": NUM_RANKED,
            "RANKED_BLOCK": RANKED_BLOCK,
        },
        num_warps=num_warps,
        num_stages=1,
        in_sample=True,
        targets=targets,
    )


_AMD = ("gfx942",)
# AMD has few registers for values that all threads share; many tokens per thread would exceed them.
_DRAWS = (
    _draw_variant("draw_rows", 2048, 16, tuple(target for target in TARGETS if target not in _AMD)),
    _draw_variant("draw_rows_amd", 512, 8, _AMD),
)
VARIANTS = (_WEIGH_PARTS, *_DRAWS)

# Three passes over the logits from memory or the second-level cache (argmax, buckets, draw), and the buckets.
WORKLOADS = tuple(
    Workload("sample_tokens", f"{rows} rows of 151,936", rows * (3 * 4 * 151936 + 4 * 8 * NUM_BUCKETS),
             rows * 40 * 151936, on_tensor_cores=False)
    for rows in (1, 256)
)  # fmt: skip


def sample_tokens(logits: Tensor, draw: DrawOptions, masks: Tensor | None = None) -> Tensor:
    """reference.sample_tokens for logits [N, V] float32. Nothing waits for the device."""
    if masks is not None:
        logits = mask_rows(logits, masks)
    if not is_served(logits) or logits.shape[1] > MAX_VOCAB:
        return by_definition(reference.sample_tokens, logits, draw)
    columns = [values.to(dtype).contiguous() for values, dtype in zip(draw, _DRAW_DTYPES, strict=True)]
    temperature, min_p, top_k, top_p, uniform = columns
    best, highest = argmax_rows(logits)
    buckets = best.new_zeros((len(logits), 2 * NUM_BUCKETS + 4))
    rows = {"logits_ptr": logits, "vocab_size": logits.shape[1], "row_stride": logits.stride(0)}
    rows |= {"highest_ptr": highest, "temperature_ptr": temperature, "buckets_ptr": buckets}
    _WEIGH_PARTS.launch((len(logits), num_parts_of(logits)), **rows, min_p_ptr=min_p)
    token_ids = torch.empty_like(best)
    target = target_of(logits.device)
    next(variant for variant in _DRAWS if target in variant.targets).launch(
        (len(logits),), **rows, best_ptr=best, top_k_ptr=top_k, top_p_ptr=top_p, uniform_ptr=uniform,
        order_ptr=best.new_empty((len(logits), NUM_RANKED)), ids_ptr=token_ids,
    )  # fmt: skip
    return token_ids
