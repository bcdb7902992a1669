"""Tensors that follow from a config.json, compared with transformers' models and with published counts."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from pagewick.doctor.checkpoint import open_checkpoint
from pagewick.doctor.inventory import FAMILIES, tensors_of
from pagewick.doctor.parameters import count, parameters_of
from pagewick.errors import ModelLoadError

DATA = Path(__file__).parent / "data"
COMMON: dict[str, Any] = {
    "vocab_size": 193, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip
MLA = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "num_key_value_heads": 6}
DEEPSEEK = {
    **MLA, "n_routed_experts": 8, "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1,
    "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
# What is tested -> transformers' class of its configuration, and what differs from the common sizes.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama with biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied, of another head size": ("Llama", {"tie_word_embeddings": True, "head_dim": 10}),
    "mistral": ("Mistral", {"head_dim": 16}),
    "mistral with a window": ("Mistral", {"sliding_window": 9}),
    "mixtral": ("Mixtral", {"num_local_experts": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen2 with a window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 with biases": ("Qwen3", {"attention_bias": True}),
    "qwen2 moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 28}),
    "qwen2 moe, dense here and there": (
        "Qwen2Moe",
        {**EXPERTS, "decoder_sparse_step": 2, "num_hidden_layers": 6, "mlp_only_layers": [3], "qkv_bias": False},
    ),
    "qwen3 moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 16}),
    "deepseek v2 lite": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": None}),
    "deepseek v2": ("DeepseekV2", {**DEEPSEEK, "q_lora_rank": 24, "attention_bias": True}),
    "deepseek v3": ("DeepseekV3", {**DEEPSEEK, "q_lora_rank": 24}),
    "gemma": ("Gemma", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", {"head_dim": 16, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3Text", {"head_dim": 16, "tie_word_embeddings": True, "num_hidden_layers": 7}),
    "glm": ("Glm", {"head_dim": 16, "attention_bias": True}),
    "glm4": ("Glm4", {"head_dim": 16, "attention_bias": True}),
    "phi3": ("Phi3", {}),
    "phi": ("Phi", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "stablelm, parallel": ("StableLm", {"use_parallel_residual": True}),
    "starcoder2": ("Starcoder2", {}),
    "starcoder2 without biases": ("Starcoder2", {"use_bias": False, "tie_word_embeddings": True}),
    "granite": ("Granite", {"attention_bias": True, "mlp_bias": True}),
}


def theirs(config: transformers.PretrainedConfig) -> Counter[str]:
    """Numbers by tensor, those of a layer's experts together; transformers fuses them."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    found = Counter[str]()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name and name != "model.embed_scale" and not name.endswith("embed_tokens.embed_scale"):
            found[merged(name)] += tensor.numel()
    return found


def merged(name: str) -> str:
    name = name.replace("block_sparse_moe", "mlp")
    return re.sub(r"(mlp\.experts)\..*", r"\1", name)


def written(config: transformers.PretrainedConfig, class_name: str) -> dict[str, Any]:
    """config.json as it is published."""
    architecture = class_name.removesuffix("Text") + "ForCausalLM"
    return {**config.to_dict(), "architectures": [architecture]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_tensors_are_those_of_transformers(variant: str) -> None:
    class_name, changes = VARIANTS[variant]
    config = getattr(transformers, f"{class_name}Config")(**{**COMMON, **changes})
    ours = Counter[str]()
    for tensor in tensors_of(written(config, class_name)):
        ours[merged(tensor.name)] += tensor.num_elements
    assert ours == theirs(config)


def test_every_family_is_tested() -> None:
    tested = {f"{class_name.removesuffix('Text')}ForCausalLM" for class_name, _ in VARIANTS.values()}
    assert tested == set(FAMILIES)


def deepseek_r1(**changes: Any) -> dict[str, Any]:
    return {**json.loads((DATA / "DeepSeek-R1/config.json").read_text()), **changes}


def test_deepseek_r1_has_its_published_parameters() -> None:
    config = deepseek_r1()
    found = tensors_of(config)
    assert count(parameters_of(found, config, is_tied=False)) == 671_026_419_200
    kwargs = {name: value for name, value in config.items() if name not in ("architectures", "quantization_config")}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.DeepseekV3Config(**kwargs))
    biases = 58 * 256  # buffers there
    assert sum(parameter.numel() for parameter in model.parameters()) + biases == 671_026_419_200


