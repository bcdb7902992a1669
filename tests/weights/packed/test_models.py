"""Models with packed weights against transformers on the same numbers; shared by two ranks; with experts in memory."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewick.config import EngineConfig
from pagewick.engine.preflight import check_models
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from tests.deep import IS_DEEP
from tests.layers.ranks import on_ranks
from tests.models.variants import VARIANTS
from tests.weights.packed.harness import SIZES, Writer, check_logits, check_two_ranks, load, logits_on, write_packed
from tests.weights.packed.test_readers import AWQ, GPTQ, ROUND
from tests.weights.packed.writers import awq, gptq, marlin

MORE = pytest.mark.skipif(not IS_DEEP, reason="PAGEWICK_DEEP=1 runs all formats")
# Every width is a multiple of 32, and of 64 for two ranks.
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 192, "hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "kv_lora_rank": 32,
    "q_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16, "num_attention_heads": 4,
    "num_key_value_heads": 4, "num_hidden_layers": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("quantization", "write"),
    [
        pytest.param({**GPTQ, "sym": False}, gptq(sym=False), id="gptq"),
        pytest.param({**GPTQ, "bits": 3, "group_size": 32}, gptq(3, 32), id="gptq 3 bits", marks=MORE),
        pytest.param({**GPTQ, "bits": 2, "group_size": 64}, gptq(2, 64), id="gptq 2 bits", marks=MORE),
        pytest.param({**GPTQ, "bits": 8, "group_size": 32}, gptq(8, 32), id="gptq 8 bits"),
        pytest.param({**GPTQ, "bits": 8, "sym": False}, gptq(8, sym=False), id="gptq 8 bits with zeros", marks=MORE),
        pytest.param({**AWQ, "group_size": 64}, awq(64), id="awq", marks=MORE),
        pytest.param({**AWQ, "version": "gemv"}, awq(version="gemv"), id="awq gemv", marks=MORE),
        pytest.param({**AWQ, "version": "gemv_fast"}, awq(version="gemv_fast"), id="awq gemv_fast", marks=MORE),
        pytest.param({**ROUND, "group_size": 32}, gptq(group_size=32), id="auto-round", marks=MORE),
        pytest.param({**GPTQ, "checkpoint_format": "marlin"}, marlin(), id="marlin", marks=MORE),
    ],
)
def test_logits(quantization: dict[str, Any], write: Writer, tmp_path: Path) -> None:
    written = write_packed(tmp_path, quantization, write)
    check_two_ranks(written, check_logits(written, tmp_path))


def test_biases_of_zeros(tmp_path: Path) -> None:
    """Old versions of AutoGPTQ wrote one for every weight, as in TheBloke's Llama 2; another is no such."""
    write = gptq(group_size=32)

    def with_bias(prefix: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        tensors, numbers = write(prefix, weight)
        return {**tensors, f"{prefix}.bias": torch.zeros(len(weight), dtype=torch.float16)}, numbers

    written = write_packed(tmp_path / "plain", {**GPTQ, "group_size": 32}, write)
    ours = logits_on(written.directory)
    directory = write_packed(tmp_path / "biased", {**GPTQ, "group_size": 32}, with_bias).directory
    check_models(EngineConfig(model=str(directory)))
    assert torch.equal(logits_on(directory), ours)
    tensors = load_file(directory / "model.safetensors")
    bias = "model.layers.1.mlp.down_proj.bias"
    tensors[bias][-1] = 0.25
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"{bias} holds other numbers than zeros.*\n.*config.json"):
        logits_on(directory)


def test_act_order(tmp_path: Path) -> None:
    """Each part of a fused layer has an order of its own; ranks cannot share the columns."""
    quantization = {**GPTQ, "desc_act": True, "group_size": 32, "lm_head": True}
    write = gptq(group_size=32, desc_act=True)
    written = write_packed(
        tmp_path, quantization, write, is_packed=lambda prefix: "_proj" in prefix or prefix == "lm_head"
    )
    check_logits(written, tmp_path)
    (model,) = on_ranks(1, lambda context: load(context, written.directory))
    product, x = model.get_submodule("model.layers.1.mlp.down_proj"), torch.randn(3, SIZES["intermediate_size"])
    results, recorded = record(lambda: [product(x)], StepMemory())
    assert isinstance(recorded, RecordedStep), f"{recorded} prevents recording"
    x.neg_()
    recorded.replay()
    assert torch.equal(results[0], product(x))
    with pytest.raises(ConfigError, match=r"does not fit the model's .*down_proj.*sorted by group \(desc_act\)"):
        check_models(EngineConfig(model=str(tmp_path), tensor_parallel_size=2))


