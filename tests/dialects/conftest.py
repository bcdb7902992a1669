"""Stand-ins for the models that the documents name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pagewick.cli import random_model
from pagewick.cli.random_model import SHAPES, Shape, write_random_model
from tests.weights.conftest import hub as hub  # a stand-in for a Hugging Face hub
from tests.weights.gguf.demo import write_demo


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with random weights and a context of 262,144 tokens, the longest one in the documents.

    Two ranks can share its widths in blocks of 256.
    """
    shape = replace(SHAPES["qwen3-tiny"], num_hidden_layers=2, vocab_size=2048, num_attention_heads=8)
    return written(shape, tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture(scope="session")
def moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with 256 experts, as the documents' DeepSeek-R1, and widths that eight ranks share in blocks of 32."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 8, "num_key_value_heads": 8}
    sizes |= {"head_dim": 32, "vocab_size": 2048, "num_experts": 256, "moe_intermediate_size": 256}
    return written(replace(SHAPES["qwen3-moe-1b"], **sizes), tmp_path_factory.mktemp("moe-model"))


def written(shape: Shape, directory: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(random_model, "NUM_TRAINING_FILES", 3)
        write_random_model(shape, directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 262144}))
    return directory


@pytest.fixture(scope="session")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model as a GGUF file, with the longest context in the documents."""
    return write_demo(tmp_path_factory.mktemp("gguf") / "model-Q8_0.gguf", context_length=262144)
