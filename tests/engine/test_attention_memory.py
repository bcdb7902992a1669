"""The memory that step_memory counts for attention, against what a layer takes as it runs."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from pagewick.engine.step_memory import (
    PLAIN_QUERIES,
    PLAIN_SCORES,
    StepLimits,
    activation_bytes,
    gpu_graph_bytes,
    gpu_step_bytes,
    plain_attention_bytes,
)
from pagewick.kernels import reference, reference_mla
from pagewick.kernels.kv_cache import LARGEST, heads_cache
from pagewick.kernels.options import AttentionMetadata, ScoreOptions
from pagewick.models.config import ModelConfig
from pagewick.models.mixers import DecoderAttention
from pagewick.models.parts import AttentionConfig, MlpConfig
from pagewick.models.registry import read_config
from tests.engine.graph.late_device import late_device
from tests.models.answers import answers, running
from tests.models.checkpoints import VARIANTS, write_checkpoint
from tests.models.published import PUBLISHED
from tests.quantization.test_at_load_memory import peak_of

NUM_TOKENS = 32


def counted_bytes(model: ModelConfig, layer: int) -> int:
    """The bytes that are counted for the widest part if that is a layer's attention."""
    narrow = replace(model.layers[layer], mlp=MlpConfig(intermediate_size=1))
    alone = replace(model, layers=(narrow,))
    return activation_bytes(alone, NUM_TOKENS, 0, 4, 0) - 4 * NUM_TOKENS * model.hidden_size * 4


