"""Latent attention compared with transformers, whole and in chunks, on one rank and on two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from pagewick.attention.backend import GroupBatch
from pagewick.engine.model_loading import num_parameters
from pagewick.errors import ModelLoadError
from pagewick.kernels import cpu
from pagewick.kernels.recorded_steps import RecordedStep, StepMemory, record
from pagewick.layers.config import MlaConfig
from pagewick.layers.context import LayerContext
from pagewick.layers.latent_attention import LatentAttention
from pagewick.weights.loader import load_weights
from tests.layers.ranks import BLOCK_SIZE, on_ranks, single_context

HIDDEN_SIZE, ROPE_DIM = 40, 6
SIZES: dict[str, Any] = {
    "hidden_size": HIDDEN_SIZE, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 20,
    "qk_nope_head_dim": 10, "qk_rope_head_dim": ROPE_DIM, "v_head_dim": 14, "head_dim": ROPE_DIM,
    "max_position_embeddings": 64,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v2-lite": ("DeepseekV2", {"q_lora_rank": None}),
    "v2": ("DeepseekV2", {"q_lora_rank": 12, "attention_bias": True}),
    "v3": ("DeepseekV3", {"q_lora_rank": 12}),
    "v3-halves": ("DeepseekV3", {"q_lora_rank": 12, "rope_interleave": False}),
    "v3-narrow": ("DeepseekV3", {"q_lora_rank": 12, "qk_nope_head_dim": 1, "v_head_dim": 1}),
}
NUM_TOKENS = 21


class OneTensorEach:
    """Return a module's parameters as a checkpoint."""

    def __init__(self, module: nn.Module) -> None:
        self._tensors = {f"attention.{name}": tensor for name, tensor in module.state_dict().items()}

    def names(self) -> list[str]:
        return list(self._tensors)

    def get(self, name: str) -> Tensor:
        tensor: Tensor = self._tensors[name]
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self._tensors[name].dtype
        return dtype

    def stored_type(self, name: str) -> torch.dtype:
        return self.dtype(name)

    def release(self, tensor: Tensor) -> None:
        pass


@dataclass
class Case:
    """A case. theirs: transformers' attention with random weights. expected: its output for `hidden_states`."""

    theirs: nn.Module
    config: MlaConfig
    hidden_states: Tensor
    cos_sin: tuple[Tensor, Tensor]
    expected: Tensor

    def build(self, context: LayerContext) -> LatentAttention:
        holder = nn.Module()
        attention = LatentAttention(context, "attention", HIDDEN_SIZE, self.config)
        holder.attention = attention
        load_weights(holder, OneTensorEach(self.theirs))  # type: ignore[arg-type]
        assert attention.kept is not None
        spec = attention.kept.cache_spec
        assert spec.kind == "latent" and spec.block_bytes == (20 + ROPE_DIM) * BLOCK_SIZE * 4
        attention.kept.bind_cache(torch.full((8, spec.block_bytes), 255, dtype=torch.uint8), 0)
        return attention

    def run(self, attention: LatentAttention, chunks: list[int]) -> Tensor:
        outputs, first = [], 0
        for count in chunks:
            tokens = slice(first, first + count)
            cos, sin = (angles[tokens] for angles in self.cos_sin)
            outputs.append(attention(self.hidden_states[tokens], (cos, sin), OneSequence(first, count)))
            first += count
        return torch.cat(outputs)


