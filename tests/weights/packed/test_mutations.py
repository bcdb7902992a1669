"""Damaged checkpoints with packed weights: an error that names the problem, or a model; never a crash."""

from __future__ import annotations

import json
import os
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewick.config import EngineConfig
from pagewick.engine.preflight import check_models
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.weights.opening import open_source
from tests.weights.gguf.test_mutations import mutated
from tests.weights.packed.harness import SIZES, Writer, write_packed
from tests.weights.packed.test_readers import AWQ, GPTQ, ROUND
from tests.weights.packed.writers import awq, gptq, marlin

NUM_MUTATIONS = 1000 if os.environ.get("PAGEWICK_DEEP") == "1" else 60
VALUES = (None, True, 0, -1, 3, 8, 16, 2**40, "gptq", "", [], [["a"]], {}, {"-:.*": {}}, {"+:(": 3}, {"": {"bits": 3}})
ENTRIES = (
    *("quant_method", "bits", "group_size", "desc_act", "sym", "dynamic", "checkpoint_format", "version", "lm_head"),
    *("modules_to_not_convert", "modules_in_block_to_quantize", "extra_config", "packing_format", "zero_point"),
)
FORMATS: dict[str, tuple[dict[str, Any], Writer]] = {
    "gptq": ({**GPTQ, "group_size": 32, "desc_act": True}, gptq(group_size=32, desc_act=True)),
    "awq": ({**AWQ, "group_size": 32}, awq(32)),
    "awq gemv_fast": ({**AWQ, "version": "gemv_fast"}, awq(128, "gemv_fast")),
    "auto-round": ({**ROUND, "group_size": 32}, gptq(group_size=32)),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, marlin()),
}


def use(directory: Path) -> None:
    """Do all that loading does before the model is built: the checks, and every tensor."""
    check_models(EngineConfig(model=str(directory)))
    with open_source(directory) as source:
        for name in source.names():
            tensor = source.get(name)
            assert tensor.shape == source.shape(name) and tensor.dtype == source.dtype(name)


@pytest.mark.parametrize("name", FORMATS)
def test_mutated_checkpoints(name: str, tmp_path: Path) -> None:
    quantization, write = FORMATS[name]
    directory = write_packed(
        tmp_path / "model", quantization, write, entries={**SIZES, "num_hidden_layers": 1}
    ).directory
    weights, config = directory / "model.safetensors", directory / "config.json"
    data, entries = weights.read_bytes(), json.loads(config.read_text())
    header_bytes, num_refused = int.from_bytes(data[:8], "little") + 8, 0
    use(directory)
    for seed in range(NUM_MUTATIONS):
        random = Random(f"{name}-{seed}")
        if seed % 2:
            weights.write_bytes(mutated(data, random, header_bytes))
        else:
            changed = {**entries["quantization_config"], random.choice(ENTRIES): random.choice(VALUES)}
            config.write_text(json.dumps({**entries, "quantization_config": changed}))
        try:
            use(directory)
        except (ModelLoadError, ConfigError) as error:
            num_refused += 1
            assert len(str(error)) < 1500 and len(str(error).splitlines()) <= 6, seed
        weights.write_bytes(data)
        config.write_text(json.dumps(entries))
    assert NUM_MUTATIONS // 4 < num_refused < NUM_MUTATIONS
