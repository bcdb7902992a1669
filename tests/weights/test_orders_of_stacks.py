"""Stacks of experts in the order of published files, which transformers does not write, mean the same."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import NemotronHConfig, NemotronHForCausalLM

from pagewick.config import EngineConfig
from pagewick.engine.preflight import check_models
from pagewick.errors import ModelLoadError
from pagewick.quantization.ggml import dequantize
from pagewick.weights.opening import open_source
from pagewick.weights.stacked import stacked_parts
from pagewick.weights.tensor_headers import TensorInfo
from tests.models.answers import answers, running
from tests.models.checkpoints import make_model, save, write_checkpoint
from tests.models.variants import VARIANTS
from tests.weights.packed import byte_writers
from tests.weights.packed.test_byte_formats import CASES, _compressed


def test_a_stack_is_read_in_both_orders(tmp_path: Path) -> None:
    write_checkpoint("qwen3-vl-moe", tmp_path)
    file = tmp_path / "model.safetensors"
    with open_source(tmp_path) as source:
        expected = {name: source.get(name).clone() for name in source.names()}
    stored = load_file(file)
    assert sum(tensor.ndim == 3 for tensor in stored.values()) == 4
    turned = {
        name: tensor.transpose(1, 2).contiguous() if tensor.ndim == 3 else tensor for name, tensor in stored.items()
    }
    save_file(turned, file)
    with open_source(tmp_path) as source:
        assert set(source.names()) == set(expected)
        for name, tensor in expected.items():
            assert source.shape(name) == tuple(tensor.shape)
            assert torch.equal(source.get(name), tensor), name


@pytest.mark.parametrize(
    ("found", "lacking"),
    [("input_linear.weight", "output_linear.weight"), ("experts.gate_up_proj", "experts.down_proj")],
)
def test_a_missing_stack_has_the_name_that_this_file_would_give_it(found: str, lacking: str) -> None:
    """Granite's files have one of two spellings."""
    owner = "model.layers.0.block_sparse_moe"
    stack = TensorInfo(f"{owner}.{found}", "F32", (4, 48, 32), 4 * 4 * 48 * 32)
    sizes = {"num_local_experts": 4, "hidden_size": 32, "intermediate_size": 24}
    with pytest.raises(ModelLoadError, match=rf"lacks 1 tensor of this model: {owner}\.{lacking}\n"):
        stacked_parts({"architectures": ["GraniteMoeForCausalLM"], **sizes}, [stack])


