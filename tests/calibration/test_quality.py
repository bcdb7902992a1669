"""GPTQ and AWQ cost the built-in model less than rounding to nearest does."""

from __future__ import annotations

import os

import pytest

from pagewick.quantization.calibrated.results import Recipe
from tests.calibration.quality import measure


@pytest.mark.skipif(os.environ.get("PAGEWICK_DEEP") != "1", reason="it takes minutes; PAGEWICK_DEEP=1 runs it")
@pytest.mark.parametrize("group_size", [128, 64, 32])
def test_divergence_is_less_than_three_quarters_of_that_of_rounding(group_size: int) -> None:
    methods = ("rtn", "gptq", "awq")
    nearest, *calibrated = measure(
        [Recipe(method=method, symmetric=False, group_size=group_size) for method in methods]  # type: ignore[arg-type]
    )
    assert all(one.divergence < 0.75 * nearest.divergence for one in calibrated), [nearest, *calibrated]
