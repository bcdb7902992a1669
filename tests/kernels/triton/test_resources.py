"""Every kernel compiles for its targets within the limits: no spills, shared memory, tensor cores where meant.

By default a sample of the variants, each for one of its targets; with PAGEWICK_DEEP=1 everything that host functions
can choose.
"""

from __future__ import annotations

import pytest

from pagewick.kernels.triton import MODULES
from tests.deep import IS_DEEP
from tests.kernels.triton.harness import compile_modules


@pytest.mark.timeout(36000 if IS_DEEP else 900)
@pytest.mark.parametrize("module", MODULES)
def test_variants_compile_within_the_limits(module: str) -> None:
    # The sample is compiled in one process: to start one for each module takes half as long again.
    found = compile_modules((module,) if IS_DEEP else tuple(MODULES), sample_only=not IS_DEEP)
    compiled = [each for each in found if each["module"] == module]
    assert compiled, f"no variant of {module} is in the sample"
    assert [fault for each in compiled for fault in each["faults"]] == []
