"""The scan of Mamba-1 behind its convolution: a state for each channel, and the gate of what queries read from it.

Definition: channel_scan of reference_scan.py. A program takes some channels through all new tokens of a sequence, with
their states in registers, so that the bits of a token depend on its own sequence alone.

Each number of a state has a factor of its own at each token, and no product of matrices gives what is read. But a state
behind a chunk of tokens is the sum of what these add to a state of zeros, and the state before them times the factor
e^(-speed * sum of their steps). So a long sequence takes two passes, all chunks at once in each: the first finds what
its chunks add, from which the states before them follow one after the other, and the second computes the results.
Chunks begin where the new tokens of a sequence begin: bits depend on how a prompt is cut, but not on the other
sequences of the batch. With --batch-invariant nothing is taken in chunks.

Dimensions: T tokens, B sequences, D channels with states of N numbers.
"""

from __future__ import annotations

import itertools
from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import batch_invariance, reference_scan
from pagewick.kernels.options import AttentionMetadata, ChannelScanOptions
from pagewick.kernels.triton import windows
from pagewick.kernels.triton.chunk_launches import DTYPES, NEVER
from pagewick.kernels.triton.chunks import chunk_in, num_chunks
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.states import num_stored
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload
from pagewick.kernels.triton.windows import silu, softplus

# The numbers of a channel's state that variants serve: that of all published models.
STATE_DIMS = (16,)
# D is a multiple of this.
MULTIPLE = 16
# Tokens of a chunk, and new tokens from which a sequence is taken in chunks: below, two passes gain too little.
CHUNK: Final = 64
LONG: Final = 512
# Channels of a program, which is one warp: a lane has 32 numbers of states, and as many speeds.
_CHANNELS = 64


@triton.jit
def _scanned(
    state, speed, bias, skip, x_ptr, gate_ptr, dt_ptr, keys_ptr, queries_ptr, out_ptr, first, count, channels,
    num_channels, x_stride, gate_stride, dt_stride, key_stride, query_stride, STATE_DIM: tl.constexpr,
):  # fmt: skip
    """Take states [N, channels] through `count` tokens from `first` on, and write results unless out_ptr is None.

    Return the states, and the sum of the steps of each channel.
    """
    dims, inside = tl.arange(0, STATE_DIM), channels < num_channels
    total = bias * 0.0
    for place in range(0, count):
        token = first.to(tl.int64) + place
        x = tl.load(x_ptr + token * x_stride + channels, mask=inside, other=0.0).to(tl.float32)
        dt = tl.load(dt_ptr + token * dt_stride + channels, mask=inside, other=0.0).to(tl.float32)
        key = tl.load(keys_ptr + token * key_stride + dims).to(tl.float32)
        step = softplus(dt + bias)
        total += step
        state = state * tl.exp2(-speed * step[None, :]) + key[:, None] * (step * x)[None, :]
        if out_ptr is not None:
            gate = tl.load(gate_ptr + token * gate_stride + channels, mask=inside, other=0.0).to(tl.float32)
            query = tl.load(queries_ptr + token * query_stride + dims).to(tl.float32)
            read = tl.sum(state * query[:, None], axis=0) + skip * x
            result = (read * silu(gate)).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + token * num_channels + channels, result, mask=inside)
    return state, total


@triton.jit
def _constants_of(log_decay_ptr, skip_ptr, dt_bias_ptr, channels, num_channels, STATE_DIM: tl.constexpr):
    """Return places of states [N, channels], which of them exist, speeds, and biases and skips of channels.

    Speeds are in base 2: a state is kept by 2^(-speed * step).
    """
    dims, inside = tl.arange(0, STATE_DIM), channels < num_channels
    places = dims[:, None] * num_channels + channels[None, :]
    is_there = (dims >= 0)[:, None] & inside[None, :]
    # Times log2(e).
    speed = 1.4426950408889634 * tl.exp(tl.load(log_decay_ptr + places, mask=is_there, other=0.0))
    bias = tl.load(dt_bias_ptr + channels, mask=inside, other=0.0)
    return places, is_there, speed, bias, tl.load(skip_ptr + channels, mask=inside, other=0.0)


@triton.jit
def _first_state(
    states_ptr, tables_ptr, lengths_ptr, seq, num_new, places, channels, num_channels, state_offset, block_floats,
    table_stride, STATE_DIM: tl.constexpr,
):  # fmt: skip
    """Return a sequence's states before num_new tokens, zeros without earlier ones, and where those after them go."""
    num_earlier = tl.where(tl.load(lengths_ptr + seq) > num_new, num_channels, 0)
    source = tl.load(tables_ptr + seq * table_stride).to(tl.int64) * block_floats + state_offset
    target = tl.load(tables_ptr + seq * table_stride + 1).to(tl.int64) * block_floats + state_offset
    is_earlier = (tl.arange(0, STATE_DIM) >= 0)[:, None] & (channels < num_earlier)[None, :]
    return tl.load(states_ptr + source + places, mask=is_earlier, other=0.0), states_ptr + target + places


