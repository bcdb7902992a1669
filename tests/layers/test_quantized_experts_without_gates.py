"""Experts without gates in ggml's formats, integers and FP8: whole, on two ranks, between latents, in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from pagewick.expert_routing import Routing
from pagewick.kernels import quantize_weight
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from pagewick.layers.config import MoeConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.expert_offload import OffloadedExperts
from pagewick.layers.moe import MoeLayer
from pagewick.quantization.at_load import QuantizingMethod
from pagewick.quantization.experts import MixedExperts
from pagewick.quantization.ggml import GgmlMethod
from pagewick.quantization.grouped_experts import GroupedExperts
from pagewick.quantization.method import LinearMethod
from pagewick.quantization.unquantized import UnquantizedMethod
from tests.layers.ranks import on_ranks, single_context
from tests.layers.test_ggml_formats import H, Stored, close, context_for, known, load, needs_library, random, stored

PREFIX, SIZE, LATENTS = "model.layers.3.mlp", 512, 768
CONFIG = MoeConfig(
    num_experts=6, intermediate_size=SIZE, routing=Routing(top_k=2, renormalize=True), activation="relu2",
    is_gated=False, shared_intermediate_size=SIZE,
)  # fmt: skip
CONFIGS = {"hidden states": CONFIG, "latents": replace(CONFIG, latent_size=LATENTS)}
# The formats of up and down projections, first those of the experts, then of the shared expert, and of the latents'
# projections; / separates those of different experts.
MIXES = known(
    "Q8_0 Q8_0 Q8_0 Q8_0 Q8_0 Q8_0", "F16 F32 F32 F16 F32 F16", "Q4_K Q6_K Q4_K Q6_K Q8_0 Q5_K",
    "Q4_0 F16 Q8_0 F16 F32 Q4_0", "F32 Q4_1 F32 Q5_1 Q4_0 F32", "Q4_K/Q6_K Q6_K/Q5_0 Q8_0 Q8_0 Q4_K Q4_K",
    "int4_g128 int4_g128 fp8_g128 fp8_g32 int4_g32 fp8_g128",
)  # fmt: skip


def experts(mix: str, config: MoeConfig) -> dict[str, Stored]:
    formats, width = mix.split(), config.latent_size or H
    tensors = {"gate": stored("F32", config.num_experts, H)}
    for expert in range(config.num_experts):
        up, down = (kinds[expert % len(kinds)] for kinds in (kinds.split("/") for kinds in formats[:2]))
        tensors[f"experts.{expert}.up_proj"] = stored(up, SIZE, width, 2 * expert)
        tensors[f"experts.{expert}.down_proj"] = stored(down, width, SIZE, 2 * expert + 1)
    tensors["shared_expert.up_proj"] = stored(formats[2], SIZE, H, 20)
    tensors["shared_expert.down_proj"] = stored(formats[3], H, SIZE, 21)
    if config.latent_size is not None:
        tensors["fc1_latent_proj"] = stored(formats[4], width, H, 22)
        tensors["fc2_latent_proj"] = stored(formats[5], H, width, 23)
    return {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}


def moe_layer(context: LayerContext, tensors: Mapping[str, Stored], config: MoeConfig) -> MoeLayer:
    layer = MoeLayer(context_for(context, tensors), PREFIX, H, config)
    load(layer, PREFIX, tensors)
    return layer


def one_by_one(tensors: Mapping[str, Stored], x: Tensor, config: MoeConfig) -> Tensor:
    """The layer's output [T, H], expert by expert, as the definition says."""

    def product(name: str, row: Tensor) -> Tensor:
        return tensors[f"{PREFIX}.{name}"].product(row)

    def expert(owner: str, row: Tensor) -> Tensor:
        return product(f"{owner}.down_proj", functional.relu(product(f"{owner}.up_proj", row)).square())

    weights, chosen = product("gate", x).softmax(-1).topk(config.routing.top_k)
    weights = weights / weights.sum(-1, keepdim=True)
    rows = []
    for row, of_token, ids in zip(x.split(1), weights, chosen.tolist(), strict=True):
        inputs = row if config.latent_size is None else product("fc1_latent_proj", row)
        total = torch.stack([w * expert(f"experts.{e}", inputs) for w, e in zip(of_token, ids, strict=True)]).sum(0)
        routed = total if config.latent_size is None else product("fc2_latent_proj", total)
        rows.append(routed + expert("shared_expert", row))
    return torch.cat(rows)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize(
    ("mix", "per_rank"),
    # Experts of different formats are refused in host memory.
    [(mix, per_rank) for mix in MIXES for per_rank in (0, 2) if "/" not in mix or not per_rank],
)
def test_experts(mix: str, per_rank: int, kind: str, world_size: int) -> None:
    config = CONFIGS[kind]
    tensors, steps = experts(mix, config), [random(count, H, seed=count) for count in (1, 7, 2, 3)]

    def act(context: LayerContext) -> list[Tensor]:
        layer = moe_layer(replace(context, num_experts_offload_per_rank=per_rank), tensors, config)
        found = [layer(x) for x in steps]
        store = layer.experts.store
        assert isinstance(store, OffloadedExperts) == (per_rank > 0)
        assert not isinstance(store, OffloadedExperts) or store.num_copies > 2
        return found

    for answers in on_ranks(world_size, act):
        for x, found in zip(steps, answers, strict=True):
            expected = one_by_one(tensors, x, config)
            scale = float(expected.std())
            assert scale > 0.3
            # A last bit of an activation may decide how it is rounded to 8 bits. Each rank rounds its own sum of
            # latents, where the definition rounds the whole sum.
            close(found, expected, scale * (4e-2 if world_size > 1 and kind == "latents" else 1e-2))


