"""Chunks of tokens for the gated delta rule whose rows of a state decay by themselves (Kimi Delta Attention).

With the names of chunks.py, and a sum G_i of its own for each of the DK numbers of a key, the chunkwise form of Kimi
Team 2025 (arXiv:2510.26692) is

    result_i = S^T (e^(G_i) q_i) + sum_j A(q, i, j) u_j,    S <- e^(G_C) S + sum_i (e^(G_C - G_i) k_i) u_i^T
    A(x, i, j) = sum_d x_id k_jd e^(G_id - G_jd) for i >= j,    U = T (V - (e^G K) S),    T as there, with
    L_ij = b_i A(k, i, j) for i > j

A is no product of two matrices with factors that are at most 1, since e^(-G_j) can be as large as any number. But for
any m from j to i - 1 it is a sum of products x_id e^(G_id - G_md) and k_jd e^(G_md - G_jd), whose exponents are not
above 0. Tokens are halved: all pairs i and j whose paths part between two blocks of 2^n tokens have the end of the
earlier block as m. So log2(C) products of matrices [C, DK] with themselves give all pairs; each token has one factor in
each, which is either from the beginning of its block or to the end of it. Those of the next n are these and the sum of
the block beside it: no exponent is the difference of two sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagewick.kernels.triton.chunks import chunk_in, inverted, strength_of
from pagewick.kernels.triton.windows import softplus


@triton.jit
def log_factors(times, speed, decay_bound):
    """Return the logarithms of factors; if decay_bound is below 0, that is this times a sigmoid."""
    logs = -speed * softplus(times)
    if decay_bound < 0.0:
        logs = decay_bound / (1.0 + tl.exp(-speed * times))
    return logs


@triton.jit
def _related(
    keys, queries, logs, of_keys, of_queries, CHUNK: tl.constexpr, PIECE: tl.constexpr, LEVELS: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the parts of A(k, i, j) and A(q, i, j), i > j, of some numbers of keys and queries [C, PIECE].

    Return both [C, C], and the sums of logs up to each token, which is included, and behind it [C, PIECE].
    """
    rows = tl.arange(0, CHUNK)
    until, behind = logs, logs * 0.0
    for level in range(0, LEVELS):
        block = rows >> level
        is_later = ((block & 1) == 1)[:, None]
        factors = tl.exp(tl.where(is_later, until, behind))
        scaled = (keys * factors).to(DOT)
        is_pair = is_later & (block[:, None] == block[None, :] + 1)
        part = tl.dot((queries * factors).to(DOT), tl.trans(scaled), input_precision=PRECISION)
        of_queries += tl.where(is_pair, part, 0.0)
        part = tl.dot(scaled, tl.trans(scaled), input_precision=PRECISION)
        of_keys += tl.where(is_pair, part, 0.0)
        places = tl.broadcast_to((rows ^ (1 << level))[:, None], (CHUNK, PIECE))
        beside = tl.gather(until + behind, places, 0)
        until += tl.where(is_later, beside, 0.0)
        behind += tl.where(is_later, 0.0, beside)
    return of_keys, of_queries, until, behind


@triton.jit(do_not_specialize=["num_seqs", "least", "decay_bound", "strength"])
def relate_channels(
    mixed_ptr, decay_ptr, beta_ptr, log_decay_ptr, dt_bias_ptr, starts_ptr, tables_ptr, rows_ptr, pairs_ptr,
    inverse_ptr, factors_ptr, num_seqs, num_heads, first_query, first_key, num_channels, decay_stride, beta_stride,
    table_stride, least, decay_bound, strength,
    KEY_DIM: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, LEVELS: tl.constexpr, TRIANGLE: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Compute for the chunk in slot program_id(0) and head program_id(1) what does not depend on a state.

    rows: [slots, H, 3, C, DK], for products: e^G K, e^G Q, and keys times the factors from behind their token to the
    chunk's end; zeros behind the chunk's last token. pairs, inverse: [slots, H, C, C], A(q, i, j) and T. factors:
    [slots, H, DK] float32, e^(G_C). Decays and their biases have DK numbers for each head. LEVELS: log2(C).
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    seq, chunk = chunk_in(slot, starts_ptr, tables_ptr, num_seqs, table_stride, least, CHUNK, BLOCK_B)
    if seq < num_seqs:
        first = tl.load(starts_ptr + seq) + chunk * CHUNK
        num_rows = tl.minimum(tl.load(starts_ptr + seq + 1) - first, CHUNK)
        rows, columns = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
        inside = rows < num_rows
        mixed_ptr += first.to(tl.int64) * num_channels + head * KEY_DIM
        decay_ptr += first.to(tl.int64) * decay_stride + head * KEY_DIM
        place = (slot * num_heads + head).to(tl.int64)
        rows_ptr += place * (3 * CHUNK * KEY_DIM)
        speed = tl.exp(tl.load(log_decay_ptr + head))
        of_keys = tl.zeros((CHUNK, CHUNK), tl.float32)
        of_queries = tl.zeros((CHUNK, CHUNK), tl.float32)
        of_themselves = tl.zeros((CHUNK,), tl.float32)
        for begin in range(0, KEY_DIM, PIECE):
            dims = begin + tl.arange(0, PIECE)
            places = rows[:, None] * num_channels + dims[None, :]
            keys = tl.load(mixed_ptr + first_key + places, mask=inside[:, None], other=0.0)
            queries = tl.load(mixed_ptr + first_query + places, mask=inside[:, None], other=0.0)
            of_themselves += tl.sum(queries * keys, 1)
            decays = tl.load(decay_ptr + rows[:, None] * decay_stride + dims[None, :], mask=inside[:, None], other=0.0)
            times = decays.to(tl.float32) + tl.load(dt_bias_ptr + head * KEY_DIM + dims)[None, :]
            logs = tl.where(inside[:, None], log_factors(times, speed, decay_bound), 0.0)
            of_keys, of_queries, until, behind = _related(
                keys, queries, logs, of_keys, of_queries, CHUNK, PIECE, LEVELS, DOT, PRECISION
            )
            packed = rows_ptr + rows[:, None] * KEY_DIM + dims[None, :]
            kept = tl.exp(until)
            tl.store(packed, (keys * kept).to(DOT))
            tl.store(packed + CHUNK * KEY_DIM, (queries * kept).to(DOT))
            tl.store(packed + 2 * CHUNK * KEY_DIM, (keys * tl.exp(behind)).to(DOT))
            whole = tl.sum(tl.where((rows == CHUNK - 1)[:, None], kept, 0.0), 0)
            tl.store(factors_ptr + place * KEY_DIM + dims, whole)
        matrix = place * (CHUNK * CHUNK) + rows[:, None] * CHUNK + columns[None, :]
        is_diagonal = rows[:, None] == columns[None, :]
        tl.store(pairs_ptr + matrix, tl.where(is_diagonal, of_themselves[:, None], of_queries).to(DOT))
        beta_ptr += first.to(tl.int64) * beta_stride + head
        lower = strength_of(beta_ptr, rows, beta_stride, inside, strength)[:, None] * of_keys
        inverse = inverted(lower, CHUNK, TRIANGLE, PRECISION)
        inverse *= strength_of(beta_ptr, columns, beta_stride, columns < num_rows, strength)[None, :]
        tl.store(inverse_ptr + matrix, inverse.to(DOT))
