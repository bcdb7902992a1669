"""The middle of a linear-attention layer in plain PyTorch; a part of `reference`.

Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) as Qwen3-Next and Qwen3.5 have it: a short convolution, then a state
S for each value head, which forgets (g), replaces what it holds for a key by a new value (the delta rule), and is read
by a query. Kimi Delta Attention (Kimi Team 2025, arXiv:2510.26692) forgets by a factor of its own in each row of S,
which Ling 3.0 keeps above a bound.

Dimensions: T tokens, B sequences, KH key heads of DK numbers, VH value heads of DV numbers, K inputs of the convolution
for each of its C channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewick.kernels.options import AttentionMetadata, DeltaOptions

# Added to the sum of the squares of a query or key before the root.
L2_EPS = 1e-6


def gated_delta_net(
    qkv: Tensor,
    gate: Tensor,
    beta: Tensor,
    decay: Tensor,
    states: Tensor,
    batch: AttentionMetadata,
    options: DeltaOptions,
) -> Tensor:
    """Take a ragged batch through the gated delta rule: [T, VH * DV] in qkv.dtype, rounded once from float32.

    qkv: [T, C], gate: [T, VH * DV], beta: [T, VH] before the sigmoid, decay before its bias is added: [T, VH], or
    [T, VH * DK] with options.has_channel_decay. S is kept by e^g, g = -e^log_decay * softplus(decay + dt_bias), or
    g = decay_bound * sigmoid(e^log_decay * (decay + dt_bias)).
    states: [num_blocks, bytes] uint8, contiguous. A block has the inputs of the convolution before the next token,
    oldest first [K - 1, C], then S [VH, DK, DV], both float32.

    Sequence b starts from block block_tables[b, 0], or from zeros if context_lens[b] is the number of its new tokens.
    Its state goes to block block_tables[b, 1], which may be the same, but no other sequence's first block. That is the
    state after the first block_tables[b, 2] of its new tokens, 0 meaning all: those behind them may be taken back.
    Sequences without new tokens change nothing.

    Tokens are taken one after the other, so that neither the rest of the batch nor the cuts between the chunks of a
    prompt change a bit. Raises ValueError for blocks that are too small.
    """
    inputs, memories = split_states(states, options)
    out = torch.empty_like(gate, memory_format=torch.contiguous_format)
    starts, lengths, blocks = batch.cu_seqlens_q.tolist(), batch.context_lens.tolist(), batch.block_tables.tolist()
    activate = torch.sigmoid if options.has_sigmoid_gate else F.silu
    # Each row of S has a factor, or all rows of a head have the same.
    decays = (options.num_value_heads, options.num_decays // options.num_value_heads, 1)
    speed, dt_bias = options.log_decay.exp()[:, None, None], options.dt_bias.reshape(decays)
    for b, context_len in enumerate(lengths):
        if starts[b] == starts[b + 1]:
            continue
        source, target, num_stored = blocks[b][:3]
        if context_len == starts[b + 1] - starts[b]:
            window, memory = torch.zeros_like(inputs[0]), torch.zeros_like(memories[0])
        else:
            window, memory = inputs[source], memories[source]
        for t in range(starts[b], starts[b + 1]):
            window = torch.cat((window, qkv[t : t + 1].float()))
            convolved = (window.t() * options.conv_weight).sum(-1)
            window = window[1:]
            times = decay[t].float().view(decays) + dt_bias
            if options.decay_bound is None:
                g = (-speed * F.softplus(times)).exp()
            else:
                g = (options.decay_bound * (speed * times).sigmoid()).exp()
            taken = beta[t].float().sigmoid() * options.strength
            memory, read = _step(memory, F.silu(convolved), g, taken, options)
            normed = read * torch.rsqrt(read.square().mean(-1, keepdim=True) + options.norm_eps) * options.norm_weight
            out[t] = (normed.flatten() * activate(gate[t].float())).to(out.dtype)
            if t + 1 == (starts[b] + num_stored if num_stored else starts[b + 1]):
                inputs[target], memories[target] = window, memory
    return out


def split_states(states: Tensor, options: DeltaOptions) -> tuple[Tensor, Tensor]:
    """Return the two parts of the blocks [num_blocks, bytes]: inputs [.., K - 1, C] and S [.., VH, DK, DV], float32."""
    num_inputs = options.conv_weight.shape[1] - 1
    num_channels = options.num_channels
    memory_size = options.num_value_heads * options.key_dim * options.value_dim
    if states.shape[1] < 4 * (num_inputs * num_channels + memory_size):
        raise ValueError(
            f"{states.shape[1]} bytes are too few for {num_inputs} x {num_channels} + {memory_size} numbers"
        )
    numbers = states.view(torch.float32)
    inputs, memories = numbers[:, : num_inputs * num_channels], numbers[:, num_inputs * num_channels :]
    return (
        inputs.view(len(states), num_inputs, num_channels),
        memories[:, :memory_size].view(len(states), options.num_value_heads, options.key_dim, options.value_dim),
    )


def _step(memory: Tensor, x: Tensor, g: Tensor, taken: Tensor, options: DeltaOptions) -> tuple[Tensor, Tensor]:
    """Return S [VH, DK, DV] after a token with channels x [C], and what its queries read from it [VH, DV].

    g: factors of S. taken: [VH], how much of the difference each head takes in.
    """
    keys = options.num_key_heads * options.key_dim
    q, k, v = x[:keys], x[keys : 2 * keys], x[2 * keys :]
    group = options.num_value_heads // options.num_key_heads
    q = (_unit(q, options) * options.key_dim**-0.5).repeat_interleave(group, dim=0)
    k = _unit(k, options).repeat_interleave(group, dim=0)
    memory = memory * g
    held = (k[:, :, None] * memory).sum(1)
    delta = (v.view(held.shape) - held) * taken[:, None]
    memory = memory + k[:, :, None] * delta[:, None]
    return memory, (q[:, :, None] * memory).sum(1)


def _unit(x: Tensor, options: DeltaOptions) -> Tensor:
    """Divide heads [KH * DK] by their length: [KH, DK]."""
    heads = x.view(options.num_key_heads, options.key_dim)
    return heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + L2_EPS)
