"""Every implementation of the kernels: the reference and the native library with each instruction set."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from pagewick.errors import ConfigError
from pagewick.kernels import cpu, reference
from pagewick.kernels.cpu import build

ISAS = tuple(build.instruction_sets(platform.machine()))


@pytest.fixture(params=["reference", *ISAS])
def kernels(request: pytest.FixtureRequest) -> Iterator[ModuleType | cpu.NativeLibrary]:
    """Something with the functions of pagewick.kernels."""
    if request.param == "reference":
        yield reference
    else:
        yield from with_isa(request.param)


@pytest.fixture(params=ISAS)
def native(request: pytest.FixtureRequest) -> Iterator[cpu.NativeLibrary]:
    """The native library with one instruction set after the other, on one thread."""
    yield from with_isa(request.param)


def with_isa(isa: str) -> Iterator[cpu.NativeLibrary]:
    library = required_library()
    if isa not in library.supported_isas():
        pytest.skip(f"this processor has no {isa}")
    before = library.isa
    library.select_isa(isa)
    library.set_num_threads(1)
    yield library
    library.select_isa(before)
    library.set_num_threads(torch.get_num_threads())


def required_library() -> cpu.NativeLibrary:
    """The library; without it the tests fail where it could have been built, and are skipped elsewhere."""
    library = cpu.library()
    if library is None:
        try:
            build.find_compiler()
        except ConfigError:
            pytest.skip(cpu.status())
        pytest.fail(cpu.status())
    return library
