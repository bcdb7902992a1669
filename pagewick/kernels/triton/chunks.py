"""Prompts through running states, a chunk of tokens at a time: products of matrices in place of a step for each token.

Both operations with a state S [DK, DV] of a head take a token with key k, query q, value v and a factor e^g, by which S
is kept, to

    S <- e^g S + k u^T,    result q^T S,    u = v * dt (Mamba-2)  or  u = b (v - e^g S^T k) (the gated delta rule).

In a chunk of C tokens that begins with S, let G_i be the sum of g up to token i, and D_ij = e^(G_i - G_j) for i >= j,
else 0. For all tokens together, with a token in each row of K, Q, V and U:

    result_i = e^(G_i) S^T q_i + sum_j D_ij (q_i . k_j) u_j,    S <- e^(G_C) S + sum_i e^(G_C - G_i) k_i u_i^T

The u of the delta rule depend on each other: U = T (V - e^G K S), where T = (I + L)^-1 diag(b) and, for i > j,
L_ij = b_i D_ij (k_i . k_j). This is the WY form of section 3.3 of Yang et al. 2024 (arXiv:2412.06464), and for Mamba-2
the duality of section 6 of Dao and Gu 2024 (arXiv:2405.21060).

`relate_tokens` computes what does not depend on S, for all chunks at once; `advance_chunks` takes a part of the columns
of S through the chunks of a sequence. No exponent is above 0, and each is a sum of its own: differences of G would have
no digits left behind a token that forgets nearly everything. Entries of T/b and of all parts it is made of are inner
products of unit keys behind contractions (reflections, if b is 2), and so at most 1, or 2 if b is; powers of L, which
a series for T has, are not.

Chunks begin where the new tokens of a sequence begin, so that bits depend on how a prompt is cut, but not on the other
sequences of the batch. With --batch-invariant nothing is taken in chunks.

Dimensions: T tokens, C tokens of a chunk, H heads of DV values, G groups of heads that share keys and queries of DK
numbers. A slot is a chunk's place in memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagewick.kernels.triton.states import load_state, num_stored, store_state
from pagewick.kernels.triton.windows import softplus


@triton.jit
def num_chunks(starts_ptr, tables_ptr, places, num_seqs, table_stride, least, CHUNK: tl.constexpr):
    """Return the chunks of sequences `places`: 0 if they have fewer tokens than `least`, or do not exist.

    Also 0 if a state between their tokens is stored.
    """
    inside = places < num_seqs
    begins = tl.load(starts_ptr + places, mask=inside, other=0)
    count = tl.load(starts_ptr + 1 + places, mask=inside, other=0) - begins
    stored = tl.load(tables_ptr + places * table_stride + 2, mask=inside, other=0)
    is_long = (count >= least) & ((stored == 0) | (stored >= count))
    return tl.where(is_long, (count + CHUNK - 1) // CHUNK, 0)


@triton.jit
def chunk_in(slot, starts_ptr, tables_ptr, num_seqs, table_stride, least, CHUNK: tl.constexpr, BLOCK_B: tl.constexpr):
    """Return the sequence whose chunk is in a slot, num_seqs if the slot is empty, and the chunk's number in it."""
    seq, earlier, total = 0, 0, 0
    for begin in range(0, num_seqs, BLOCK_B):
        places = begin + tl.arange(0, BLOCK_B)
        counts = num_chunks(starts_ptr, tables_ptr, places, num_seqs, table_stride, least, CHUNK)
        is_before = (places < num_seqs) & (total + tl.cumsum(counts, 0) <= slot)
        seq += tl.sum(is_before.to(tl.int32), 0)
        earlier += tl.sum(tl.where(is_before, counts, 0), 0)
        total += tl.sum(counts, 0)
    return seq, slot - earlier


