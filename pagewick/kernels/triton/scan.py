"""The middle of a Mamba-2 layer: a convolution, the states of all heads, and the gated norm of what queries read.

Definition: selective_scan of reference_scan.py. The state of a head is divided by columns among programs, each of which
takes its part through all new tokens of a sequence, in registers, so that the bits of a token depend on its own
sequence alone. Long runs of tokens go in chunks (chunks.py), and their bits depend on where a chunk begins as well. The
convolution and its inputs are in windows.py.

Dimensions: T tokens, B sequences, H heads of P numbers, G groups of heads that share keys and queries of N numbers, K
inputs of the convolution for each of its C channels.
"""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference_scan
from pagewick.kernels.options import AttentionMetadata, ScanOptions
from pagewick.kernels.triton import windows
from pagewick.kernels.triton.chunk_launches import NEVER, Chunks, Heads, Rule
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.states import load_state, num_stored
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload
from pagewick.kernels.triton.windows import convolved_block, silu, softplus

# The sizes of keys that variants serve.
STATE_DIMS = (16, 32, 64, 128, 256)
# Heads are served whose size is a multiple of the columns of any state: see columns_of.
HEAD_MULTIPLE = 32
# Channels of a program that convolves. It is one warp, which finds its sequence without waiting for others.
_CHANNELS = 256
# Numbers of a state that a program has. One warp adds them without waiting for others.
_STATE_NUMBERS = 2048
# Numbers of a row that a program gates at once; longer parts of a norm are taken piece by piece.
_PIECES = (512, 1024, 4096)
_NUMBERS_PER_THREAD = 8
# When a row is gated: it has no norm, or the gate comes before the norm, or behind it.
_PLAIN, _GATE_FIRST, _NORM_FIRST = "gate", "gate_norm", "norm_gate"
# Else the threads of a sum get results that differ in their last bits: see Variant.
_FUSES = False