class OneSequence:
    """The batch of a sequence's tokens [first, first + count); its blocks are in descending order."""

    def __init__(self, first: int, count: int) -> None:
        table = torch.arange(7, 0, -1, dtype=torch.int32)
        positions = torch.arange(first, first + count)
        slots = table[positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        self.cu_seqlens_q = torch.tensor([0, count], dtype=torch.int32)
        self.context_lens = torch.tensor([first + count], dtype=torch.int32)
        self.groups = [GroupBatch(slots, table.unsqueeze(0))]


def make_case(name: str) -> Case:
    family, changes = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    config._attn_implementation = "eager"
    module = getattr(transformers.models, "deepseek_v2" if family == "DeepseekV2" else "deepseek_v3")
    modeling = getattr(module, f"modeling_{module.__name__.rpartition('.')[2]}")
    torch.manual_seed(5)
    theirs = getattr(modeling, f"{family}Attention")(config, layer_idx=0).eval()
    for parameter_name, parameter in theirs.named_parameters():
        if "norm" in parameter_name:
            nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            nn.init.normal_(parameter, std=0.4)
    hidden_states = torch.randn(NUM_TOKENS, HIDDEN_SIZE)
    angles = torch.arange(NUM_TOKENS)[:, None] * torch.tensor([1.0, 0.3, 0.02])
    cos, sin = angles.cos(), angles.sin()
    is_complex = family == "DeepseekV2"
    positions = torch.polar(torch.ones_like(angles), angles) if is_complex else (cos.repeat(1, 2), sin.repeat(1, 2))
    hidden = torch.full((NUM_TOKENS, NUM_TOKENS), float("-inf")).triu(1)
    with torch.no_grad():
        embeddings = positions[None] if isinstance(positions, Tensor) else tuple(x[None] for x in positions)
        expected = theirs(hidden_states[None], attention_mask=hidden[None, None], position_embeddings=embeddings)[0][0]
    mla = MlaConfig(
        num_heads=4, q_lora_rank=config.q_lora_rank, kv_lora_rank=20,
        qk_nope_head_dim=config.qk_nope_head_dim, qk_rope_head_dim=ROPE_DIM, v_head_dim=config.v_head_dim,
        softmax_scale=(config.qk_nope_head_dim + ROPE_DIM) ** -0.5, attention_bias=bool(config.attention_bias),
        rope_interleaved=bool(getattr(config, "rope_interleave", True)),
    )  # fmt: skip
    return Case(theirs, mla, hidden_states, (cos, sin), expected)


@pytest.mark.parametrize("name", CASES)
def test_agrees_with_transformers(name: str) -> None:
    case = make_case(name)
    attention = case.build(single_context())
    whole = case.run(attention, [NUM_TOKENS])
    torch.testing.assert_close(whole, case.expected, atol=2e-5, rtol=1e-5)
    assert case.expected.std() > 1
    chunked = case.run(attention, [3, 1, 9, *[1] * 8])
    if cpu.library() is None:
        torch.testing.assert_close(chunked, whole, atol=2e-5, rtol=1e-5)
    else:
        assert torch.equal(chunked, whole)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("name", ["v2-lite", "v2"])
def test_heads_are_divided_among_ranks(name: str, world_size: int) -> None:
    case = make_case(name)
    outputs = on_ranks(world_size, lambda context: case.run(case.build(context), [20, 1]))
    for output in outputs:
        torch.testing.assert_close(output, case.expected, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_rank_counts_the_parameters_of_its_heads(world_size: int) -> None:
    """Padding of packed weights does not count. Only the weights that belong to heads are divided among ranks."""
    case = make_case("v2-lite")
    mla, shared = case.config, HIDDEN_SIZE * (20 + ROPE_DIM) + 20
    of_head = (
        HIDDEN_SIZE * mla.qk_head_dim + 20 * (mla.qk_nope_head_dim + mla.v_head_dim) + mla.v_head_dim * HIDDEN_SIZE
    )
    counts = on_ranks(world_size, lambda context: num_parameters(case.build(context)))
    assert counts == [shared + of_head * 4 // world_size] * world_size


def test_no_tokens() -> None:
    case = make_case("v2")
    assert case.run(case.build(single_context()), [0, 3, 0]).shape == (3, HIDDEN_SIZE)


@pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
def test_it_can_be_recorded() -> None:
    case = make_case("v2")
    attention = case.build(single_context())
    batch, (cos, sin) = OneSequence(0, 5), case.cos_sin
    hidden_states = case.hidden_states[:5].clone()
    results, recorded = record(lambda: [attention(hidden_states, (cos[:5], sin[:5]), batch)], StepMemory())
    assert isinstance(recorded, RecordedStep), recorded
    expected = results[0].clone()
    hidden_states.mul_(2)
    recorded.replay()
    assert not torch.equal(results[0], expected)
    hidden_states.mul_(0.5)
    recorded.replay()
    assert torch.equal(results[0], expected)


def test_a_tensor_of_another_shape_is_refused() -> None:
    case = make_case("v3")
    case.theirs.kv_b_proj = nn.Linear(20, 95, bias=False)
    with pytest.raises(ModelLoadError, match=r"attention.kv_b_proj.weight.*\[95, 20\].*\[96, 20\]"):
        case.build(single_context())
