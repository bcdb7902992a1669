"""Alternating updates (AltUp, arXiv:2301.13310) of several residual streams, and LAuReL (arXiv:2411.07501).

T: tokens of a batch; H: hidden_size; S: streams, of which the first is active and N = S - 1 are others.
"""

from __future__ import annotations

from typing import Final

from torch import Tensor, nn

from pagewick import kernels
from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.elementwise import VectorScale, add, scale, soft_cap
from pagewick.layers.linear import MergedReplicatedLinear, ReplicatedLinear
from pagewick.layers.norm import RMSNorm

# The mean square of a projected stream counts as at least this.
_LEAST: Final = 1e-5


class AltUpStreams(nn.Module):
    """The streams of a token before the first layer, and what follows from them behind the last one.

    The other streams begin as projections of the embedding, and are projected back at the end, where the mean of all
    streams counts. Projections are brought to the magnitude of the active stream.
    """

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, num_streams: int) -> None:
        super().__init__()
        self._num_others = num_streams - 1
        names = [f"projections.{index}" for index in range(self._num_others)]
        self.spread_proj = MergedReplicatedLinear(context, prefix, hidden_size, dict.fromkeys(names, hidden_size))
        self.unembed_projections = nn.ModuleList(
            ReplicatedLinear(context, f"{prefix}.unembed_projections.{index}", hidden_size, hidden_size)
            for index in range(self._num_others)
        )

    def spread(self, hidden_states: Tensor, batch: LayerBatch) -> Tensor:
        """Return the other streams of tokens whose active stream is given: [T, H] -> [T, N, H]."""
        projected = self.spread_proj(hidden_states, batch).view(len(hidden_states), self._num_others, -1)
        return kernels.match_magnitude(projected, hidden_states, _LEAST)

    def merge(self, active: Tensor, others: Tensor, batch: LayerBatch) -> Tensor:
        """Return the mean of all streams: [T, H] and [T, N, H] -> [T, H]."""
        total = active
        for index, projection in enumerate(self.unembed_projections):
            total = add(total, kernels.match_magnitude(projection(others[:, index], batch), active, _LEAST))
        return scale(total, 1.0 / (1 + self._num_others))


class AltUp(nn.Module):
    """The update of the streams by one layer. Its coefficients depend on what a router sees in the active stream."""

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, num_streams: int, eps: float) -> None:
        super().__init__()
        self.router_norm = RMSNorm(context, hidden_size, eps)
        self.modality_router = ReplicatedLinear(context, f"{prefix}.modality_router", hidden_size, num_streams)
        self.prediction_coefs = ReplicatedLinear(context, f"{prefix}.prediction_coefs", num_streams, num_streams**2)
        self.correction_coefs = ReplicatedLinear(context, f"{prefix}.correction_coefs", num_streams, num_streams)
        self.correct_output_scale = VectorScale(context, hidden_size)
        self._router_scale = 1.0 / hidden_size

    def predict(self, active: Tensor, others: Tensor, batch: LayerBatch) -> tuple[Tensor, Tensor]:
        """Return what is expected of the streams before the layer computes: [T, H] and [T, N, H]."""
        coefficients = self.prediction_coefs(self._modalities(active, batch), batch)
        return kernels.mix_streams(active, others, coefficients)

    def correct(self, active: Tensor, others: Tensor, computed: Tensor, batch: LayerBatch) -> tuple[Tensor, Tensor]:
        """Return the predicted streams, corrected by what the layer made of the active one: [T, H] and [T, N, H]."""
        coefficients = self.correction_coefs(self._modalities(computed, batch), batch)
        return kernels.correct_streams(active, others, computed, coefficients)

    def _modalities(self, x: Tensor, batch: LayerBatch) -> Tensor:
        """[T, H] -> [T, S], between -1 and 1."""
        routed = self.modality_router(scale(self.router_norm(x), self._router_scale), batch)
        # A cap of 1 is tanh.
        return soft_cap(routed, 1.0)


class Laurel(nn.Module):
    """A residual connection with learned weights of low rank: x [T, H] -> x + norm(right(left(x)))."""

    def __init__(self, context: LayerContext, prefix: str, hidden_size: int, rank: int, eps: float) -> None:
        super().__init__()
        self.linear_left = ReplicatedLinear(context, f"{prefix}.linear_left", hidden_size, rank)
        self.linear_right = ReplicatedLinear(context, f"{prefix}.linear_right", rank, hidden_size)
        self.post_laurel_norm = RMSNorm(context, hidden_size, eps)

    def forward(self, x: Tensor, batch: LayerBatch) -> Tensor:
        return add(x, self.post_laurel_norm(self.linear_right(self.linear_left(x, batch), batch)))