@triton.jit(do_not_specialize=["least"])
def scan_channels(
    x_ptr, gate_ptr, dt_ptr, keys_ptr, queries_ptr, log_decay_ptr, skip_ptr, dt_bias_ptr, out_ptr, states_ptr,
    tables_ptr, lengths_ptr, starts_ptr, num_channels, state_offset, x_stride, gate_stride, dt_stride, key_stride,
    query_stride, block_floats, table_stride, least, STATE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take channels program_id(1) through the new tokens of sequence program_id(0), unless scan_chunks does.

    log_decay: [N, D]; out: [T, D].
    """
    seq, channels = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    stored = num_stored(tables_ptr, seq, table_stride, end - start)
    if (start < end) & ((end - start < least) | (stored < end - start)):
        places, is_there, speed, bias, skip = _constants_of(
            log_decay_ptr, skip_ptr, dt_bias_ptr, channels, num_channels, STATE_DIM
        )
        state, target_ptr = _first_state(
            states_ptr, tables_ptr, lengths_ptr, seq, end - start, places, channels, num_channels, state_offset,
            block_floats, table_stride, STATE_DIM,
        )  # fmt: skip
        # Up to the state that is stored, and then through draft tokens.
        for begin in range(0, end - start, stored):
            count = tl.minimum(stored, end - start - begin)
            state, _ = _scanned(
                state, speed, bias, skip, x_ptr, gate_ptr, dt_ptr, keys_ptr, queries_ptr, out_ptr, start + begin, count,
                channels, num_channels, x_stride, gate_stride, dt_stride, key_stride, query_stride, STATE_DIM,
            )  # fmt: skip
            if begin == 0:
                tl.store(target_ptr, state, mask=is_there)


@triton.jit(do_not_specialize=["num_seqs", "least"])
def scan_chunks(
    x_ptr, gate_ptr, dt_ptr, keys_ptr, queries_ptr, log_decay_ptr, skip_ptr, dt_bias_ptr, out_ptr, starts_ptr,
    tables_ptr, parts_ptr, steps_ptr, num_seqs, num_channels, x_stride, gate_stride, dt_stride, key_stride,
    query_stride, table_stride, least, STATE_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Take channels program_id(1) through the chunk in slot program_id(0).

    If out_ptr is None, from zeros: parts [slots, N, D] float32 are the states behind the chunk, and steps [slots, D]
    float32 the sums of its steps. Else parts are the states before the chunk, and results are written.
    """
    slot, channels = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seq, chunk = chunk_in(slot, starts_ptr, tables_ptr, num_seqs, table_stride, least, CHUNK, BLOCK_B)
    if seq < num_seqs:
        first = tl.load(starts_ptr + seq) + chunk * CHUNK
        count = tl.minimum(tl.load(starts_ptr + seq + 1) - first, CHUNK)
        places, is_there, speed, bias, skip = _constants_of(
            log_decay_ptr, skip_ptr, dt_bias_ptr, channels, num_channels, STATE_DIM
        )
        parts_ptr += slot.to(tl.int64) * (STATE_DIM * num_channels)
        state = speed * 0.0
        if out_ptr is not None:
            state = tl.load(parts_ptr + places, mask=is_there, other=0.0)
        state, total = _scanned(
            state, speed, bias, skip, x_ptr, gate_ptr, dt_ptr, keys_ptr, queries_ptr, out_ptr, first, count, channels,
            num_channels, x_stride, gate_stride, dt_stride, key_stride, query_stride, STATE_DIM,
        )  # fmt: skip
        if out_ptr is None:
            tl.store(parts_ptr + places, state, mask=is_there)
            steps_ptr += slot.to(tl.int64) * num_channels
            tl.store(steps_ptr + channels, total, mask=channels < num_channels)


@triton.jit(do_not_specialize=["least"])
def join_chunks(
    log_decay_ptr, skip_ptr, dt_bias_ptr, states_ptr, tables_ptr, lengths_ptr, starts_ptr, parts_ptr, steps_ptr,
    num_channels, state_offset, block_floats, table_stride, least,
    STATE_DIM: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Replace the states behind each chunk of sequence program_id(0), begun with zeros, by those before it.

    For channels program_id(1). The states behind the last chunk are the sequence's.
    """
    seq, channels = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(starts_ptr + seq + 1) - tl.load(starts_ptr + seq)
    if (count >= least) & (num_stored(tables_ptr, seq, table_stride, count) == count):
        slot = seq * 0
        for begin in range(0, seq, BLOCK_B):
            others = begin + tl.arange(0, BLOCK_B)
            slot += tl.sum(num_chunks(starts_ptr, tables_ptr, others, seq, table_stride, least, CHUNK), 0)
        places, is_there, speed, _, _ = _constants_of(
            log_decay_ptr, skip_ptr, dt_bias_ptr, channels, num_channels, STATE_DIM
        )
        state, target_ptr = _first_state(
            states_ptr, tables_ptr, lengths_ptr, seq, count, places, channels, num_channels, state_offset,
            block_floats, table_stride, STATE_DIM,
        )  # fmt: skip
        parts_ptr += slot * (STATE_DIM * num_channels)
        steps_ptr += slot * num_channels
        for _ in range(0, count, CHUNK):
            part = tl.load(parts_ptr + places, mask=is_there, other=0.0)
            total = tl.load(steps_ptr + channels, mask=channels < num_channels, other=0.0)
            tl.store(parts_ptr + places, state, mask=is_there)
            state = state * tl.exp2(-speed * total[None, :]) + part
            parts_ptr += STATE_DIM * num_channels
            steps_ptr += num_channels
        tl.store(target_ptr, state, mask=is_there)


def _scan(dtype: torch.dtype, state_dim: int) -> Variant:
    sizes = {**_SIZES, "state_offset": "i32:16", "block_floats": "i32:16", "table_stride": "i32"}
    return Variant(
        name=f"scan_channels_{TYPE_NAMES[dtype]}_{state_dim}",
        kernel=scan_channels,
        signature={**_pointers(dtype), **windows.BATCH, **sizes},
        constexprs={"STATE_DIM": state_dim, "BLOCK": _CHANNELS},
        num_warps=1,
        # Else the threads of a sum get results that differ in their last bits: see Variant.
        fuses=False,
        in_sample=dtype == torch.bfloat16,
    )


def _scan_chunks(dtype: torch.dtype, state_dim: int, has_results: bool) -> Variant:
    absent: dict[str, Any] = dict.fromkeys(("gate_ptr", "queries_ptr", "out_ptr"))
    if has_results:
        absent = {"steps_ptr": None}
    parts = {**dict.fromkeys(("starts_ptr", "tables_ptr"), "*i32"), "parts_ptr": "*fp32", "steps_ptr": "*fp32"}
    parts |= dict.fromkeys(("num_seqs", "table_stride"), "i32")
    signature = {**_pointers(dtype), **parts, **_SIZES}
    return Variant(
        name=f"{'read' if has_results else 'leave'}_chunks_{TYPE_NAMES[dtype]}_{state_dim}",
        kernel=scan_chunks,
        signature={name: kind for name, kind in signature.items() if name not in absent},
        constexprs={**absent, **_chunk_constants(state_dim)},
        num_warps=1,
        fuses=False,
        in_sample=dtype == torch.bfloat16 and not has_results,
    )


def _join(state_dim: int) -> Variant:
    names = ("log_decay_ptr", "skip_ptr", "dt_bias_ptr", "parts_ptr", "steps_ptr")
    sizes = dict.fromkeys(("num_channels", "state_offset", "block_floats"), "i32:16")
    return Variant(
        name=f"join_chunks_{state_dim}",
        kernel=join_chunks,
        signature={**dict.fromkeys(names, "*fp32"), **windows.BATCH, **sizes, "table_stride": "i32", "least": "i32"},
        constexprs=_chunk_constants(state_dim),
        num_warps=1,
        fuses=False,
    )


def _pointers(dtype: torch.dtype) -> dict[str, str]:
    rows = ("x_ptr", "gate_ptr", "dt_ptr", "keys_ptr", "queries_ptr", "out_ptr")
    constants = ("log_decay_ptr", "skip_ptr", "dt_bias_ptr")
    return {**dict.fromkeys(rows, f"*{TYPE_NAMES[dtype]}"), **dict.fromkeys(constants, "*fp32")}


def _chunk_constants(state_dim: int) -> dict[str, Any]:
    return {"STATE_DIM": state_dim, "CHUNK": CHUNK, "BLOCK": _CHANNELS, "BLOCK_B": windows.BLOCK_B}


_SIZES = {
    **dict.fromkeys(("num_channels", "x_stride", "gate_stride", "dt_stride"), "i32:16"),
    **dict.fromkeys(("key_stride", "query_stride", "least"), "i32"),
}
_SCANS = {(dtype, state_dim): _scan(dtype, state_dim) for dtype in windows.DTYPES for state_dim in STATE_DIMS}
_KEYS = tuple(itertools.product(DTYPES, STATE_DIMS))
# Chunks that begin with zeros, the states between them, and chunks with results.
_LEAVES = {key: _scan_chunks(*key, has_results=False) for key in _KEYS}
_JOINS = {state_dim: _join(state_dim) for state_dim in STATE_DIMS}
_READS = {key: _scan_chunks(*key, has_results=True) for key in _KEYS}
VARIANTS = (*_SCANS.values(), *_LEAVES.values(), *_JOINS.values(), *_READS.values())

# Falcon Mamba 7B: 8,192 channels of 16 numbers. States are read and written once for each sequence. In chunks, values,
# steps and keys are read twice, and a state of each chunk is written and read twice.
WORKLOADS = tuple(
    Workload("channel_scan", f"{seqs} x {tokens} tokens, 8,192 channels of 16 numbers, bf16",
             seqs * 8192 * (2 * 16 * 4 + tokens * 4 * 2 + (tokens >= LONG) * (tokens * 2 * 2 + tokens // CHUNK * 256)),
             seqs * tokens * 8192 * 16 * (12 if tokens >= LONG else 7), on_tensor_cores=False)
    for seqs, tokens in ((1, 1), (64, 1), (1, 2048))
)  # fmt: skip


def channel_scan(
    x: Tensor,
    gate: Tensor,
    dt: Tensor,
    keys: Tensor,
    queries: Tensor,
    states: Tensor,
    batch: AttentionMetadata,
    options: ChannelScanOptions,
) -> Tensor:
    """reference_scan.channel_scan."""
    if not _is_served((x, gate, dt, keys, queries), states, options):
        return by_definition(reference_scan.channel_scan, x, gate, dt, keys, queries, states, batch, options)
    state_dim, num_channels = options.log_decay.shape
    out = torch.empty((len(x), num_channels), dtype=x.dtype, device=x.device)
    numbers, least = states.view(torch.float32), _least(x, batch)
    constants = {
        "log_decay_ptr": options.log_decay, "skip_ptr": options.skip, "dt_bias_ptr": options.dt_bias,
        "num_channels": num_channels, "starts_ptr": batch.cu_seqlens_q, "least": least,
        "tables_ptr": batch.block_tables, "table_stride": batch.block_tables.stride(0),
    }  # fmt: skip
    taken = {
        "x_ptr": x, "dt_ptr": dt, "keys_ptr": keys, "x_stride": x.stride(0), "gate_stride": gate.stride(0),
        "dt_stride": dt.stride(0), "key_stride": keys.stride(0), "query_stride": queries.stride(0), **constants,
    }  # fmt: skip
    results = {"gate_ptr": gate, "queries_ptr": queries, "out_ptr": out}
    places = {
        "states_ptr": numbers, "lengths_ptr": batch.context_lens, "state_offset": options.state_offset,
        "block_floats": numbers.stride(0),
    }  # fmt: skip
    num_seqs, num_blocks = len(batch.context_lens), -(-num_channels // _CHANNELS)
    _SCANS[x.dtype, state_dim].launch((num_seqs, num_blocks), **taken, **results, **places)
    if least < NEVER:
        num_slots = len(x) // CHUNK + min(num_seqs, len(x) // least)
        parts = {"parts_ptr": torch.empty(num_slots, state_dim, num_channels, dtype=torch.float32, device=x.device)}
        steps = {"steps_ptr": torch.empty(num_slots, num_channels, dtype=torch.float32, device=x.device)}
        grid, key = (num_slots, num_blocks), (x.dtype, state_dim)
        _LEAVES[key].launch(grid, num_seqs=num_seqs, **taken, **parts, **steps)
        _JOINS[state_dim].launch((num_seqs, num_blocks), **constants, **places, **parts, **steps)
        _READS[key].launch(grid, num_seqs=num_seqs, **taken, **parts, **results)
    return out


def _least(x: Tensor, batch: AttentionMetadata) -> int:
    """Return the number of new tokens from which a sequence is taken in chunks; NEVER if none is."""
    longest = len(x) if batch.max_query_len is None else batch.max_query_len
    return LONG if x.dtype in DTYPES and longest >= LONG and not batch_invariance.is_required() else NEVER


def _is_served(rows: tuple[Tensor, ...], states: Tensor, options: ChannelScanOptions) -> bool:
    constants = (options.log_decay, options.skip, options.dt_bias)
    state_dim, num_channels = options.log_decay.shape
    is_alike = all(each.dtype == rows[0].dtype and each.stride(-1) == 1 for each in rows)
    fits = state_dim in STATE_DIMS and num_channels % MULTIPLE == 0 and states.is_contiguous()
    return rows[0].dtype in windows.DTYPES and is_alike and fits and all(each.is_contiguous() for each in constants)
