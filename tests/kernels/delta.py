"""Batches for the gated delta rule, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from pagewick.kernels.options import AttentionMetadata, DeltaOptions
from pagewick.kernels.reference_delta import split_states

EPS = 1e-6
# Half a unit in the last place of 1, and in float32 what the sums add to it.
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}
# Blocks that are nobody's source or target: block 0 is that of padding.
NUM_SPARE = 2


@dataclass(frozen=True)
class DeltaBatch:
    """The arguments of gated_delta_net."""

    qkv: Tensor
    gate: Tensor
    beta: Tensor
    decay: Tensor
    states: Tensor
    batch: AttentionMetadata
    options: DeltaOptions

    def run(self, operation: Callable[..., Tensor]) -> tuple[Tensor, Tensor]:
        """Return the result and the states that are left; those of the batch stay as they are."""
        states = self.states.clone()
        return replace(self, states=states).in_place(operation), states

    def in_place(self, operation: Callable[..., Tensor]) -> Tensor:
        return operation(self.qkv, self.gate, self.beta, self.decay, self.states, self.batch, self.options)

    def of(self, seq: int) -> slice:
        """Its new tokens."""
        return slice(*self.batch.cu_seqlens_q[seq : seq + 2].tolist())

    def only(self, seq: int, begin: int = 0, end: int | None = None) -> DeltaBatch:
        """New tokens begin .. end of one sequence, as a batch of its own."""
        tokens = range(*self.of(seq).indices(len(self.qkv)))[begin:end]
        rows = slice(tokens.start, tokens.stop)
        earlier = int(self.batch.context_lens[seq]) - (self.of(seq).stop - self.of(seq).start)
        block_tables = self.batch.block_tables[seq : seq + 1].clone()
        if begin:
            block_tables[:, 0] = block_tables[:, 1]
        batch = metadata(block_tables.tolist(), [earlier + begin + len(tokens)], [len(tokens)])
        return replace(
            self,
            qkv=self.qkv[rows], gate=self.gate[rows], beta=self.beta[rows], decay=self.decay[rows], batch=batch,
        )  # fmt: skip

    def expected(self) -> tuple[Tensor, Tensor]:
        """Return what `run` returns, computed in float32: [T, VH * DV] and the states."""
        states = self.states.clone()
        inputs, memories = split_states(states, self.options)
        out = torch.zeros(self.gate.shape)
        for seq, (source, target) in enumerate(self.batch.block_tables.tolist()):
            rows = self.of(seq)
            if rows.start == rows.stop:
                continue
            has_past = int(self.batch.context_lens[seq]) > rows.stop - rows.start
            window, memory = (
                (inputs[source], memories[source])
                if has_past
                else (torch.zeros_like(each[0]) for each in (inputs, memories))
            )
            sequence = torch.cat((window, self.qkv[rows].float()))
            out[rows], memory = self._expected_of_one(sequence, rows, memory)
            inputs[target], memories[target] = sequence[len(sequence) - len(window) :], memory
        return out, states

    def _expected_of_one(self, inputs: Tensor, rows: slice, memory: Tensor) -> tuple[Tensor, Tensor]:
        o = self.options
        x = F.silu(F.conv1d(inputs.t()[None], o.conv_weight[:, None], groups=o.num_channels))[0].t()[None]
        q, k, v = x.split([o.num_key_heads * o.key_dim] * 2 + [o.num_value_heads * o.value_dim], dim=-1)
        read, memory = qwen.torch_recurrent_gated_delta_rule(
            q.unflatten(-1, (-1, o.key_dim)), k.unflatten(-1, (-1, o.key_dim)), v.unflatten(-1, (-1, o.value_dim)),
            g=-o.log_decay.exp() * F.softplus(self.decay[rows].float() + o.dt_bias)[None],
            beta=self.beta[rows].float().sigmoid()[None], initial_state=memory[None], output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        norm = qwen.Qwen3_5RMSNormGated(o.value_dim, o.norm_eps)
        norm.weight.data = o.norm_weight
        with torch.no_grad():
            normed = norm(read[0], self.gate[rows].float().unflatten(-1, (-1, o.value_dim)))
        return normed.flatten(1), memory[0]


def make_delta(
    q_lens: Sequence[int],
    earlier: Sequence[int],
    *,
    heads: tuple[int, int] = (2, 4),
    dims: tuple[int, int] = (24, 40),
    width: int = 4,
    dtype: torch.dtype = torch.float32,
    in_place: bool = False,
) -> DeltaBatch:
    """Random numbers; heads: KH and VH, dims: DK and DV, width: K. Sources of new sequences are NaN, and so is block 0.

    With in_place each sequence's state goes to the block that it comes from.
    """
    generator = torch.Generator().manual_seed(len(q_lens) + sum(q_lens))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    channels, values = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim
    options = DeltaOptions(
        key_heads, value_heads, key_dim, value_dim, random(channels, width), random(value_heads), random(value_heads),
        1 + 0.5 * random(value_dim), EPS,
    )  # fmt: skip
    num_tokens, num_seqs = sum(q_lens), len(q_lens)
    # Rows of qkv that lie apart, as in a fused product.
    qkv = random(num_tokens, channels + 8).to(dtype)[:, :channels]
    gate, (beta, decay) = random(num_tokens, values).to(dtype), random(2, num_tokens, value_heads).to(dtype)
    numbers = random(NUM_SPARE + 2 * num_seqs, (width - 1) * channels + value_heads * key_dim * value_dim)
    block_ids = (NUM_SPARE + torch.randperm(2 * num_seqs, generator=generator)).view(num_seqs, 2)
    if in_place:
        block_ids[:, 1] = block_ids[:, 0]
    numbers[0] = float("nan")
    for seq, count in enumerate(earlier):
        if not count:
            numbers[block_ids[seq, 0]] = float("nan")
    context_lens = [new + old for new, old in zip(q_lens, earlier, strict=True)]
    return DeltaBatch(
        qkv, gate, beta, decay, numbers.view(torch.uint8), metadata(block_ids.tolist(), context_lens, q_lens), options
    )


def metadata(block_tables: list[list[int]], context_lens: Sequence[int], q_lens: Sequence[int]) -> AttentionMetadata:
    starts = torch.tensor([0, *q_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    blocks, lengths = torch.tensor(block_tables, dtype=torch.int32), torch.tensor(context_lens, dtype=torch.int32)
    return AttentionMetadata(blocks, lengths, starts)


def assert_is_expected(found: tuple[Tensor, Tensor], delta: DeltaBatch, *, num_roundings: int = 1) -> None:
    """The result but for its roundings, targets but for sums in another order, and all other blocks to the bit."""
    expected, left = delta.expected()
    out, states = found[0].float(), found[1].view(torch.float32)
    assert found[0].dtype == delta.qkv.dtype and out.shape == expected.shape
    excess = (out - expected).abs() - num_roundings * ROUNDING[found[0].dtype] * expected.abs() - 2e-5
    assert bool((excess <= 0).all()), f"an error of {excess.max().item()} more than tolerated"
    has_new = delta.batch.cu_seqlens_q.diff() > 0
    targets = delta.batch.block_tables[has_new, 1].unique().tolist()
    torch.testing.assert_close(states[targets], left.view(torch.float32)[targets], rtol=1e-5, atol=1e-5)
    others = [block for block in range(len(states)) if block not in targets]
    assert torch.equal(found[1][others], delta.states[others])
