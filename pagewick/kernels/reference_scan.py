"""The middle of layers of Mamba-2 and Mamba-1, and a gated short convolution, in plain PyTorch; a part of `reference`.

Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) has a short convolution, then a state S for each head, which forgets by a
factor of the head and the token, adds the outer product of a key (B) and a value (x), and is read by a query (C).
Gated short convolutions are those of Liquid AI's LFM2 (arXiv:2511.23404). Mamba-1 (Gu and Dao 2023, arXiv:2312.00752)
has one without gates, and behind it a state for each channel, in which every number forgets by a factor of its own.

Dimensions: T tokens, B sequences, H heads of P numbers, G groups of heads that share keys and queries of N numbers, K
inputs of a convolution for each of its C or D channels.

The sequences of a batch are those of reference_delta.gated_delta_net: sequence b starts from block block_tables[b, 0],
or from zeros if context_lens[b] is the number of its new tokens. Its state goes to block block_tables[b, 1], which may
be the same, but no other sequence's first block. That is the state after the first block_tables[b, 2] of its new
tokens, 0 meaning all. Sequences without new tokens change nothing. Tokens are taken one after the other, so that
neither the rest of the batch nor the cuts between the chunks of a prompt change a bit.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewick.kernels.options import AttentionMetadata, ChannelScanOptions, ConvolutionOptions, ScanOptions


def selective_scan(
    xbc: Tensor, gate: Tensor, dt: Tensor, states: Tensor, batch: AttentionMetadata, options: ScanOptions
) -> Tensor:
    """Take a ragged batch through Mamba-2's states: [T, H * P] in xbc.dtype, rounded once from float32.

    xbc: [T, C], values of all heads, then keys and then queries of all groups, before the convolution. gate: [T, H * P]
    before the SiLU. dt: [T, H], the step before the softplus. states: [num_blocks, bytes] uint8, contiguous. A block
    has the inputs of the convolution before the next token, oldest first [K - 1, C], then S [H, N, P], both float32.

    Raises ValueError for blocks that are too small.
    """
    inputs, memories = split_scan_states(states, options)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    forgetting = -options.log_decay.exp()
    for tokens, source, target, last in _sequences(batch):
        window = torch.zeros_like(inputs[0]) if source is None else inputs[source]
        memory = torch.zeros_like(memories[0]) if source is None else memories[source]
        for t in tokens:
            window = torch.cat((window, xbc[t : t + 1].float()))
            convolved = F.silu((window.t() * options.conv_weight).sum(-1) + options.conv_bias)
            window = window[1:]
            step = F.softplus(dt[t].float() * options.dt_scale + options.dt_bias)
            memory, read = _advance(memory, convolved, step, (step * forgetting).exp(), options)
            out[t] = _gated(read, gate[t].float() * options.gate_scale, options).to(out.dtype)
            if t == last:
                inputs[target], memories[target] = window, memory
    return out


def short_convolution(bcx: Tensor, states: Tensor, batch: AttentionMetadata, options: ConvolutionOptions) -> Tensor:
    """Return c * convolution(b * x) for a ragged batch: [T, D] in bcx.dtype, rounded once from float32.

    bcx: [T, 3 * D], b, c and x of each token; with options.has_gates false [T, D], x alone, and the result is
    silu(convolution(x)). states: [num_blocks, bytes] uint8, contiguous. A block begins with the products b * x, or with
    x, before the next token, oldest first [K - 1, D] float32. Raises ValueError for blocks that are too small.
    """
    inputs = split_convolution_states(states, options)
    num_channels = len(options.weight)
    out = bcx.new_empty(len(bcx), num_channels)
    for tokens, source, target, last in _sequences(batch):
        window = torch.zeros_like(inputs[0]) if source is None else inputs[source]
        for t in tokens:
            b, c, x = bcx[t].float().chunk(3) if options.has_gates else (1.0, None, bcx[t].float())
            window = torch.cat((window, (b * x)[None]))
            convolved = (window.t() * options.weight).sum(-1)
            window = window[1:]
            if options.bias is not None:
                convolved = convolved + options.bias
            out[t] = (F.silu(convolved) if c is None else c * convolved).to(out.dtype)
            if t == last:
                inputs[target] = window
    return out


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
    """Take a ragged batch through Mamba-1's states: [T, D] in x.dtype, rounded once from float32.

    x: [T, D], values behind the convolution. gate: [T, D] before the SiLU. dt: [T, D], the step before the softplus.
    keys, queries: [T, N]. states: [num_blocks, bytes] uint8, contiguous. A block has S [N, D] float32 behind its first
    options.state_offset numbers, which are another operation's. Raises ValueError for blocks that are too small.
    """
    memories = split_channel_states(states, options)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    forgetting = -options.log_decay.exp()
    for tokens, source, target, last in _sequences(batch):
        memory = torch.zeros_like(memories[0]) if source is None else memories[source]
        for t in tokens:
            step, value = F.softplus(dt[t].float() + options.dt_bias), x[t].float()
            memory = memory * (step * forgetting).exp() + keys[t].float()[:, None] * (step * value)
            read = (queries[t].float()[:, None] * memory).sum(0) + options.skip * value
            out[t] = (read * F.silu(gate[t].float())).to(out.dtype)
            if t == last:
                memories[target] = memory
    return out


def split_scan_states(states: Tensor, options: ScanOptions) -> tuple[Tensor, Tensor]:
    """Return the two parts of the blocks [num_blocks, bytes]: inputs [.., K - 1, C] and S [.., H, N, P], float32."""
    num_inputs, num_channels = options.conv_weight.shape[1] - 1, options.num_channels
    size = num_inputs * num_channels
    memory_size = options.num_heads * options.state_dim * options.head_dim
    numbers = _numbers(states, size + memory_size)
    return (
        numbers[:, :size].view(len(states), num_inputs, num_channels),
        numbers[:, size : size + memory_size].view(len(states), options.num_heads, options.state_dim, options.head_dim),
    )


def split_convolution_states(states: Tensor, options: ConvolutionOptions) -> Tensor:
    """Return the numbers of the blocks [num_blocks, bytes]: [num_blocks, K - 1, D] float32."""
    num_channels, width = options.weight.shape
    size = (width - 1) * num_channels
    return _numbers(states, size)[:, :size].view(len(states), width - 1, num_channels)


def split_channel_states(states: Tensor, options: ChannelScanOptions) -> Tensor:
    """Return S of the blocks [num_blocks, bytes]: [num_blocks, N, D] float32."""
    begin, end = options.state_offset, options.state_offset + options.log_decay.numel()
    return _numbers(states, end)[:, begin:end].view(len(states), *options.log_decay.shape)


def _numbers(states: Tensor, size: int) -> Tensor:
    if states.shape[1] < 4 * size:
        raise ValueError(f"{states.shape[1]} bytes are too few for {size} numbers")
    return states.view(torch.float32)


def _sequences(batch: AttentionMetadata) -> Iterator[tuple[range, int | None, int, int]]:
    """Yield the new tokens of each sequence that has some, the block it starts from (None: zeros), and its target.

    Also the token after which its state is stored there.
    """
    starts, lengths, blocks = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist(), batch.block_tables.tolist()
    for b, context_len in enumerate(lengths):
        tokens = range(starts[b], starts[b + 1])
        if tokens:
            source, target, num_stored = blocks[b][:3]
            yield tokens, None if context_len == len(tokens) else source, target, tokens[num_stored - 1]


def _advance(memory: Tensor, x: Tensor, step: Tensor, kept: Tensor, options: ScanOptions) -> tuple[Tensor, Tensor]:
    """Return S [H, N, P] after a token with channels x [C], and what its queries read from it [H, P]."""
    size = options.num_heads * options.head_dim
    ratio = options.num_heads // options.num_groups
    values = x[:size].view(options.num_heads, options.head_dim)
    keys, queries = x[size:].view(2, options.num_groups, options.state_dim).repeat_interleave(ratio, dim=1)
    added = keys[:, :, None] * (values * step[:, None])[:, None]
    memory = memory * kept[:, None, None] + added
    return memory, (queries[:, :, None] * memory).sum(1) + options.skip[:, None] * values


def _gated(read: Tensor, gate: Tensor, options: ScanOptions) -> Tensor:
    """Return the output [H * P] of a token from what it has read [H, P] and its gate [H * P]."""
    y = read.flatten()
    if options.norm_weight is None:
        return y * F.silu(gate)
    if not options.is_norm_first:
        y = y * F.silu(gate)
    parts = y.view(options.num_norm_groups, -1)
    parts = parts * torch.rsqrt(parts.square().mean(-1, keepdim=True) + options.norm_eps)
    y = parts.flatten() * options.norm_weight
    return y * F.silu(gate) if options.is_norm_first else y
