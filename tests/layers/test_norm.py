"""RMSNorm compared with its formula in double precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagewick.errors import ModelLoadError
from pagewick.layers.norm import RMSNorm
from tests.layers.ranks import single_context


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def formula(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()).float()


def make_norm(size: int, eps: float) -> tuple[RMSNorm, Tensor]:
    norm, weight = RMSNorm(single_context(), size, eps), random(size, seed=7)
    assert list(norm.expected_weights()) == [(None, "weight")]
    norm.load_weight("weight", weight, None)
    return norm, weight


@pytest.mark.parametrize("shape", [(5, 48), (1, 16), (3, 4, 17), (0, 8)])
@pytest.mark.parametrize("eps", [1e-6, 1e-1])
def test_norm(shape: tuple[int, ...], eps: float) -> None:
    norm, weight = make_norm(shape[-1], eps)
    x = random(*shape) * 3
    torch.testing.assert_close(norm(x), formula(x, weight, eps))
    residual = random(*shape, seed=1)
    normed, total = norm.add_and_norm(x.clone(), residual.clone())
    torch.testing.assert_close(total, x + residual)
    torch.testing.assert_close(normed, formula(x + residual, weight, eps))


def test_zeros_stay_zeros() -> None:
    norm, _ = make_norm(16, 1e-6)
    assert torch.equal(norm(torch.zeros(2, 16)), torch.zeros(2, 16))


def test_a_weight_of_another_shape_is_an_error_with_both_shapes() -> None:
    norm, _ = make_norm(16, 1e-6)
    with pytest.raises(ModelLoadError, match=r"\[17\].*\[16\]"):
        norm.load_weight("weight", torch.zeros(17), None)
