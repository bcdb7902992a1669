"""Normalisation: of hidden states, alone and fused with the residual addition before it, and of query and key heads."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.kernels import batch_invariance, options
from pagewick.layers.context import LayerContext
from pagewick.parallel.collectives import Collectives
from pagewick.quantization.share import check_floats


class Norm(nn.Module):
    """Base of normalisations: parameters of one row's size, which every rank holds whole.

    has_weight: False: the checkpoint has no weight, and rows are not multiplied by one.
    """

    weight: Tensor

    def __init__(
        self, context: LayerContext, size: int, eps: float, *, has_bias: bool, has_weight: bool = True
    ) -> None:
        super().__init__()
        self.eps = eps
        if has_weight:
            self.weight = empty_parameter(context, size)
        else:
            self.weight = torch.ones(size, dtype=context.dtype, device=context.device)
        self.bias = empty_parameter(context, size) if has_bias else None

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return [(None, name) for name, _ in self.named_parameters()]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        parameter = self.get_parameter(name)
        check_floats(tensor, tuple(parameter.shape))
        parameter.copy_(tensor)


def empty_parameter(context: LayerContext, *shape: int) -> nn.Parameter:
    """Make an uninitialised parameter in the dtype of the activations."""
    return nn.Parameter(torch.empty(shape, dtype=context.dtype, device=context.device), requires_grad=False)


def empty_sum(context: LayerContext, size: int) -> Tensor | None:
    """Return a row of zeros [1, size] in float32, to which the first layer adds; None: activations have that dtype."""
    return None if context.dtype == torch.float32 else torch.zeros(1, size, device=context.device)


class RMSNorm(Norm):
    """y = x / sqrt(mean(x^2) + eps) * (weight + offset) over the last dimension (arXiv:1910.07467)."""

    def __init__(
        self, context: LayerContext, size: int, eps: float, *, offset: float = 0.0, has_weight: bool = True
    ) -> None:
        super().__init__(context, size, eps, has_bias=False, has_weight=has_weight)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self.weight, self.eps, self.offset)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (normed sum, x + residual)."""
        return kernels.add_rms_norm(x, residual, self.weight, self.eps, self.offset)


def normed_side_by_side(*parts: tuple[RMSNorm, Tensor]) -> Tensor:
    """Return the rows [T, size] of each part, normalised, beside those of the others: [T, sum of sizes]."""
    _, like = parts[0]
    whole = kernels.empty_result((len(like), sum(rows.shape[1] for _, rows in parts)), like.dtype, like.device)
    start = 0
    for norm, rows in parts:
        end = start + rows.shape[1]
        kernels.rms_norm(rows, norm.weight, norm.eps, norm.offset, out=whole[:, start:end])
        start = end
    return whole


class ScaledRMSNorm(RMSNorm):
    """An RMS norm whose results are multiplied by a constant, which becomes a part of the weight."""

    def __init__(self, context: LayerContext, size: int, eps: float, scale: float) -> None:
        super().__init__(context, size, eps)
        self._scale = scale

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        super().load_weight(name, tensor, part)
        self.weight.mul_(self._scale)


class PlainRMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) over the last dimension: an RMS norm without a weight."""

    def __init__(self, context: LayerContext, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self._ones = torch.ones(size, dtype=context.dtype, device=context.device)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.rms_norm(x, self._ones, self.eps)


class LayerNorm(Norm):
    """y = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension (arXiv:1607.06450).

    offset: is added to the weights of the file, in the dtype of the activations.
    """

    def __init__(
        self,
        context: LayerContext,
        size: int,
        eps: float,
        *,
        has_bias: bool,
        offset: float = 0.0,
        has_weight: bool = True,
    ) -> None:
        super().__init__(context, size, eps, has_bias=has_bias, has_weight=has_weight)
        self._offset = offset

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        super().load_weight(name, tensor, part)
        if name == "weight" and self._offset:
            self.weight.add_(self._offset)

    def forward(self, x: Tensor) -> Tensor:
        return kernels.layer_norm(x, self.weight, self.bias, self.eps)

    def add_and_norm(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (normed sum, x + residual)."""
        return kernels.add_layer_norm(x, residual, self.weight, self.bias, self.eps)


