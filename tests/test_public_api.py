"""The public names of `import pagewick`, and the modules that it must not load."""

from __future__ import annotations

import subprocess
import sys

import pytest

import pagewick


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
