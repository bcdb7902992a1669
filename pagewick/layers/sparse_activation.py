"""The gate of an MLP most of whose numbers are 0 (arXiv:2506.06644). T: tokens; I: this rank's intermediate size."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.kernels.batch_invariance import sum_rows
from pagewick.layers.context import LayerContext


def deviations_below(sparsity: float) -> float:
    """Return the number below which this share of normally distributed numbers lies, in deviations above their mean.

    It is computed in float32, as by transformers and for GGUF files; minus infinity for a share of 0.
    """
    return float(torch.erfinv(2.0 * torch.tensor(sparsity, dtype=torch.float32) - 1.0) * math.sqrt(2.0))


class SparseActivation(nn.Module):
    """x [T, 2 * I] = (gate, up) -> activation(top(gate)) * up: [T, I].

    top subtracts, from all gates of a token, the number below which the share `sparsity` of them lies if they are
    normally distributed, and makes 0 of what is below 0. kind: a name in kernels.reference.ACTIVATIONS. total_size: the
    intermediate size of all ranks together, whose gates have one mean and one deviation.
    """

    def __init__(self, context: LayerContext, kind: str, sparsity: float, total_size: int) -> None:
        super().__init__()
        self._kind, self._total_size = kind, total_size
        self._factor = deviations_below(sparsity)
        self._collectives = context.collectives

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1] // 2
        gate, up = x[..., :size], x[..., size:]
        top = kernels.gaussian_top_k(gate, self._factor) if self._collectives.tp_size == 1 else self._shared_top(gate)
        return kernels.multiply(kernels.activation(top, self._kind), up)

    def _shared_top(self, gate: Tensor) -> Tensor:
        """kernels.gaussian_top_k of the gates of all ranks together."""
        wide = gate.to(torch.float32)
        sums = torch.stack((sum_rows(wide), sum_rows(wide.square())))
        mean, mean_square = self._collectives.all_reduce(sums) / self._total_size
        deviation = (mean_square - mean.square()).clamp(min=0.0).sqrt()
        return torch.relu(wide - (mean + self._factor * deviation).unsqueeze(-1)).to(gate.dtype)
