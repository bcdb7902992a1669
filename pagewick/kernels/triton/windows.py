"""Short convolutions over tokens of ragged batches: what the operations with running states have in common.

A convolution reads a token's input and the K - 1 before it. Those of earlier steps are at the front of the block that
its sequence comes from, [K - 1, C] float32, oldest first. The inputs for the next token are stored last, as they may go
to the block that others come from. A block outside `states` is not noticed.

Dimensions: T tokens, B sequences, K inputs of the convolution for each of its C channels.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels.options import AttentionMetadata
from pagewick.kernels.triton.states import num_stored
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Ends of sequences that a program compares with its token at once.
BLOCK_B = 128
# Channels of a program that stores inputs.
_KEPT_CHANNELS = 1024
# The arguments that say where sequences and their states lie; `where` and `rows_of` give them.
BATCH = {"states_ptr": "*fp32", **dict.fromkeys(("tables_ptr", "lengths_ptr", "starts_ptr"), "*i32")}
SIZES = {
    **dict.fromkeys(("width", "table_stride"), "i32"),
    **dict.fromkeys(("num_channels", "row_stride", "block_floats"), "i32:16"),
}


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def softplus(x):
    """Return log(1 + e^x), with the digits that 1 + e^x has no room for."""
    power = tl.exp(-tl.abs(x))
    total = 1.0 + power
    log = tl.where(total == 1.0, power, tl.log(total) * (power / tl.where(total == 1.0, 1.0, total - 1.0)))
    return log + tl.where(x > 0.0, x, 0.0)


@triton.jit
def _inputs(row_ptr, channels, inside, num_channels, IS_PRODUCT: tl.constexpr):
    """Return a token's inputs; if IS_PRODUCT, that is its first C numbers times its third C numbers."""
    x = tl.load(row_ptr + channels, mask=inside, other=0.0).to(tl.float32)
    if IS_PRODUCT:
        x = x * tl.load(row_ptr + 2 * num_channels + channels, mask=inside, other=0.0).to(tl.float32)
    return x


