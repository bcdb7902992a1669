"""Batches for the scans of Mamba-2 and Mamba-1 and for short convolutions, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated
from transformers.models.mamba import modeling_mamba as mamba

from pagewick.kernels.options import ChannelScanOptions, ConvolutionOptions, ScanOptions
from pagewick.kernels.reference_scan import split_channel_states, split_convolution_states, split_scan_states
from tests.kernels.states import StateBatch, random_states

EPS = 1e-5


@dataclass(frozen=True)
class ScanBatch(StateBatch):
    """The arguments of selective_scan."""

    OPERATION = "selective_scan"
    ROWS = "xbc", "gate", "dt"
    ERRORS = 5e-5, 2e-5

    xbc: Tensor
    gate: Tensor
    dt: Tensor
    options: ScanOptions

    def in_place(self, operation: Callable[..., Tensor]) -> Tensor:
        return operation(self.xbc, self.gate, self.dt, self.states, self.batch, self.options)

    def expected(self) -> tuple[Tensor, Tensor]:
        o, states = self.options, self.states.clone()
        inputs, memories = split_scan_states(states, o)
        out = torch.zeros(self.gate.shape)
        for rows, source, target in self.sequences():
            window = torch.zeros_like(inputs[0]) if source is None else inputs[source]
            memory = torch.zeros_like(memories[0]) if source is None else memories[source]
            sequence = torch.cat((window, self.xbc[rows].float()))
            channels = F.silu(F.conv1d(sequence.t()[None], o.conv_weight[:, None], o.conv_bias, groups=o.num_channels))
            memory = memory.transpose(1, 2)[None].contiguous()
            reads = [self._read(x, dt, memory) for x, dt in zip(channels[0].t(), self.dt[rows].float(), strict=True)]
            out[rows] = self._gated(torch.stack(reads), self.gate[rows].float() * o.gate_scale)
            inputs[target], memories[target] = sequence[len(sequence) - len(window) :], memory[0].transpose(1, 2)
        return out, states

    def _read(self, x: Tensor, dt: Tensor, memory: Tensor) -> Tensor:
        """memory: [1, H, P, N], which becomes that after the token."""
        o = self.options
        size, keys = o.num_heads * o.head_dim, o.num_groups * o.state_dim
        values, b, c = x.split([size, keys, keys])

        def wide(each: Tensor) -> Tensor:
            return each[:, None].expand(o.num_heads, o.head_dim)

        return bamba.mamba2_selective_state_update(
            memory, values.view(1, o.num_heads, o.head_dim), wide(dt * o.dt_scale)[None],
            -o.log_decay.exp()[:, None, None].expand(o.num_heads, o.head_dim, o.state_dim),
            b.view(1, o.num_groups, o.state_dim), c.view(1, o.num_groups, o.state_dim), wide(o.skip),
            dt_bias=wide(o.dt_bias), dt_softplus=True,
        ).flatten()  # type: ignore[no-any-return]  # fmt: skip

    def _gated(self, y: Tensor, gate: Tensor) -> Tensor:
        o = self.options
        if o.norm_weight is None:
            return y * F.silu(gate)
        norm = FalconH1RMSNormGated(y.shape[1], o.norm_eps, o.num_norm_groups, norm_before_gate=o.is_norm_first)
        norm.weight.data = o.norm_weight
        with torch.no_grad():
            return norm(y[None], gate[None])[0]  # type: ignore[no-any-return]


@dataclass(frozen=True)
class ConvolutionBatch(StateBatch):
    """The arguments of short_convolution."""

    OPERATION = "short_convolution"
    ROWS = ("bcx",)
    ERRORS = 5e-5, 2e-5

    bcx: Tensor
    options: ConvolutionOptions

    def in_place(self, operation: Callable[..., Tensor]) -> Tensor:
        return operation(self.bcx, self.states, self.batch, self.options)

    def expected(self) -> tuple[Tensor, Tensor]:
        weight, bias = self.options.weight, self.options.bias
        states = self.states.clone()
        inputs = split_convolution_states(states, self.options)
        out = torch.zeros(len(self.bcx), len(weight))
        for rows, source, target in self.sequences():
            window = torch.zeros_like(inputs[0]) if source is None else inputs[source]
            given = self.bcx[rows].float()
            b, c, x = given.chunk(3, dim=1) if self.options.has_gates else (1.0, None, given)
            sequence = torch.cat((window, b * x))
            convolved = F.conv1d(sequence.t()[None], weight[:, None], bias, groups=len(weight))[0].t()
            out[rows] = F.silu(convolved) if c is None else c * convolved
            inputs[target] = sequence[len(sequence) - len(window) :]
        return out, states


@dataclass(frozen=True)
class ChannelScanBatch(StateBatch):
    """The arguments of channel_scan."""

    OPERATION = "channel_scan"
    ROWS = "x", "gate", "dt", "keys", "queries"
    ERRORS = 5e-5, 2e-5

    x: Tensor
    gate: Tensor
    dt: Tensor
    keys: Tensor
    queries: Tensor
    options: ChannelScanOptions

    def in_place(self, operation: Callable[..., Tensor]) -> Tensor:
        rows = (getattr(self, name) for name in self.ROWS)
        return operation(*rows, self.states, self.batch, self.options)

    def expected(self) -> tuple[Tensor, Tensor]:
        o, states = self.options, self.states.clone()
        memories = split_channel_states(states, o)
        out = torch.zeros(self.x.shape)
        for rows, source, target in self.sequences():
            memory = (torch.zeros_like(memories[0]) if source is None else memories[source]).t()[None].contiguous()
            for token in range(rows.start, rows.stop):
                x, gate, dt, b, c = (getattr(self, name)[token : token + 1].float() for name in self.ROWS)
                out[token] = mamba.mamba_selective_state_update(
                    memory, x, dt, -o.log_decay.exp().t(), b, c, o.skip, z=gate, dt_bias=o.dt_bias, dt_softplus=True
                )[0]
            memories[target] = memory[0].t()
        return out, states


def make_scan(
    q_lens: Sequence[int],
    earlier: Sequence[int],
    *,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (24, 40),
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    in_place: bool = False,
    num_norm_groups: int | None = 2,
    is_norm_first: bool = False,
) -> ScanBatch:
    """Random numbers; heads: H and G, dims: P and N, width: K. num_norm_groups: None for no norm.

    Blocks are those of random_states.
    """
    generator = torch.Generator().manual_seed(len(q_lens) + sum(q_lens))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    (num_heads, num_groups), (head_dim, state_dim) = heads, dims
    size = num_heads * head_dim
    channels = size + 2 * num_groups * state_dim
    options = ScanOptions(
        num_heads, num_groups, head_dim, state_dim, random(channels, width), random(channels), random(num_heads),
        random(num_heads), random(num_heads), None if num_norm_groups is None else 1 + 0.5 * random(size), EPS,
        num_norm_groups or 1, is_norm_first, gate_scale=0.75, dt_scale=1.25,
    )  # fmt: skip
    num_tokens = sum(q_lens)
    # Rows that lie apart, as in a fused product.
    rows = random(num_tokens, size + channels + num_heads + 3).to(dtype)
    gate, xbc, dt, _ = rows.split([size, channels, num_heads, 3], dim=1)
    states, batch = random_states(generator, q_lens, earlier, (width - 1) * channels + size * state_dim, in_place)
    return ScanBatch(states, batch, xbc, gate, dt, options)


def make_convolution(
    q_lens: Sequence[int],
    earlier: Sequence[int],
    *,
    num_channels: int = 40,
    width: int = 3,
    dtype: torch.dtype = torch.float32,
    in_place: bool = False,
    has_bias: bool = True,
    has_gates: bool = True,
) -> ConvolutionBatch:
    """Random numbers; width: K. Blocks are those of random_states."""
    generator = torch.Generator().manual_seed(len(q_lens) + sum(q_lens))
    weight = torch.randn(num_channels, width, generator=generator)
    bias = torch.randn(num_channels, generator=generator) if has_bias else None
    bcx = torch.randn(sum(q_lens), (3 if has_gates else 1) * num_channels, generator=generator).to(dtype)
    states, batch = random_states(generator, q_lens, earlier, (width - 1) * num_channels, in_place)
    return ConvolutionBatch(states, batch, bcx, ConvolutionOptions(weight, bias, has_gates))


def make_plain_convolution(q_lens: Sequence[int], earlier: Sequence[int], **others: Any) -> ConvolutionBatch:
    """make_convolution without gates."""
    return make_convolution(q_lens, earlier, has_gates=False, **others)


def make_channel_scan(
    q_lens: Sequence[int],
    earlier: Sequence[int],
    *,
    num_channels: int = 150,
    state_dim: int = 16,
    dtype: torch.dtype = torch.float32,
    in_place: bool = False,
) -> ChannelScanBatch:
    """Random numbers; blocks are those of random_states, and begin with a few numbers of somebody else."""
    generator = torch.Generator().manual_seed(len(q_lens) + sum(q_lens))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    offset, num_tokens = 6, sum(q_lens)
    options = ChannelScanOptions(random(state_dim, num_channels), random(num_channels), random(num_channels), offset)
    x, gate, dt = (random(num_tokens, num_channels + 3).to(dtype)[:, :num_channels] for _ in range(3))
    keys, queries = random(num_tokens, 2 * state_dim).to(dtype).chunk(2, dim=1)
    states, batch = random_states(generator, q_lens, earlier, offset + state_dim * num_channels, in_place)
    states.view(torch.float32)[:, :offset] = 0.5
    return ChannelScanBatch(states, batch, x, gate, dt, keys, queries, options)
