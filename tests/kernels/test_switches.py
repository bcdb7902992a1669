"""Environment variables that switch kernels off."""

from __future__ import annotations

import pytest

from pagewick.errors import ConfigError
from pagewick.kernels import triton
from pagewick.kernels.cpu.binding import load
from pagewick.kernels.switches import is_switched_on


@pytest.mark.parametrize("value", ["0", "false", "No", " OFF"])
def test_no(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("PAGEWICK_NATIVE", value)
    monkeypatch.setenv("PAGEWICK_TRITON", value)
    assert load() == (None, f"PAGEWICK_NATIVE={value}")
    assert triton.why_off.__wrapped__() == f"PAGEWICK_TRITON={value}"


@pytest.mark.parametrize("value", ["", "1", "true", "Yes", "on "])
def test_yes(value: str) -> None:
    assert is_switched_on("PAGEWICK_NATIVE", {"PAGEWICK_NATIVE": value})


def test_unset() -> None:
    assert is_switched_on("PAGEWICK_NATIVE", {"PAGEWICK_TRITON": "0"})


def test_another_value_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWICK_NATIVE", "nein")
    with pytest.raises(ConfigError, match="PAGEWICK_NATIVE is 'nein'; set it to 0 or 1, or unset it"):
        load()