def test_experts_of_qwen3_5_are_stacked_in_published_files(tmp_path: Path) -> None:
    """transformers writes them one by one. Layers that predict further tokens have stacks, too, which nobody reads."""
    write_checkpoint("qwen3.5-moe-multimodal", tmp_path)
    file = tmp_path / "model.safetensors"
    with open_source(tmp_path) as source:
        expected = {name: source.get(name).clone() for name in source.names()}
    stored, experts = {}, defaultdict[str, dict[str, Tensor]](dict)
    for name, tensor in load_file(file).items():
        owner, found, rest = name.partition(".mlp.experts.")
        if found:
            experts[f"{owner}.mlp.experts"][rest.removesuffix(".weight")] = tensor
        else:
            stored[name] = tensor
    assert len(experts) > 1
    for owner, tensors in experts.items():
        projections = ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (
            torch.stack([tensors[f"{index}.{projection}"] for index in range(len(tensors) // 3)])
            for projection in projections
        )
        stored |= {f"{owner}.gate_up_proj": torch.cat([gate, up], dim=1), f"{owner}.down_proj": down}
    stored |= {
        f"mtp.layers.0.mlp.experts.{leaf}": stored[f"{owner}.{leaf}"].clone() for leaf in ("gate_up_proj", "down_proj")
    }
    save_file(stored, file)
    with open_source(tmp_path) as source:
        names = [name for name in source.names() if not name.startswith("mtp.")]
        assert sorted(names) == sorted(expected)
        for name, tensor in expected.items():
            assert torch.equal(source.get(name), tensor), name
    with running(tmp_path) as engine:
        assert len(answers(engine, [[1, 2, 3]], num_tokens=3)[0].token_ids) == 3


def fp8_stacks(directory: Path, *, is_transposed: bool) -> dict[str, Tensor]:
    """Write Qwen3-VL with experts in FP8, in stacks; return the numbers of its experts by name."""
    sizes = {**VARIANTS["qwen3-vl-moe"].all_entries()}
    sizes["text_config"] = {**sizes["text_config"], "hidden_size": 96, "moe_intermediate_size": 32}
    sizes["vision_config"] = {**sizes["vision_config"], "out_hidden_size": 96}
    save(make_model("qwen3-vl-moe", sizes), directory)
    stored, meant = {}, {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if tensor.ndim != 3:
            stored[name] = tensor
            continue
        written = [byte_writers.fp8(one.float(), (16, 16)) for one in tensor]
        rows = {"down_proj": slice(None)}
        if name.endswith("gate_up_proj"):
            rows = {"gate_proj": slice(0, 32), "up_proj": slice(32, None)}
        for index, (_, numbers) in enumerate(written):
            owner = name.rpartition(".")[0]
            meant |= {f"{owner}.{index}.{leaf}.weight": numbers[own] for leaf, own in rows.items()}
        for end, part in (("", ".weight"), ("_scale_inv", ".weight_scale_inv")):
            stack = torch.stack([parts[part] for parts, _ in written])
            stored[f"{name}{end}"] = stack.transpose(1, 2).contiguous() if is_transposed else stack
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [16, 16]}
    (directory / "config.json").write_text(json.dumps(config))
    return meant


@pytest.mark.parametrize("is_transposed", [False, True])
def test_stacks_in_fp8(is_transposed: bool, tmp_path: Path) -> None:
    """Published files of Qwen3-VL have both numbers and scales transposed."""
    meant = fp8_stacks(tmp_path, is_transposed=is_transposed)
    check_models(EngineConfig(model=str(tmp_path)))
    with open_source(tmp_path) as source:
        for name, numbers in meant.items():
            assert torch.equal(source.get(name), numbers), name
    with running(tmp_path) as engine:
        assert len(answers(engine, [[1, 2, 3]], num_tokens=3)[0].token_ids) == 3


def test_stacks_in_fp8_that_cannot_be_separated_are_refused(tmp_path: Path) -> None:
    fp8_stacks(tmp_path, is_transposed=True)
    tensors, file = load_file(tmp_path / "model.safetensors"), tmp_path / "config.json"
    config = json.loads(file.read_text())
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj_scale_inv"

    def check(words: str, block: object = None, **changed: Tensor | None) -> None:
        kept = {key: tensor for key, tensor in {**tensors, **changed}.items() if tensor is not None}
        save_file(kept, tmp_path / "model.safetensors")
        entries = {**config["quantization_config"], "weight_block_size": block or [16, 16]}
        file.write_text(json.dumps({**config, "quantization_config": entries}))
        with pytest.raises(ModelLoadError, match=words):
            open_source(tmp_path)

    check("_scale_inv: experts of a layer in one tensor need a weight_block_size", "16x16")
    check("as many rows as columns", [16, 32])
    down = {key: torch.ones(len(one), 1, 2) for key, one in tensors.items() if key.endswith("down_proj_scale_inv")}
    check("gate_up_proj_scale_inv: some of its blocks of 64 rows are in gate and in up", [64, 64], **down)
    check(f"{name}: its shape is .*, and config.json says", **{name: tensors[name][:, :1].contiguous()})
    check(f"lacks 1 tensor of this model: {name}", **{name: None})


@pytest.mark.parametrize(
    "name",
    [
        "mixtral", "qwen2-moe-dense-layers", "qwen3-moe", "qwen3-next", "glm-4.5", "glm-4.7-flash", "deepseek-v2",
        "deepseek-v3", "granite-moe", "minimax-m2", "olmoe", "ernie-4.5-moe", "hy3", "mellum-2", "phi-3.5-moe",
        "command-a-plus", "laguna-xs", "mimo-v2-flash", "glm-4.5v", "a.x-k2", "flint", "jamba",
    ],
)  # fmt: skip
def test_models_that_transformers_writes_as_it_computes(name: str, tmp_path: Path) -> None:
    """With all experts of a layer in one tensor, and for some with other names; fine-tuned models have such files."""
    model, prompts = make_model(name), [[3, 4, 5, 6, 7]]
    save(model, tmp_path / "one-by-one")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)  # type: ignore[operator]
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / "stacked" / "model.safetensors"))
    found = []
    for directory in ("one-by-one", "stacked"):
        check_models(EngineConfig(model=str(tmp_path / directory)))
        with running(tmp_path / directory) as engine:
            found.append(answers(engine, prompts, num_tokens=3)[0].logits)
    assert torch.equal(*found)


