"""How the kernels run: in Triton's interpreter, with exact products, or compiled on a GPU or in an emulator of PTX."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from tests.kernels import paged
from tests.kernels.triton.harness import IS_COMPILED, IS_ON_GPU


@pytest.fixture(scope="session", autouse=True)
def exact_dots() -> Iterator[None]:
    """Compute tl.dot in float64, and round once.

    NumPy's float32 products add in an order that depends on the place of a row and on the processor: tests that
    compare bits failed on some machines only.
    """
    as_triton_has_it = interpreter.InterpreterBuilder.create_dot

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        if d.data.dtype != np.float32 or a.dtype.primitive_bitwidth == 8:
            return as_triton_has_it(self, a, b, d, *options)
        product = np.matmul(a.data, b.data, dtype=np.float64).astype(np.float32)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
        yield


@pytest.fixture(scope="session", autouse=True)
def compiled() -> Iterator[None]:
    """Run every launch of a kernel on the GPU with PAGEWICK_TEST_GPU=1.

    With PAGEWICK_EMULATE_PTX=sm_90, or another target, run its PTX in the emulator.
    """
    with pytest.MonkeyPatch.context() as patch:
        if IS_ON_GPU:
            from tests.kernels.triton.on_gpu import use_gpu

            use_gpu(patch)
        elif IS_COMPILED:
            from tests.kernels.triton.ptx import launcher

            launcher.emulate_gpu(patch)
            launcher.emulate_package(patch)
            # The interpreter keeps probabilities in float32.
            patch.setitem(paged.PROBABILITY_ROUNDING, torch.float16, 2**-11)
        yield
