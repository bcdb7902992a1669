"""The public names of `import pagewick`, and the modules that it must not load."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import pagewick
from pagewick import openmp


def test_every_public_name_is_there() -> None:
    for name in pagewick.__all__:
        value = getattr(pagewick, name)
        assert value.__name__ == name if name != "__version__" else isinstance(value, str)
    assert set(pagewick.__all__) <= set(dir(pagewick))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'Llm'"):
        _ = pagewick.Llm


def test_every_exception_is_public() -> None:
    from pagewick import errors

    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}
    assert defined <= set(pagewick.__all__)


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        ("import pagewick", "torch transformers rich tokenizers starlette"),
        ("from pagewick import SamplingParams, EngineConfig, InvalidRequestError", "torch rich tokenizers"),
        ("from pagewick import LLM, AsyncEngine, RequestOutput, Engine, Message", "torch transformers rich"),
    ],
)
def test_importing_is_cheap(statement: str, heavy: str) -> None:
    code = f"import sys; {statement}; sys.exit(' '.join(set({heavy!r}.split()) & set(sys.modules)) or 0)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU's OpenMP runtime on Linux only")
@pytest.mark.parametrize("is_first", [False, True])
def test_a_program_that_imports_torch_first_is_warned_of_spinning_threads(is_first: bool) -> None:
    modules = "torch, pagewick" if is_first else "pagewick, torch"
    environment = {name: value for name, value in os.environ.items() if name not in openmp.VARIABLES}
    code = f"import {modules}; from pagewick import openmp; openmp.warn_if_too_late(1); openmp.warn_if_too_late(2)"
    arguments = [sys.executable, "-c", code]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True, env=environment)
    assert result.stderr.count("import pagewick first, or set OMP_WAIT_POLICY=PASSIVE") == is_first