@triton.jit
def _merged(inverse, lower, HALF: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """Make inverses of triangles of 2 * HALF rows from those of HALF rows: the part below them is -T2 L T1."""
    rows, columns = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
    is_beside = (rows // (2 * HALF))[:, None] == (columns // (2 * HALF))[None, :]
    is_below = (rows // HALF)[:, None] > (columns // HALF)[None, :]
    product = tl.dot(inverse, tl.where(is_beside & is_below, lower, 0.0), input_precision=PRECISION)
    return inverse - tl.dot(product, inverse, input_precision=PRECISION)


@triton.jit
def inverted(lower, CHUNK: tl.constexpr, TRIANGLE: tl.constexpr, PRECISION: tl.constexpr):
    """Return (I + lower)^-1 [C, C] for numbers below the diagonal only."""
    num: tl.constexpr = CHUNK // TRIANGLE
    is_own = (tl.arange(0, CHUNK) // TRIANGLE)[:, None, None] == tl.arange(0, num)[None, :, None]
    own = tl.sum(tl.where(is_own, tl.reshape(lower, (CHUNK, num, TRIANGLE)), 0.0), 1)
    turned = tl.permute(tl.reshape(own, (num, TRIANGLE, TRIANGLE)), (0, 2, 1))
    places = tl.arange(0, TRIANGLE)
    is_diagonal = (places[:, None] == places[None, :])[None, :, :]
    inverse = tl.where(is_diagonal, 1.0, tl.zeros((num, TRIANGLE, TRIANGLE), tl.float32))
    for row in range(1, TRIANGLE):
        factors = tl.sum(tl.where((places == row)[None, None, :], turned, 0.0), 2)
        sums = tl.sum(factors[:, :, None] * inverse, 1)
        inverse -= tl.where((places == row)[None, :, None], sums[:, None, :], 0.0)
    wide = tl.where(is_own, tl.reshape(inverse, (CHUNK, TRIANGLE))[:, None, :], 0.0)
    inverse = tl.reshape(wide, (CHUNK, CHUNK))
    if CHUNK > TRIANGLE:
        inverse = _merged(inverse, lower, TRIANGLE, CHUNK, PRECISION)
    if CHUNK > 2 * TRIANGLE:
        inverse = _merged(inverse, lower, 2 * TRIANGLE, CHUNK, PRECISION)
    return inverse


@triton.jit
def strength_of(beta_ptr, tokens, beta_stride, inside, strength):
    """Return what each token takes in of a difference, at most `strength`, and 0 for those that are not inside."""
    beta = tl.load(beta_ptr + tokens * beta_stride, mask=inside, other=0.0).to(tl.float32)
    return tl.where(inside, strength / (1.0 + tl.exp(-beta)), 0.0)


@triton.jit(do_not_specialize=["num_seqs", "least", "dt_scale", "strength"])
def relate_tokens(
    mixed_ptr, decay_ptr, beta_ptr, log_decay_ptr, dt_bias_ptr, starts_ptr, tables_ptr, rows_ptr, pairs_ptr,
    inverse_ptr, factors_ptr, num_seqs, num_heads, num_groups, first_query, first_key, num_channels, decay_stride,
    beta_stride, table_stride, least, dt_scale, strength,
    KEY_DIM: tl.constexpr, CHUNK: tl.constexpr, PIECE: tl.constexpr, TRIANGLE: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Compute for the chunk in slot program_id(0) and head program_id(1) what does not depend on a state.

    rows: [slots, G, 2, C, DK], keys and queries for products, zeros behind the chunk's last token. pairs, inverse:
    [slots, H, C, C], D * QK^T (times dt of the token that is read) and T. factors: [slots, H, 2, C] float32, by which a
    state is kept up to each token, and a token's u until the end of the chunk. strength: a state takes in this times
    the sigmoid of beta. beta and inverse are None for Mamba-2.
    """
    slot, head = tl.program_id(0), tl.program_id(1)
    seq, chunk = chunk_in(slot, starts_ptr, tables_ptr, num_seqs, table_stride, least, CHUNK, BLOCK_B)
    if seq < num_seqs:
        first = tl.load(starts_ptr + seq) + chunk * CHUNK
        num_rows = tl.minimum(tl.load(starts_ptr + seq + 1) - first, CHUNK)
        rows, columns = tl.arange(0, CHUNK), tl.arange(0, CHUNK)
        inside, is_column = rows < num_rows, columns < num_rows
        ratio = num_heads // num_groups
        group = head // ratio
        mixed_ptr += first.to(tl.int64) * num_channels + group * KEY_DIM
        rows_ptr += (slot * num_groups + group).to(tl.int64) * (2 * CHUNK * KEY_DIM)
        of_keys = tl.zeros((CHUNK, CHUNK), tl.float32)
        of_queries = tl.zeros((CHUNK, CHUNK), tl.float32)
        for begin in range(0, KEY_DIM, PIECE):
            dims = begin + tl.arange(0, PIECE)
            places = rows[:, None] * num_channels + dims[None, :]
            keys = tl.load(mixed_ptr + first_key + places, mask=inside[:, None], other=0.0).to(DOT)
            queries = tl.load(mixed_ptr + first_query + places, mask=inside[:, None], other=0.0).to(DOT)
            of_queries = tl.dot(queries, tl.trans(keys), of_queries, input_precision=PRECISION)
            if beta_ptr is not None:
                of_keys = tl.dot(keys, tl.trans(keys), of_keys, input_precision=PRECISION)
            if head % ratio == 0:
                packed = rows_ptr + rows[:, None] * KEY_DIM + dims[None, :]
                tl.store(packed, keys)
                tl.store(packed + CHUNK * KEY_DIM, queries)
        decay_ptr += first.to(tl.int64) * decay_stride + head
        decay = tl.load(decay_ptr + rows * decay_stride, mask=inside, other=0.0).to(tl.float32)
        time = softplus(decay * dt_scale + tl.load(dt_bias_ptr + head))
        logs = tl.where(inside, -tl.exp(tl.load(log_decay_ptr + head)) * time, 0.0)
        is_later = rows[:, None] > columns[None, :]
        # G_i - G_j, each as a sum of its own.
        sums = tl.cumsum(tl.where(is_later, logs[:, None], 0.0), 0)
        kept = tl.where(rows[:, None] >= columns[None, :], tl.exp(sums), 0.0)
        until_end = tl.sum(tl.where((rows == CHUNK - 1)[:, None], kept, 0.0), 0)
        place = (slot * num_heads + head).to(tl.int64)
        matrix = rows[:, None] * CHUNK + columns[None, :]
        pairs_ptr += place * (CHUNK * CHUNK)
        factors_ptr += place * (2 * CHUNK)
        tl.store(factors_ptr + rows, tl.exp(tl.cumsum(logs, 0)))
        if beta_ptr is not None:
            beta_ptr += first.to(tl.int64) * beta_stride + head
            taken = strength_of(beta_ptr, rows, beta_stride, inside, strength)
            lower = tl.where(is_later, taken[:, None] * kept * of_keys, 0.0)
            inverse = inverted(lower, CHUNK, TRIANGLE, PRECISION)
            inverse *= strength_of(beta_ptr, columns, beta_stride, is_column, strength)[None, :]
            tl.store(inverse_ptr + place * (CHUNK * CHUNK) + matrix, inverse.to(DOT))
            tl.store(pairs_ptr + matrix, (kept * of_queries).to(DOT))
        else:
            decay = tl.load(decay_ptr + columns * decay_stride, mask=is_column, other=0.0).to(tl.float32)
            time = softplus(decay * dt_scale + tl.load(dt_bias_ptr + head))
            tl.store(pairs_ptr + matrix, (kept * of_queries * time[None, :]).to(DOT))
            until_end *= time
        tl.store(factors_ptr + CHUNK + columns, until_end)


@triton.jit
def _padded(places, dims, KEY_DIM: tl.constexpr, ROWS: tl.constexpr):
    """Load rows of DK numbers from places [C, ROWS], with zeros from DK on."""
    if ROWS == KEY_DIM:
        return tl.load(places)
    return tl.load(places, mask=(dims < KEY_DIM)[None, :], other=0.0)


@triton.jit(do_not_specialize=["least"])
def advance_chunks(
    mixed_ptr, rows_ptr, pairs_ptr, inverse_ptr, factors_ptr, skip_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr,
    num_heads, num_groups, value_dim, first_value, num_channels, width, block_floats, table_stride, least,
    KEY_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr, CHUNK: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_B: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Take columns program_id(2) of head program_id(1) through the chunks of sequence program_id(0).

    The values in mixed [T, C] are replaced by the numbers that queries read; no other program reads these columns.
    rows, pairs, inverse and factors are those of relate_tokens, or with BY_CHANNEL those of channel_chunks.py. skip:
    [H], Mamba-2's factor of a value in its result. ROWS: a power of two that is DK or larger, or DK with BY_CHANNEL.
    """
    seq, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    if (end - start >= least) & (num_stored(tables_ptr, seq, table_stride, end - start) == end - start):
        slot = 0
        for begin in range(0, seq, BLOCK_B):
            places = begin + tl.arange(0, BLOCK_B)
            slot += tl.sum(num_chunks(starts_ptr, tables_ptr, places, seq, table_stride, least, CHUNK), 0)
        columns = tile * BLOCK_V + tl.arange(0, BLOCK_V)
        state, offsets, target_ptr = load_state(
            states_ptr, tables_ptr, lengths_ptr, seq, end - start, head, columns, value_dim, num_channels, width,
            block_floats, table_stride, KEY_DIM, ROWS,
        )  # fmt: skip
        rows, others, dims = tl.arange(0, CHUNK), tl.arange(0, CHUNK), tl.arange(0, ROWS)
        key_places = rows[:, None] * KEY_DIM + dims[None, :]
        matrix = rows[:, None] * CHUNK + others[None, :]
        value_places = rows[:, None] * num_channels + (first_value + head * value_dim + columns)[None, :]
        mixed_ptr += start.to(tl.int64) * num_channels
        num_rows: tl.constexpr = 3 if BY_CHANNEL else 2
        num_factors: tl.constexpr = KEY_DIM if BY_CHANNEL else 2 * CHUNK
        group = slot * num_groups + head // (num_heads // num_groups)
        rows_ptr += group.to(tl.int64) * (num_rows * CHUNK * KEY_DIM)
        place = (slot * num_heads + head).to(tl.int64)
        pairs_ptr += place * (CHUNK * CHUNK)
        if inverse_ptr is not None:
            inverse_ptr += place * (CHUNK * CHUNK)
        factors_ptr += place * num_factors
        for first in range(0, end - start, CHUNK):
            inside = (rows < end - start - first)[:, None]
            values = tl.load(mixed_ptr + value_places, mask=inside, other=0.0)
            keys = _padded(rows_ptr + key_places, dims, KEY_DIM, ROWS)
            queries = _padded(rows_ptr + CHUNK * KEY_DIM + key_places, dims, KEY_DIM, ROWS)
            if BY_CHANNEL:
                # Keys and queries have their factors.
                kept, until_end, whole = 1.0, 1.0, tl.load(factors_ptr + dims)[:, None]
                last_keys = tl.load(rows_ptr + 2 * CHUNK * KEY_DIM + key_places)
            else:
                kept, until_end = tl.load(factors_ptr + rows)[:, None], tl.load(factors_ptr + CHUNK + rows)[:, None]
                whole, last_keys = tl.load(factors_ptr + CHUNK - 1), keys
            low = state.to(DOT)
            if inverse_ptr is not None:
                held = tl.dot(keys, low, input_precision=PRECISION)
                changes = (values - kept * held).to(DOT)
                new = tl.dot(tl.load(inverse_ptr + matrix), changes, input_precision=PRECISION)
                inverse_ptr += num_heads * (CHUNK * CHUNK)
            else:
                new = values
            read = kept * tl.dot(queries, low, input_precision=PRECISION)
            read = tl.dot(tl.load(pairs_ptr + matrix), new.to(DOT), read, input_precision=PRECISION)
            if skip_ptr is not None:
                read += tl.load(skip_ptr + head) * values
            tl.store(mixed_ptr + value_places, read, mask=inside)
            added = (until_end * new).to(DOT)
            state *= whole
            state = tl.dot(tl.trans(last_keys), added, state, input_precision=PRECISION)
            mixed_ptr += CHUNK * num_channels
            rows_ptr += num_groups * (num_rows * CHUNK * KEY_DIM)
            pairs_ptr += num_heads * (CHUNK * CHUNK)
            factors_ptr += num_heads * num_factors
        store_state(target_ptr, offsets, state, KEY_DIM, ROWS)
