"""Stacks of experts in the order of published files, which transformers does not write, mean the same."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from pagewick.weights.opening import open_source
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
