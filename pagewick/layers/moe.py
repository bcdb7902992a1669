"""A mixture of experts: a router, the experts that it chooses from, and one that every token goes to.

Module names are checkpoint names. T: tokens; E: experts; H: hidden_size.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from pagewick import kernels
from pagewick.kernels.matrix import Matrix
from pagewick.layers.context import LayerContext
from pagewick.layers.experts import ExpertWeights, check_floating
from pagewick.layers.linear import Linear, MergedColumnParallelLinear, Part
from pagewick.layers.moe_config import MoeConfig
from pagewick.layers.shapes import check_shape
from pagewick.parallel.sharding import shard_bounds


class MoeLayer(nn.Module):
    """[T, H] -> [T, H]; what ranks have of each expert, and of the shared one, is added once.

    prefix: the layer's checkpoint name, below which are gate, experts, shared_expert and shared_expert_gate.
    Raises ConfigError if experts are quantized.
    """

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: MoeConfig) -> None:
        super().__init__()
        self._collectives = context.collectives
        self.gate = RowsInFloat32(context, hidden_size, config.num_experts, has_bias=config.has_router_bias)
        self.experts = ExpertWeights(context, f"{prefix}.experts", hidden_size, config)
        self.shared_expert: SharedExpert | None = None
        self.shared_expert_gate: RowsInFloat32 | None = None
        if config.shared_intermediate_size is not None:
            self.shared_expert = SharedExpert(
                context, f"{prefix}.shared_expert", hidden_size, config.shared_intermediate_size, config.activation
            )
        if config.has_shared_gate:
            self.shared_expert_gate = RowsInFloat32(context, hidden_size, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        shared = None if self.shared_expert is None else self.shared_expert(hidden_states)
        shared_gate = None if self.shared_expert_gate is None else self.shared_expert_gate(hidden_states).squeeze(-1)
        bias = self.gate.e_score_correction_bias
        given: Tensor = self.experts(hidden_states, self.gate(hidden_states), bias, shared, shared_gate)
        return given if self._collectives.tp_size == 1 else self._collectives.all_reduce(given)


class RowsInFloat32(nn.Module):
    """[T, H] -> [T, num_rows] in float32, the same on every rank: a router, or the gate of a shared expert.

    The sums are float32 and not rounded: ranks and batches must not choose different experts. has_bias: it has
    numbers [num_rows] float32 that are not added, but kept for who chooses.
    """

    def __init__(self, context: LayerContext, hidden_size: int, num_rows: int, *, has_bias: bool = False) -> None:
        super().__init__()
        self.matrix = Matrix.empty(num_rows, hidden_size, context.dtype, context.device)
        if not self.matrix.is_packed:
            self.matrix = Matrix.empty(num_rows, hidden_size, torch.float32, context.device)
        self.weight = nn.Parameter(self.matrix.data, requires_grad=False)
        self.e_score_correction_bias: nn.Parameter | None = None
        if has_bias:
            empty = torch.empty(num_rows, dtype=torch.float32, device=context.device)
            self.e_score_correction_bias = nn.Parameter(empty, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.matrix.is_packed:
            return self.matrix.linear(x, out_dtype=torch.float32)
        return functional.linear(x.to(torch.float32), self.weight)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        names = ["weight"] if self.e_score_correction_bias is None else ["weight", "e_score_correction_bias"]
        return ((None, name) for name in names)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Raises ModelLoadError if a tensor does not fit."""
        check_floating(tensor)
        if name == "e_score_correction_bias" and self.e_score_correction_bias is not None:
            check_shape(tensor, (self.matrix.num_rows,))
            self.e_score_correction_bias.copy_(tensor)
            return
        check_shape(tensor, (self.matrix.num_rows, self.matrix.num_columns))
        self.matrix.load(tensor, 0)


class SharedExpert(nn.Module):
    """A gated feed-forward: [T, H] -> [T, H], this rank's part of the sum over all ranks."""

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, intermediate_size: int, activation: str
    ) -> None:
        super().__init__()
        self._activation = activation
        self.gate_up_proj = MergedColumnParallelLinear(
            context, prefix, hidden_size, {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        )
        columns = shard_bounds(intermediate_size, context.tp_rank, context.tp_size)
        part = Part(None, hidden_size, ((0, hidden_size),))
        # Not RowParallelLinear: the layer adds what ranks have once, with the other experts' in it.
        self.down_proj = Linear(context, f"{prefix}.down_proj", intermediate_size, columns, [part], bias=False)

    def forward(self, hidden_states: Tensor) -> Tensor:
        activated = kernels.gated_activation(self.gate_up_proj(hidden_states), self._activation)
        return self.down_proj(activated)  # type: ignore[no-any-return]
