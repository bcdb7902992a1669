"""Fixtures for tests of the command line."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import pagewick.llm
from pagewick.cli import random_model
from pagewick.cli.random_model import SHAPES, write_random_model
from tests.cli.fake_llm import FakeLLM


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights, small enough for processes that a test starts."""
    directory = tmp_path_factory.mktemp("tiny-model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_model, "NUM_TRAINING_FILES", 3)
        write_random_model(replace(SHAPES["qwen3-tiny"], num_hidden_layers=2, vocab_size=2048), directory)
    return directory


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeLLM]:
    """The FakeLLMs that commands open instead of LLM."""
    instances: list[FakeLLM] = []
    monkeypatch.setattr(FakeLLM, "opened", instances, raising=False)
    monkeypatch.setattr(pagewick.llm, "LLM", FakeLLM)
    return instances
