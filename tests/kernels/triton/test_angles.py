"""Rotary angles in Triton against their definitions, interpreted."""

from __future__ import annotations

import pytest
import torch

from pagewick.kernels import reference

angles = pytest.importorskip("pagewick.kernels.triton.angles")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
POSITIONS = torch.tensor([0, 1, 31, 32, 33, 500, 100_000])


def test_rotary_angles() -> None:
    frequencies = 5000.1 ** (-torch.arange(0, 20, 2) / 20)
    for scale in (1.0, 1.25):
        found = angles.rotary_angles(POSITIONS, frequencies, scale)
        torch.testing.assert_close(found, reference.rotary_angles(POSITIONS, frequencies, scale), rtol=0, atol=2**-22)
    assert angles.rotary_angles(POSITIONS[:0], frequencies)[0].shape == (0, 10)


@pytest.mark.parametrize(("rotary_dim", "factor", "original"), [(4, 1.0, 1), (10, 4.0, 32), (128, 2.5, 300)])
def test_dynamic_angles(rotary_dim: int, factor: float, original: int) -> None:
    found = angles.dynamic_rotary_angles(POSITIONS, 5000.1, rotary_dim, factor, original)
    expected = reference.dynamic_rotary_angles(POSITIONS, 5000.1, rotary_dim, factor, original)
    # A power may be rounded to the next float32: a unit in the last place of the frequency, so times the position.
    tolerance = (3 * 2.0**-24 * POSITIONS.double() + 2.0**-23).unsqueeze(-1)
    for mine, wanted in zip(found, expected, strict=True):
        assert ((mine.double() - wanted.double()).abs() <= tolerance).all()
    with pytest.raises(ValueError, match="dynamic scaling"):
        angles.dynamic_rotary_angles(POSITIONS, 5000.1, rotary_dim, 0.5, original)
