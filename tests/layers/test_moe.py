"""Layers with experts agree with transformers, on several ranks too; a token's bits do not depend on the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    MixtralConfig,
    NemotronHConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMoE
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from pagewick import kernels
from pagewick.errors import ConfigError, ModelLoadError
from pagewick.expert_routing import Routing
from pagewick.kernels import cpu
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from pagewick.layers.config import MoeConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.moe import MoeLayer
from pagewick.quantization import method_chooser
from tests.layers.ranks import on_ranks, single_context

H, I = 42, 26  # noqa: E741
PREFIX = "model.layers.3.mlp"


def mixtral() -> tuple[nn.Module, MoeConfig]:
    config = MixtralConfig(hidden_size=H, intermediate_size=I, num_local_experts=7, num_experts_per_tok=2)
    return MixtralSparseMoeBlock(config), MoeConfig(
        num_experts=7, intermediate_size=I, routing=Routing(top_k=2, renormalize=True)
    )


def qwen2(renormalize: bool) -> tuple[nn.Module, MoeConfig]:
    config = Qwen2MoeConfig(
        hidden_size=H, moe_intermediate_size=I, shared_expert_intermediate_size=33, num_experts=12,
        num_experts_per_tok=4, norm_topk_prob=renormalize, hidden_act="gelu_pytorch_tanh",
    )  # fmt: skip
    return Qwen2MoeSparseMoeBlock(config), MoeConfig(
        num_experts=12, intermediate_size=I, routing=Routing(top_k=4, renormalize=renormalize),
        activation="gelu_tanh", shared_intermediate_size=33, has_shared_gate=True,
    )  # fmt: skip


def qwen3(renormalize: bool) -> tuple[nn.Module, MoeConfig]:
    config = Qwen3MoeConfig(
        hidden_size=H, moe_intermediate_size=I, num_experts=9, num_experts_per_tok=3, norm_topk_prob=renormalize
    )
    return Qwen3MoeSparseMoeBlock(config), MoeConfig(
        num_experts=9, intermediate_size=I, routing=Routing(top_k=3, renormalize=renormalize)
    )


def deepseek_v2(method: str) -> tuple[nn.Module, MoeConfig]:
    config = DeepseekV2Config(
        hidden_size=H, moe_intermediate_size=I, n_routed_experts=12, num_experts_per_tok=3, n_shared_experts=2,
        num_attention_heads=2, topk_method=method, n_group=4, topk_group=2, routed_scaling_factor=2.5,
    )  # fmt: skip
    groups = (4, 2) if method == "group_limited_greedy" else (1, 1)
    routing = Routing(top_k=3, num_groups=groups[0], top_k_groups=groups[1], scaling=2.5)
    return DeepseekV2Moe(config), MoeConfig(
        num_experts=12, intermediate_size=I, routing=routing, shared_intermediate_size=2 * I
    )


def deepseek_v3(renormalize: bool) -> tuple[nn.Module, MoeConfig]:
    config = DeepseekV3Config(
        hidden_size=H, moe_intermediate_size=I, n_routed_experts=12, num_experts_per_tok=4, n_shared_experts=1,
        n_group=4, topk_group=2, routed_scaling_factor=1.7, norm_topk_prob=renormalize,
    )  # fmt: skip
    routing = Routing(
        top_k=4, scoring="sigmoid", renormalize=renormalize, num_groups=4, top_k_groups=2, group_score="sum_of_two",
        scaling=1.7,
    )  # fmt: skip
    return DeepseekV3MoE(config), MoeConfig(
        num_experts=12, intermediate_size=I, routing=routing, has_router_bias=True, shared_intermediate_size=I
    )


def nemotron(latent_size: int | None) -> tuple[nn.Module, MoeConfig]:
    config = NemotronHConfig(
        hidden_size=H, moe_intermediate_size=I, moe_shared_expert_intermediate_size=33, moe_latent_size=latent_size,
        n_routed_experts=12, num_experts_per_tok=4, n_group=3, topk_group=2, routed_scaling_factor=2.5,
    )  # fmt: skip
    routing = Routing(
        top_k=4, scoring="sigmoid", renormalize=True, num_groups=3, top_k_groups=2, group_score="sum_of_two",
        scaling=2.5,
    )  # fmt: skip
    return NemotronHMoE(config), MoeConfig(
        num_experts=12, intermediate_size=I, routing=routing, activation="relu2", is_gated=False,
        latent_size=latent_size, has_router_bias=True, shared_intermediate_size=33,
    )  # fmt: skip


FAMILIES: dict[str, Callable[[], tuple[nn.Module, MoeConfig]]] = {
    "mixtral": mixtral,
    "qwen2": lambda: qwen2(False),
    "qwen2-renormalized": lambda: qwen2(True),
    "qwen3": lambda: qwen3(True),
    "qwen3-plain": lambda: qwen3(False),
    "deepseek-v2-greedy": lambda: deepseek_v2("greedy"),
    "deepseek-v2-groups": lambda: deepseek_v2("group_limited_greedy"),
    "deepseek-v3": lambda: deepseek_v3(True),
    "deepseek-v3-plain": lambda: deepseek_v3(False),
    "nemotron": lambda: nemotron(None),
    "nemotron-latents": lambda: nemotron(19),
}


def made(family: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, MoeConfig, dict[str, Tensor]]:
    """Return transformers' layer with random weights, our config of it, and the tensors of a checkpoint."""
    block, config = FAMILIES[family]()
    generator = torch.Generator().manual_seed(len(family))
    for name, tensor in block.state_dict(keep_vars=True).items():
        scale = 0.3 if "correction_bias" in name else 1.5 / tensor.shape[-1] ** 0.5
        tensor.data = torch.randn(tensor.shape, generator=generator).mul(scale)
        if "correction_bias" not in name:
            tensor.data = tensor.data.to(dtype)
    return block.eval(), config, checkpoint(block.state_dict())