@pytest.mark.parametrize(
    ("name", "packed", "has_order"),
    [
        pytest.param("phi-3-mini-4k", r"_proj$|lm_head", True, id="phi-3 act-order"),
        pytest.param("phi-3-mini-4k", r"_proj$|lm_head", False, id="phi-3"),
        pytest.param("starcoder", r"c_(attn|fc|proj)$", True, id="starcoder act-order", marks=MORE),
        pytest.param("gpt-bigcode-mha", r"c_(attn|fc|proj)$", True, id="heads in turn, act-order"),
        pytest.param("starcoder", r"c_(attn|fc|proj)$", False, id="starcoder", marks=MORE),
        pytest.param("glm-4-0414", r"_proj$|lm_head", False, id="glm-4", marks=MORE),
        pytest.param("llama-3.2-tied", r"_proj$|embed_tokens", True, id="tied embedding, act-order"),
        pytest.param("llama-3.2-tied", r"_proj$|embed_tokens", False, id="tied embedding", marks=MORE),
    ],
)
def test_weights_in_one_tensor_embeddings_and_heads(name: str, packed: str, has_order: bool, tmp_path: Path) -> None:
    """GPTQ of architectures that store queries, keys and values, or gates and inputs, in one tensor."""
    sizes = {**SIZES, "n_embd": 128, "n_inner": 256, "n_head": 8, "n_layer": 2}
    entries = {key: value for key, value in sizes.items() if key in VARIANTS[name].all_entries()}
    quantization = {**GPTQ, "group_size": 32, "desc_act": has_order, "lm_head": True}
    write = gptq(group_size=32, desc_act=has_order)
    written = write_packed(
        tmp_path, quantization, write, name=name, entries=entries, is_packed=re.compile(packed).search
    )
    assert len(written.packed) >= 8
    alone = check_logits(written, tmp_path)
    if not has_order:
        check_two_ranks(written, alone)


@pytest.mark.parametrize(
    ("quantization", "write"),
    [
        pytest.param({**AWQ, "group_size": 32}, awq(32), id="awq"),
        pytest.param({**GPTQ, "group_size": 32, "desc_act": True}, gptq(group_size=32, desc_act=True), id="act-order"),
    ],
)
def test_experts_and_latents(quantization: dict[str, Any], write: Writer, tmp_path: Path) -> None:
    """A model of DeepSeek-V3's shape: kv_b_proj is unpacked, and experts trade places with those in host memory."""
    written = write_packed(tmp_path, quantization, write, name="deepseek-v3", entries=DEEPSEEK)
    assert len(written.packed) > 12
    alone = check_logits(written, tmp_path)
    torch.testing.assert_close(logits_on(tmp_path, num_offloaded=3), alone, atol=1e-4, rtol=0)
    if "desc_act" not in quantization:
        check_two_ranks(written, alone)


def test_ranks_that_cannot_share_a_model_without_heads(tmp_path: Path) -> None:
    """The columns of each row have an order of their own, so that no two ranks can have some of them."""
    quantization = {**GPTQ, "desc_act": True, "group_size": 32}
    entries = {"hidden_size": 64, "intermediate_size": 128}
    write_packed(
        tmp_path, quantization, gptq(group_size=32, desc_act=True), name="mamba-1", entries=entries,
        is_packed=lambda prefix: "out_proj" in prefix,
    )  # fmt: skip
    config = EngineConfig(model=str(tmp_path))
    check_models(config)
    with pytest.raises(ConfigError, match=r"size 2 does not fit the model's .*\n  sizes that work: 1$"):
        check_models(replace(config, tensor_parallel_size=2))


def test_sizes_fit_two_ranks() -> None:
    assert all(SIZES[name] % 128 == 0 for name in ("hidden_size", "intermediate_size"))
