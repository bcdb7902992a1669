"""Packed weights that are quantized again at load, to another format, and kept."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from pagewick.config import EngineConfig
from pagewick.engine.model_loading import load_model
from pagewick.engine.preflight import FoundModel, check_models, plan_at_load
from pagewick.errors import ConfigError
from pagewick.local_models import with_local_models
from pagewick.parallel.collectives import Collectives
from pagewick.quantization.at_load import quantize_rows
from pagewick.quantization.ggml import dequantize
from pagewick.quantization.plan import QuantizationPlan
from pagewick.weights.description import describe
from pagewick.weights.opening import open_source
from pagewick.weights.progress import Progress
from pagewick.weights.quantized_cache import QuantizedCache, cache_key
from pagewick.weights.quantized_source import quantized_once
from tests.models.checkpoints import make_model, save
from tests.models.variants import VARIANTS
from tests.weights.packed.harness import SIZES, Written, write_packed
from tests.weights.packed.test_byte_formats import CASES
from tests.weights.packed.test_byte_models import writer
from tests.weights.packed.test_readers import GPTQ
from tests.weights.packed.writers import gptq

PLAIN = ("model.embed_tokens.weight", "lm_head.weight")


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
    with open_source(written.directory, mix="q4_0") as source:
        kept = quantized_once(written.directory, source, plan, cache, Progress())
        assert kept is not None
        for name in written.packed:
            assert kept.stored_type(name) == "Q4_0"
            assert torch.equal(kept.get(name), quantize_rows("Q4_0", written.meant[name]))


def test_int4_keeps_the_levels_of_weights_that_are_in_it(written: Written, tmp_path: Path) -> None:
    """The embedding and the head are quantized, and the others stay in the order of their columns."""
    (found,) = check_models(EngineConfig(model=str(written.directory), quantization="int4"))
    assert {found.blocks[name].dtype for name in written.packed} == {"int4_g32"}
    assert [found.blocks[name].dtype for name in PLAIN] == ["int4_g128", "Q8_0"]
    with open_source(written.directory, mix="int4") as source:
        types = {name: kind for name in source.names() if isinstance(kind := source.stored_type(name), str)}
        plan = plan_at_load("int4", found.config, found.names, types)
        kept = quantized_once(written.directory, source, plan, QuantizedCache(tmp_path / "cache"), Progress())
        assert kept is not None and set(plan.formats) == set(PLAIN)
        for name in written.packed:
            numbers = dequantize(kept.stored_type(name), kept.get(name), written.meant[name].shape[1])
            order = kept.get(name.replace(".weight", ".column_order"))
            assert torch.equal(numbers[:, order.argsort()], written.meant[name])
        assert set(kept.labels) == set(written.packed)
        assert kept.stored_type(PLAIN[1]) == "Q8_0"


@pytest.mark.parametrize(
    ("source", "quantization", "expected"),
    [
        ("gptq", "marlin", "GPTQ int4 g32 act-order and float32"),
        ("gptq", "int4", "GPTQ int4 g32 act-order, int4_g128 and Q8_0"),
        ("fp8", "marlin", "int4_g128 and Q8_0"),
        ("plain", "marlin", "int4_g128 and Q8_0"),
    ],
)
def test_marlin_and_int4(
    source: str, quantization: str, expected: str, tmp_path: Path, lines: list[str], request: pytest.FixtureRequest
) -> None:
    """Marlin is int4 here: weights that are in it stay as they are, and others are quantized to it."""
    directory = tmp_path / source
    if source == "gptq":
        directory = request.getfixturevalue("written").directory
    elif source == "fp8":
        config, write, _ = CASES["fp8-blocks"]
        write_packed(directory, config, writer(write))
    else:
        save(make_model("llama", {**VARIANTS["llama"].all_entries(), **SIZES}), directory)
    given = EngineConfig(model=str(directory), quantization=quantization, quantized_cache=False, device="cpu")
    loaded = load_model(with_local_models(given), Collectives.single(), torch.device("cpu"))
    assert loaded.weights == expected
    said = [line for line in lines if "--quantization marlin is int4 here" in line]
    assert [line.rpartition(", and ")[2] for line in said] == (
        []
        if quantization == "int4"
        else ["the weights keep their levels"]
        if source == "gptq"
        else ["the weights are quantized to it"]
    )


def test_a_checkpoint_may_have_all_weights_in_int4(tmp_path: Path) -> None:
    write = gptq(group_size=32)
    written = write_packed(
        tmp_path, {**GPTQ, "group_size": 32}, write, name="llama-3.2-tied", entries=SIZES, is_packed=lambda prefix: True
    )
    given = EngineConfig(model=str(written.directory), quantization="int4", device="cpu")
    assert load_model(given, Collectives.single(), torch.device("cpu")).weights == "GPTQ int4 g32"


def test_ranks_share_columns_that_are_quantized_in_the_models_order(written: Written) -> None:
    """Ranks cannot share columns that are sorted (desc_act)."""
    for quantization, error in (("q4_0", ""), ("int4", "sorted by group"), (None, "sorted by group")):
        config = EngineConfig(model=str(written.directory), quantization=quantization, tensor_parallel_size=2)
        with pytest.raises(ConfigError, match=error) if error else nullcontext():
            check_models(config)


def test_one_line_of_the_first_rank_names_weights_that_no_block_format_holds(tmp_path: Path, lines: list[str]) -> None:
    directory = write_packed(tmp_path, {**GPTQ, "group_size": 16}, gptq(group_size=16)).directory
    config, found = EngineConfig(model=str(directory), device="cpu"), []
    for rank in (0, 1):
        load_model(config, Collectives(rank, 2), torch.device("cpu"))
        found.append([line for line in lines if "no block format holds some weights" in line])
        lines.clear()
    assert [len(of_rank) for of_rank in found] == [1, 0]
    assert "GPTQ int4 g16" in found[0][0]


def test_the_cache_follows_the_rules_in_config_json(written: Written) -> None:
    """A change of config.json alone changes what the tensors mean."""
    plan, path = plan_of(written.directory), written.directory / "config.json"
    before = cache_key(written.directory, plan)
    assert cache_key(written.directory, plan) == before
    config = json.loads(path.read_text())
    config["quantization_config"]["checkpoint_format"] = "gptq_v2"
    path.write_text(json.dumps(config))
    assert cache_key(written.directory, plan) != before
