"""Hyper-connections (arXiv:2409.19606; mHC, arXiv:2512.24880): several residual streams, which each layer mixes.

T: tokens of a batch; S: streams; H: hidden_size. Every rank has all of it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.kernels.matrix import Matrix
from pagewick.kernels.options import HyperOptions, StreamWeights
from pagewick.layers.config import HyperConfig
from pagewick.layers.context import LayerContext
from pagewick.quantization.share import check_floats


class StreamReader(nn.Module):
    """Weights of streams that depend on the token, computed in float32 whatever the dtype of the streams.

    num_weights: S, of a sum alone, or HyperConfig.num_weights.
    """

    def __init__(self, context: LayerContext, hidden_size: int, config: HyperConfig, num_weights: int) -> None:
        super().__init__()
        width = config.num_streams * hidden_size
        self._matrix = Matrix.empty(num_weights, width, torch.float32, context.device)
        self.fn = nn.Parameter(self._matrix.data, requires_grad=False)
        num_scales = 1 if num_weights == config.num_streams else config.num_kinds
        self.base, self.scale = (
            nn.Parameter(torch.empty(size, dtype=torch.float32, device=context.device), requires_grad=False)
            for size in (num_weights, num_scales)
        )
        self._options = HyperOptions(
            self.base, self.scale, config.num_iterations, config.eps, config.norm_eps, config.magnitude
        )
        self._shapes = {"fn": (num_weights, width), "base": (num_weights,), "scale": (num_scales,)}

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, name) for name in self._shapes)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_floats(tensor, self._shapes[name])
        if name == "fn":
            self._matrix.load(tensor, 0)
        else:
            self.get_parameter(name).copy_(tensor)

    def weights(self, streams: Tensor) -> StreamWeights:
        """Return the weights of streams [T, S, H]."""
        products = self._matrix.linear(kernels.widen(streams.flatten(1)))
        return kernels.stream_weights(products, streams, self._options)


class HyperConnection(StreamReader):
    """Around a part of a layer: what it reads of the streams, and what these become."""

    def __init__(self, context: LayerContext, hidden_size: int, config: HyperConfig) -> None:
        super().__init__(context, hidden_size, config, config.num_weights)

    def read(self, streams: Tensor) -> tuple[Tensor, StreamWeights]:
        """Return the input of the part, and the weights that `write` needs: [T, S, H] -> [T, H]."""
        weights = self.weights(streams)
        return kernels.collapse_streams(streams, weights.before), weights

    def write(self, streams: Tensor, output: Tensor, weights: StreamWeights) -> Tensor:
        """Return the streams behind the part: [T, S, H]. output: the part's, [T, H]."""
        return kernels.expand_streams(streams, output, weights)


class HyperHead(StreamReader):
    """Behind the last layer: the sum of the streams that the model's norm reads."""

    def __init__(self, context: LayerContext, hidden_size: int, config: HyperConfig) -> None:
        super().__init__(context, hidden_size, config, config.num_streams)
        self._num_streams = config.num_streams
        # Recorded steps gather columns, but do not repeat rows.
        self._columns = torch.arange(hidden_size, device=context.device).repeat(config.num_streams)

    def spread(self, hidden_states: Tensor) -> Tensor:
        """Return the streams before the first layer, which are all alike: [T, H] -> [T, S, H]."""
        streams = kernels.gather_columns(hidden_states, self._columns)
        return streams.view(len(streams), self._num_streams, -1)

    def forward(self, streams: Tensor) -> Tensor:
        return kernels.collapse_streams(streams, self.weights(streams).before)