class HeadNorm(Norm):
    """The parameters of an options.HeadNorm, which rope_and_store applies; one weight for all heads.

    offset: added to the weight of an RMS norm. is_layer_norm: a layer norm instead, with a bias if has_bias.
    is_after_rotation: heads are rotated first.
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
        is_after_rotation: bool = False,
    ) -> None:
        super().__init__(context, head_dim, eps, has_bias=has_bias)
        self._offset, self._is_layer_norm, self._is_after_rotation = offset, is_layer_norm, is_after_rotation

    @property
    def kernel(self) -> options.HeadNorm:
        return options.HeadNorm(
            self.weight, self.bias, self.eps, self._offset, self._is_layer_norm, self._is_after_rotation
        )


def plain_head_norm(
    context: LayerContext, head_dim: int, eps: float, *, is_after_rotation: bool = False
) -> options.HeadNorm:
    """Return the RMS norm of heads that has no weight."""
    ones = torch.ones(head_dim, dtype=context.dtype, device=context.device)
    return options.HeadNorm(ones, eps=eps, is_after_rotation=is_after_rotation)


class HeadNorms(HeadNorm):
    """One weight for each head; the checkpoint calls that of head N of the whole model `norms.N.weight`.

    is_matrix: it has all of them as one matrix, `weight`.
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
        is_matrix: bool = False,
    ) -> None:
        super().__init__(context, head_dim, eps, is_layer_norm=is_layer_norm)
        self.weight = empty_parameter(context, len(heads), head_dim)
        self._heads = list(heads)
        self._total_num_heads = total_num_heads
        self._is_matrix = is_matrix

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        if self._is_matrix:
            return [(None, "weight")]
        return [(None, f"norms.{head}.weight") for head in range(self._total_num_heads)]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        if self._is_matrix:
            check_floats(tensor, (self._total_num_heads, self.weight.shape[-1]))
            self.weight.copy_(tensor[self._heads])
            return
        check_floats(tensor, (self.weight.shape[-1],))
        number = int(name.split(".")[1])
        for place, head in enumerate(self._heads):
            if head == number:
                self.weight[place].copy_(tensor)


class JointHeadNorm(Norm):
    """An RMS norm of all heads of a token as one vector (OLMo 2). A rank holds the weights of its heads.

    heads: ids of this rank's heads, in the order in which it holds them; an id may repeat. earlier: ids of the heads
    that the ranks before this one hold, whose squares this rank does not add to the sum.
    """

    def __init__(
        self,
        context: LayerContext,
        head_dim: int,
        eps: float,
        *,
        heads: Sequence[int],
        total_num_heads: int,
        earlier: Collection[int],
    ) -> None:
        super().__init__(context, len(heads) * head_dim, eps, has_bias=False)
        self._heads, self._shape = list(heads), (total_num_heads, head_dim)
        counts = [head not in earlier and head not in heads[:place] for place, head in enumerate(heads)]
        self._is_counted = torch.tensor(counts, device=context.device).repeat_interleave(head_dim)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        num_heads, head_dim = self._shape
        check_floats(tensor, (num_heads * head_dim,))
        self.weight.copy_(tensor.view(num_heads, head_dim)[self._heads].flatten())

    def sum_of_squares(self, x: Tensor) -> Tensor:
        """Return this rank's share of the sum over all heads: [T, heads * head_dim] -> [T] float32."""
        return batch_invariance.sum_rows(x.to(torch.float32).square() * self._is_counted)

    def scale(self, x: Tensor, squares: Tensor) -> None:
        """Normalise x [T, heads * head_dim] in place, given the sum of squares [T] over the heads of all ranks."""
        num_heads, head_dim = self._shape
        normed = x.to(torch.float32) * torch.rsqrt(squares / (num_heads * head_dim) + self.eps).unsqueeze(-1)
        x.copy_(normed.to(x.dtype) * self.weight)


def norm_jointly(norms: Sequence[JointHeadNorm], heads: Sequence[Tensor], collectives: Collectives) -> None:
    """Normalise each of `heads` [T, heads * head_dim] in place. The sums of all ranks are added at once."""
    if collectives.tp_size == 1:
        for norm, x in zip(norms, heads, strict=True):
            kernels.rms_norm(x, norm.weight, norm.eps, out=x)
        return
    squares = torch.stack([norm.sum_of_squares(x) for norm, x in zip(norms, heads, strict=True)])
    for norm, x, total in zip(norms, heads, collectives.all_reduce(squares), strict=True):
        norm.scale(x, total)
