"""Operations on each number by itself, for models: sums, products, caps (Gemma 2's, arXiv:2408.00118), activations."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.errors import ModelLoadError
from pagewick.kernels import add, limit, multiply, scale, sigmoid_gate, soft_cap
from pagewick.layers.config import XIELU_SHAPES
from pagewick.layers.context import LayerContext
from pagewick.quantization.share import check_floats

__all__ = [
    "Activation", "OutputScale", "VectorScale", "Xielu", "add", "limit", "multiply", "scale", "sigmoid_gate",
    "soft_cap",
]  # fmt: skip


class Activation(nn.Module):
    """kind(x), a name in kernels.reference.ACTIVATIONS, of each number; with is_gated, x [..., 2 * size]
    -> kind(first half) * second half (arXiv:2002.05202).
    """

    def __init__(self, kind: str, *, is_gated: bool) -> None:
        super().__init__()
        self._kind = kind
        self._function = kernels.gated_activation if is_gated else kernels.activation

    def forward(self, x: Tensor) -> Tensor:
        return self._function(x, self._kind)


class OutputScale(nn.Module):
    """One number, from the checkpoint, by which every number is multiplied."""

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=context.dtype, device=context.device), requires_grad=False)
        self._factor = 1.0

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, "weight"),)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_floats(tensor, (1,))
        self.weight.copy_(tensor)

    def finish_loading(self) -> None:
        """Take the number to the host, where the operation wants it."""
        self._factor = float(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return scale(x, self._factor)


class VectorScale(nn.Module):
    """A vector, from the checkpoint, by which every row is multiplied: [..., size] -> [..., size]."""

    def __init__(self, context: LayerContext, size: int) -> None:
        super().__init__()
        empty = torch.empty(size, dtype=context.dtype, device=context.device)
        self.weight = nn.Parameter(empty, requires_grad=False)

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, "weight"),)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_floats(tensor, tuple(self.weight.shape))
        self.weight.copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        return multiply(x, self.weight)


class Xielu(nn.Module):
    """xIELU (arXiv:2411.13010) of each number, with the numbers of a checkpoint, from which it is computed in float32.

    softplus(alpha_p) is the factor of the square above 0, beta + softplus(alpha_n) that of the power below.
    """

    def __init__(self, context: LayerContext) -> None:
        super().__init__()
        for name, shape in XIELU_SHAPES.items():
            number = torch.ones(shape, dtype=torch.float32, device=context.device)
            self.register_parameter(name, nn.Parameter(number, requires_grad=False))
        self._numbers = 1.0, 1.0, 1.0, -1.0

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return ((None, name) for name in XIELU_SHAPES)

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        check_floats(tensor, XIELU_SHAPES[name])
        self.get_parameter(name).copy_(tensor)

    def finish_loading(self) -> None:
        """Take the numbers to the host, where the operation wants them. Raises ModelLoadError for an eps from 0 on."""
        of_alphas = (torch.nn.functional.softplus(self.get_parameter(name)) for name in ("alpha_p", "alpha_n"))
        positive, negative = (float(number) for number in of_alphas)
        beta, eps = (float(self.get_parameter(name)) for name in ("beta", "eps"))
        if not eps < 0:
            raise ModelLoadError(f"act_fn.eps of an MLP is {eps}, and must be below 0\n  use another checkpoint")
        self._numbers = positive, beta + negative, beta, eps

    def forward(self, x: Tensor) -> Tensor:
        return kernels.xielu(x, *self._numbers)
