"""The gated delta rule: a convolution, the states of all value heads, and the gated norm of what queries read.

Definition: gated_delta_net of reference_delta.py. The state of a head is divided by columns among programs, each of
which takes its part through all new tokens of a sequence, in registers, so that the bits of a token depend on its own
sequence alone. Long runs of tokens go in chunks (chunks.py, channel_chunks.py), and their bits depend on where a chunk
begins as well. The convolution and its inputs are in windows.py.

Dimensions: T tokens, B sequences, KH key heads of DK numbers, VH value heads of DV numbers, K inputs of the convolution
for each of its C channels.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference_delta
from pagewick.kernels.options import AttentionMetadata, DeltaOptions
from pagewick.kernels.triton import windows
from pagewick.kernels.triton.channel_chunks import log_factors
from pagewick.kernels.triton.chunk_launches import NEVER, Chunks, Heads, Rule
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.states import load_numbers, load_state, num_stored, store_state
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload
from pagewick.kernels.triton.windows import convolved, silu, softplus

# The sizes of heads that variants serve, and those of OLMo Hybrid, which are served with decays of heads.
SIZES = (16, 32, 64, 128, 256)
KEY_SIZES, VALUE_SIZES = (*SIZES, 96), (*SIZES, 192)
# Numbers of a state that a program has. One warp adds them without waiting for others.
_STATE_NUMBERS = 2048
# Else the threads of a sum get results that differ in their last bits: see Variant.
_FUSES = False


@triton.jit(do_not_specialize=["num_seqs"])
def convolve_heads(
    rows_ptr, weight_ptr, mixed_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr, num_seqs, num_key_heads, key_dim,
    value_dim, num_channels, width, row_stride, block_floats, table_stride, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Convolve the channels of head program_id(1) for token program_id(0): queries, then keys, then values.

    mixed: [T, C] float32. Queries and keys are brought to length 1, queries divided by the root of DK as well.
    """
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_value = head >= 2 * num_key_heads
    size = tl.where(is_value, value_dim, key_dim)
    begin = tl.where(is_value, 2 * num_key_heads * (key_dim - value_dim), 0) + head * size
    columns = tl.arange(0, BLOCK)
    x = silu(
        convolved(
            rows_ptr, weight_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr, token, begin, columns, size,
            num_seqs, num_channels, width, row_stride, block_floats, table_stride, False, BLOCK_B,
        )
    )  # fmt: skip
    if not is_value:
        x = x * tl.rsqrt(tl.sum(x * x, axis=0) + 1e-6)
        x = x * tl.where(head < num_key_heads, tl.rsqrt(key_dim.to(tl.float32)), 1.0)
    tl.store(mixed_ptr + token * num_channels + begin + columns, x, mask=columns < size)


