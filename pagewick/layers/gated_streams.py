"""Residual streams whose numbers each have a gate (Qwen4-Exp's hyper-connections; arXiv:2409.19606 has the idea).

A part of a layer reads the mean over the streams of normalised numbers times their gates, and its output is added to
each stream with a factor from 0 to 2. Streams lie side by side. T: tokens of a batch; S: streams; H: hidden_size. Every
rank has all of it. Module names are checkpoint names.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.layers.config import GatedStreamsConfig
from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.elementwise import Activation, add, scale, sigmoid_gate
from pagewick.layers.linear import ReplicatedLinear
from pagewick.layers.norm import Norm


class StreamNorm(Norm):
    """An RMS norm of each stream by itself, with weights of its own plus 1: [T, S * H] -> [T, S * H]."""

    def __init__(self, context: LayerContext, num_streams: int, hidden_size: int, eps: float) -> None:
        super().__init__(context, num_streams * hidden_size, eps, has_bias=False)
        self._size = hidden_size

    def forward(self, streams: Tensor) -> Tensor:
        out = kernels.empty_result((len(streams), streams.shape[1]), streams.dtype, streams.device)
        for start in range(0, streams.shape[1], self._size):
            of_stream = slice(start, start + self._size)
            kernels.rms_norm(streams[:, of_stream], self.weight[of_stream], self.eps, 1.0, out=out[:, of_stream])
        return out


class GatedReader(nn.Module):
    """The gated mean of the streams, which a part of a model reads: [T, S * H] -> [T, H]."""

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: GatedStreamsConfig) -> None:
        super().__init__()
        self._num_streams, width = config.num_streams, config.num_streams * hidden_size
        self.hc_norm = StreamNorm(context, config.num_streams, hidden_size, config.norm_eps)
        self.input_mix_weight_down = ReplicatedLinear(context, f"{prefix}.input_mix_weight_down", width, config.rank)
        self.input_mix_weight_up = ReplicatedLinear(context, f"{prefix}.input_mix_weight_up", config.rank, width)
        self._silu = Activation("silu", is_gated=False)

    def spread(self, hidden_states: Tensor) -> Tensor:
        """Return the streams before the first layer, which are all alike: [T, H] -> [T, S * H]."""
        return hidden_states.repeat(1, self._num_streams)

    def forward(self, streams: Tensor, batch: LayerBatch) -> Tensor:
        return self.read_normed(self.hc_norm(streams), batch)

    def read_normed(self, normed: Tensor, batch: LayerBatch) -> Tensor:
        """Return what is read of normalised streams."""
        low = scale(self.input_mix_weight_down(normed, batch), 1 / self._num_streams)
        gated = sigmoid_gate(normed, self.input_mix_weight_up(self._silu(low), batch))
        equal = torch.full((len(normed), self._num_streams), 1 / self._num_streams, device=normed.device)
        return kernels.collapse_streams(gated.view(len(gated), self._num_streams, -1), equal)


class GatedConnection(GatedReader):
    """A GatedReader in front of a part of a layer, which also adds the output of the part to the streams."""

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, config: GatedStreamsConfig) -> None:
        super().__init__(context, prefix, hidden_size, config)
        num_streams = config.num_streams
        self.block_inject_weight = ReplicatedLinear(
            context, f"{prefix}.block_inject_weight", num_streams * hidden_size, num_streams
        )
        self._stream_of_number = spread_columns(context, num_streams, hidden_size)
        self._number_of_output = torch.arange(hidden_size, device=context.device).repeat(num_streams)

    def read(self, streams: Tensor, batch: LayerBatch) -> tuple[Tensor, Tensor]:
        """Return the input of the part [T, H], and the logits [T, S] that `write` needs."""
        normed = self.hc_norm(streams)
        logits = scale(self.block_inject_weight(normed, batch), 1 / self._num_streams)
        return self.read_normed(normed, batch), logits

    def write(self, streams: Tensor, output: Tensor, logits: Tensor) -> Tensor:
        """Return the streams behind the part [T, S * H]. output: the part's, [T, H]."""
        outputs = kernels.gather_columns(output, self._number_of_output)
        injected = sigmoid_gate(outputs, kernels.gather_columns(logits, self._stream_of_number))
        return add(streams, scale(injected, 2.0))


def spread_columns(context: LayerContext, num_streams: int, hidden_size: int) -> Tensor:
    """Return the stream of each number of all streams, [S * H] int64."""
    streams = torch.arange(num_streams, device=context.device)
    return streams.repeat_interleave(hidden_size, output_size=num_streams * hidden_size)
