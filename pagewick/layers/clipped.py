"""Products whose inputs and outputs are limited by numbers of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from pagewick.layers.config import CLIP_BOUNDS
from pagewick.layers.context import LayerContext
from pagewick.layers.linear import Linear
from pagewick.quantization.share import check_floats


class ClippedLinear(nn.Module):
    """x [..., in] -> limited(linear(limited(x))) [..., out]; the file has `linear` within a module of that name.

    is_clipped: whether the file has the limits, CLIP_BOUNDS, one number each; else nothing is limited. Ranks limit
    their shares of the input, and the output after it has been added up.
    """

    # A limit may be infinite.
    takes_infinity = True

    def __init__(self, context: LayerContext, linear: Linear, *, is_clipped: bool) -> None:
        super().__init__()
        self.linear = linear
        for name in CLIP_BOUNDS if is_clipped else ():
            bound = torch.empty((), dtype=torch.float32, device=context.device)
            self.register_parameter(name, nn.Parameter(bound, requires_grad=False))
        self._bounds: tuple[float, ...] = ()

    def expected_weights(self) -> Iterable[tuple[str | None, str]]:
        return [(None, name) for name in self._parameters]

    def load_weight(self, name: str, tensor: Tensor, part: str | None) -> None:
        """Keep a limit, which may be infinite. Raises ModelLoadError unless it is one floating-point number."""
        check_floats(tensor, ())
        self.get_parameter(name).copy_(tensor)

    def finish_loading(self) -> None:
        """Take the limits to the host, where the operation wants them."""
        self._bounds = tuple(float(bound) for bound in self._parameters.values() if bound is not None)

    def forward(self, x: Tensor) -> Tensor:
        if not self._bounds:
            return self.linear(x)  # type: ignore[no-any-return]
        low_in, high_in, low_out, high_out = self._bounds
        return self.linear(torch.clamp(x, low_in, high_in)).clamp_(low_out, high_out)  # type: ignore[no-any-return]
