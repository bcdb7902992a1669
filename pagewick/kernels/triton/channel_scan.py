"""The scan of Mamba-1 behind its convolution: a state for each channel, and the gate of what queries read from it.

Definition: channel_scan of reference_scan.py. A program takes some channels through all new tokens of a sequence, with
their states in registers, so that the bits of a token depend on its own sequence alone, and not on where it is cut.

Dimensions: T tokens, B sequences, D channels with states of N numbers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagewick.kernels import reference_scan
from pagewick.kernels.options import AttentionMetadata, ChannelScanOptions
from pagewick.kernels.triton import windows
from pagewick.kernels.triton.fallback import by_definition
from pagewick.kernels.triton.variant import TYPE_NAMES, Variant, Workload
from pagewick.kernels.triton.windows import silu, softplus

# The numbers of a channel's state that variants serve: that of all published models.
STATE_DIMS = (16,)
# D is a multiple of this.
MULTIPLE = 16
# Channels of a program, which is one warp: a lane has 32 numbers of states, and as many speeds.
_CHANNELS = 64


@triton.jit
def scan_channels(
    x_ptr, gate_ptr, dt_ptr, keys_ptr, queries_ptr, log_decay_ptr, skip_ptr, dt_bias_ptr, out_ptr, states_ptr,
    tables_ptr, lengths_ptr, starts_ptr, num_channels, state_offset, x_stride, gate_stride, dt_stride, key_stride,
    query_stride, block_floats, table_stride, STATE_DIM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Take channels program_id(1) through the new tokens of sequence program_id(0). log_decay: [N, D]; out: [T, D]."""
    seq, channels = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    start, end = tl.load(starts_ptr + seq), tl.load(starts_ptr + seq + 1)
    if start < end:
        dims, inside = tl.arange(0, STATE_DIM), channels < num_channels
        places = dims[:, None] * num_channels + channels[None, :]
        is_there = (dims >= 0)[:, None] & inside[None, :]
        num_earlier = tl.where(tl.load(lengths_ptr + seq) > end - start, num_channels, 0)
        source = tl.load(tables_ptr + seq * table_stride).to(tl.int64) * block_floats + state_offset
        target = tl.load(tables_ptr + seq * table_stride + 1).to(tl.int64) * block_floats + state_offset
        is_earlier = (dims >= 0)[:, None] & (channels < num_earlier)[None, :]
        state = tl.load(states_ptr + source + places, mask=is_earlier, other=0.0)
        speed = tl.exp(tl.load(log_decay_ptr + places, mask=is_there, other=0.0))
        skip = tl.load(skip_ptr + channels, mask=inside, other=0.0)
        bias = tl.load(dt_bias_ptr + channels, mask=inside, other=0.0)
        for place in range(0, end - start):
            token = start.to(tl.int64) + place
            x = tl.load(x_ptr + token * x_stride + channels, mask=inside, other=0.0).to(tl.float32)
            dt = tl.load(dt_ptr + token * dt_stride + channels, mask=inside, other=0.0).to(tl.float32)
            gate = tl.load(gate_ptr + token * gate_stride + channels, mask=inside, other=0.0).to(tl.float32)
            key = tl.load(keys_ptr + token * key_stride + dims).to(tl.float32)
            query = tl.load(queries_ptr + token * query_stride + dims).to(tl.float32)
            step = softplus(dt + bias)
            state = state * tl.exp(-speed * step[None, :]) + key[:, None] * (step * x)[None, :]
            read = tl.sum(state * query[:, None], axis=0) + skip * x
            result = (read * silu(gate)).to(out_ptr.dtype.element_ty)
            tl.store(out_ptr + token * num_channels + channels, result, mask=inside)
        tl.store(states_ptr + target + places, state, mask=is_there)


def _scan(dtype: torch.dtype, state_dim: int) -> Variant:
    rows = ("x_ptr", "gate_ptr", "dt_ptr", "keys_ptr", "queries_ptr", "out_ptr")
    pointers = dict.fromkeys(rows, f"*{TYPE_NAMES[dtype]}")
    pointers |= dict.fromkeys(("log_decay_ptr", "skip_ptr", "dt_bias_ptr"), "*fp32")
    sizes = dict.fromkeys(("num_channels", "state_offset", "x_stride", "gate_stride", "dt_stride"), "i32:16")
    sizes |= {"block_floats": "i32:16", **dict.fromkeys(("key_stride", "query_stride", "table_stride"), "i32")}
    return Variant(
        name=f"scan_channels_{TYPE_NAMES[dtype]}_{state_dim}",
        kernel=scan_channels,
        signature={**pointers, **windows.BATCH, **sizes},
        constexprs={"STATE_DIM": state_dim, "BLOCK": _CHANNELS},
        num_warps=1,
        # Else the threads of a sum get results that differ in their last bits: see Variant.
        fuses=False,
        in_sample=dtype == torch.bfloat16,
    )


_SCANS = {(dtype, state_dim): _scan(dtype, state_dim) for dtype in windows.DTYPES for state_dim in STATE_DIMS}
VARIANTS = tuple(_SCANS.values())

# Falcon Mamba 7B: 8,192 channels of 16 numbers. States are read and written once for each sequence.
WORKLOADS = tuple(
    Workload("channel_scan", f"{seqs} x {tokens} tokens, 8,192 channels of 16 numbers, bf16",
             seqs * 8192 * (2 * 16 * 4 + tokens * 4 * 2), seqs * tokens * 8192 * 16 * 7, on_tensor_cores=False)
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
    numbers = states.view(torch.float32)
    _SCANS[x.dtype, state_dim].launch(
        (len(batch.context_lens), -(-num_channels // _CHANNELS)), x_ptr=x, gate_ptr=gate, dt_ptr=dt, keys_ptr=keys,
        queries_ptr=queries, log_decay_ptr=options.log_decay, skip_ptr=options.skip, dt_bias_ptr=options.dt_bias,
        out_ptr=out, states_ptr=numbers, tables_ptr=batch.block_tables, lengths_ptr=batch.context_lens,
        starts_ptr=batch.cu_seqlens_q, num_channels=num_channels, state_offset=options.state_offset,
        x_stride=x.stride(0), gate_stride=gate.stride(0), dt_stride=dt.stride(0), key_stride=keys.stride(0),
        query_stride=queries.stride(0), block_floats=numbers.stride(0), table_stride=batch.block_tables.stride(0),
    )  # fmt: skip
    return out


def _is_served(rows: tuple[Tensor, ...], states: Tensor, options: ChannelScanOptions) -> bool:
    constants = (options.log_decay, options.skip, options.dt_bias)
    state_dim, num_channels = options.log_decay.shape
    is_alike = all(each.dtype == rows[0].dtype and each.stride(-1) == 1 for each in rows)
    fits = state_dim in STATE_DIMS and num_channels % MULTIPLE == 0 and states.is_contiguous()
    return rows[0].dtype in windows.DTYPES and is_alike and fits and all(each.is_contiguous() for each in constants)
