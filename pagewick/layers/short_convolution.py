"""Gated short convolutions (LFM2, arXiv:2511.23404), which keep the last few tokens' products of a sequence."""

from __future__ import annotations

from torch import Tensor

from pagewick import kernels
from pagewick.attention.backend import AttentionBatch
from pagewick.kernels.options import ConvolutionOptions
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from pagewick.layers.rotary import Angles
from pagewick.layers.state import Constant, StateLayer, constant
from pagewick.layers.state_config import ConvolutionConfig
from pagewick.parallel.sharding import shard_bounds

# Raise the number whenever the layout of a state changes.
_LAYOUT = "short convolution 1"


class ShortConvolution(StateLayer):
    """[T, hidden_size] -> [T, hidden_size]. Each rank has some of the channels."""

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: ConvolutionConfig) -> None:
        super().__init__(config.state_bytes(context.tp_size), _LAYOUT)
        size = config.num_channels
        kept = shard_bounds(size, context.tp_rank, context.tp_size)
        self.in_proj = MergedColumnParallelLinear(
            context, prefix, hidden_size, dict.fromkeys(("b", "c", "x"), size), bias=config.has_bias,
            fused_name="in_proj",
        )  # fmt: skip
        self.out_proj = RowParallelLinear(context, f"{prefix}.out_proj", size, hidden_size, bias=config.has_bias)
        num_channels = kept[1] - kept[0]
        self.conv_weight = constant(context, num_channels, config.conv_size)
        self._constants = {"conv.weight": Constant((size, 1, config.conv_size), (kept,), self.conv_weight)}
        self.options = ConvolutionOptions(self.conv_weight)
        if config.has_bias:
            self.conv_bias = constant(context, num_channels)
            self._constants["conv.bias"] = Constant((size,), (kept,), self.conv_bias)
            self.options = ConvolutionOptions(self.conv_weight, self.conv_bias)

    def forward(self, hidden_states: Tensor, angles: Angles | None, batch: AttentionBatch) -> Tensor:
        """angles: not used; the order of the tokens is in the state."""
        states, metadata = self.states(batch, len(hidden_states))
        mixed = kernels.short_convolution(self.in_proj(hidden_states, batch), states, metadata, self.options)
        return self.out_proj(mixed, batch)  # type: ignore[no-any-return]
