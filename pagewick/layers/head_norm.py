"""Normalisation of a rank's query or key heads, each by itself, before they are rotated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.layers.context import LayerContext
from pagewick.quantization.shapes import check_floats


class HeadNorm(nn.Module):
    """Parameters of kernels.HeadNorm, which rope_and_store applies; one weight for all heads.

    offset: added to the weight of an RMS norm. is_layer_norm: a layer norm instead, with a bias if has_bias.
    """

    def __init__(
        self,
        context: LayerContext,
        head_dim: int,
        eps: float,
        *,
        offset: float = 0.0,
        is_layer_norm: bool = False,
        has_bias: bool = False,
    ) -> None:
        super().__init__()
        self.weight = _parameter(context, head_dim)
        self.bias = _parameter(context, head_dim) if has_bias else None
        self._options = eps, offset, is_layer_norm

    @property
    def kernel(self) -> kernels.HeadNorm:
        eps, offset, is_layer_norm = self._options
        return kernels.HeadNorm(self.weight, self.bias, eps=eps, offset=offset, is_layer_norm=is_layer_norm)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return [(None, name) for name, _ in self.named_parameters()]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        parameter = self.get_parameter(name)
        check_floats(tensor, (parameter.shape[-1],))
        parameter.copy_(tensor)


class HeadNorms(HeadNorm):
    """A weight for each head: `norms.N.weight` is that of head N of the whole model.

    heads: ids of this rank's heads, in the order in which it holds them; an id may repeat.
    """

    def __init__(
        self,
        context: LayerContext,
        head_dim: int,
        eps: float,
        *,
        heads: Sequence[int],
        total_num_heads: int,
        is_layer_norm: bool,
    ) -> None:
        super().__init__(context, head_dim, eps, is_layer_norm=is_layer_norm)
        self.weight = _parameter(context, len(heads), head_dim)
        self._heads = list(heads)
        self._total_num_heads = total_num_heads

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return [(None, f"norms.{head}.weight") for head in range(self._total_num_heads)]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_floats(tensor, (self.weight.shape[-1],))
        number = int(name.split(".")[1])
        for place, head in enumerate(self._heads):
            if head == number:
                self.weight[place].copy_(tensor)


def _parameter(context: LayerContext, *shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, dtype=context.dtype, device=context.device), requires_grad=False)
