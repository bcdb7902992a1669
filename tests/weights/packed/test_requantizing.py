"""Packed weights that are quantized again at load, to another format, and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pagewick.config import EngineConfig
from pagewick.engine.preflight import FoundModel, check_models, plan_at_load
from pagewick.quantization.at_load import quantize_rows
from pagewick.quantization.plan import QuantizationPlan
from pagewick.weights.description import describe
from pagewick.weights.opening import open_source
from pagewick.weights.progress import Progress
from pagewick.weights.quantized_cache import QuantizedCache, cache_key
from pagewick.weights.quantized_source import quantized_once
from tests.weights.packed.harness import Written, write_packed
from tests.weights.packed.test_readers import GPTQ
from tests.weights.packed.writers import gptq


@pytest.fixture
def written(tmp_path: Path) -> Written:
    quantization = {**GPTQ, "group_size": 32, "desc_act": True}
    return write_packed(tmp_path / "model", quantization, gptq(group_size=32, desc_act=True))


def plan_of(directory: Path) -> QuantizationPlan:
    found = FoundModel.of(describe(directory))
    return plan_at_load("q4_0", found.config, found.names, {})


def test_blocks_are_those_of_the_numbers(written: Written, tmp_path: Path) -> None:
    """Columns that the file has in another order are quantized in the model's."""
    (found,) = check_models(EngineConfig(model=str(written.directory), quantization="q4_0"))
    plan, cache = plan_of(written.directory), QuantizedCache(tmp_path / "cache")
    assert set(written.packed) < set(plan.formats)
    assert {found.blocks[name].dtype for name in written.packed} == {"Q4_0"}
    with open_source(written.directory, as_numbers=True) as source:
        kept = quantized_once(written.directory, source, plan, cache, Progress())
        assert kept is not None
        for name in written.packed:
            assert kept.stored_type(name) == "Q4_0"
            assert torch.equal(kept.get(name), quantize_rows("Q4_0", written.meant[name]))


def test_the_cache_follows_the_rules_in_config_json(written: Written) -> None:
    """A change of config.json alone changes what the tensors mean."""
    plan, path = plan_of(written.directory), written.directory / "config.json"
    before = cache_key(written.directory, plan)
    assert cache_key(written.directory, plan) == before
    config = json.loads(path.read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    path.write_text(json.dumps(config))
    assert cache_key(written.directory, plan) != before
