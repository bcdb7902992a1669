"""Text parts of larger models by themselves, whose files still have the larger one's names or its config.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewick.config import EngineConfig
from pagewick.engine.preflight import check_models
from pagewick.models.registry import read_config
from tests.models.answers import answers, running
from tests.models.checkpoints import write_checkpoint


def rename(directory: Path, prefix: str) -> None:
    """Give all tensors the names that they have in the larger model, and add one of another part."""
    file = directory / "model.safetensors"
    names = {"model": prefix, "lm_head": "language_model.lm_head" if prefix == "language_model.model" else "lm_head"}
    tensors = {}
    for name, tensor in load_file(file).items():
        first, _, rest = name.partition(".")
        tensors[f"{names[first]}.{rest}"] = tensor
    save_file(tensors | {"model.visual.norm.weight": torch.ones(3)}, file)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("qwen3.5", "model.language_model"),
        ("qwen3.5-moe", "model.language_model"),
        ("gemma-3-1b", "language_model.model"),
        ("gemma-3n", "model.language_model"),
        ("gemma-4-26b-a4b", "model.language_model"),
        ("ministral-3", "language_model.model"),
    ],
)
def test_names_of_the_larger_model(name: str, prefix: str, tmp_path: Path) -> None:
    """As text models that were cut out of Qwen3.5 have them."""
    write_checkpoint(name, tmp_path)
    prompts = [[5, 3, 9, 12]]
    with running(tmp_path) as engine:
        (expected,) = answers(engine, prompts, num_tokens=4)
    rename(tmp_path, prefix)
    check_models(EngineConfig(model=str(tmp_path)))
    with running(tmp_path) as engine:
        (found,) = answers(engine, prompts, num_tokens=4)
    assert found.token_ids == expected.token_ids
    assert torch.equal(found.logits, expected.logits)


@pytest.mark.parametrize(
    "name", ["qwen3.5", "qwen3.5-moe", "gemma-3-1b", "gemma-3n", "gemma-4-26b-a4b", "mistral-nemo", "ministral-3"]
)
def test_entries_of_the_larger_model(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    alone = read_config(config)
    nested = {"architectures": config["architectures"], "tie_word_embeddings": alone.tie_word_embeddings}
    part = read_config({**nested, "text_config": config})
    assert set(alone.names) == set(part.names)
    assert replace(part, names=alone.names) == alone


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("qwen3.5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3.5-moe", "Qwen3_5MoeForConditionalGeneration"),
        ("gemma-3-1b", "Gemma3ForConditionalGeneration"),
        ("gemma-3n", "Gemma3nForConditionalGeneration"),
        ("gemma-4-26b-a4b", "Gemma4ForConditionalGeneration"),
    ],
)
def test_the_name_of_the_larger_model(name: str, architecture: str, tmp_path: Path) -> None:
    """As pruned models of Qwen3.5 have it, and what AutoRound writes."""
    write_checkpoint(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    alone, part = read_config(config), read_config({**config, "architectures": [architecture]})
    assert set(alone.names) == set(part.names)
    assert replace(part, names=alone.names, architecture=alone.architecture) == alone
