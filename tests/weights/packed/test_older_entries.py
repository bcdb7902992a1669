"""Entries that older versions of the programs wrote, and entries that say of a weight that it is not as the others."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.models.registry import read_config
from pagewick.quantization.ggml import dequantize
from pagewick.weights.opening import open_source
from pagewick.weights.packed.config import packed_rules, quant_method
from tests.models.published import PUBLISHED
from tests.weights.packed import byte_writers
from tests.weights.packed.test_byte_formats import CASES, _hqq, described
from tests.weights.packed.test_readers import NAME, ROUND, numbers_in, weight_of, write_one
from tests.weights.packed.writers import gptq

OLD_ROUND = {**ROUND, "quant_method": "intel/auto-round"}


def rules_of(entries: dict[str, Any]) -> Any:
    return packed_rules({"quantization_config": entries})


def test_auto_round_without_packing_format(tmp_path: Path) -> None:
    parts, meant = gptq(group_size=128)(NAME, weight_of())
    write_one(tmp_path, {**OLD_ROUND, "backend": "auto_round:gptq:exllamav2"}, parts)
    assert torch.equal(numbers_in(tmp_path)[0], meant)
    assert quant_method({"quantization_config": OLD_ROUND}) == "auto-round"


@pytest.mark.parametrize("names", [("language_model.model", "model.language_model"), ("model.language_model",) * 2])
def test_rules_with_the_names_of_modules(names: tuple[str, str], tmp_path: Path) -> None:
    """transformers writes Gemma 3 with other names than its modules have, and AutoRound names the modules."""
    for of_file, of_rule in (names, names[::-1]):
        parts, meant = gptq(group_size=128)(NAME.replace("model", of_file, 1), weight_of())
        write_one(tmp_path, {**ROUND, "block_name_to_quantize": f"{of_rule}.layers"}, parts)
        with open_source(tmp_path) as source:
            (name,) = [name for name in source.names() if name.startswith(of_file)]
            numbers = dequantize(str(source.stored_type(name)), source.get(name), meant.shape[1])
        assert torch.equal(numbers, meant)
    write_one(tmp_path, {**ROUND, "block_name_to_quantize": "vision_tower.layers"}, parts)
    with pytest.raises(ModelLoadError, match="packed, and extra_config"), open_source(tmp_path):
        pass


@pytest.mark.parametrize("backend", ["auto_round:exllamav2", 3])
def test_auto_round_refuses_kernels_whose_zero_points_are_stored_otherwise(backend: object) -> None:
    with pytest.raises(ModelLoadError, match=r"backend in config\.json is"):
        rules_of({**OLD_ROUND, "sym": False, "backend": backend})


def test_auto_round_refuses_rotated_inputs() -> None:
    with pytest.raises(ModelLoadError, match="rotation_config"):
        rules_of({**ROUND, "rotation_config": {"hadamard_type": "random"}})
    assert rules_of({**ROUND, "rotation_config": {}}).format_of(NAME) is not None


@pytest.mark.parametrize("bits", [16, 32])
def test_auto_round_leaves_out_weights_of_more_than_8_bits(bits: int) -> None:
    rules = rules_of({**ROUND, "extra_config": {NAME: {"bits": bits}}})
    assert rules.format_of(NAME) is None
    assert rules.format_of("model.layers.1.mlp.up_proj") is not None


@pytest.mark.parametrize("scheme", ["NVFP4", {"num_bits": 4, "type": "float", "dynamic": False}])
def test_modelopt_refuses_constants_of_other_caches(scheme: object) -> None:
    entries = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}
    with pytest.raises(ModelLoadError, match="kv_cache_scheme"):
        rules_of({**entries, "kv_cache_scheme": scheme})
    for known in ("FP8", {"num_bits": 8, "type": "float", "dynamic": False}):
        assert rules_of({**entries, "kv_cache_scheme": known}).format_of(NAME) is not None


def test_compressed_tensors_without_an_order_of_columns() -> None:
    """The quantizer leaves -1 in weight_g_idx of a weight that it has not reordered."""
    tensors, numbers = byte_writers.integers(weight_of(64, 128), 4, 32)
    tensors[".weight_g_idx"] = torch.full((128,), -1, dtype=torch.int32)
    weight, get = described(CASES["packed-int4-order"].config, tensors)
    assert torch.equal(weight.format.numbers(weight, get), numbers)


def test_compressed_tensors_with_a_block_in_one_string() -> None:
    config = CASES["float-blocks"].config
    (group,) = config["config_groups"].values()
    rows, columns = group["weights"]["block_structure"]
    weights = {**group["weights"], "block_structure": f"{rows}x{columns}"}
    entries = {**config, "config_groups": {"group_0": {**group, "weights": weights}}}
    assert vars(rules_of(entries).format_of(NAME)) == vars(rules_of(dict(config)).format_of(NAME))
    for wrong in ("128", "axb", "0x128", "9" * 5000 + "x1"):
        weights["block_structure"] = wrong
        with pytest.raises(ModelLoadError, match="block_structure"):
            rules_of(entries)


def test_compressed_tensors_that_round_activations_of_attention(tmp_path: Path) -> None:
    """A group for a class without weights; llm-compressor writes one for attention in FP8, and scales of queries."""
    attention = {"targets": ["LlamaAttention"], "weights": None, "input_activations": _CACHE, "format": None}
    entries = copy.deepcopy(dict(CASES["float-tensor"].config))
    entries["config_groups"] = {"attention": attention, **entries["config_groups"]}
    assert rules_of(entries).format_of(NAME) == rules_of(dict(CASES["float-tensor"].config)).format_of(NAME)
    ignored = read_config(PUBLISHED["Meta-Llama-3.1-8B"]).ignored_tensors
    assert any(re.fullmatch(pattern, "model.layers.0.self_attn.q_scale") for pattern in ignored)
    entries["config_groups"]["group_0"]["targets"].append("LlamaMLP")
    with pytest.raises(ModelLoadError, match=r"config_groups\.group_0\.targets in .*Linear, Embedding: not LlamaMLP"):
        rules_of(entries)


@pytest.mark.parametrize("key", ["quantization_config", "text"])
def test_mlx_is_refused_by_its_name(key: str) -> None:
    """Older versions of MLX wrote no quantization_config."""
    entries = {"group_size": 64, "bits": 4, "mode": "affine"}
    with pytest.raises(ConfigError, match=r"quantized with mlx \(4 bits\), which is not supported\n.*\n  use another"):
        packed_rules({"quantization": entries, key: entries})
    assert packed_rules({"quantization": {"bits": 4}}) is None


def test_bitsandbytes_without_a_name() -> None:
    assert rules_of({"load_in_8bit": True, "llm_int8_threshold": 6.0}).label == "bitsandbytes int8"


def test_hqq_quantizes_a_skipped_weight_that_has_an_entry() -> None:
    of_tag = _hqq(4, 64, 1)["quant_config"]
    entries = {"quant_method": "hqq", "quant_config": {"lm_head": of_tag}, "skip_modules": ["lm_head", "norm"]}
    rules = rules_of(entries)
    assert rules.format_of("lm_head") is not None
    assert rules.format_of("norm") is None


_CACHE = {"num_bits": 8, "type": "float", "dynamic": False}
_DENSE = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": _CACHE}


@pytest.mark.parametrize(
    "entries",
    [
        {**_DENSE, "config_groups": {}},
        {**_DENSE, "config_groups": {"group_0": {"targets": [], "weights": None}}},
        {"quant_method": "modelopt", "kv_cache_scheme": _CACHE},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8", "quant_algo": None},
    ],
)
def test_only_the_cache_is_quantized(entries: dict[str, Any], tmp_path: Path) -> None:
    weight = weight_of().bfloat16()
    write_one(tmp_path, entries, {f"{NAME}.weight": weight, "model.layers.0.self_attn.k_scale": torch.tensor(0.5)})
    numbers, kind = numbers_in(tmp_path)
    assert torch.equal(numbers, weight)
    assert kind == torch.bfloat16
    assert quant_method({"quantization_config": entries}) == ""


@pytest.mark.parametrize(
    "entries",
    [
        {**_DENSE, "kv_cache_scheme": None},
        {**_DENSE, "config_groups": {"group_0": 3}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8", "quant_algo": "unknown"},
    ],
)
def test_entries_without_formats_of_weights_are_errors(entries: dict[str, Any]) -> None:
    with pytest.raises(ModelLoadError):
        rules_of(entries)