@pytest.mark.parametrize(
    "name", ["llama", "qwen3-next", "laguna-xs", "laguna-m", "step-3.7", "olmo-0424", "mimo-v2-flash"]
)
def test_attention_takes_what_is_counted(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    peaks: list[int] = []
    original = DecoderAttention.forward

    def forward(self: DecoderAttention, hidden_states: Tensor, *arguments: Any) -> Tensor:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
            result = original(self, hidden_states, *arguments)
        events = [event for event in measured.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        if len(hidden_states) == NUM_TOKENS:
            peaks.append(max(accumulate(changes)))
        return result

    write_checkpoint(name, tmp_path)
    model = read_config(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    monkeypatch.setattr(DecoderAttention, "forward", forward)
    with running(tmp_path, **{**VARIANTS[name].engine, "dtype": "float32"}) as engine:
        answers(engine, [[*range(5, 5 + NUM_TOKENS)]], num_tokens=1)
    layers = [index for index, layer in enumerate(model.layers) if isinstance(layer.attention, AttentionConfig)]
    assert len(peaks) == len(layers) > 0
    for layer, peak in zip(layers, peaks, strict=True):
        assert peak == counted_bytes(model, layer)


def of_plain_attention(num_heads: int, num_kv_heads: int, head_dim: int, **fields: Any) -> ModelConfig:
    model = read_config(PUBLISHED["Meta-Llama-3.1-8B"])
    attention = AttentionConfig(
        num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, softmax_scale=0.1, **fields
    )
    return replace(model, layers=(replace(model.layers[0], attention=attention),))


@pytest.mark.parametrize("cap", [None, 30.0])
@pytest.mark.parametrize(("num_queries", "context"), [(300, 2048), (1, 4096), (300, 300)])
@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.bfloat16, torch.int8)],
)
@pytest.mark.parametrize("heads", [(8, 2), (2, 2)])
def test_plain_attention_takes_no_more_than_is_counted(
    heads: tuple[int, int], dtype: torch.dtype, cache_dtype: torch.dtype, num_queries: int, context: int,
    cap: float | None,
) -> None:  # fmt: skip
    """The heads of 512 numbers that Gemma 4 has."""
    (num_heads, num_kv_heads), block_size = heads, 32
    num_blocks = -(-context // block_size)
    scale_bytes = 4 * 2 * num_kv_heads * block_size if cache_dtype in LARGEST else 0
    block_bytes = 2 * num_kv_heads * block_size * 512 * cache_dtype.itemsize + scale_bytes
    blocks = torch.zeros(num_blocks, block_bytes, dtype=torch.uint8)
    cache = heads_cache(blocks, cache_dtype, num_kv_heads, block_size, 512, is_packed=False)
    q = torch.zeros(num_queries, num_heads, 512, dtype=dtype)
    tables, lengths, starts = (
        torch.tensor(numbers, dtype=torch.int32) for numbers in ([[*range(num_blocks)]], [context], [0, num_queries])
    )
    metadata, options = AttentionMetadata(tables, lengths, starts), ScoreOptions(0.1, logit_soft_cap=cap)
    measured = peak_of(lambda: reference.paged_attention(q, cache, metadata, options))
    # The output is part of the layer's activations.
    measured -= q.nbytes
    model = of_plain_attention(num_heads, num_kv_heads, 512, logit_soft_cap=cap)
    limits = StepLimits(num_queries, 1, context, dtype.itemsize, has_kernels=False)
    counted = plain_attention_bytes(model, limits)
    assert measured <= counted * 1.02
    assert counted <= measured * 1.6


def test_plain_attention_by_hand() -> None:
    """Gemma 4 E2B, without kernels: layers that see all have heads of 512 numbers."""
    model = read_config(PUBLISHED["gemma-4-E2B"])
    served = StepLimits(num_tokens=2048, num_logits=32, context=8192, element_bytes=2)
    assert plain_attention_bytes(model, served) == 0
    limits = replace(served, has_kernels=False)
    expected = 2 * 4 * 256 * 8 * 8192 + (12 * 256 * 8 + 16 * 1 * 8192) * 512
    assert plain_attention_bytes(model, limits) == expected
    # Layers with a window of 512 have heads of 256, and queries of 256 tokens see 768 keys.
    windows = replace(model, layers=tuple(layer for layer in model.layers if layer.window is not None))
    assert plain_attention_bytes(windows, limits) == 2 * 4 * 256 * 8 * 768 + (12 * 256 * 8 + 16 * 1 * 768) * 256
    assert gpu_step_bytes(model, limits) >= expected * 9 // 8 + gpu_graph_bytes(model, limits)
    long = replace(limits, context=131072 * 2)
    assert plain_attention_bytes(model, long) == 2 * 4 * PLAIN_SCORES + (12 * 256 * 8 + 16 * 1 * 131072 * 2) * 512
    # Two ranks have half of the heads, and one KV head each.
    assert plain_attention_bytes(model, limits, 2) == 2 * 4 * 256 * 4 * 8192 + (12 * 256 * 4 + 16 * 8192) * 512


def test_plain_attention_in_a_window_and_with_sinks() -> None:
    limits = StepLimits(num_tokens=2048, num_logits=32, context=8192, element_bytes=2)
    model = of_plain_attention(8, 2, 144, has_sinks=True)
    num_bytes = 3 * 4 * 256 * 8 * 8192 + (12 * 256 * 8 + 16 * 2 * 8192) * 144
    assert plain_attention_bytes(model, limits) == num_bytes
    narrow = replace(model, layers=(replace(model.layers[0], window=100),))
    num_bytes = 3 * 4 * 256 * 8 * 356 + (12 * 256 * 8 + 16 * 2 * 356) * 144
    assert plain_attention_bytes(narrow, limits) == num_bytes


def test_numbers_of_plain_attention_are_those_of_the_operations() -> None:
    for module in (reference, reference_mla):
        assert (module.QUERY_SLICE, module.MAX_SCORES) == (PLAIN_QUERIES, PLAIN_SCORES)


def of_plain_latents(num_heads: int, sizes: tuple[int, int]) -> ModelConfig:
    model = read_config(PUBLISHED["DeepSeek-V2-Lite"])
    latent = model.layers[0].latent
    assert latent is not None
    latent = replace(latent, num_heads=num_heads, kv_lora_rank=sizes[0], qk_rope_head_dim=sizes[1])
    return replace(model, layers=(replace(model.layers[0], attention=latent),))


@pytest.mark.parametrize(("num_queries", "context"), [(300, 2048), (1, 4096), (300, 300)])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.int8])
@pytest.mark.parametrize("heads", [16, 2])
def test_plain_attention_to_latents_takes_no_more_than_is_counted(
    heads: int, cache_dtype: torch.dtype, num_queries: int, context: int
) -> None:
    """The latents of DeepSeek. Those of a cache of 8 bits, which are counted, take twice as much."""
    num_blocks, size = -(-context // 32), 512 + 64
    cache = torch.zeros(num_blocks, 32, size, dtype=cache_dtype)
    scales = None if cache_dtype == torch.bfloat16 else torch.ones(num_blocks, 32, 2)
    q = torch.zeros(num_queries, heads, size, dtype=torch.bfloat16).split((512, 64), dim=-1)
    tables, lengths, starts = (
        torch.tensor(numbers, dtype=torch.int32) for numbers in ([[*range(num_blocks)]], [context], [0, num_queries])
    )
    metadata = AttentionMetadata(tables, lengths, starts)
    measured = peak_of(lambda: reference_mla.latent_attention(*q, cache, metadata, softmax_scale=0.1, scales=scales))
    measured -= q[0].numel() * 2
    limits = StepLimits(num_queries, 1, context, 2, has_kernels=False)
    counted = plain_attention_bytes(of_plain_latents(heads, (512, 64)), limits)
    assert measured <= counted * 1.02
    assert counted <= measured * 2.1


def test_plain_attention_to_latents_by_hand() -> None:
    limits = StepLimits(num_tokens=2048, num_logits=32, context=8192, element_bytes=2)
    for sizes, is_served in (((512, 64), True), ((256, 32), True), ((512, 32), False)):
        model = of_plain_latents(16, sizes)
        expected = 3 * 4 * 256 * 16 * 8192 + (12 * 8192 + 16 * 256 * 16) * sum(sizes)
        assert plain_attention_bytes(model, replace(limits, has_kernels=False)) == expected
        assert plain_attention_bytes(model, limits) == (0 if is_served else expected)
    # 2^28 scores are those of 32 queries.
    many = replace(limits, context=2**19)
    expected = 3 * 4 * 2**28 + (12 * 2**19 + 16 * 32 * 16) * 544
    assert plain_attention_bytes(of_plain_latents(16, (512, 32)), many) == expected


def test_latents_of_sparse_attention_are_attended_token_by_token() -> None:
    model = read_config(PUBLISHED["DeepSeek-V3.2"])
    limits = StepLimits(num_tokens=2048, num_logits=32, context=8192, element_bytes=2, has_kernels=False)
    assert plain_attention_bytes(model, limits) == 3 * 4 * 128 * 2048 + (12 * 2048 + 16 * 128) * 576


def test_attention_without_kernels_is_counted_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_checkpoint("llama", tmp_path)
    model = read_config(json.loads((tmp_path / "config.json").read_text(encoding="utf-8")))
    with late_device(), running(tmp_path, device="cuda", max_model_len=96, num_kv_blocks=30) as engine:
        runner = engine._ranks.runner
        with_kernels = runner.step_bytes
        monkeypatch.setattr("pagewick.kernels.serves_attention", lambda device_kind: False)
        more = runner.step_bytes - with_kernels
        limits = replace(StepLimits.of(runner.config, model), has_kernels=False)
        assert more == pytest.approx(plain_attention_bytes(model, limits) * 9 / 8, abs=1) and more > 0
        monkeypatch.setattr(runner, "config", replace(runner.config, attention_backend="FLASH_ATTN"))
        assert runner.step_bytes == with_kernels
