"""An RMS norm with a gate of low rank behind it (A.X K2)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from pagewick.layers.context import LayerContext
from pagewick.layers.elementwise import Activation, sigmoid_gate
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.norm import RMSNorm


class GatedNorm(nn.Module):
    """y = norm(x); y * sigmoid(gate_up(silu(gate_down(y)))) over the last dimension. All ranks hold all of it.

    rank: outputs of gate_down. Adapters cannot change the gate.
    """

    def __init__(self, context: LayerContext, prefix: str, size: int, eps: float, rank: int) -> None:
        super().__init__()
        context = replace(context, lora=None)
        self.norm = RMSNorm(context, size, eps)
        self.gate_down = ReplicatedLinear(context, f"{prefix}.gate_down", size, rank)
        self.gate_up = ReplicatedLinear(context, f"{prefix}.gate_up", rank, size)
        self._activation = Activation("silu", is_gated=False)

    def forward(self, x: Tensor) -> Tensor:
        return self._gated(self.norm(x))

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (normed and gated sum, x + residual)."""
        normed, total = self.norm.add_and_norm(x, residual)
        return self._gated(normed), total

    def _gated(self, normed: Tensor) -> Tensor:
        return sigmoid_gate(normed, self.gate_up(self._activation(self.gate_down(normed))))
