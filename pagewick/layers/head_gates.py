"""Gates of attention heads: one number for each token and head, made from hidden states."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewick import kernels
from pagewick.layers.context import LayerBatch, LayerContext
from pagewick.layers.linear import ColumnParallelLinear


class HeadGates(ColumnParallelLinear):
    """[T, hidden_size] -> [T, heads * head_dim] of this rank, before the sigmoid: every number of a head has its gate.

    num_heads: of this rank.
    """

    def __init__(
        self, context: LayerContext, prefix: str, hidden_size: int, total_num_heads: int, num_heads: int, head_dim: int
    ) -> None:
        super().__init__(context, prefix, hidden_size, total_num_heads)
        heads = torch.arange(num_heads, device=context.device)
        self._columns = heads.repeat_interleave(head_dim, output_size=num_heads * head_dim)

    def forward(self, x: Tensor, batch: LayerBatch | None = None) -> Tensor:
        return kernels.gather_columns(super().forward(x, batch), self._columns)
