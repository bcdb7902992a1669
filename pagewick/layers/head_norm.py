"""Normalisation of each of a rank's query or key heads, before they are rotated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from pagewick.kernels import options
from pagewick.layers.context import LayerContext
from pagewick.layers.norm import Norm, empty_parameter
from pagewick.quantization.shapes import check_floats


class HeadNorm(Norm):
    """The parameters of a options.HeadNorm, which rope_and_store applies; one weight for all heads.

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
        super().__init__(context, head_dim, eps, has_bias=has_bias)
        self._offset, self._is_layer_norm = offset, is_layer_norm

    @property
    def kernel(self) -> options.HeadNorm:
        return options.HeadNorm(self.weight, self.bias, self.eps, self._offset, self._is_layer_norm)


class HeadNorms(HeadNorm):
    """One weight for each head; the checkpoint calls that of head N of the whole model `norms.N.weight`.

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
        self.weight = empty_parameter(context, len(heads), head_dim)
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