def test_bytes_in_blocks_of_fp8() -> None:
    tensors = {tensor.name: tensor for tensor in tensors_of(deepseek_r1())}
    prefix = "model.layers.60.self_attn.kv_a_proj_with_mqa.weight"
    assert (tensors[prefix].dtype, tensors[prefix].num_bytes) == ("F8_E4M3", 576 * 7168)
    assert tensors[f"{prefix}_scale_inv"].shape == (5, 56)  # the last block of rows is half full
    assert tensors["model.layers.3.mlp.gate.weight"].dtype == "BF16"
    assert tensors["lm_head.weight"].num_bytes == 129280 * 7168 * 2


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_bytes_of_four_bits(method: str) -> None:
    quantization = {"quant_method": method, "bits": 4, "group_size": 128}
    config = deepseek_r1(quantization_config=quantization, num_hidden_layers=4)
    plain = tensors_of({**config, "quantization_config": None})
    tensors = {tensor.name: tensor for tensor in tensors_of(config)}
    prefix = "model.layers.3.mlp.experts.255.up_proj"
    assert tensors[f"{prefix}.qweight"].num_bytes == 2048 * 7168 // 2
    assert tensors[f"{prefix}.scales"].num_bytes == 56 * 2048 * 2
    assert tensors[f"{prefix}.qzeros"].num_bytes == 56 * 2048 // 2
    assert (f"{prefix}.g_idx" in tensors) == (method == "gptq")
    found = parameters_of(list(tensors.values()), config, is_tied=False)
    assert count(found) == sum(tensor.num_elements for tensor in plain)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["Mamba9ForCausalLM"]}, "Mamba9ForCausalLM: how many parameters"),
        ({"qk_layernorm": True}, "qk_layernorm: how many"),
        ({"quantization_config": {"quant_method": "hqq", "bits": 3}}, r"hqq \(3 bits\)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "without weight_block_size"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 8}}, r"gptq \(8 bits\)"),
        ({"quantization_config": [1]}, "no object"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok is 257, and there are 256"),
        ({"n_routed_experts": 10**6}, "1000000 experts in each of 58 layers"),
        ({"v_head_dim": None}, "v_head_dim is missing"),
    ],
)
def test_what_does_not_follow_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelLoadError, match=words):
        tensors_of(deepseek_r1(**changes))


class TestDirectories:
    def test_config_json_is_enough(self) -> None:
        checkpoint = open_checkpoint(str(DATA / "DeepSeek-R1"), {})
        assert (checkpoint.is_only_described, checkpoint.is_downloaded) == (True, False)
        assert checkpoint.tensors == tuple(tensors_of(deepseek_r1()))

    def test_weights_are_looked_at_where_there_are_any(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(deepseek_r1()))
        (tmp_path / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(ModelLoadError, match="has no weight_map"):
            open_checkpoint(str(tmp_path), {})
        (tmp_path / "model.safetensors.index.json").unlink()
        (tmp_path / "pytorch_model.bin").touch()
        with pytest.raises(ModelLoadError, match="holds no safetensors"):
            open_checkpoint(str(tmp_path), {})

    def test_layers_that_guess_are_not_counted(self, tmp_path: Path) -> None:
        config = deepseek_r1(num_hidden_layers=2, quantization_config=None)
        tensors = {name: torch.zeros(1) for name in ("model.norm.weight", "model.layers.1.a", "model.layers.2.a")}
        save_file(tensors, tmp_path / "model.safetensors")
        for guessing, expected in ((1, 2), (0, 3)):
            (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": guessing}))
            assert len(open_checkpoint(str(tmp_path), {}).tensors) == expected