@triton.jit(do_not_specialize=["least", "decay_bound", "strength"])
def advance_states(
    mixed_ptr, beta_ptr, decay_ptr, log_decay_ptr, dt_bias_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr,
    num_key_heads, num_value_heads, value_dim, num_channels, width, beta_stride, decay_stride, block_floats,
    table_stride, least, decay_bound, strength, KEY_DIM: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Take columns program_id(2) of value head program_id(1) through the new tokens of sequence program_id(0).

    The values in mixed [T, C] are replaced by the numbers that queries read; no other program reads these columns.
    Sequences with `least` new tokens or more, none of them draft tokens, are left to chunks.py. BY_CHANNEL: each row of
    a state decays by itself, and there are as many value heads as key heads; if decay_bound is below 0, logarithms of
    factors are this times a sigmoid. strength: a state takes in this times the sigmoid of beta. ROWS: a power of two
    that is DK or larger; DK itself with BY_CHANNEL.
    """
    seq, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    stored = num_stored(tables_ptr, seq, table_stride, end - start)
    if (start < end) & ((end - start < least) | (stored < end - start)):
        dims, columns = tl.arange(0, ROWS), tile * BLOCK_V + tl.arange(0, BLOCK_V)
        state, offsets, target_ptr = load_state(
            states_ptr, tables_ptr, lengths_ptr, seq, end - start, head, columns, value_dim, num_channels, width,
            block_floats, table_stride, KEY_DIM, ROWS,
        )  # fmt: skip
        speed = tl.exp(tl.load(log_decay_ptr + head))
        first_query = head // (num_value_heads // num_key_heads) * KEY_DIM
        first_key = num_key_heads * KEY_DIM + first_query
        values = 2 * num_key_heads * KEY_DIM + head * value_dim + columns
        bias = tl.load(dt_bias_ptr + (first_query + dims if BY_CHANNEL else head))
        for step in range(0, end - start):
            token = start.to(tl.int64) + step
            row_ptr = mixed_ptr + token * num_channels
            key = load_numbers(row_ptr + first_key, dims, KEY_DIM, ROWS)
            query = load_numbers(row_ptr + first_query, dims, KEY_DIM, ROWS)
            beta = tl.load(beta_ptr + token * beta_stride + head).to(tl.float32)
            decays_ptr = decay_ptr + token * decay_stride
            if BY_CHANNEL:
                time = tl.load(decays_ptr + first_query + dims).to(tl.float32) + bias
                state = state * tl.exp(log_factors(time, speed, decay_bound))[:, None]
            else:
                time = softplus(tl.load(decays_ptr + head).to(tl.float32) + bias)
                state = state * tl.exp(-speed * time)
            held = tl.sum(state * key[:, None], axis=0)
            delta = (tl.load(row_ptr + values) - held) * (strength / (1.0 + tl.exp(-beta)))
            state += key[:, None] * delta[None, :]
            tl.store(row_ptr + values, tl.sum(state * query[:, None], axis=0))
            if step + 1 == stored:
                store_state(target_ptr, offsets, state, KEY_DIM, ROWS)


@triton.jit(do_not_specialize=["eps"])
def finish_heads(
    mixed_ptr, gate_ptr, weight_ptr, out_ptr, first_channel, num_channels, gate_stride, out_stride, eps,
    VALUE_DIM: tl.constexpr, BLOCK: tl.constexpr, IS_SIGMOID: tl.constexpr,
):  # fmt: skip
    """Normalise what value head program_id(1) of token program_id(0) has read, and multiply it with its gate."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, BLOCK)
    columns, inside = head * VALUE_DIM + dims, dims < VALUE_DIM
    x = tl.load(mixed_ptr + token * num_channels + first_channel + columns, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + dims, mask=inside, other=0.0)
    gate = tl.load(gate_ptr + token * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    normed = x * tl.rsqrt(tl.sum(x * x, axis=0) / VALUE_DIM + eps) * weight
    factor = 1.0 / (1.0 + tl.exp(-gate)) if IS_SIGMOID else silu(gate)
    tl.store(out_ptr + token * out_stride + columns, (normed * factor).to(out_ptr.dtype.element_ty), mask=inside)


def columns_of(key_dim: int, value_dim: int) -> int:
    """Return the columns of a state [DK, DV] that a program has."""
    num_rows: int = triton.next_power_of_2(key_dim)
    return min(value_dim, 32, max(8, _STATE_NUMBERS // num_rows))


def _convolution(dtype: torch.dtype, size: int) -> Variant:
    numbers = {"rows_ptr": f"*{TYPE_NAMES[dtype]}", "weight_ptr": "*fp32", "mixed_ptr": "*fp32"}
    sizes = {**dict.fromkeys(("num_seqs", "num_key_heads"), "i32"), **dict.fromkeys(("key_dim", "value_dim"), "i32:16")}
    return Variant(
        name=f"convolve_{TYPE_NAMES[dtype]}_{size}",
        kernel=convolve_heads,
        signature={**numbers, **windows.BATCH, **windows.SIZES, **sizes},
        constexprs={"BLOCK": size, "BLOCK_B": windows.BLOCK_B},
        num_warps=1,
        fuses=_FUSES,
        in_sample=(dtype, size) == (torch.bfloat16, 128),
    )


def _advance(dtype: torch.dtype, key_dim: int, columns: int, by_channel: bool) -> Variant:
    numbers = {**dict.fromkeys(("beta_ptr", "decay_ptr"), f"*{TYPE_NAMES[dtype]}"), "mixed_ptr": "*fp32"}
    numbers |= dict.fromkeys(("log_decay_ptr", "dt_bias_ptr"), "*fp32")
    counts = ("num_key_heads", "num_value_heads", "width", "beta_stride", "decay_stride", "table_stride", "least")
    sizes = dict.fromkeys(("value_dim", "num_channels", "block_floats"), "i32:16")
    factors = dict.fromkeys(("decay_bound", "strength"), "fp32")
    return Variant(
        name=f"advance_{'channels_' if by_channel else ''}{TYPE_NAMES[dtype]}_{key_dim}_{columns}",
        kernel=advance_states,
        signature={**numbers, **windows.BATCH, **dict.fromkeys(counts, "i32"), **sizes, **factors},
        constexprs={
            "KEY_DIM": key_dim,
            "ROWS": triton.next_power_of_2(key_dim),
            "BLOCK_V": columns,
            "BY_CHANNEL": by_channel,
        },
        num_warps=1,
        fuses=_FUSES,
        num_stages=3,
        in_sample=(dtype, key_dim) == (torch.bfloat16, 128),
    )


def _finish(dtype: torch.dtype, value_dim: int, is_sigmoid: bool) -> Variant:
    number = f"*{TYPE_NAMES[dtype]}"
    pointers = {"mixed_ptr": "*fp32", "gate_ptr": number, "weight_ptr": "*fp32", "out_ptr": number}
    sizes = dict.fromkeys(("first_channel", "num_channels", "gate_stride", "out_stride"), "i32:16")
    return Variant(
        name=f"finish_{'sigmoid_' if is_sigmoid else ''}{TYPE_NAMES[dtype]}_{value_dim}",
        kernel=finish_heads,
        signature={**pointers, **sizes, "eps": "fp32"},
        constexprs={"VALUE_DIM": value_dim, "BLOCK": triton.next_power_of_2(value_dim), "IS_SIGMOID": is_sigmoid},
        num_warps=1,
        fuses=_FUSES,
    )


_CONVOLUTIONS = {key: _convolution(*key) for key in itertools.product(windows.DTYPES, SIZES)}
_ADVANCES = {
    (dtype, key_dim, columns, by_channel): _advance(dtype, key_dim, columns, by_channel)
    for dtype, key_dim, by_channel in itertools.product(windows.DTYPES, KEY_SIZES, (False, True))
    if key_dim in SIZES or not by_channel
    for columns in sorted({columns_of(key_dim, value_dim) for value_dim in SIZES})
}
_FINISHES = {key: _finish(*key) for key in itertools.product(windows.DTYPES, VALUE_SIZES, (False, True))}
# By whether channels decay by themselves.
_CHUNKS = {False: Chunks.of((64, 96, 128), Rule.DELTA), True: Chunks.of((64, 128), Rule.CHANNEL_DELTA)}
VARIANTS = (
    *_CONVOLUTIONS.values(), *_ADVANCES.values(), *_FINISHES.values(), *windows.KEEPS.values(),
    *_CHUNKS[False].variants, *_CHUNKS[True].variants,
)  # fmt: skip

# Qwen3-Next: 16 key heads and 32 value heads of 128. States are read and written once for each sequence; its channels
# are read in bfloat16, written and read in float32, and so are the numbers that queries read. In chunks of 64, queries
# and keys are copied in bfloat16, and two matrices of each value head are written and read. A chunk of a head has three
# products of 64 x 128 x 128, four of 64 x 64 x 128 and four of 64 x 64 x 64. Kimi Linear: 32 heads of both, a decay for
# each number of a key, a second copy of the keys, and 14 products of 64 x 64 x 128.
WORKLOADS = (
    *(
        Workload("gated_delta_net", f"{seqs} x 1 tokens, 16 and 32 heads of 128, bf16",
                 seqs * (2 * 32 * 128 * 128 * 4 + 8192 * (2 + 3 * 4) + 4096 * (2 + 2 + 4)),
                 seqs * 32 * 128 * 128 * 7, on_tensor_cores=False)
        for seqs in (1, 64)
    ),
    Workload("gated_delta_net", "1 x 2048 tokens, 16 and 32 heads of 128, bf16",
             2 * 32 * 128 * 128 * 4
             + 2048 * (4096 * (2 + 4 + 4 + 2 + 2) + 4096 * (2 + 4 * 4 + 2 + 2) + 2 * 32 * 64 * (2 + 2)),
             2048 // 64 * 32 * 2 * (3 * 64 * 128 * 128 + 4 * 64 * 64 * 128 + 4 * 64 * 64 * 64)),
    Workload("gated_delta_net", "1 x 2048 tokens, 32 heads of 128 with decays of channels, bf16",
             2 * 32 * 128 * 128 * 4
             + 2048 * (4096 * (2 * (2 + 4 + 4) + 2 + 3 * (2 + 2)) + 4096 * (2 + 4 * 4 + 2 + 2) + 2 * 32 * 64 * (2 + 2)),
             2048 // 64 * 32 * 2 * (3 * 64 * 128 * 128 + 14 * 64 * 64 * 128 + 4 * 64 * 64 * 64)),
)  # fmt: skip


def gated_delta_net(
    qkv: Tensor,
    gate: Tensor,
    beta: Tensor,
    decay: Tensor,
    states: Tensor,
    batch: AttentionMetadata,
    options: DeltaOptions,
) -> Tensor:
    """reference_delta.gated_delta_net."""
    if not _is_served((qkv, gate, beta, decay), states, options):
        return by_definition(reference_delta.gated_delta_net, qkv, gate, beta, decay, states, batch, options)
    dtype, key_dim, value_dim, width = qkv.dtype, options.key_dim, options.value_dim, options.conv_weight.shape[1]
    key_heads, value_heads, channels = options.num_key_heads, options.num_value_heads, options.num_channels
    num_tokens, num_seqs = len(qkv), len(batch.context_lens)
    # The results of the convolution, then the numbers that queries read in the place of values.
    mixed = torch.empty((num_tokens, channels), dtype=torch.float32, device=qkv.device)
    out = torch.empty((num_tokens, value_heads * value_dim), dtype=dtype, device=qkv.device)
    where = windows.where(states, batch, channels, width)
    _CONVOLUTIONS[dtype, triton.next_power_of_2(max(key_dim, value_dim))].launch(
        (num_tokens, 2 * key_heads + value_heads), weight_ptr=options.conv_weight, mixed_ptr=mixed,
        num_seqs=num_seqs, num_key_heads=key_heads, key_dim=key_dim, value_dim=value_dim, **windows.rows_of(qkv),
        **where,
    )  # fmt: skip
    heads = Heads(value_heads, key_heads, key_dim, value_dim, 0, key_heads * key_dim, 2 * key_heads * key_dim)
    gates = {
        "beta_ptr": beta, "decay_ptr": decay, "log_decay_ptr": options.log_decay, "dt_bias_ptr": options.dt_bias,
        "beta_stride": beta.stride(0), "decay_stride": decay.stride(0), "strength": options.strength,
    }  # fmt: skip
    columns, by_channel = columns_of(key_dim, value_dim), options.has_channel_decay
    chunks, bound = _CHUNKS[by_channel], options.decay_bound or 0.0
    least = chunks.least(dtype, heads, batch, num_tokens)
    _ADVANCES[dtype, key_dim, columns, by_channel].launch(
        (num_seqs, value_heads, value_dim // columns), mixed_ptr=mixed, num_key_heads=key_heads,
        num_value_heads=value_heads, value_dim=value_dim, least=least, decay_bound=bound, **gates, **where,
    )  # fmt: skip
    if least < NEVER:
        chunks.advance(heads, mixed, where, gates | ({"decay_bound": bound} if by_channel else {"dt_scale": 1.0}))
    _FINISHES[dtype, value_dim, options.has_sigmoid_gate].launch(
        (num_tokens, value_heads), mixed_ptr=mixed, gate_ptr=gate, weight_ptr=options.norm_weight, out_ptr=out,
        first_channel=2 * key_heads * key_dim, num_channels=channels, gate_stride=gate.stride(0),
        out_stride=out.stride(0), eps=options.norm_eps,
    )  # fmt: skip
    windows.keep(windows.KEEPS[dtype], qkv, where)
    return out


def _is_served(rows: tuple[Tensor, ...], states: Tensor, options: DeltaOptions) -> bool:
    constants = (options.conv_weight, options.log_decay, options.dt_bias, options.norm_weight)
    is_alike = all(each.dtype == rows[0].dtype and each.stride(-1) == 1 for each in rows)
    by_channel = options.has_channel_decay
    fits = options.key_dim in (SIZES if by_channel else KEY_SIZES) and options.value_dim in VALUE_SIZES
    fits = fits and states.is_contiguous() and (options.decay_bound is None or by_channel)
    fits = fits and not (by_channel and options.num_key_heads != options.num_value_heads)
    return rows[0].dtype in windows.DTYPES and is_alike and fits and all(each.is_contiguous() for each in constants)
