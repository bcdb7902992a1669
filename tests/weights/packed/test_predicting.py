"""Packed checkpoints with a layer that predicts further tokens: it computes what the same numbers do unpacked.

Published ones pack the layer as the model, or leave it out: because a list names it, or without naming it anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.config import EngineConfig
from pagewick.engine.cache.kv_cache import allocate_cache
from pagewick.engine.model_loading import load_model
from pagewick.engine.preflight import check_models
from pagewick.kernels import quantize_weight
from pagewick.layers.context import LayerContext
from pagewick.parallel.collectives import Collectives
from tests.deep import IS_DEEP
from tests.layers.ranks import on_ranks
from tests.models.by_hand import make_batch
from tests.models.predicting import Predicting
from tests.weights.gguf.test_quantized_models import RoundedActivations, key_of
from tests.weights.packed import byte_writers
from tests.weights.packed.harness import Writer, pack
from tests.weights.packed.test_byte_formats import CASES as FORMATS
from tests.weights.packed.test_byte_models import DEEPSEEK, writer
from tests.weights.packed.test_readers import AWQ, GPTQ
from tests.weights.packed.writers import awq, gptq

MORE = pytest.mark.skipif(not IS_DEEP, reason="PAGEWICK_DEEP=1 runs all formats")
GLM: dict[str, Any] = {
    "vocab_size": 192, "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 64, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
}  # fmt: skip
QWEN: dict[str, Any] = {
    **GLM, "is_like_qwen": True, "shared_expert_intermediate_size": 96, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
# Qwen's list names what the layer does not pack; that of DeepSeek's files is empty.
OF_QWEN = ["lm_head", "mtp.fc", "mtp.layers.0.mlp.gate", "mtp.layers.0.mlp.shared_expert_gate"]
OF_GLM = ["lm_head", "model.layers.2.eh_proj", "model.layers.2.shared_head.head", "re:.*mlp\\.gate$"]
ROWS = {
    "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True, "dynamic": False},
        }
    },
}  # fmt: skip
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
PROMPT = [token_id % 192 for token_id in range(7, 7 + 41 * 5, 5)]


@dataclass(frozen=True)
class Case:
    """is_left_out: whether the layer is stored as it is."""

    name: str
    entries: Mapping[str, Any]
    quantization: Mapping[str, Any]
    write: Writer
    is_left_out: bool = False

    @property
    def is_packed(self) -> Callable[[str], object]:
        inside = r"^(?!mtp\.|model\.layers\.2\.).*" if self.is_left_out else ""
        return re.compile(rf"{inside}((?<!eh)_proj|in_proj_qkvz)$").search


FP8, WRITE_FP8, _ = FORMATS["fp8-blocks"]
WRITE_NVFP4 = writer(partial(byte_writers.nvfp4, is_modelopt=True))
SMALL_AWQ, SMALL_GPTQ = {**AWQ, "group_size": 32}, {**GPTQ, "group_size": 32}
CASES = {
    "DeepSeek FP8": Case("deepseek-v3", DEEPSEEK, FP8, writer(WRITE_FP8)),
    "DeepSeek NVFP4": Case("deepseek-v3", DEEPSEEK, {**NVFP4, "exclude_modules": ["lm_head"]}, WRITE_NVFP4),
    "DeepSeek NVFP4, left out": Case(
        "deepseek-v3", DEEPSEEK, {**NVFP4, "exclude_modules": ["lm_head", "model.layers.2*"]}, WRITE_NVFP4, True
    ),
    "GLM FP8": Case("glm-4.5", GLM, {**ROWS, "ignore": OF_GLM}, writer(byte_writers.fp8_rows)),
    "GLM FP8, left out": Case(
        "glm-4.5", GLM, {**ROWS, "ignore": ["lm_head", "re:.*layers\\.2\\..*"]}, writer(byte_writers.fp8_rows), True
    ),
    "GLM AWQ": Case("glm-4.5", GLM, SMALL_AWQ, awq(32)),
    "GLM AWQ, left out": Case("glm-4.5", GLM, {**SMALL_AWQ, "modules_to_not_convert": ["layers.2"]}, awq(32), True),
    "Qwen FP8": Case("qwen3-next", QWEN, {**FP8, "modules_to_not_convert": OF_QWEN}, writer(WRITE_FP8)),
    "Qwen GPTQ, left out": Case("qwen3-next", QWEN, SMALL_GPTQ, gptq(group_size=32), True),
    "Qwen NVFP4, left out": Case("qwen3-next", QWEN, {**NVFP4, "exclude_modules": ["mtp*"]}, WRITE_NVFP4, True),
}
SOME = ("DeepSeek FP8", "DeepSeek NVFP4, left out", "GLM FP8, left out", "GLM AWQ", "Qwen FP8", "Qwen GPTQ, left out")


def options(directory: Path, **given: Any) -> EngineConfig:
    given = {"speculative_method": "mtp", "device": "cpu", "dtype": "float32", "num_threads": 1, **given}
    return EngineConfig(model=str(directory), **given)


def logits_on(config: EngineConfig, hidden_states: Tensor, num_ranks: int = 1) -> Tensor:
    """Return our layer's logits [T, vocab_size]. hidden_states: of all tokens of PROMPT but the last one."""

    def act(context: LayerContext) -> Tensor:
        loaded = load_model(config, context.collectives, torch.device("cpu"))
        model, layer = loaded.model, loaded.model.model.mtp
        assert layer is not None
        allocate_cache(loaded.groups, [64] * len(loaded.groups), torch.device("cpu"))
        with torch.inference_mode():
            batch = make_batch(model, [PROMPT[1:]])
            return model.compute_logits(layer(model.model.embed(batch), hidden_states, batch), batch)

    check_models(config)
    return on_ranks(num_ranks, act)[0]


