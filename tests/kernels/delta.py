"""Batches for the gated delta rule, and what transformers makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.kimi_linear import modeling_kimi_linear as kimi
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

from pagewick.kernels.options import DeltaOptions
from pagewick.kernels.reference_delta import split_states
from tests.kernels.states import StateBatch, random_states

EPS = 1e-6


@dataclass(frozen=True)
class DeltaBatch(StateBatch):
    """The arguments of gated_delta_net."""

    OPERATION = "gated_delta_net"
    ROWS = "qkv", "gate", "beta", "decay"
    ERRORS = 2e-5, 1e-5

    qkv: Tensor
    gate: Tensor
    beta: Tensor
    decay: Tensor
    options: DeltaOptions

    def in_place(self, operation: Callable[..., Tensor]) -> Tensor:
        return operation(self.qkv, self.gate, self.beta, self.decay, self.states, self.batch, self.options)

    def expected(self) -> tuple[Tensor, Tensor]:
        states = self.states.clone()
        inputs, memories = split_states(states, self.options)
        out = torch.zeros(self.gate.shape)
        for rows, source, target in self.sequences():
            window = torch.zeros_like(inputs[0]) if source is None else inputs[source]
            memory = torch.zeros_like(memories[0]) if source is None else memories[source]
            sequence = torch.cat((window, self.qkv[rows].float()))
            out[rows], memory = self._expected_of_one(sequence, rows, memory)
            inputs[target], memories[target] = sequence[len(sequence) - len(window) :], memory
        return out, states

    def _expected_of_one(self, inputs: Tensor, rows: slice, memory: Tensor) -> tuple[Tensor, Tensor]:
        o = self.options
        x = F.silu(F.conv1d(inputs.t()[None], o.conv_weight[:, None], groups=o.num_channels))[0].t()[None]
        q, k, v = x.split([o.num_key_heads * o.key_dim] * 2 + [o.num_value_heads * o.value_dim], dim=-1)
        inputs_of_decays = (self.decay[rows].float() + o.dt_bias).unflatten(-1, (o.num_value_heads, -1))
        speed = o.log_decay.exp()[:, None]
        if o.decay_bound is None:
            g = -speed * F.softplus(inputs_of_decays)
        else:
            g = o.decay_bound / (1 + (-speed * inputs_of_decays).exp())
        rule = kimi.recurrent_kimi_delta_attention if o.has_channel_decay else qwen.torch_recurrent_gated_delta_rule
        read, memory = rule(
            q.unflatten(-1, (-1, o.key_dim)), k.unflatten(-1, (-1, o.key_dim)), v.unflatten(-1, (-1, o.value_dim)),
            g=(g if o.has_channel_decay else g.squeeze(-1))[None],
            beta=o.strength * self.beta[rows].float().sigmoid()[None], initial_state=memory[None],
            output_final_state=True, use_qk_l2norm_in_kernel=True,
        )  # fmt: skip
        norm = (kimi.KimiLinearRMSNormGated if o.has_sigmoid_gate else qwen.Qwen3_5RMSNormGated)(
            o.value_dim, o.norm_eps
        )
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
    decays_by_channel: bool = False,
    strength: float = 1.0,
    has_sigmoid_gate: bool = False,
    decay_bound: float | None = None,
) -> DeltaBatch:
    """Random numbers; heads: KH and VH, dims: DK and DV, width: K. Blocks are those of random_states."""
    generator = torch.Generator().manual_seed(len(q_lens) + sum(q_lens))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    channels, values = 2 * key_heads * key_dim + value_heads * value_dim, value_heads * value_dim
    decays = value_heads * key_dim if decays_by_channel else value_heads
    options = DeltaOptions(
        key_heads, value_heads, key_dim, value_dim, random(channels, width), random(value_heads), random(decays),
        1 + 0.5 * random(value_dim), EPS, has_channel_decay=decays_by_channel, strength=strength,
        has_sigmoid_gate=has_sigmoid_gate, decay_bound=decay_bound,
    )  # fmt: skip
    num_tokens = sum(q_lens)
    # Rows of qkv that lie apart, as in a fused product.
    qkv = random(num_tokens, channels + 8).to(dtype)[:, :channels]
    gate, beta = random(num_tokens, values).to(dtype), random(num_tokens, value_heads).to(dtype)
    decay = random(num_tokens, decays).to(dtype)
    size = (width - 1) * channels + value_heads * key_dim * value_dim
    states, batch = random_states(generator, q_lens, earlier, size, in_place)
    return DeltaBatch(states, batch, qkv, gate, beta, decay, options)


def make_channel_delta(
    q_lens: Sequence[int], earlier: Sequence[int], *, heads: tuple[int, int] = (3, 3), **others: Any
) -> DeltaBatch:
    """make_delta with Kimi's decays and gates."""
    return make_delta(q_lens, earlier, heads=heads, decays_by_channel=True, has_sigmoid_gate=True, **others)
