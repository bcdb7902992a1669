"""The experts of a layer: two weights of all of them together, of which a rank keeps its share of each expert.

T: tokens; E: experts; H: hidden_size; I: intermediate_size of an expert, of which this rank keeps a range.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.kernels import Experts
from pagewick.kernels.matrix import Matrix
from pagewick.layers.context import LayerContext
from pagewick.layers.expert_offload import OffloadedExperts
from pagewick.layers.moe_config import MoeConfig
from pagewick.layers.shapes import check_shape
from pagewick.parallel.sharding import shard_bounds
from pagewick.quantization.unquantized import UnquantizedMethod

_FLOAT_DTYPES = frozenset({torch.bfloat16, torch.float16, torch.float32, torch.float64})


class ExpertWeights(nn.Module):
    """x [T, H] and router logits [T, E] float32 -> [T, H], this rank's part of the sum over all ranks.

    prefix: the checkpoint name of the module that holds the experts, whose tensors are `prefix`.0.gate_proj.weight and
    so on. Raises ConfigError if they are quantized.
    """

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: MoeConfig) -> None:
        super().__init__()
        self._config = config
        self._hidden_size = hidden_size
        self._start, self._stop = shard_bounds(config.intermediate_size, context.tp_rank, context.tp_size)
        self._places = {
            f"{prefix.rpartition('.')[2]}.{expert}.{name}": (expert, name)
            for expert in range(config.num_experts)
            for name in ("gate_proj", "up_proj", "down_proj")
        }
        for expert, name in self._places.values():
            _refuse_quantized(context, f"{prefix}.{expert}.{name}")
        kept = self._stop - self._start
        kind = OffloadedExperts if context.num_experts_offload_per_rank else ResidentExperts
        self.store: ResidentExperts | OffloadedExperts = kind(context, config, hidden_size, kept)

    def forward(
        self,
        x: Tensor,
        logits: Tensor,
        router_bias: Tensor | None,
        shared: Tensor | None,
        shared_gate: Tensor | None,
    ) -> Tensor:
        """router_bias [E], shared [T, H] and shared_gate [T] are as kernels.fused_moe says."""
        return self.store(x, logits, router_bias, shared, shared_gate)  # type: ignore[no-any-return]

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((part, "weight") for part in self._places)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Keep this rank's share of one expert's tensor. Raises ModelLoadError if it does not fit."""
        assert part is not None, "every tensor is an expert's"
        expert, projection = self._places[part]
        check_floating(tensor)
        gate_up, down = self.store.matrices(expert)
        size, start, stop = self._config.intermediate_size, self._start, self._stop
        if projection == "down_proj":
            check_shape(tensor, (self._hidden_size, size))
            down.load(tensor[:, start:stop], 0)
            return
        check_shape(tensor, (size, self._hidden_size))
        gate_up.load(tensor[start:stop], 0 if projection == "gate_proj" else stop - start)


class ResidentExperts(nn.Module):
    """All experts on the device; arguments are those of OffloadedExperts."""

    def __init__(self, context: LayerContext, config: MoeConfig, num_rows: int, num_columns: int) -> None:
        super().__init__()
        self._config = config
        self.gate_up = Experts.empty(config.num_experts, 2 * num_columns, num_rows, context.dtype, context.device)
        self.down = Experts.empty(config.num_experts, num_rows, num_columns, context.dtype, context.device)
        self.gate_up_weight = nn.Parameter(self.gate_up.data, requires_grad=False)
        self.down_weight = nn.Parameter(self.down.data, requires_grad=False)

    @property
    def num_uncounted_parameters(self) -> int:
        """Below 0: what packed weights are padded with."""
        both = (self.gate_up, self.down)
        return sum(each.num_experts * each.num_rows * each.num_columns - each.data.numel() for each in both)

    def matrices(self, expert: int) -> tuple[Matrix, Matrix]:
        """gate_up and down of an expert."""
        return self.gate_up.matrix(expert), self.down.matrix(expert)

    def forward(
        self,
        x: Tensor,
        logits: Tensor,
        router_bias: Tensor | None,
        shared: Tensor | None,
        shared_gate: Tensor | None,
    ) -> Tensor:
        """As kernels.fused_moe."""
        return kernels.fused_moe(
            x, logits, self.gate_up, self.down, self._config.routing,
            activation=self._config.activation, router_bias=router_bias, shared=shared, shared_gate=shared_gate,
        )  # fmt: skip


def check_floating(tensor: Tensor) -> None:
    """Raises ModelLoadError for integers and 8-bit floats, which mean nothing without their scales."""
    if tensor.dtype not in _FLOAT_DTYPES:
        raise ModelLoadError(
            f"it is stored as {tensor.dtype}, a quantized weight, but config.json has no quantization_config; use the "
            "unquantized checkpoint"
        )


def _refuse_quantized(context: LayerContext, name: str) -> None:
    if not isinstance(context.choose_method(name), UnquantizedMethod):
        raise ConfigError(f"{name} is quantized, which is not supported yet for experts; use an unquantized checkpoint")