@triton.jit
def convolved(
    rows_ptr, weight_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr, token, begin, columns, size, num_seqs,
    num_channels, width, row_stride, block_floats, table_stride, IS_PRODUCT: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Return the convolution of channels begin + columns for a token; columns from size on get zeros."""
    # The sequence is the first that ends behind the token.
    seq = tl.full((), 0, tl.int32)
    for first in range(0, num_seqs, BLOCK_B):
        places = first + tl.arange(0, BLOCK_B)
        ends = tl.load(starts_ptr + 1 + places, mask=places < num_seqs, other=2147483647)
        seq += tl.sum((ends <= token).to(tl.int32), axis=0)
    start = tl.load(starts_ptr + seq)
    has_past = tl.load(lengths_ptr + seq) > tl.load(starts_ptr + seq + 1) - start
    source = tl.load(tables_ptr + seq.to(tl.int64) * table_stride).to(tl.int64)
    place = token - start
    channels = begin + columns
    total = columns.to(tl.float32) * 0.0
    for tap in range(0, width):
        before = width - 1 - tap
        row_ptr = rows_ptr + (token - before) * row_stride
        num_new = tl.where(before <= place, size, 0)
        new = _inputs(row_ptr, channels, columns < num_new, num_channels, IS_PRODUCT)
        earlier_ptr = states_ptr + source * block_floats + (place + tap) * num_channels
        num_earlier = tl.where((before > place) & has_past, size, 0)
        earlier = tl.load(earlier_ptr + channels, mask=columns < num_earlier, other=0.0)
        weight = tl.load(weight_ptr + channels * width + tap, mask=columns < size, other=0.0)
        total += weight * (new + earlier)
    return total


@triton.jit
def convolved_block(
    rows_ptr, weight_ptr, bias_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr, num_seqs, num_channels, width,
    row_stride, block_floats, table_stride, IS_PRODUCT: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Return token program_id(0), BLOCK channels by program_id(1), which of them exist, and their convolution.

    bias: [C], or None.
    """
    token, begin = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK
    columns, size = tl.arange(0, BLOCK), num_channels - begin
    total = convolved(
        rows_ptr, weight_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr, token, begin, columns, size, num_seqs,
        num_channels, width, row_stride, block_floats, table_stride, IS_PRODUCT, BLOCK_B,
    )  # fmt: skip
    channels, inside = begin + columns, columns < size
    if bias_ptr is not None:
        total += tl.load(bias_ptr + channels, mask=inside, other=0.0)
    return token, channels, inside, total


@triton.jit
def keep_inputs(
    rows_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr, num_channels, width, row_stride, block_floats,
    table_stride, IS_PRODUCT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Store channels program_id(1) of the last K - 1 inputs of sequence program_id(0) up to its stored state."""
    seq, channels = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    if start < end:
        has_past = tl.load(lengths_ptr + seq) > end - start
        count = num_stored(tables_ptr, seq, table_stride, end - start)
        source = states_ptr + tl.load(tables_ptr + seq * table_stride).to(tl.int64) * block_floats
        target = states_ptr + tl.load(tables_ptr + seq * table_stride + 1).to(tl.int64) * block_floats
        # In a block that is source and target, each row comes from a later one.
        for row in range(0, width - 1):
            place = count - (width - 1) + row
            row_ptr = rows_ptr + (start + place).to(tl.int64) * row_stride
            num_new = tl.where(place >= 0, num_channels, 0)
            new = _inputs(row_ptr, channels, channels < num_new, num_channels, IS_PRODUCT)
            earlier_ptr = source + (count + row).to(tl.int64) * num_channels
            num_earlier = tl.where((place < 0) & has_past, num_channels, 0)
            earlier = tl.load(earlier_ptr + channels, mask=channels < num_earlier, other=0.0)
            tl.store(target + row * num_channels + channels, new + earlier, mask=channels < num_channels)


def _keep(dtype: torch.dtype, is_product: bool) -> Variant:
    return Variant(
        name=f"keep_{'products_' if is_product else ''}{TYPE_NAMES[dtype]}",
        kernel=keep_inputs,
        signature={"rows_ptr": f"*{TYPE_NAMES[dtype]}", **BATCH, **SIZES},
        constexprs={"IS_PRODUCT": is_product, "BLOCK": _KEPT_CHANNELS},
    )


# Those that store inputs as they are, and those that store products.
KEEPS = {dtype: _keep(dtype, False) for dtype in DTYPES}
PRODUCT_KEEPS = {dtype: _keep(dtype, True) for dtype in DTYPES}


def where(states: Tensor, batch: AttentionMetadata, num_channels: int, width: int) -> dict[str, Any]:
    """Return the arguments of kernels that say where sequences and their states lie. width: K."""
    numbers = states.view(torch.float32)
    return {
        "states_ptr": numbers, "tables_ptr": batch.block_tables, "lengths_ptr": batch.context_lens,
        "starts_ptr": batch.cu_seqlens_q, "table_stride": batch.block_tables.stride(0), "num_channels": num_channels,
        "width": width, "block_floats": numbers.stride(0),
    }  # fmt: skip


def rows_of(x: Tensor) -> dict[str, Any]:
    """Return the arguments of kernels that say where the inputs of tokens [T, numbers] lie."""
    return {"rows_ptr": x, "row_stride": x.stride(0)}


def keep(variant: Variant, x: Tensor, places: dict[str, Any]) -> None:
    """Store the inputs for the token after each stored state: the last of x and, if those are too few, earlier ones.

    variant: that of KEEPS or PRODUCT_KEEPS for the dtype of x. places: the result of `where`.
    """
    num_seqs, num_channels = len(places["lengths_ptr"]), places["num_channels"]
    variant.launch((num_seqs, -(-num_channels // _KEPT_CHANNELS)), **rows_of(x), **places)
