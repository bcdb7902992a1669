"""Models with all matrices in a format that has only the four verbs, against models with plain, equal weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagewick.engine.model_loading import num_parameters
from pagewick.layers.context import LayerContext
from pagewick.quantization.method import Storage
from tests.layers.ranks import on_ranks, single_context
from tests.models.answers import make_prompts
from tests.models.by_hand import build, logits_of, make_checkpoint
from tests.quantization.int8 import INT8, quantized

PROMPTS = make_prompts((5, 1, 19))


@pytest.mark.parametrize(
    ("name", "world_size", "per_rank"),
    [
        ("llama", 1, 0), ("llama", 2, 0), ("llama-bias-tied", 2, 0), ("phi-3-mini-4k", 2, 0), ("starcoder", 1, 0),
        ("gemma-2", 1, 0), ("qwen2-moe", 2, 0), ("qwen2-moe", 2, 1), ("deepseek-v3", 1, 0), ("deepseek-v3", 1, 3),
        ("deepseek-v2", 2, 0), ("glm-4.5", 2, 0), ("glm-4.7-flash", 1, 0), ("minimax-m2", 1, 2),
    ],
)  # fmt: skip
def test_every_matrix_is_int8(name: str, world_size: int, per_rank: int, tmp_path: Path) -> None:
    """Embeddings, positions, projections fused or not, routers, experts, latents and heads; experts in host memory."""
    config, tensors = make_checkpoint(name, tmp_path)
    stored, meant = quantized(tensors)
    plain = build(single_context(), config, meant)
    expected = logits_of(plain, PROMPTS)

    def act(context: LayerContext) -> tuple[Tensor, int]:
        context = replace(context, choose_method=lambda prefix: INT8, num_experts_offload_per_rank=per_rank)
        model = build(context, config, stored)
        assert {
            storage.get_parameter("weight").dtype for storage in model.modules() if isinstance(storage, Storage)
        } == {torch.int8}
        return logits_of(model, PROMPTS), num_parameters(model)

    for found, count in on_ranks(world_size, act):
        assert world_size > 1 or count == num_parameters(plain)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
    assert expected.std() > 0.5
