"""Runs kernels of pagewick/kernels/triton/ without a GPU: interpreted in this process, compiled ahead in another.

A module of kernels that is imported here is interpreted: its host functions take tensors on the CPU, and are compared
with their definitions. tests/conftest.py sets TRITON_INTERPRET for that, which Triton reads when it is imported. The
interpreter computes bfloat16 wrongly, so kernels convert it to float32 where they load it.

Interpreted functions cannot be compiled, so another process does that (benchmarks/gpu_kernels.py).
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

# Whether kernels run on a real GPU (on_gpu.py).
IS_ON_GPU = "PAGEWICK_TEST_GPU" in os.environ
# Whether kernels are compiled, in place of being interpreted, and run there or in the emulator of PTX (ptx/).
IS_COMPILED = IS_ON_GPU or "PAGEWICK_EMULATE_PTX" in os.environ
# Half a unit in the last place of 1, and in float32 what long sums add to it.
ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-10}


def assert_close(found: Tensor, expected: Tensor, *, absolute: float = 1e-5) -> None:
    """That a kernel's result is its definition's (computed in float32 or float64) but for one rounding."""
    assert found.shape == expected.shape
    error, size = (found.double() - expected.double()).abs(), expected.double().abs()
    excess = error - absolute - ROUNDING.get(found.dtype, 0.0) * size
    assert bool((excess <= 0).all()), f"an error of {excess.max().item()} more than tolerated"


@functools.cache
def compile_modules(modules: tuple[str, ...], *, sample_only: bool) -> list[dict[str, Any]]:
    """Compile the variants of modules for every target: fields of benchmarks.gpu_kernels.Resources, and faults."""
    command = [sys.executable, "-m", "benchmarks.gpu_kernels", "--json", *(["--sample"] if sample_only else [])]
    command += [argument for module in modules for argument in ("--module", module)]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]
