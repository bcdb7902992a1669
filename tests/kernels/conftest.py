"""Every implementation of the kernels: the reference and the native library with each instruction set."""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from pagewick.errors import ConfigError
from pagewick.kernels import TABLE, cpu, reference
from pagewick.kernels.cpu import build

# The library that the tests of this process load instead of the package's: native_programs.py builds it.
STAND_IN_LIBRARY = "PAGEWICK_TEST_STAND_IN_LIBRARY"
if _stand_in := os.environ.get(STAND_IN_LIBRARY):
    importlib.import_module("pagewick.kernels.cpu.binding").LIBRARY_PATH = Path(_stand_in)

ISAS = tuple(build.instruction_sets(platform.machine()))
# No test is made for an instruction set that this processor lacks; test_native_library.py names those.
ISAS_HERE = ISAS if (_library := cpu.library()) is None else tuple(_library.supported_isas())
# Those with other kernels than products with quantized weights.
FULL_ISAS_HERE = tuple(isa for isa in ISAS_HERE if build.PARTIAL_SETS.get(isa) != build.BYTE_PRODUCTS)


class NativeKernels:
    """The native operations by name, and what else the library does."""

    def __init__(self, library: cpu.NativeLibrary) -> None:
        self._library = library

    @property
    def isa(self) -> str:
        return self._library.isa

    def __getattr__(self, name: str) -> Callable[..., Any]:
        found: Callable[..., Any] = cpu.BACKEND.operations.get(name) or getattr(self._library, name)
        return found


@contextmanager
def library_off() -> Iterator[str]:
    """Until the end of the block, the native library is off; gives the reason that users read."""
    reason = "libpagewick_cpu.so not built; run `make install`"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pagewick.kernels.cpu.binding._loaded", lambda: (None, reason))
        TABLE.choose_again()
        yield reason
    TABLE.choose_again()


@pytest.fixture
def without_the_library() -> Iterator[str]:
    with library_off() as reason:
        yield reason


@pytest.fixture(params=["reference", *FULL_ISAS_HERE])
def kernels(request: pytest.FixtureRequest) -> Iterator[ModuleType | NativeKernels]:
    """Something with the operations of one implementation."""
    if request.param == "reference":
        yield reference
    else:
        yield from with_isa(request.param)


@pytest.fixture(params=FULL_ISAS_HERE)
def native(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    """The native library with one instruction set after the other, on one thread."""
    yield from with_isa(request.param)


@pytest.fixture(params=["reference", *FULL_ISAS_HERE])
def operations(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The definitions, then the native library, as `native`."""
    if request.param == "reference":
        yield reference
    else:
        yield from with_isa(request.param)


@pytest.fixture(params=ISAS_HERE)
def native_bytes(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    """The same, for products with quantized weights, of which more instruction sets have kernels of their own."""
    yield from with_isa(request.param)


def with_isa(isa: str) -> Iterator[NativeKernels]:
    library = required_library()
    before = library.isa
    library.select_isa(isa)
    library.set_num_threads(1)
    yield NativeKernels(library)
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
