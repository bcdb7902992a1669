"""The shared fixtures of tests/conftest.py and the distribution of tests work as described."""

from __future__ import annotations

from types import FunctionType

import pytest
import torch

from tests.conftest import MAX_POISONED_BYTES, poisoned


def call(allocate, *args, **kwargs):  # type: ignore[no-untyped-def]
    return allocate(*args, **kwargs)


in_the_package = FunctionType(call.__code__, {"__name__": "pagewick.kernels.reference"})
in_a_library = FunctionType(call.__code__, {"__name__": "torch.nn.functional"})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_package_gets_uninitialised_memory_full_of_nan(dtype: torch.dtype) -> None:
    assert in_the_package(poisoned(torch.empty), 3, dtype=dtype).isnan().all()
    assert in_the_package(poisoned(torch.empty), 8, dtype=torch.uint8).view(dtype).isnan().all()
    assert in_the_package(poisoned(torch.empty_like), torch.zeros(3, dtype=dtype)).isnan().all()


def test_other_callers_and_large_or_other_tensors_are_not_filled() -> None:
    zeros = poisoned(torch.zeros)
    assert not in_a_library(zeros, 3).any()
    assert not in_the_package(zeros, 3, dtype=torch.int64).any()
    assert not in_the_package(zeros, MAX_POISONED_BYTES // 4 + 1).any()
    assert in_the_package(poisoned(torch.empty), 3, device="meta").shape == (3,)
