"""SwiGLU against its formula."""

from __future__ import annotations

import pytest
import torch

from pagewick.layers.activation import SiluAndMul


@pytest.mark.parametrize("shape", [(1, 2), (5, 14), (2, 3, 96)])
def test_the_first_half_gates_the_second(shape: tuple[int, ...]) -> None:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 4
    gate, up = x.double()[..., : shape[-1] // 2], x.double()[..., shape[-1] // 2 :]
    torch.testing.assert_close(SiluAndMul()(x), (gate / (1 + torch.exp(-gate)) * up).float())