@needs_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("mix", MIXES)
def test_a_token_has_the_same_bits_in_any_batch_and_anywhere(mix: str, kind: str, dtype: torch.dtype) -> None:
    config = CONFIGS[kind]
    tensors, x = experts(mix, config), random(50, H, seed=4).to(dtype)
    layers = [moe_layer(replace(single_context(), dtype=dtype), tensors, config)]
    if "/" not in mix:
        context = replace(single_context(), dtype=dtype, num_experts_offload_per_rank=3)
        layers.append(moe_layer(context, tensors, config))
    together = layers[0](x)
    for layer in layers:
        assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), together)
        assert torch.equal(torch.cat([layer(rows) for rows in x.split(7)]), together)


@needs_library
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("mix", MIXES)
def test_a_step_is_recorded(mix: str, kind: str) -> None:
    """A step recorded with some tokens is right for others, which use other experts."""
    tensors, x = experts(mix, CONFIGS[kind]), random(3, H)
    layer = moe_layer(single_context(), tensors, CONFIGS[kind])
    assert type(layer.experts.store.gate_up) is (MixedExperts if "/" in mix else GroupedExperts)
    with torch.inference_mode():
        (found,), recorded = record(lambda: [layer(x)], StepMemory())
        if "/" in mix:
            # Which formats are multiplied is known within a step only.
            assert isinstance(recorded, str)
            return
        assert isinstance(recorded, RecordedStep), recorded
        x.copy_(random(3, H, seed=1))
        recorded.replay()
        assert torch.equal(found, layer(x))


def choose_method(method: LinearMethod, prefix: str) -> LinearMethod:
    return UnquantizedMethod() if prefix.endswith(".gate") else method


@pytest.mark.parametrize("world_size", [1, 2])
def test_experts_are_quantized_while_they_load(world_size: int) -> None:
    """The layer has the bits of one that loads blocks."""
    config, x = CONFIGS["latents"], random(5, H)
    numbers = experts("F32 F32 F32 F32 F32 F32", config)
    blocks = {
        name: tensor if name.endswith(".gate") else replace(tensor, tensor=quantize_weight(tensor.tensor, "Q4_K"))
        for name, tensor in numbers.items()
    }

    def act(context: LayerContext) -> list[Tensor]:
        answers = []
        for is_stored, method in ((False, QuantizingMethod("Q4_K")), (True, GgmlMethod("Q4_K"))):
            choose = partial(choose_method, method)
            layer = MoeLayer(replace(context, choose_method=choose), PREFIX, H, config)
            load(layer, PREFIX, blocks if is_stored else numbers)
            answers.append(layer(x))
        return answers

    for found, expected in on_ranks(world_size, act):
        assert torch.equal(found, expected)
