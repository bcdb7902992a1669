"""Attention within sequences, without a cache: reference.full_attention, for encoders of images.

Dimensions: T rows of all sequences, H heads, D head size.

A program takes a tile of the rows of a sequence over all keys of that sequence, for one head. It keeps a running
softmax (online_softmax.py), so that scores exist for a tile of rows and of keys only. The lengths are on the host,
which lists the tiles: every program has rows to compute.

Heads of encoders often have a size a little above a power of two: 72, 80. Tensor cores multiply tiles whose sides are
powers of two, and to fill 72 up to 128 would nearly double the work. So a head is cut into a first part, whose size is
a power of two, and a rest, which is filled up by itself (64 + 16), where both are less than the next power of two.
Heads of sizes without a variant are copied into larger ones, filled up with zeros.

Tiles of rows and keys begin at multiples of constants, counted from the first row of the sequence, so that a row's bits
depend on its own sequence alone. With bfloat16 and float16, the weights of the values are rounded to that dtype.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import fused, reference
from pagewick.kernels.reference_full import check_sequences
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.online_softmax import converted, dot_type, next_weights
from pagewick.kernels.triton.variant import TARGETS, TYPE_NAMES, Variant, Workload, target_of

# Sizes of heads with variants: 64, 72 and 80 are those of most encoders that Pagewick reads, 88 to 128 those of others.
HEAD_DIMS = (16, 32, 64, 72, 80, 88, 96, 104, 112, 128)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Tensor cores multiply 16 numbers of a row at once.
_LEAST_PART = 16
# The registers of a thread if two programs of 8 warps share a multiprocessor of NVIDIA's GPUs, which has 65,536.
_HALF_OF_REGISTERS = 128


@triton.jit
def _load_rows(
    first, rows, stride, dims, num_rows, SIZE: tl.constexpr, ALL_ROWS: tl.constexpr, ALL_DIMS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Return numbers `dims` [D] of rows [N] behind the one at address `first`: [N, D], 0 where there are none.

    ALL_ROWS, ALL_DIMS: whether all exist, so that nothing need be compared.
    """
    addresses = first + rows[:, None] * stride + dims[None, :]
    if ALL_ROWS and ALL_DIMS:
        x = tl.load(addresses)
    elif ALL_ROWS:
        x = tl.load(addresses, mask=(dims < SIZE)[None, :], other=0)
    elif ALL_DIMS:
        x = tl.load(addresses, mask=(rows < num_rows)[:, None], other=0)
    else:
        x = tl.load(addresses, mask=(rows < num_rows)[:, None] & (dims < SIZE)[None, :], other=0)
    return converted(x, DOT)


