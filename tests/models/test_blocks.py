"""Each way in which the parts of a layer follow each other, against its formula, with stand-ins for the parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from pagewick.models.blocks import BLOCKS
from pagewick.models.parts import Block as BlockName
from pagewick.models.registry import read_config
from tests.layers.ranks import single_context

SIZE = 24
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": SIZE,
    "intermediate_size": 7,
    "num_hidden_layers": 1,
    "num_attention_heads": 3,
    "vocab_size": 5,
}


class Part(nn.Module):
    """Replaces attention or MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE), requires_grad=False)

    def forward(self, x: Tensor, *_: object) -> Tensor:
        return torch.tanh(x @ self.weight)


def defined(block: nn.Module, kind: str, h: Tensor, scale: float) -> Tensor:
    """The formulas beside config.Block, in float64."""

    def norm(name: str, x: Tensor) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * block.get_parameter(f"{name}.weight").double()

    def part(name: str, x: Tensor) -> Tensor:
        return torch.tanh(x @ block.get_parameter(f"{name}.weight").double())

    h = h.double()
    if kind == "post_ln":
        h = norm("post_attention_layernorm", h + scale * part("self_attn", h))
        return norm("post_feedforward_layernorm", h + scale * part("mlp", h))
    if kind == "post_norm":
        h = h + scale * norm("post_attention_layernorm", part("self_attn", h))
        return h + scale * norm("post_feedforward_layernorm", part("mlp", h))
    normed = norm("input_layernorm", h)
    attended = part("self_attn", normed)
    if kind == "parallel":
        return h + scale * (attended + part("mlp", normed))
    if kind == "parallel_norms":
        return h + scale * (attended + part("mlp", norm("post_attention_layernorm", h)))
    if kind in ("sequential", "post_mlp"):
        h = h + scale * attended
        fed = part("mlp", norm("post_attention_layernorm", h))
        return h + scale * (fed if kind == "sequential" else norm("post_feedforward_layernorm", fed))
    h = h + scale * norm("post_attention_layernorm", attended)
    return h + scale * norm("post_feedforward_layernorm", part("mlp", norm("pre_feedforward_layernorm", h)))


@pytest.mark.parametrize("residual_scale", [1.0, 0.37])
# Layers that attend to an image, too, are compared with transformers alone (test_blip.py).
@pytest.mark.parametrize("kind", [kind for kind in BLOCKS if kind != "captioning"])
def test_a_layer_adds_what_its_formula_says(kind: str, residual_scale: float) -> None:
    torch.manual_seed(1)
    config = replace(read_config(CONFIG), block=cast("BlockName", kind), residual_scale=residual_scale)
    block = BLOCKS[kind](single_context(), "model.layers.0", config, config.layers[0])
    block.self_attn, block.mlp = Part(), Part()
    for name, weight in block.named_parameters():
        if "norm" in name:
            weight.uniform_(0.5, 1.5)
    hidden_states, earlier = torch.randn(2, 5, SIZE)
    # Blocks with norms behind the sums return no residual, and get none.
    for residual in (None,) if kind == "post_ln" else (None, earlier):
        added, kept = block(hidden_states.clone(), None if residual is None else residual.clone(), None, None)
        expected = defined(block, kind, hidden_states if residual is None else hidden_states + residual, residual_scale)
        kept = torch.zeros_like(added) if kept is None else kept
        torch.testing.assert_close(added.double() + kept, expected, rtol=0, atol=1e-5)
