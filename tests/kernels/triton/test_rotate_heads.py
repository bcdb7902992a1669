"""Rotation of heads in Triton against the definition, interpreted."""

from __future__ import annotations

import pytest
import torch

from pagewick.kernels import batch_invariance, reference
from pagewick.kernels.options import Rotation
from tests.kernels.triton.comparison import DTYPES, assert_near, numbers
from tests.kernels.triton.harness import IS_COMPILED

rotate = pytest.importorskip("pagewick.kernels.triton.rotate_heads")
# D and R. Distances that are multiples of 8, of 4 and of less; rotations of parts, and of more than a program's pairs.
SIZES = [(80, 80), (72, 72), (64, 32), (20, 10), (13, 12), (300, 280)]


def angles(num_rows: int, half: int, *, interleaved: bool = False) -> Rotation:
    theta = 9 * numbers(num_rows, half, seed=1)
    return Rotation(theta.cos(), theta.sin(), interleaved)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rotated_heads(dtype: torch.dtype, head_dim: int, rotary_dim: int, interleaved: bool) -> None:
    """Heads as the second part of a fused product."""
    x = numbers(5, 3 * 7 * head_dim).to(dtype)[:, 7 * head_dim : 14 * head_dim].unflatten(1, (7, head_dim))
    rotation = angles(5, rotary_dim // 2, interleaved=interleaved)
    found, expected = rotate.rotate_heads(x, rotation), reference.rotate_heads(x, rotation)
    assert found.is_contiguous()
    if dtype == torch.bfloat16 and not IS_COMPILED:
        # The interpreter cuts off what a GPU rounds.
        assert_near(found, expected)
    else:
        assert torch.equal(found, expected)


def test_more_heads_than_a_program_takes_and_no_rows() -> None:
    x, rotation = numbers(2, 70, 16), angles(2, 8)
    assert torch.equal(rotate.rotate_heads(x, rotation), reference.rotate_heads(x, rotation))
    assert rotate.rotate_heads(x[:0], angles(0, 8)).shape == (0, 70, 16)
    assert torch.equal(rotate.rotate_heads(x, angles(2, 0)), x)


def test_angles_and_rows_may_lie_apart() -> None:
    x, (cos, sin, _) = numbers(9, 2, 16), angles(9, 8)
    wide = torch.full((3, 20), float("nan"))
    wide[:, :8] = cos[::3]
    found = rotate.rotate_heads(x[::3], Rotation(wide[:, :8], sin[::3]))
    assert torch.equal(found, reference.rotate_heads(x, Rotation(cos, sin))[::3])


def test_other_calls_pass_to_the_definition(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not refused with --batch-invariant: each number is computed by itself."""
    monkeypatch.setattr(batch_invariance, "is_required", lambda: True)
    rotation = angles(3, 4)
    for x in (numbers(3, 2, 8).double(), numbers(3, 8, 2).transpose(1, 2)):
        assert torch.equal(rotate.rotate_heads(x, rotation), reference.rotate_heads(x, rotation))
