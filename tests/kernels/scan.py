"""Batches for Mamba-2's scan and for gated short convolutions, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.bamba import modeling_bamba as bamba
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1RMSNormGated

from pagewick.kernels.options import AttentionMetadata, ConvolutionOptions, ScanOptions
from pagewick.kernels.reference_scan import split_convolution_states, split_scan_states
from tests.kernels.delta import NUM_SPARE, ROUNDING, metadata

EPS = 1e-5


@dataclass(frozen=True)
class StateBatch:
    """New tokens of some sequences, and their states: what both operations have in common."""

    states: Tensor
    batch: AttentionMetadata

    def run(self, operation: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """Return the result and the states that are left; those of the batch stay as they are."""
        states = self.states.clone()
        return replace(self, states=states).in_place(operation), states

    def in_place(self, operation: Callable[..., Tensor]) -> Tensor:
        raise NotImplementedError

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return what `run` returns, computed in float32."""
        raise NotImplementedError

    def of(self, seq: int) -> slice:
        """Its new tokens."""
        return slice(*self.batch.cu_seqlens_q[seq : seq + 2].tolist())

    def cut(self, seq: int, begin: int = 0, end: int | None = None) -> tuple[slice, AttentionMetadata]:
        """Return the rows of new tokens begin .. end of one sequence, and the metadata of a batch of only these."""
        start, stop = self.of(seq).start, self.of(seq).stop
        tokens = range(start, stop)[begin:end]
        block_tables = self.batch.block_tables[seq : seq + 1].clone()
        if begin:
            block_tables[:, 0] = block_tables[:, 1]
        length = int(self.batch.context_lens[seq]) - (stop - start) + begin + len(tokens)
        return slice(tokens.start, tokens.stop), metadata(block_tables.tolist(), [length], [len(tokens)])

    def sequences(self) -> Iterator[tuple[slice, int | None, int]]:
        """Yield the rows of each sequence with new tokens, the block of its state (None: it is new), and the target."""
        for seq, (source, target) in enumerate(self.batch.block_tables.tolist()):
            rows = self.of(seq)
            if rows.start < rows.stop:
                has_past = int(self.batch.context_lens[seq]) > rows.stop - rows.start
                yield rows, source if has_past else None, target


@dataclass(frozen=True)
class ScanBatch(StateBatch):
    """The arguments of selective_scan."""

    xbc: Tensor
    gate: Tensor
    dt: Tensor
    options: ScanOptions

    def in_place(self, operation: Callable[..., Tensor]) -> Tensor:
        return operation(self.xbc, self.gate, self.dt, self.states, self.batch, self.options)

    def only(self, seq: int, begin: int = 0, end: int | None = None) -> ScanBatch:
        """New tokens begin .. end of one sequence, as a batch of its own."""
        rows, batch = self.cut(seq, begin, end)
        return replace(self, xbc=self.xbc[rows], gate=self.gate[rows], dt=self.dt[rows], batch=batch)

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

    bcx: Tensor
    options: ConvolutionOptions

    def in_place(self, operation: Callable[..., Tensor]) -> Tensor:
        return operation(self.bcx, self.states, self.batch, self.options)

    def only(self, seq: int, begin: int = 0, end: int | None = None) -> ConvolutionBatch:
        """New tokens begin .. end of one sequence, as a batch of its own."""
        rows, batch = self.cut(seq, begin, end)
        return replace(self, bcx=self.bcx[rows], batch=batch)

    def expected(self) -> tuple[Tensor, Tensor]:
        weight, bias = self.options.weight, self.options.bias
        states = self.states.clone()
        inputs = split_convolution_states(states, self.options)
        out = torch.zeros(len(self.bcx), len(weight))
        for rows, source, target in self.sequences():
            window = torch.zeros_like(inputs[0]) if source is None else inputs[source]
            b, c, x = self.bcx[rows].float().chunk(3, dim=1)
            sequence = torch.cat((window, b * x))
            out[rows] = c * F.conv1d(sequence.t()[None], weight[:, None], bias, groups=len(weight))[0].t()
            inputs[target] = sequence[len(sequence) - len(window) :]
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

    Sources of new sequences are NaN, and so is block 0. With in_place each sequence's state goes to the block that it
    comes from.
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
    states, batch = _states(generator, q_lens, earlier, (width - 1) * channels + size * state_dim, in_place)
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
) -> ConvolutionBatch:
    """Random numbers; width: K. Blocks are those of make_scan."""
    generator = torch.Generator().manual_seed(len(q_lens) + sum(q_lens))
    weight = torch.randn(num_channels, width, generator=generator)
    bias = torch.randn(num_channels, generator=generator) if has_bias else None
    bcx = torch.randn(sum(q_lens), 3 * num_channels, generator=generator).to(dtype)
    states, batch = _states(generator, q_lens, earlier, (width - 1) * num_channels, in_place)
    return ConvolutionBatch(states, batch, bcx, ConvolutionOptions(weight, bias))


def _states(
    generator: torch.Generator, q_lens: Sequence[int], earlier: Sequence[int], size: int, in_place: bool
) -> tuple[Tensor, AttentionMetadata]:
    num_seqs = len(q_lens)
    numbers = torch.randn(NUM_SPARE + 2 * num_seqs, size, generator=generator)
    block_ids = (NUM_SPARE + torch.randperm(2 * num_seqs, generator=generator)).view(num_seqs, 2)
    if in_place:
        block_ids[:, 1] = block_ids[:, 0]
    numbers[0] = float("nan")
    for seq, count in enumerate(earlier):
        if not count:
            numbers[block_ids[seq, 0]] = float("nan")
    context_lens = [new + old for new, old in zip(q_lens, earlier, strict=True)]
    return numbers.view(torch.uint8), metadata(block_ids.tolist(), context_lens, q_lens)


def assert_is_expected(found: tuple[Tensor, Tensor], batch: ScanBatch | ConvolutionBatch) -> None:
    """The result but for its roundings, targets but for sums in another order, and all other blocks to the bit."""
    expected, left = batch.expected()
    out, states = found[0].float(), found[1].view(torch.float32)
    rows = batch.xbc if isinstance(batch, ScanBatch) else batch.bcx
    assert found[0].dtype == rows.dtype and out.shape == expected.shape
    excess = (out - expected).abs() - ROUNDING[found[0].dtype] * expected.abs() - 5e-5
    assert bool((excess <= 0).all()), f"an error of {excess.max().item()} more than tolerated"
    targets = sorted({target for _, _, target in batch.sequences()})
    torch.testing.assert_close(states[targets], left.view(torch.float32)[targets], rtol=1e-5, atol=2e-5)
    others = [block for block in range(len(states)) if block not in targets]
    assert torch.equal(found[1][others], batch.states[others])
