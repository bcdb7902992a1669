"""ModelOpt's algorithms and entries as published checkpoints have them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewick.errors import ModelLoadError
from pagewick.weights.packed.config import packed_rules, quant_method
from pagewick.weights.packed.layout import PackedRules
from tests.weights.packed import byte_writers as writers
from tests.weights.packed.harness import SIZES, check_logits, write_packed
from tests.weights.packed.test_byte_formats import described
from tests.weights.packed.test_byte_models import writer

TEXT = "model.language_model.layers.0"
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def rules_of(entries: dict[str, Any]) -> PackedRules:
    rules = packed_rules({"quantization_config": entries})
    assert rules is not None
    return rules


def label(rules: PackedRules, prefix: str) -> str:
    form = rules.format_of(prefix)
    return "" if form is None else form.label


@pytest.mark.parametrize(
    ("algorithm", "write"),
    [
        ("FP8_PB_WO", partial(writers.fp8, name=".weight_scale", shape=(2, 1, 2, 1))),
        ("fp8_pb_wo", writers.fp8),
        ("MXFP8", partial(writers.fp8, block=(1, 32), name=".weight_scale", scale_dtype=torch.uint8)),
        ("W4A16_NVFP4", partial(writers.nvfp4, is_modelopt=True)),
    ],
)
def test_algorithms(algorithm: str, write: writers.Writer) -> None:
    tensors, numbers = write(torch.randn(160, 192, generator=torch.Generator().manual_seed(1)) / 8)
    weight, get = described({"quant_method": "modelopt", "quant_algo": algorithm}, tensors)
    assert torch.equal(weight.format.numbers(weight, get), numbers)


def test_a_layer_of_experts_has_one_entry_for_all() -> None:
    """As in nvidia/Qwen3.6-35B-A3B-NVFP4."""
    layers = {
        f"{TEXT}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        f"{TEXT}.mlp.shared_expert.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        f"{TEXT}.linear_attn.out_proj": {"quant_algo": "FP8"},
        "lm_head": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    }
    entries = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    rules = rules_of({**entries, "ignore": ["mtp*"], "kv_cache_scheme": {"num_bits": 8, "type": "float"}})
    assert label(rules, f"{TEXT}.mlp.experts.3.down_proj") == "NVFP4"
    assert label(rules, f"{TEXT}.mlp.shared_expert.up_proj") == "NVFP4"
    assert label(rules, f"{TEXT}.linear_attn.out_proj") == label(rules, "lm_head") == "FP8"
    for prefix in (f"{TEXT}.mlp.shared_expert.down_proj", f"{TEXT}.mlp", "mtp.layers.0.mlp.experts.0.up_proj"):
        assert label(rules, prefix) == ""
    layers[f"{TEXT}.mlp.experts"] = {"quant_algo": "W8A8_SQ_PER_CHANNEL"}
    with pytest.raises(ModelLoadError, match=r"experts\.quant_algo in config\.json is 'W8A8_SQ_PER_CHANNEL'"):
        rules_of(entries)
    layers[f"{TEXT}.mlp.experts"] = {"quant_algo": "NVFP4", "group_size": 32}
    with pytest.raises(ModelLoadError, match=r"experts\.group_size"):
        rules_of(entries)


@pytest.mark.parametrize(
    "entries",
    [
        {"quant_algo": "FP8", "kv_cache_scheme": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt"}},
        {"quant_method": "modelopt", "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
    ],
)
def test_older_forms_of_the_entry(entries: dict[str, Any]) -> None:
    assert quant_method({"quantization_config": entries}) == "modelopt"
    rules = rules_of(entries)
    assert (label(rules, "model.layers.0.mlp.up_proj"), label(rules, "lm_head")) == ("FP8", "")


def test_a_model_of_two_formats_with_a_packed_head(tmp_path: Path) -> None:
    """As nvidia/Qwen3.6-27B-NVFP4 has its text part: attention in FP8, MLPs and the head in NVFP4."""
    fp8, fp4 = writer(writers.fp8_whole), writer(partial(writers.nvfp4, is_modelopt=True))
    layers = {
        f"model.layers.{layer}.{name}": {"quant_algo": "FP8" if name.startswith("self_attn") else "W4A16_NVFP4"}
        for layer in range(SIZES["num_hidden_layers"])
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", *MLP)
    }
    layers["lm_head"] = {"quant_algo": "W4A16_NVFP4"}
    written = write_packed(
        tmp_path,
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers},
        lambda prefix, weight: (fp8 if "self_attn" in prefix else fp4)(prefix, weight),
        name="qwen3",
        entries={**SIZES, "tie_word_embeddings": False},
        is_packed=lambda prefix: "_proj" in prefix or prefix == "lm_head",
    )
    assert "lm_head.weight" in written.packed
    check_logits(written, tmp_path)