def check(made: Predicting, hidden_states: Tensor, ours: Tensor, rounding: Mapping[bytes, int]) -> None:
    """Compare logits with transformers'. rounding: of RoundedActivations; if it is empty, the two are equal."""
    exact = made.all_logits(hidden_states, PROMPT[1:])
    with RoundedActivations(rounding):
        rounded = made.all_logits(hidden_states, PROMPT[1:])
    errors, allowed = (ours - exact).abs(), (rounded - exact).abs()
    assert exact.std() > 0.5
    assert errors.max() <= 2e-4 or errors.mean() <= 1.25 * allowed.mean(), (errors.mean(), allowed.mean())


def written(case: str, directory: Path) -> tuple[Predicting, Tensor, dict[bytes, int]]:
    """Write a checkpoint. Returns transformers' model of its numbers, its hidden states, and the layer's rounding."""
    given = CASES[case]
    made = Predicting(given.name, **given.entries)
    made.write(directory / "model")
    meant, packed = pack(directory / "model", given.quantization, given.write, given.is_packed)
    of_layer = [name for name in packed if name.startswith(("mtp.", "model.layers.2."))]
    assert (not of_layer) is given.is_left_out and len(packed) > len(of_layer) + 20
    made.read(meant, directory / "numbers")
    return made, made.hidden_states(PROMPT[:-1]), {key_of(meant[name][0]): 32 for name in of_layer}


@pytest.mark.parametrize("case", [pytest.param(name, marks=() if name in SOME else MORE) for name in CASES])
def test_logits(case: str, tmp_path: Path) -> None:
    made, hidden_states, rounding = written(case, tmp_path)
    check(made, hidden_states, logits_on(options(tmp_path / "model"), hidden_states), rounding)


def test_ranks_and_experts_in_host_memory(tmp_path: Path) -> None:
    _, hidden_states, _ = written("DeepSeek FP8", tmp_path)
    config = options(tmp_path / "model")
    alone = logits_on(config, hidden_states)
    offloaded = logits_on(replace(config, num_experts_offload_per_rank=3), hidden_states)
    torch.testing.assert_close(offloaded, alone, atol=1e-4, rtol=0)
    shared = logits_on(replace(config, tensor_parallel_size=2), hidden_states, 2)
    assert (shared - alone).abs().mean() < 2e-3


def test_stacked_experts_of_a_layer_beside_packed_ones(tmp_path: Path) -> None:
    """As nvidia/Qwen3.6-35B-A3B-NVFP4 has them."""
    made, hidden_states, _ = written("Qwen NVFP4, left out", tmp_path)
    file, owner = tmp_path / "model/model.safetensors", "mtp.layers.0.mlp.experts"
    tensors = load_file(file)
    gate, up, down = (
        torch.stack([tensors.pop(f"{owner}.{expert}.{name}_proj.weight") for expert in range(7)])
        for name in ("gate", "up", "down")
    )
    tensors |= {f"{owner}.gate_up_proj": torch.cat([gate, up], dim=1), f"{owner}.down_proj": down}
    save_file(tensors, file)
    check(made, hidden_states, logits_on(options(tmp_path / "model"), hidden_states), {})


def test_quantized_at_load_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer may be wanted by a later start than the first one."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = Predicting("glm-4.5", **{**GLM, "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256})
    made.write(tmp_path / "model")
    config = options(tmp_path / "model", quantization="q4_k_m")
    load_model(replace(config, speculative_method=None), Collectives.single(), torch.device("cpu"))
    (found,) = check_models(config)
    tensors, rounding = load_file(tmp_path / "model/model.safetensors"), {}
    for name, named in found.at_load.items():
        kind = gguf.GGMLQuantizationType[named]
        tensors[name] = torch.from_numpy(gguf.quants.dequantize(quantize_weight(tensors[name], named).numpy(), kind))
        rounding[key_of(tensors[name][0])] = gguf.GGML_QUANT_SIZES[kind][0]
    assert {"model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.3.up_proj.weight"} <= found.at_load.keys()
    made.read(tensors, tmp_path / "numbers")
    hidden_states = made.hidden_states(PROMPT[:-1])
    first, second = (logits_on(config, hidden_states) for _ in range(2))
    assert torch.equal(first, second)
    assert len(list((tmp_path / "pagewick/quantized").glob("*.safetensors"))) == 2
    check(made, hidden_states, first, rounding)
