"""Queries that are scaled by the logarithm of their position, each head's in its own way.

Scalable softmax (arXiv:2501.19399): a query is multiplied by scale * log(position + 1) + bias, with two numbers of each
head that the file holds, so that attention does not become flatter as a sequence becomes longer. T: tokens of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.layers.context import LayerContext
from pagewick.layers.norm import empty_parameter
from pagewick.layers.rotary import Angles
from pagewick.quantization.share import check_floats


class LogPositions(nn.Module):
    """positions [T] -> log(position + 1) [T, 1] in the dtype of hidden states: looked up once per step."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        numbers = torch.arange(1, context.max_model_len + 1, dtype=torch.float32)
        self._logs = numbers.log().unsqueeze(1).to(context.device, context.dtype)
        self._nothing = torch.empty(0, device=context.device)

    def forward(self, positions: Tensor) -> Tensor:
        assert len(positions.shape) == 1, "queries are scaled by a token's only position"
        return kernels.gather_rows(self._logs, positions, len(self._logs), 1, False)

    def added_to(self, angles: Angles | None, logs: Tensor) -> Angles:
        """Return a layer's angles with what `forward` has returned; None: the layer rotates nothing."""
        return Angles(self._nothing, self._nothing, logs=logs) if angles is None else angles._replace(logs=logs)


class LogScales(nn.Module):
    """Queries [T, heads * head_dim] of this rank -> the same, scaled. first_head: that of all heads which is the first.

    Factors are rounded as the numbers are to the dtype of hidden states, as in transformers.
    """

    def __init__(
        self, context: LayerContext, head_dim: int, num_heads: int, *, total_num_heads: int, first_head: int = 0
    ) -> None:
        super().__init__()
        self.scale = empty_parameter(context, num_heads)
        self.bias = empty_parameter(context, num_heads)
        self._total_num_heads, self._heads = total_num_heads, slice(first_head, first_head + num_heads)
        self._only_column = torch.zeros(num_heads, dtype=torch.int64, device=context.device)
        heads = torch.arange(num_heads, device=context.device)
        self._columns = heads.repeat_interleave(head_dim, output_size=num_heads * head_dim)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, "scale"), (None, "bias"))

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_floats(tensor, (self._total_num_heads,))
        self.get_parameter(name).copy_(tensor[self._heads])

    def forward(self, queries: Tensor, angles: object) -> Tensor:
        """angles: an Angles with logs."""
        assert isinstance(angles, Angles) and angles.logs is not None, "the decoder adds them"
        factors = kernels.gather_columns(angles.logs, self._only_column)
        factors = kernels.add(kernels.multiply(factors, self.scale), self.bias)
        return kernels.multiply(queries, kernels.gather_columns(factors, self._columns))