@triton.jit(do_not_specialize=["num_seqs"])
def convolve_channels(
    rows_ptr, weight_ptr, bias_ptr, mixed_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr, num_seqs, num_channels,
    width, row_stride, block_floats, table_stride, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Convolve channels program_id(1) for token program_id(0), and apply the SiLU. mixed: [T, C] float32."""
    token, channels, inside, total = convolved_block(
        rows_ptr, weight_ptr, bias_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr, num_seqs, num_channels, width,
        row_stride, block_floats, table_stride, False, BLOCK, BLOCK_B,
    )  # fmt: skip
    tl.store(mixed_ptr + token * num_channels + channels, silu(total), mask=inside)


@triton.jit(do_not_specialize=["dt_scale", "least"])
def advance_scan(
    mixed_ptr, dt_ptr, log_decay_ptr, skip_ptr, dt_bias_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr,
    num_heads, num_groups, head_dim, num_channels, width, dt_stride, block_floats, table_stride, dt_scale, least,
    STATE_DIM: tl.constexpr, BLOCK_P: tl.constexpr,
):  # fmt: skip
    """Take columns program_id(2) of head program_id(1) through the new tokens of sequence program_id(0).

    The values in mixed [T, C] are replaced by the numbers that queries read; no other program reads these columns.
    Sequences with `least` new tokens or more, none of them draft tokens, are left to chunks.py.
    """
    seq, head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    stored = num_stored(tables_ptr, seq, table_stride, end - start)
    if (start < end) & ((end - start < least) | (stored < end - start)):
        dims, columns = tl.arange(0, STATE_DIM), tile * BLOCK_P + tl.arange(0, BLOCK_P)
        state, offsets, target_ptr = load_state(
            states_ptr, tables_ptr, lengths_ptr, seq, end - start, head, columns, head_dim, num_channels, width,
            block_floats, table_stride, STATE_DIM, STATE_DIM,
        )  # fmt: skip
        speed = tl.exp(tl.load(log_decay_ptr + head))
        bias, skip = tl.load(dt_bias_ptr + head), tl.load(skip_ptr + head)
        values = head * head_dim + columns
        keys = num_heads * head_dim + head // (num_heads // num_groups) * STATE_DIM + dims
        queries = keys + num_groups * STATE_DIM
        for step in range(0, end - start):
            token = start.to(tl.int64) + step
            row_ptr = mixed_ptr + token * num_channels
            key, query, value = tl.load(row_ptr + keys), tl.load(row_ptr + queries), tl.load(row_ptr + values)
            time = softplus(tl.load(dt_ptr + token * dt_stride + head).to(tl.float32) * dt_scale + bias)
            state = state * tl.exp(-speed * time) + key[:, None] * (value * time)[None, :]
            tl.store(row_ptr + values, tl.sum(state * query[:, None], axis=0) + skip * value)
            if step + 1 == stored:
                tl.store(target_ptr + offsets, state)


@triton.jit
def _piece(mixed_ptr, gate_ptr, columns, inside, gate_scale, IS_GATED: tl.constexpr):
    """Return numbers that were read, times their gates if IS_GATED."""
    x = tl.load(mixed_ptr + columns, mask=inside, other=0.0)
    if IS_GATED:
        x = x * silu(tl.load(gate_ptr + columns, mask=inside, other=0.0).to(tl.float32) * gate_scale)
    return x


@triton.jit(do_not_specialize=["eps", "gate_scale"])
def gate_rows(
    mixed_ptr, gate_ptr, weight_ptr, out_ptr, size, part_size, num_channels, gate_stride, eps, gate_scale,
    BLOCK: tl.constexpr, IS_NORM_FIRST: tl.constexpr,
):  # fmt: skip
    """Gate part program_id(1) of what token program_id(0) has read, and normalise it if there is a weight."""
    token, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * part_size
    mixed_ptr += token * num_channels
    gate_ptr += token * gate_stride
    # The last part may be shorter if there is no norm.
    end = tl.minimum(first + part_size, size)
    factor = 1.0
    if weight_ptr is not None:
        squares = tl.zeros((BLOCK,), tl.float32)
        for begin in range(first, end, BLOCK):
            columns = begin + tl.arange(0, BLOCK)
            x = _piece(mixed_ptr, gate_ptr, columns, columns < end, gate_scale, not IS_NORM_FIRST)
            squares += x * x
        factor = tl.rsqrt(tl.sum(squares, axis=0) / part_size + eps)
    for begin in range(first, end, BLOCK):
        columns = begin + tl.arange(0, BLOCK)
        inside = columns < end
        x = _piece(mixed_ptr, gate_ptr, columns, inside, gate_scale, not IS_NORM_FIRST)
        if weight_ptr is not None:
            x = x * factor * tl.load(weight_ptr + columns, mask=inside, other=0.0)
        if IS_NORM_FIRST:
            x = x * silu(tl.load(gate_ptr + columns, mask=inside, other=0.0).to(tl.float32) * gate_scale)
        tl.store(out_ptr + token * size + columns, x.to(out_ptr.dtype.element_ty), mask=inside)


def columns_of(state_dim: int) -> int:
    """Return the columns of a state [N, P] that a program has."""
    return min(HEAD_MULTIPLE, max(8, _STATE_NUMBERS // state_dim))


def _convolution(dtype: torch.dtype) -> Variant:
    floats = dict.fromkeys(("weight_ptr", "bias_ptr", "mixed_ptr"), "*fp32")
    return Variant(
        name=f"convolve_channels_{TYPE_NAMES[dtype]}",
        kernel=convolve_channels,
        signature={"rows_ptr": f"*{TYPE_NAMES[dtype]}", **floats, **windows.BATCH, **windows.SIZES, "num_seqs": "i32"},
        constexprs={"BLOCK": _CHANNELS, "BLOCK_B": windows.BLOCK_B},
        num_warps=1,
        fuses=_FUSES,
        in_sample=dtype == torch.bfloat16,
    )


def _advance(dtype: torch.dtype, state_dim: int) -> Variant:
    floats = dict.fromkeys(("mixed_ptr", "log_decay_ptr", "skip_ptr", "dt_bias_ptr"), "*fp32")
    counts = dict.fromkeys(("num_heads", "num_groups", "width", "dt_stride", "table_stride", "least"), "i32")
    sizes = dict.fromkeys(("head_dim", "num_channels", "block_floats"), "i32:16")
    return Variant(
        name=f"advance_{TYPE_NAMES[dtype]}_{state_dim}",
        kernel=advance_scan,
        signature={"dt_ptr": f"*{TYPE_NAMES[dtype]}", **floats, **windows.BATCH, **counts, **sizes, "dt_scale": "fp32"},
        constexprs={"STATE_DIM": state_dim, "BLOCK_P": columns_of(state_dim)},
        num_warps=1,
        fuses=_FUSES,
        num_stages=3,
        in_sample=dtype == torch.bfloat16 and state_dim >= 128,
    )


def _gate(dtype: torch.dtype, kind: str, block: int) -> Variant:
    number = f"*{TYPE_NAMES[dtype]}"
    pointers = {"mixed_ptr": "*fp32", **dict.fromkeys(("gate_ptr", "out_ptr"), number)}
    sizes = dict.fromkeys(("size", "part_size", "num_channels", "gate_stride"), "i32:16")
    weight = {} if kind == _PLAIN else {"weight_ptr": "*fp32"}
    absent = {"weight_ptr": None} if kind == _PLAIN else {}
    return Variant(
        name=f"{kind}_{TYPE_NAMES[dtype]}_{block}",
        kernel=gate_rows,
        signature={**pointers, **weight, **sizes, "eps": "fp32", "gate_scale": "fp32"},
        constexprs={**absent, "BLOCK": block, "IS_NORM_FIRST": kind == _NORM_FIRST},
        num_warps=block // (32 * _NUMBERS_PER_THREAD),
        fuses=_FUSES,
        in_sample=(dtype, kind, block) == (torch.bfloat16, _GATE_FIRST, 4096),
    )


_CONVOLUTIONS = {dtype: _convolution(dtype) for dtype in windows.DTYPES}
_ADVANCES = {key: _advance(*key) for key in itertools.product(windows.DTYPES, STATE_DIMS)}
_GATES = {
    key: _gate(*key)
    for key in (
        *itertools.product(windows.DTYPES, (_PLAIN,), _PIECES[:1]),
        *itertools.product(windows.DTYPES, (_GATE_FIRST, _NORM_FIRST), _PIECES),
    )
}
_CHUNKS = Chunks.of((64, 128, 256), Rule.SCAN)
VARIANTS = (
    *_CONVOLUTIONS.values(), *_ADVANCES.values(), *_GATES.values(), *windows.KEEPS.values(), *_CHUNKS.variants
)  # fmt: skip

# Granite 4.0-H: 48 heads of 64, keys of 128, and Nemotron 3 Nano: 64 heads of 64, keys of 128 in 8 groups. States are
# read and written once for each sequence; channels are read in bfloat16, written and read in float32, and so are the
# numbers that queries read. In chunks of 64, queries and keys are copied in bfloat16, and a matrix of each head is
# written and read; a chunk of a head has three products of 64 x 128 x 64 and two of 64 x 64 and 128 or 64.
WORKLOADS = tuple(
    Workload("selective_scan", f"{seqs} x {tokens} tokens, {heads} heads of 64, {groups} x 128 keys, bf16",
             seqs * (2 * heads * 64 * 128 * 4
                     + tokens * ((64 * heads + 256 * groups) * (2 + 4 + 4) + 64 * heads * (4 + 4 + 2 + 2)))
             + (tokens > 1) * seqs * tokens * (256 * groups * (2 + 2) + heads * 64 * (2 + 2)),
             seqs * heads * (64 * 128 * 5 if tokens == 1 else
                             tokens // 64 * 2 * (2 * 64 * 128 * 64 + 64 * 64 * 128 + 64 * 64 * 64)),
             on_tensor_cores=tokens > 1)
    for heads, groups in ((48, 1), (64, 8))
    for seqs, tokens in ((1, 1), (64, 1), (1, 2048))
)  # fmt: skip


def selective_scan(
    xbc: Tensor, gate: Tensor, dt: Tensor, states: Tensor, batch: AttentionMetadata, options: ScanOptions
) -> Tensor:
    """reference_scan.selective_scan."""
    if not _is_served((xbc, gate, dt), states, options):
        return by_definition(reference_scan.selective_scan, xbc, gate, dt, states, batch, options)
    dtype, channels, width = xbc.dtype, options.num_channels, options.conv_weight.shape[1]
    num_tokens, num_seqs, size = len(xbc), len(batch.context_lens), options.num_heads * options.head_dim
    # The results of the convolution, then the numbers that queries read in the place of values.
    mixed = torch.empty((num_tokens, channels), dtype=torch.float32, device=xbc.device)
    where = windows.where(states, batch, channels, width)
    _CONVOLUTIONS[dtype].launch(
        (num_tokens, -(-channels // _CHANNELS)), weight_ptr=options.conv_weight, bias_ptr=options.conv_bias,
        mixed_ptr=mixed, num_seqs=num_seqs, **windows.rows_of(xbc), **where,
    )  # fmt: skip
    keys = options.num_groups * options.state_dim
    heads = Heads(
        options.num_heads, options.num_groups, options.state_dim, options.head_dim, size + keys, size, 0
    )  # fmt: skip
    constants = {
        "log_decay_ptr": options.log_decay, "dt_bias_ptr": options.dt_bias, "dt_scale": options.dt_scale
    }  # fmt: skip
    columns, least = columns_of(options.state_dim), _CHUNKS.least(dtype, heads, batch, num_tokens)
    _ADVANCES[dtype, options.state_dim].launch(
        (num_seqs, options.num_heads, options.head_dim // columns), mixed_ptr=mixed, dt_ptr=dt, skip_ptr=options.skip,
        num_heads=options.num_heads, num_groups=options.num_groups, head_dim=options.head_dim, dt_stride=dt.stride(0),
        least=least, **constants, **where,
    )  # fmt: skip
    if least < NEVER:
        gates = {"decay_ptr": dt, "decay_stride": dt.stride(0), **constants}
        _CHUNKS.advance(heads, mixed, where, gates, options.skip)
    out = torch.empty((num_tokens, size), dtype=dtype, device=xbc.device)
    _gate_tokens(mixed, gate, out, options)
    windows.keep(windows.KEEPS[dtype], xbc, where)
    return out


def _gate_tokens(mixed: Tensor, gate: Tensor, out: Tensor, options: ScanOptions) -> None:
    """Write what queries have read [T, C], of which the first H * P numbers count, gated and normalised to out."""
    has_norm, size = options.norm_weight is not None, out.shape[1]
    kind = (_NORM_FIRST if options.is_norm_first else _GATE_FIRST) if has_norm else _PLAIN
    # Without a norm, a part is what a program takes at once.
    part_size = size // options.num_norm_groups if has_norm else _PIECES[0]
    block = next((piece for piece in _PIECES if piece >= part_size), _PIECES[-1])
    _GATES[out.dtype, kind, block].launch(
        (len(out), -(-size // part_size)), mixed_ptr=mixed, gate_ptr=gate, out_ptr=out, size=size, part_size=part_size,
        num_channels=mixed.stride(0), gate_stride=gate.stride(0), eps=options.norm_eps, gate_scale=options.gate_scale,
        **({"weight_ptr": options.norm_weight} if has_norm else {}),
    )  # fmt: skip


def _is_served(rows: tuple[Tensor, ...], states: Tensor, options: ScanOptions) -> bool:
    vectors = (options.conv_bias, options.log_decay, options.skip, options.dt_bias, options.norm_weight)
    constants = [each for each in (options.conv_weight, *vectors) if each is not None]
    is_alike = all(each.dtype == rows[0].dtype and each.stride(-1) == 1 for each in rows)
    fits = options.head_dim % HEAD_MULTIPLE == 0 and options.state_dim in STATE_DIMS and states.is_contiguous()
    return rows[0].dtype in windows.DTYPES and is_alike and fits and all(each.is_contiguous() for each in constants)
