"""Running states in their blocks: where a program finds its part of one, and where and when it stores it.

A block has the inputs of a convolution, [K - 1, C] float32, and behind them S [H, DK, DV] float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_state(
    states_ptr, tables_ptr, lengths_ptr, seq, num_new, head, columns, value_dim, num_channels, width, block_floats,
    table_stride, KEY_DIM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return columns of a head's state before num_new tokens of a sequence, and the places for those to be stored.

    Both are [ROWS, columns], places behind an address, which is the third result. ROWS: a power of two that is DK or
    larger; rows from DK on are zeros. A sequence without earlier tokens begins with zeros, whatever its block has.
    """
    seq = seq.to(tl.int64)
    has_past = tl.load(lengths_ptr + seq) > num_new
    dims = tl.arange(0, ROWS)
    place = (width - 1) * num_channels + head * KEY_DIM * value_dim
    offsets = place + dims[:, None] * value_dim + columns[None, :]
    source = tl.load(tables_ptr + seq * table_stride).to(tl.int64) * block_floats
    target = tl.load(tables_ptr + seq * table_stride + 1).to(tl.int64) * block_floats
    num_columns = tl.where(has_past, value_dim, 0)
    is_there = (dims < KEY_DIM)[:, None] & (columns < num_columns)[None, :]
    state = tl.load(states_ptr + source + offsets, mask=is_there, other=0.0)
    return state, offsets, states_ptr + target


@triton.jit
def num_stored(tables_ptr, seq, table_stride, num_new):
    """Return after how many of num_new tokens the state of a sequence is stored; all, unless its row says fewer."""
    count = tl.load(tables_ptr + seq * table_stride + 2)
    return tl.where((count > 0) & (count < num_new), count, num_new)


@triton.jit
def store_state(target_ptr, offsets, state, KEY_DIM: tl.constexpr, ROWS: tl.constexpr):
    """Store columns of a head's state, of which load_state has given the places."""
    if ROWS == KEY_DIM:
        tl.store(target_ptr + offsets, state)
    else:
        tl.store(target_ptr + offsets, state, mask=(tl.arange(0, ROWS) < KEY_DIM)[:, None])


@triton.jit
def load_numbers(ptr, dims, KEY_DIM: tl.constexpr, ROWS: tl.constexpr):
    """Return a query's or a key's numbers [ROWS], zeros from DK on."""
    if ROWS == KEY_DIM:
        return tl.load(ptr + dims)
    return tl.load(ptr + dims, mask=dims < KEY_DIM, other=0.0)
