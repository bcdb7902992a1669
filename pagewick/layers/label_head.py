"""Heads that rate a text by labels, and layers that change a pooled vector. Every rank holds them whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from pagewick.kernels import reference
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import WeightLayer
from pagewick.quantization.share import whole_rows

ACTIVATIONS: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    **reference.ACTIVATIONS,
    "identity": lambda x: x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


class LabelScores(WeightLayer):
    """The last layer of a head of labels: [N, hidden_size] -> [N, num_labels] in float32."""

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, num_labels: int, *, has_bias: bool = False
    ) -> None:
        # Like a router's, the sums are not rounded: scores of texts that are alike differ little.
        super().__init__(context.make_weight(prefix, whole_rows(num_labels, hidden_size), has_float32_sums=True))
        self.bias = self.make_vector(torch.float32, context.device) if has_bias else None

    def forward(self, hidden_states: Tensor) -> Tensor:
        scores = self.weight.linear(hidden_states, out_dtype=torch.float32)
        return scores if self.bias is None else scores + self.bias


class DenseLayer(WeightLayer):
    """activation(weight x + bias), computed in float32: [N, in_features] -> [N, out_features] of the same dtype.

    It changes a few rows that stand for whole texts, so that its speed hardly matters. activation: a name in
    ACTIVATIONS.
    """

    def __init__(
        self,
        context: LayerContext,
        prefix: str,
        in_features: int,
        out_features: int,
        activation: str,
        *,
        has_bias: bool,
    ) -> None:
        context = replace(context, dtype=torch.float32)
        super().__init__(context.make_weight(prefix, whole_rows(out_features, in_features)))
        self.bias = self.make_vector(torch.float32, context.device) if has_bias else None
        self._activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor) -> Tensor:
        return self._activation(self.weight.linear(x.float(), self.bias)).to(x.dtype)
