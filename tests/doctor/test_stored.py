"""Tensors that follow from a config.json alone, compared with published counts and with figures worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file

from pagewick.doctor.checkpoint import open_checkpoint
from pagewick.doctor.stored import described_tensors
from pagewick.errors import ModelLoadError, PagewickError
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from pagewick.weights.tensor_headers import TensorInfo
from tests.models.published import PUBLISHED

DATA = Path(__file__).parent / "data"


def tensors_of(config: dict[str, Any]) -> list[TensorInfo]:
    return described_tensors(read_config(config), config)


def deepseek_r1(**changes: Any) -> dict[str, Any]:
    return {**json.loads((DATA / "DeepSeek-R1/config.json").read_text()), **changes}


def test_deepseek_r1_has_its_published_parameters() -> None:
    config = deepseek_r1()
    assert sum(tensor.num_elements for tensor in model_tensors(read_config(config))) == 671_026_419_200

    kwargs = {name: value for name, value in config.items() if name not in ("architectures", "quantization_config")}
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.DeepseekV3Config(**kwargs))
    biases = 58 * 256  # buffers in transformers
    assert sum(parameter.numel() for parameter in model.parameters()) + biases == 671_026_419_200


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("Llama-4-Scout-17B-16E", 108_641_793_536, 17_172_894_720),
        ("Llama-4-Maverick-17B-128E-Instruct", 401_583_781_376, 17_184_691_200),
    ],
)
def test_parameters_of_llama_4(name: str, total: int, active: int) -> None:
    """Published: 109 and 400 billion, of which the part that sees has 1; 17 billion take part in a token.

    The totals are those of transformers' models.
    """
    config = read_config(PUBLISHED[name])
    tensors = list(model_tensors(config))
    seeing = sum(
        one.num_elements for one in tensors if one.name.startswith(("vision_model.", "multi_modal_projector."))
    )
    idle = sum(tensor.num_elements for tensor in tensors if tensor.role == "expert")
    assert sum(tensor.num_elements for tensor in tensors) == total
    assert seeing == 871_932_416
    assert total - seeing - idle + idle // config.num_experts == active


@pytest.mark.parametrize("has_order", [False, True])
def test_bytes_of_four_bits(has_order: bool) -> None:
    quantization = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": has_order}
    config = deepseek_r1(quantization_config=quantization, num_hidden_layers=4)
    tensors = {tensor.name: tensor for tensor in tensors_of(config)}
    expert = tensors["model.layers.3.mlp.experts.255.up_proj.weight"]
    scales_and_zeros = 56 * 2048 * 2 + 56 * 2048 // 2
    assert expert.num_bytes == 2048 * 7168 // 2 + scales_and_zeros + 4 * 7168  # and the group of each column
    assert (expert.dtype, expert.shape, expert.has_column_order) == ("int4_g128", (2048, 7168), has_order)
    assert tensors["model.layers.3.mlp.gate.weight"].dtype == "BF16"
    assert tensors["lm_head.weight"].num_bytes == 129280 * 7168 * 2


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "aqlm", "bits": 3}}, r"aqlm \(3 bits\)"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 5, "group_size": 128}}, "bits in config.json is 5"),
        ({"quantization_config": [1]}, "no object"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok is 257"),
        ({"n_routed_experts": 10**6}, "1000000 experts in each of 58 layers"),
        ({"v_head_dim": "wide"}, "v_head_dim is 'wide'"),
    ],
)
def test_impossible_entries_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(PagewickError, match=words):
        tensors_of(deepseek_r1(**changes))


class TestDirectories:
    def test_config_json_is_enough(self, tmp_path: Path) -> None:
        config = deepseek_r1(quantization_config={"quant_method": "gptq", "bits": 4, "group_size": 128})
        (tmp_path / "config.json").write_text(json.dumps(config))
        checkpoint = open_checkpoint(str(tmp_path), {})
        assert (checkpoint.is_only_described, checkpoint.is_downloaded) == (True, False)
        assert checkpoint.tensors == tuple(tensors_of(config))

    def test_config_json_of_an_unknown_architecture(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(deepseek_r1(architectures=["Mamba9ForCausalLM"])))
        checkpoint = open_checkpoint(str(tmp_path), {})
        assert (checkpoint.model_config, checkpoint.tensors, checkpoint.is_only_described) == (None, (), True)
        assert checkpoint.verdict.reason == "Mamba9ForCausalLM (model_type deepseek_v3) is not supported yet"

    def test_weights_are_looked_at_where_there_are_any(self, tmp_path: Path) -> None:
        (tmp_path / "config.json").write_text(json.dumps(deepseek_r1()))
        (tmp_path / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(ModelLoadError, match="has no weight_map"):
            open_checkpoint(str(tmp_path), {})
        (tmp_path / "model.safetensors.index.json").unlink()
        (tmp_path / "pytorch_model.bin").touch()
        with pytest.raises(ModelLoadError, match="holds no safetensors"):
            open_checkpoint(str(tmp_path), {})

    def test_layers_for_draft_tokens_are_not_counted(self, tmp_path: Path) -> None:
        config = deepseek_r1(num_hidden_layers=2, quantization_config=None)
        tensors = {name: torch.zeros(1) for name in ("model.norm.weight", "model.layers.1.a", "model.layers.2.a")}
        save_file(tensors, tmp_path / "model.safetensors")
        for num_extra, expected in ((1, 2), (0, 3)):
            (tmp_path / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": num_extra}))
            assert len(open_checkpoint(str(tmp_path), {}).tensors) == expected