@triton.jit
def _add_keys(
    queries, query_rest, keys, values, k_stride, v_stride, num_left, factor, acc, acc_rest, m, total,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr, BLOCK_N: tl.constexpr, ALL_KEYS: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Add a tile of BLOCK_N keys and values to the sums: (acc, acc_rest, m, total).

    keys, values: addresses of the tile's first row. num_left: rows of the sequence from there on; ALL_KEYS: at least
    BLOCK_N.
    """
    n, d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    k = _load_rows(keys, n, k_stride, d, num_left, HEAD_DIM, ALL_KEYS, HEAD_DIM >= BLOCK_D, DOT)
    scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
    if REST > 0:
        rest = BLOCK_D + tl.arange(0, REST)
        k = _load_rows(keys, n, k_stride, rest, num_left, HEAD_DIM, ALL_KEYS, HEAD_DIM == BLOCK_D + REST, DOT)
        scores = tl.dot(query_rest, tl.trans(k), scores, input_precision="ieee")
    if not ALL_KEYS:
        scores = tl.where((n < num_left)[None, :], scores, float("-inf"))
    weights, correction, m, total = next_weights(scores, factor, m, total)
    weights = weights.to(DOT)
    v = _load_rows(values, n, v_stride, d, num_left, HEAD_DIM, ALL_KEYS, HEAD_DIM >= BLOCK_D, DOT)
    acc = tl.dot(weights, v, acc * correction[:, None], input_precision="ieee")
    if REST > 0:
        v = _load_rows(values, n, v_stride, rest, num_left, HEAD_DIM, ALL_KEYS, HEAD_DIM == BLOCK_D + REST, DOT)
        acc_rest = tl.dot(weights, v, acc_rest * correction[:, None], input_precision="ieee")
    return acc, acc_rest, m, total


@triton.jit(do_not_specialize=["num_heads", "q_heads", "k_heads", "v_heads"])
def attend_all(
    q, k, v, out, tiles, num_heads, q_heads, k_heads, v_heads, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    DOT: tl.constexpr,
):  # fmt: skip
    """Attend with tile program_id(0) of the rows to all keys of its sequence, in head program_id(1).

    q, k, v: rows of heads that follow each other; a row begins q_heads, k_heads or v_heads heads behind the one before.
    out: [T, H, D]. tiles: [tiles, 3] int32: the first row of a tile, the first row of its sequence, and the one behind
    its last. HEAD_DIM: D, from which the compiler knows how addresses are aligned. BLOCK_D, REST: the parts of a head,
    filled up; REST is 0 if there is one.
    """
    tile, head = tl.program_id(0), tl.program_id(1)
    first, begin, end = tl.load(tiles + 3 * tile), tl.load(tiles + 3 * tile + 1), tl.load(tiles + 3 * tile + 2)
    rows, d = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    own = q + (first.to(tl.int64) * q_heads + head) * HEAD_DIM
    queries = _load_rows(own, rows, q_heads * HEAD_DIM, d, end - first, HEAD_DIM, False, HEAD_DIM >= BLOCK_D, DOT)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if REST > 0:
        rest = BLOCK_D + tl.arange(0, REST)
        query_rest = _load_rows(
            own, rows, q_heads * HEAD_DIM, rest, end - first, HEAD_DIM, False, HEAD_DIM == BLOCK_D + REST, DOT
        )
        acc_rest = tl.zeros((BLOCK_M, REST), tl.float32)
    else:
        query_rest, acc_rest = queries, acc
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    factor = scale * 1.4426950408889634
    keys = k + (begin.to(tl.int64) * k_heads + head) * HEAD_DIM
    values = v + (begin.to(tl.int64) * v_heads + head) * HEAD_DIM
    # The last tile is the only one of which keys may be missing, and each sequence has it.
    num_whole = (end - begin - 1) // BLOCK_N
    for _ in range(num_whole):
        acc, acc_rest, m, total = _add_keys(
            queries, query_rest, keys, values, k_heads * HEAD_DIM, v_heads * HEAD_DIM, BLOCK_N, factor, acc, acc_rest,
            m, total, HEAD_DIM, BLOCK_D, REST, BLOCK_N, True, DOT,
        )  # fmt: skip
        keys += BLOCK_N * (k_heads * HEAD_DIM)
        values += BLOCK_N * (v_heads * HEAD_DIM)
    acc, acc_rest, m, total = _add_keys(
        queries, query_rest, keys, values, k_heads * HEAD_DIM, v_heads * HEAD_DIM, end - begin - num_whole * BLOCK_N,
        factor, acc, acc_rest, m, total, HEAD_DIM, BLOCK_D, REST, BLOCK_N, False, DOT,
    )  # fmt: skip
    is_row = (first + rows < end)[:, None]
    places = out + (first.to(tl.int64) * num_heads + head) * HEAD_DIM + rows[:, None] * (num_heads * HEAD_DIM)
    mean = acc / total[:, None]
    tl.store(places + d[None, :], mean.to(out.dtype.element_ty), mask=is_row & (d < HEAD_DIM)[None, :])
    if REST > 0:
        mean_rest = acc_rest / total[:, None]
        mask = is_row & (rest < HEAD_DIM)[None, :]
        tl.store(places + rest[None, :], mean_rest.to(out.dtype.element_ty), mask=mask)


class Tile(NamedTuple):
    """num_rows, num_keys: of a tile; how it is compiled: see Variant."""

    num_rows: int
    num_keys: int
    num_warps: int
    num_stages: int
    max_registers: int = 0


def parts_of(head_dim: int) -> tuple[int, int]:
    """Return the sizes to which the parts of a head are filled up: (64, 16) for 72, but (128, 0), one part, for 112."""
    whole = triton.next_power_of_2(head_dim)
    first = whole // 2
    rest = max(_LEAST_PART, triton.next_power_of_2(head_dim - first))
    return (first, rest) if first >= _LEAST_PART and first + rest < whole else (max(_LEAST_PART, whole), 0)


def _tile(target: str, dtype: torch.dtype, block_dim: int) -> Tile:
    """Return the tile of a variant. Chosen so that registers and shared memory suffice; no GPU was there to measure."""
    if dtype == torch.float32:
        return Tile(32 if block_dim <= 80 else 16, 16, 8, 2)
    if target == "sm_90":
        # One program multiplies while another one computes exponentials, if half of the registers are enough for each:
        # larger heads do not fit, and for heads of 72 the compiler would take one register too many.
        return Tile(128, 64, 8, 3, _HALF_OF_REGISTERS if block_dim <= 96 else 0)
    # With the same limit on other GPUs, Triton 3.6 would spill registers.
    return Tile(128, 32, 8, 2 if target == "gfx942" else 3)


def _variant(target: str, dtype: torch.dtype, head_dim: int) -> Variant:
    name, (first, rest) = TYPE_NAMES[dtype], parts_of(head_dim)
    tile = _tile(target, dtype, first + rest)
    return Variant(
        name=f"full {name} {head_dim} {target}",
        kernel=attend_all,
        signature={
            **dict.fromkeys(("q", "k", "v", "out"), f"*{name}"), "tiles": "*i32",
            **dict.fromkeys(("num_heads", "q_heads", "k_heads", "v_heads"), "i32"), "scale": "fp32",
        },
        constexprs={
            "HEAD_DIM": head_dim, "BLOCK_D": first, "REST": rest, "BLOCK_M": tile.num_rows, "BLOCK_N": tile.num_keys,
            "DOT": dot_type(dtype),
        },
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        uses_tensor_cores=dtype != torch.float32,
        in_sample=(dtype, head_dim) in _SAMPLE,
        targets=(target,),
        fuses=False,
        max_registers=tile.max_registers,
    )  # fmt: skip


# Compiled in every run of the tests: the encoders of Qwen3-VL and Qwen2-VL.
_SAMPLE = {(torch.bfloat16, 72), (torch.bfloat16, 80), (torch.float32, 72)}
_VARIANTS = {key: _variant(*key) for key in itertools.product(TARGETS, _DTYPES, HEAD_DIMS)}
VARIANTS = tuple(_VARIANTS.values())


def workload(num_seqs: int, length: int, num_heads: int, head_dim: int) -> Workload:
    """Return the work of sequences of one length, in bfloat16."""
    numbers = 4 * num_seqs * length * num_heads * head_dim
    shape = f"{num_seqs} x {length} rows, {num_heads} heads of {head_dim}, bf16"
    return Workload("full_attention", shape, 2 * numbers, numbers * length)


# A picture of 1,024 x 1,024 pixels for Qwen3-VL, one of 2,048 x 2,048, and the windows of one for Qwen2.5-VL.
WORKLOADS = (workload(1, 4096, 16, 72), workload(1, 16384, 16, 72), workload(81, 64, 16, 80))


def full_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int], scale: float, bias: Tensor | None = None
) -> Tensor:
    """reference.full_attention; see the module. Raises ValueError as it does."""
    check_sequences(cu_seqlens, len(q))
    if bias is not None or not _is_served(q, k, v, scale):
        # PyTorch's fused kernel does not keep all scores of a sequence, either.
        is_fused = q.dtype == k.dtype == v.dtype and fused.supports("full_attention", q.device.type, q.dtype)
        definition = fused.full_attention if is_fused else reference.full_attention
        return by_definition(definition, q, k, v, cu_seqlens, scale, bias)
    num_rows, num_heads, head_dim = q.shape
    served_dim = next(size for size in HEAD_DIMS if size >= head_dim)
    if served_dim > head_dim:
        q, k, v = (F.pad(x, (0, served_dim - head_dim)) for x in (q, k, v))
    q, k, v = (_with_heads_in_rows(x) for x in (q, k, v))
    out = torch.empty((num_rows, num_heads, served_dim), dtype=q.dtype, device=q.device)
    variant = _VARIANTS[target_of(q.device), q.dtype, served_dim]
    tiles = _tiles(tuple(cu_seqlens), variant.constexprs["BLOCK_M"], q.device)
    variant.launch(
        (len(tiles), num_heads), q=q, k=k, v=v, out=out, tiles=tiles, num_heads=num_heads,
        q_heads=q.stride(0) // served_dim, k_heads=k.stride(0) // served_dim, v_heads=v.stride(0) // served_dim,
        scale=float(scale),
    )  # fmt: skip
    return out[..., :head_dim].contiguous()


def _is_served(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Whether there is a variant for these. It takes the greatest score for that of the greatest product."""
    return (
        q.dtype in _DTYPES
        and q.dtype == k.dtype == v.dtype
        and q.shape == k.shape == v.shape
        and 0 < q.shape[2] <= HEAD_DIMS[-1]
        and scale > 0
        and not (torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)))
    )


def _with_heads_in_rows(x: Tensor) -> Tensor:
    """Return heads [T, H, D] such that those of a row follow each other and rows are a number of heads apart."""
    size = x.shape[2]
    return x if x.stride(2) == 1 and x.stride(1) == size and x.stride(0) % size == 0 else x.contiguous()


@functools.lru_cache(maxsize=64)
def _tiles(cu_seqlens: tuple[int, ...], num_rows: int, device: torch.device) -> Tensor:
    """Return the tiles of num_rows rows as attend_all reads them.

    Copying them makes the host wait for the GPU, and all layers of an encoder take the same.
    """
    tiles = [
        (first, begin, end) for begin, end in itertools.pairwise(cu_seqlens) for first in range(begin, end, num_rows)
    ]
    return torch.tensor(tiles, dtype=torch.int32, device=device).view(-1, 3)