def save_nemotron(directory: Path, latent_size: int | None, *, is_stacked: bool) -> None:
    config = NemotronHConfig(
        layers_block_type=["moe", "attention", "moe"], hidden_size=42, vocab_size=50, moe_latent_size=latent_size,
        moe_intermediate_size=24, moe_shared_expert_intermediate_size=33, n_routed_experts=5, num_experts_per_tok=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    torch.manual_seed(3)
    NemotronHForCausalLM(config).save_pretrained(directory, save_original_format=not is_stacked)


@pytest.mark.parametrize("latent_size", [None, 17])
def test_stacks_of_experts_without_gates(latent_size: int | None, tmp_path: Path) -> None:
    """Nemotron 3 as transformers computes with it, and as published files have it."""
    for name, is_stacked in (("stacked", True), ("one-by-one", False)):
        save_nemotron(tmp_path / name, latent_size, is_stacked=is_stacked)
    stored = load_file(tmp_path / "stacked" / "model.safetensors")
    assert sum(name.endswith(("experts.up_proj", "experts.down_proj")) for name in stored) == 4
    with open_source(tmp_path / "stacked") as found, open_source(tmp_path / "one-by-one") as expected:
        names = {name: name.replace("backbone.", "model.") for name in expected.names()}
        assert sorted(found.names()) == sorted(names.values())
        for name, other in names.items():
            assert found.shape(other) == expected.shape(name)
            assert torch.equal(found.get(other), expected.get(name)), name
    name = "model.layers.2.mixer.experts.up_proj"
    save_file({**stored, name: stored[name][:, :-1].contiguous()}, tmp_path / "stacked" / "model.safetensors")
    with pytest.raises(ModelLoadError, match=rf"\[5, 23, {latent_size or 42}\], and config.json says \[5, 24, "):
        open_source(tmp_path / "stacked")
    del stored[name]
    save_file(stored, tmp_path / "stacked" / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"lacks 1 tensor of this model: {name}"):
        open_source(tmp_path / "stacked")


@pytest.mark.parametrize("is_fp8", [False, True])
def test_stacks_of_compressed_tensors(is_fp8: bool, tmp_path: Path) -> None:
    """As AWQ checkpoints of Gemma 4 26B-A4B have them, and the same in FP8 with a scale for each row."""
    entries = {**VARIANTS["gemma-4-26b-a4b"].all_entries(), "hidden_size": 64, "moe_intermediate_size": 32}
    save(make_model("gemma-4-26b-a4b", entries), tmp_path)
    write = byte_writers.fp8_rows if is_fp8 else partial(byte_writers.integers, bits=4, group_size=32)
    leaves = {"" if is_fp8 else "_packed": ".weight" if is_fp8 else ".weight_packed", "_scale": ".weight_scale"}
    stored, meant = {}, {}
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        if tensor.ndim != 3:
            stored[name] = tensor
            continue
        written = [write(one.float()) for one in tensor]
        for index, (_, numbers) in enumerate(written):
            owner, _, projection = name.rpartition(".")
            parts = numbers.chunk(2) if projection == "gate_up_proj" else [numbers]
            names = ("gate_proj", "up_proj") if len(parts) == 2 else ("down_proj",)
            meant |= {f"{owner}.{index}.{leaf}.weight": part for leaf, part in zip(names, parts, strict=True)}
        stored |= {f"{name}{end}": torch.stack([of[leaf] for of, _ in written]) for end, leaf in leaves.items()}
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    groups = _compressed("pack-quantized", num_bits=4, strategy="group", group_size=32)
    config["quantization_config"] = CASES["float-rows"].config if is_fp8 else groups
    (tmp_path / "config.json").write_text(json.dumps(config))
    check_models(EngineConfig(model=str(tmp_path)))
    with open_source(tmp_path) as source:
        for name, numbers in meant.items():
            kind = source.stored_type(name)
            found = source.get(name)
            assert torch.equal(dequantize(kind, found, numbers.shape[1]) if isinstance(kind, str) else found, numbers)
    with running(tmp_path) as engine:
        assert len(answers(engine, [[1, 2, 3]], num_tokens=3)[0].token_ids) == 3
