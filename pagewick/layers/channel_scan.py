"""Mamba-1 (arXiv:2312.00752): a convolution, and a state for each channel in place of keys and values."""

from __future__ import annotations

from torch import Tensor

from pagewick import kernels
from pagewick.attention.backend import AttentionBatch
from pagewick.kernels.options import ChannelScanOptions, ConvolutionOptions
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from pagewick.layers.norm import PlainRMSNorm, RMSNorm
from pagewick.layers.rotary import Angles
from pagewick.layers.state import Constant, StateLayer, constant
from pagewick.layers.state_config import STEP_NORMS, ChannelScanConfig
from pagewick.parallel.sharding import shard_bounds

# Raise the number whenever the layout of a state changes.
_LAYOUT = "mamba 1"


class ChannelScan(StateLayer):
    """[T, hidden_size] -> [T, hidden_size]. Each rank has some of the channels.

    Steps, keys and queries of all channels come from one product over the channels, which the ranks add up.
    """

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: ChannelScanConfig) -> None:
        super().__init__(config.state_bytes(context.tp_size), _LAYOUT)
        size, state_dim = config.num_channels, config.state_dim
        kept = shard_bounds(size, context.tp_rank, context.tp_size)
        num_channels = kept[1] - kept[0]
        self._widths = [num_channels, num_channels]
        self._parts = [config.step_rank, state_dim, state_dim]
        self.in_proj = MergedColumnParallelLinear(
            context, prefix, hidden_size, dict.fromkeys(("x", "z"), size), bias=config.has_bias, fused_name="in_proj"
        )
        self.x_proj = RowParallelLinear(context, f"{prefix}.x_proj", size, sum(self._parts))
        self.dt_proj = ColumnParallelLinear(context, f"{prefix}.dt_proj", config.step_rank, size)
        self.out_proj = RowParallelLinear(context, f"{prefix}.out_proj", size, hidden_size, bias=config.has_bias)
        self._norms: list[PlainRMSNorm | RMSNorm] = []
        if config.norm_eps is not None:
            kind = RMSNorm if config.has_norm_weights else PlainRMSNorm
            self._norms = [kind(context, width, config.norm_eps) for width in self._parts]
        if config.has_norm_weights:
            for name, norm in zip(STEP_NORMS, self._norms, strict=True):
                self.add_module(name, norm)
        self.conv_weight = constant(context, num_channels, config.conv_size)
        self.log_decay = constant(context, state_dim, num_channels)
        self.skip = constant(context, num_channels)
        self.dt_bias = constant(context, num_channels)
        self._constants = {
            "conv1d.weight": Constant((size, 1, config.conv_size), (kept,), self.conv_weight),
            # The file has a row for each channel, and the scan takes neighbouring channels together.
            "A_log": Constant((size, state_dim), (kept,), self.log_decay.t()),
            "D": Constant((size,), (kept,), self.skip),
            "dt_proj.bias": Constant((size,), (kept,), self.dt_bias),
        }
        conv_bias = None
        if config.has_conv_bias:
            conv_bias = self.conv_bias = constant(context, num_channels)
            self._constants["conv1d.bias"] = Constant((size,), (kept,), conv_bias)
        self._convolution = ConvolutionOptions(self.conv_weight, conv_bias, has_gates=False)
        offset = (config.conv_size - 1) * num_channels
        self._scan = ChannelScanOptions(self.log_decay, self.skip, self.dt_bias, offset)

    def forward(self, hidden_states: Tensor, angles: Angles | None, batch: AttentionBatch) -> Tensor:
        """angles: not used; the order of the tokens is in the state."""
        states, metadata = self.states(batch, len(hidden_states))
        x, gate = self.in_proj(hidden_states, batch).split(self._widths, dim=1)
        x = kernels.short_convolution(x, states, metadata, self._convolution)
        parts = self.x_proj(x, batch).split(self._parts, dim=1)
        if self._norms:
            parts = [norm(part) for norm, part in zip(self._norms, parts, strict=True)]
        step, keys, queries = parts
        dt = self.dt_proj(step, batch)
        mixed = kernels.channel_scan(x, gate, dt, keys, queries, states, metadata, self._scan)
        return self.out_proj(mixed, batch)  # type: ignore[no-any-return]
