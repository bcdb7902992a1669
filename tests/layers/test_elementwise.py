"""Activation functions, compared with their formulas in double precision."""

from __future__ import annotations

import math

import pytest
import torch

from pagewick.layers.elementwise import Activation


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * 4


@pytest.mark.parametrize("shape", [(1, 2), (5, 14), (2, 3, 96)])
def test_the_first_half_gates_the_second(shape: tuple[int, ...]) -> None:
    x = random(*shape)
    gate, up = x.double()[..., : shape[-1] // 2], x.double()[..., shape[-1] // 2 :]
    expected = (gate / (1 + torch.exp(-gate)) * up).float()
    torch.testing.assert_close(Activation("silu", is_gated=True)(x), expected)


@pytest.mark.parametrize("shape", [(1, 1), (5, 7), (2, 3, 48)])
def test_without_a_gate_the_function_applies_to_all_numbers(shape: tuple[int, ...]) -> None:
    x = random(*shape)
    wide = x.double()
    expected = 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    torch.testing.assert_close(Activation("gelu_tanh", is_gated=False)(x), expected.float(), atol=1e-6, rtol=1e-5)
