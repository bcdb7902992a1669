"""The arithmetic of memory for adapters, beside what layers allocate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pagewick.engine.step_memory import StepLimits, gpu_step_bytes
from pagewick.layers.context import LayerContext, LoraRoom
from pagewick.layers.linear import Linear
from pagewick.layers.moe import MoeLayer
from pagewick.models.adapter_memory import adapter_bytes
from pagewick.models.registry import read_config
from pagewick.models.tensors import model_tensors
from tests.layers.ranks import on_ranks
from tests.models.by_hand import build, make_checkpoint

ROOM = LoraRoom(num_adapters=3, max_rank=17)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "phi-3-mini-4k", "starcoder", "qwen2-moe", "qwen3.5", "deepseek-v2", "kimi-linear", "olmo-hybrid"),
        *("mamba-1", "mamba-2", "falcon-h1", "deepseek-v3.2", "a.x-k2", "longcat-flash", "ling-3-flash", "deepseek-v4"),
        "qwen4",
    ],
)
def test_room_for_adapters(name: str, num_ranks: int, tmp_path: Path) -> None:
    entries, tensors = make_checkpoint(name, tmp_path)

    def count(context: LayerContext) -> int:
        model = build(replace(context, lora=ROOM), entries, tensors)
        layers = [layer.lora for layer in model.modules() if isinstance(layer, Linear) and layer.lora is not None]
        return sum(layer.num_numbers for layer in layers)

    found = on_ranks(num_ranks, count)
    for rank, numbers in enumerate(found):
        table = model_tensors(read_config(entries), list(tensors), rank=rank, num_ranks=num_ranks)
        # MLA multiplies with kv_b_proj in another way, and groups of heads with o_a_proj; the table has both.
        listed = [tensor for tensor in table if not any(name in tensor.path for name in ("kv_b_proj", "o_a_proj"))]
        assert adapter_bytes(listed, ROOM.num_adapters, ROOM.max_rank, "float32") == 4 * numbers > 0


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_room_for_adapters_of_latents(num_ranks: int, tmp_path: Path) -> None:
    """The projections of latents have adapters, and so has the shared expert, which has no gate here."""
    config = read_config(make_checkpoint("deepseek-v3", tmp_path)[0])
    layer, path = config.layers[-1], f"model.layers.{config.num_layers - 1}.mlp"
    experts = replace(config.mixtures[-1], is_gated=False, latent_size=31)
    config = replace(config, layers=(*config.layers[:-1], replace(layer, mlp=experts)))

    def count(context: LayerContext) -> int:
        moe = MoeLayer(replace(context, lora=ROOM), path, config.hidden_size, experts)
        layers = [layer.lora for layer in moe.modules() if isinstance(layer, Linear) and layer.lora is not None]
        assert len(layers) == 4
        return sum(layer.num_numbers for layer in layers)

    for rank, numbers in enumerate(on_ranks(num_ranks, count)):
        table = [tensor for tensor in model_tensors(config, rank=rank, num_ranks=num_ranks) if path in tensor.path]
        assert adapter_bytes(table, ROOM.num_adapters, ROOM.max_rank, "float32") == 4 * numbers


def test_a_step_with_adapters_needs_more(tmp_path: Path) -> None:
    config = read_config(make_checkpoint("llama", tmp_path)[0])
    limits = StepLimits(num_tokens=2048, num_logits=32, context=96, element_bytes=2)
    more = gpu_step_bytes(config, replace(limits, has_adapters=True)) - gpu_step_bytes(config, limits)
    # 6 heads and 2 KV heads of 16 numbers each, before and after they are rotated, and the outputs of the heads.
    widest = (3 * 6 + 2 * 2) * 16
    # For the step and an eighth for gaps, and for the graphs of up to 512 tokens.
    assert more == int(2048 * widest * 2 * 9 / 8) + 512 * widest * 2
