"""Matrix products of Triton's interpreter whose bits do not depend on the processor."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from triton.runtime import interpreter


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