def checkpoint(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return one tensor for each matrix of each expert, as in files."""
    tensors = {}
    for name, tensor in state.items():
        if name == "experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                tensors[f"experts.{expert}.gate_proj.weight"], tensors[f"experts.{expert}.up_proj.weight"] = both.chunk(
                    2
                )
        elif name in ("experts.up_proj", "experts.down_proj"):
            leaf = name.removeprefix("experts.")
            tensors |= {f"experts.{expert}.{leaf}.weight": weight for expert, weight in enumerate(tensor)}
        else:
            tensors[name.replace("shared_experts.", "shared_expert.")] = tensor
    return tensors


def loaded(context: LayerContext, config: MoeConfig, tensors: dict[str, Tensor]) -> MoeLayer:
    """Load our layer. Exactly one module must expect each tensor, and no other tensors are expected."""
    layer = MoeLayer(context, PREFIX, H, config)
    left = dict(tensors)
    for path, module in layer.named_modules():
        expected: Any = getattr(module, "expected_weights", list)()
        for part, leaf in expected:
            owner = path if part is None else ".".join([*path.split(".")[:-1], part])
            module.load_weight(leaf, left.pop(f"{owner}.{leaf}"), part)
    assert not left
    return layer


def tokens(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, H, generator=torch.Generator().manual_seed(count)).to(dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_transformers(family: str) -> None:
    block, config, tensors = made(family)
    layer = loaded(single_context(), config, tensors)
    for count in (1, 67):
        x = tokens(count)
        with torch.inference_mode():
            expected = block(x[None])[0]
            assert expected.std() > 0.1
            torch.testing.assert_close(layer(x), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize(
    "family", ["mixtral", "qwen2", "deepseek-v2-groups", "deepseek-v3", "nemotron", "nemotron-latents"]
)
def test_the_ranks_together_give_the_layer(family: str, world_size: int) -> None:
    block, config, tensors = made(family)
    x = tokens(19)

    def act(context: LayerContext) -> Tensor:
        found: Tensor = loaded(context, config, tensors)(x)
        return found

    shares = on_ranks(world_size, act)
    with torch.inference_mode():
        expected = block(x[None])[0]
    for found in shares:
        assert torch.equal(found, shares[0])
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("is_gated", [True, False])
def test_more_ranks_than_columns(is_gated: bool) -> None:
    config = MoeConfig(
        num_experts=3, intermediate_size=2, routing=Routing(top_k=2), shared_intermediate_size=1, is_gated=is_gated
    )
    shapes = {"gate.weight": (3, H)}
    for owner, size in [*((f"experts.{expert}", 2) for expert in range(3)), ("shared_expert", 1)]:
        shapes |= {f"{owner}.{name}.weight": (size, H) for name in config.input_projections}
        shapes |= {f"{owner}.down_proj.weight": (H, size)}
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=generator) / 5 for name, shape in shapes.items()}
    x = tokens(5)
    whole = loaded(single_context(), config, tensors)(x)
    for found in on_ranks(3, lambda context: loaded(context, config, tensors)(x)):
        torch.testing.assert_close(found, whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize("family", ["mixtral", "qwen2", "deepseek-v3", "nemotron", "nemotron-latents"])
def test_agrees_with_transformers_in_bfloat16(family: str) -> None:
    """transformers rounds router logits, so that some tokens use other experts; most rows must be close."""
    block, config, tensors = made(family, torch.bfloat16)
    layer = loaded(replace(single_context(), dtype=torch.bfloat16), config, tensors)
    x = tokens(200, torch.bfloat16)
    with torch.inference_mode():
        expected = block(x[None])[0].float()
    error = (layer(x).float() - expected).abs().amax(dim=-1)
    assert (error < 0.03 * expected.abs().max()).float().mean() > 0.97


@pytest.fixture
def native_threads() -> Any:
    if cpu.library() is None:
        pytest.skip("needs the native library: make install")
    yield
    kernels.set_num_threads(torch.get_num_threads())


@pytest.mark.usefixtures("native_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen2", "deepseek-v3", "nemotron", "nemotron-latents"])
def test_a_token_has_the_same_bits_in_any_batch(family: str, dtype: torch.dtype) -> None:
    _, config, tensors = made(family, dtype)
    layer = loaded(replace(single_context(), dtype=dtype), config, tensors)
    x = tokens(71, dtype)
    kernels.set_num_threads(1)
    together = layer(x)
    for count in (1, 2, 3):
        kernels.set_num_threads(count)
        assert torch.equal(layer(x), together)
        assert torch.equal(torch.cat([layer(row) for row in x.split(1)]), together)
        assert torch.equal(torch.cat([layer(chunk) for chunk in x.split(7)]), together)


@pytest.mark.usefixtures("native_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_is_recorded(family: str, dtype: torch.dtype) -> None:
    """A step recorded with some tokens is right for others, which use other experts."""
    _, config, tensors = made(family, dtype)
    layer = loaded(replace(single_context(), dtype=dtype), config, tensors)
    x = tokens(3, dtype)
    with torch.inference_mode():
        (found,), recorded = record(lambda: [layer(x)], StepMemory())
        assert isinstance(recorded, RecordedStep), recorded
        x.copy_(tokens(9, dtype)[4:7])
        recorded.replay()
        assert torch.equal(found, layer(x))


@pytest.mark.parametrize(
    ("module", "part", "tensor", "message"),
    [
        ("experts", "experts.3.down_proj", torch.zeros(I, H), rf"\[{I}, {H}\], and config.json says \[{H}, {I}\]"),
        ("experts", "experts.0.up_proj", torch.zeros(I, H + 1), rf"\[{I}, {H + 1}\]"),
        ("experts", "experts.0.up_proj", torch.zeros(I, H, dtype=torch.int8), "torch.int8, a quantized weight"),
        ("gate", None, torch.zeros(8, H), rf"\[8, {H}\], and config.json says \[7, {H}\]"),
        ("gate", None, torch.zeros(7, H, dtype=torch.uint8), "quantized"),
    ],
)
def test_tensors_that_do_not_fit(module: str, part: str | None, tensor: Tensor, message: str) -> None:
    layer = MoeLayer(single_context(), PREFIX, H, mixtral()[1])
    with pytest.raises(ModelLoadError, match=message):
        getattr(layer, module).load_weight("weight", tensor, part)


def test_a_format_of_experts_that_is_not_supported_is_refused() -> None:
    choose = method_chooser({f"{PREFIX}.experts.6.up_proj.weight": "Q8_K"})
    context = replace(single_context(), choose_method=choose)
    with pytest.raises(ConfigError, match=r"experts\.6\.up_proj.*not supported"):
        MoeLayer(context, PREFIX, H, mixtral()[1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"routing": Routing(top_k=8)}, "top_k 8"),
        ({"routing": Routing(top_k=1, num_groups=3)}, "3 equal groups"),
        ({"has_shared_gate": True}, "no shared expert"),
        ({"has_shared_gate": True, "shared_intermediate_size": 3, "latent_size": 5}, "beside latents"),
    ],
)
def test_configs_that_contradict_themselves(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(mixtral()[1], **fields)
