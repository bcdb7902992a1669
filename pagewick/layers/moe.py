"""A mixture of experts: a router, the experts from which it chooses, and one shared expert that serves every token.

Module names are checkpoint names. T: tokens; E: experts; H: hidden_size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.kernels.options import SharedOutput
from pagewick.layers.config import MoeConfig
from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.experts import ExpertWeights
from pagewick.layers.linear import Linear, MergedColumnParallelLinear, WeightLayer
from pagewick.parallel.sharding import shard_bounds
from pagewick.quantization.share import whole_rows


class MoeLayer(nn.Module):
    """[T, H] -> [T, H]. Each rank computes with its share of all experts; the partial sums are added once at the end.

    prefix: the layer's checkpoint name; gate, experts, shared_expert and shared_expert_gate are below it.
    """

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: MoeConfig) -> None:
        super().__init__()
        self._collectives = context.collectives
        self.gate = Router(context, f"{prefix}.gate", hidden_size, config.num_experts, has_bias=config.has_router_bias)
        if config.has_logit_bias:
            self.gate.add_logit_bias(context)
        self.experts = ExpertWeights(context, f"{prefix}.experts", hidden_size, config)
        self.shared_expert: SharedExpert | None = None
        self.shared_expert_gate: Router | None = None
        if config.shared_intermediate_size is not None:
            self.shared_expert = SharedExpert(
                context, f"{prefix}.shared_expert", hidden_size, config.shared_intermediate_size, config.activation
            )
        if config.has_shared_gate:
            self.shared_expert_gate = Router(context, f"{prefix}.shared_expert_gate", hidden_size, 1)

    def forward(self, hidden_states: Tensor, batch: LayerBatch | None = None) -> Tensor:
        gate, shared = None, None
        if self.shared_expert_gate is not None:
            gate = self.shared_expert_gate(hidden_states, batch).squeeze(-1)
        if self.shared_expert is not None:
            shared = SharedOutput(self.shared_expert(hidden_states, batch), gate)
        logits, bias = self.gate(hidden_states, batch), self.gate.e_score_correction_bias
        partial: Tensor = self.experts(hidden_states, logits, bias, shared, batch)
        return self._collectives.all_reduce(partial)


class Router(WeightLayer):
    """Scores of the experts for each token: [T, H] -> [T, num_experts] in float32, the same on every rank.

    The sums are float32 and not rounded, because ranks and batches must not choose different experts. has_bias: there
    is a bias [num_experts] float32, which is not added here: it changes only which experts are chosen. With one row,
    the router is the gate of a shared expert, which scores that one alone.
    """

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, num_experts: int, *, has_bias: bool = False
    ) -> None:
        super().__init__(context.make_weight(prefix, whole_rows(num_experts, hidden_size), has_float32_sums=True))
        self.e_score_correction_bias = self.make_vector(torch.float32, context.device) if has_bias else None
        self.bias: nn.Parameter | None = None

    def add_logit_bias(self, context: LayerContext) -> None:
        """Have a bias of the scores, which is part of them (gpt-oss)."""
        self.bias = self.make_vector(context.dtype, context.device)

    def forward(self, x: Tensor, batch: LayerBatch | None = None) -> Tensor:
        return self.weight.linear(x, self.bias, out_dtype=torch.float32)


class SharedExpert(nn.Module):
    """A gated feed-forward layer: [T, H] -> [T, H], this rank's partial sum."""

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, intermediate_size: int, activation: str
    ) -> None:
        super().__init__()
        self._activation = activation
        self.gate_up_proj = MergedColumnParallelLinear(
            context, prefix, hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        )
        columns = shard_bounds(intermediate_size, context.tp_rank, context.tp_size)
        # Not RowParallelLinear: MoeLayer adds the partial sums of all experts over the ranks at once.
        self.down_proj = Linear(context, f"{prefix}.down_proj", whole_rows(hidden_size, intermediate_size, columns))

    def forward(self, hidden_states: Tensor, batch: LayerBatch | None = None) -> Tensor:
        activated = kernels.gated_activation(self.gate_up_proj(hidden_states, batch), self._activation)
        return self.down_proj(activated, batch)  # type: ignore[no-any-return]
