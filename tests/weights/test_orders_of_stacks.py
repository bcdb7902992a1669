"""Stacks of experts in the order of published files, which transformers does not write, mean the same."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewick.weights.opening import open_source
from tests.models.answers import answers, running
from tests.models.checkpoints import write_checkpoint


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
