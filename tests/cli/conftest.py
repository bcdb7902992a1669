"""Fixtures of the command line's tests."""

from __future__ import annotations

import pytest

import pagewick.llm
from tests.cli.fake_llm import FakeLLM


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """The FakeLLMs that commands open in place of LLM."""
    instances: list[FakeLLM] = []
    monkeypatch.setattr(FakeLLM, "opened", instances, raising=False)
    monkeypatch.setattr(pagewick.llm, "LLM", FakeLLM)
    return instances
