"""Plans, compared with what the engine itself does with the same memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewick import LLM
from pagewick.attention.cache_spec import CACHE_DTYPES
from pagewick.attention.native import NativeBackend, default_block_size
from pagewick.config import BUILTIN_MODEL, DEFAULT_MAX_NUM_BATCHED_TOKENS, EngineConfig
from pagewick.demo import MODEL_DIR
from pagewick.doctor import plan as plan_module
from pagewick.doctor.findings import format_memory
from pagewick.doctor.plan import (
    BLOCK_SIZE,
    CACHE_SHARE,
    Device,
    Wishes,
    best_plan,
    cache_bytes,
    longest_context,
    make_plan,
    sizes_that_fit,
)
from pagewick.engine.cache import kv_cache
from pagewick.engine.cache.kv_cache import CacheGroup, blocks_per_group, cache_groups, capacity_of
from pagewick.engine.step_memory import StepLimits, image_bytes
from pagewick.errors import ConfigError
from pagewick.layers.context import LayerContext
from pagewick.models.registry import build_model, read_config
from pagewick.parallel.collectives import Collectives
from pagewick.quantization.unquantized import UnquantizedMethod
from tests.models.checkpoints import write_checkpoint
from tests.models.published import PUBLISHED

GIB = 2**30


def config_of(**changes: Any) -> dict[str, Any]:
    """Llama 3.1 8B's config.json, without entries that do not matter here."""
    return {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "torch_dtype": "bfloat16", **changes,
    }  # fmt: skip


LLAMA = read_config(config_of())
LLAMA_BYTES = 16 * 10**9


def divided(num_bytes: int) -> Callable[[int], int]:
    """The weights of a rank, if all of them are divided."""
    return lambda num_ranks: -(-num_bytes // num_ranks)


WEIGHTS = divided(LLAMA_BYTES)
GPU = Device("cuda", 24 * GIB, 24 * GIB)


def engine_groups(config: dict[str, Any], kv_dtype: str, rank: int, size: int) -> list[CacheGroup]:
    """The cache groups of the engine's own layers, on one of several ranks; their weights take no memory."""
    context = LayerContext(
        dtype=torch.float32,
        device=torch.device("meta"),
        collectives=Collectives(rank, size),
        backend=NativeBackend(BLOCK_SIZE, kv_dtype),
        choose_method=lambda prefix: UnquantizedMethod(),
        max_model_len=512,
    )
    return cache_groups(build_model(context, read_config(config)))


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 1), (6, 2, 3), (6, 6, 2), (12, 4, 6), (12, 3, 2)])
def test_layers_keep_what_the_engine_says(heads: int, kv_heads: int, size: int, kv_dtype: str) -> None:
    sizes = {"hidden_size": 24 * heads, "intermediate_size": 36, "vocab_size": 50, "num_hidden_layers": 3}
    config = config_of(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=24, **sizes)
    (group,) = plan_module.cache_groups(read_config(config), cache_dtype=kv_dtype, num_ranks=size)
    theirs = [engine_groups(config, kv_dtype, rank, size) for rank in range(size)]
    assert {len(groups) for groups in theirs} == {1}
    assert group.spec.block_bytes == max(groups[0].spec.block_bytes for groups in theirs)
    assert group.num_layers == len(theirs[0][0].layers) == 3


@pytest.mark.parametrize("memory", [300_000, 1_000_003, 5_000_000])
def test_memory_holds_what_it_holds_in_the_engine(memory: int, tmp_path: Path) -> None:
    write_checkpoint("llama", tmp_path)
    shape = read_config(json.loads((tmp_path / "config.json").read_text()))
    groups = plan_module.cache_groups(shape, cache_dtype="float32")
    config = EngineConfig(str(tmp_path), kv_cache_memory=memory).resolve(
        max_position_embeddings=10**6, checkpoint_dtype="float32", device="cpu", block_size=BLOCK_SIZE, num_cores=1
    )
    theirs = engine_groups(json.loads((tmp_path / "config.json").read_text()), "float32", 0, 1)
    blocks = blocks_per_group(theirs, config)
    assert longest_context(groups, memory, 10**6) == capacity_of(theirs, blocks, config)


@pytest.mark.parametrize("kv_dtype", ["bfloat16", "fp8_e4m3"])
def test_a_whole_engine(kv_dtype: str) -> None:
    shape = read_config(json.loads((MODEL_DIR / "config.json").read_text()))
    wishes = Wishes(dtype="float32", kv_cache_dtype=kv_dtype)
    plan = make_plan(shape, divided(10**6), Device("cpu", 2 * GIB, 2 * GIB), wishes)
    with LLM(BUILTIN_MODEL, dtype="float32", kv_cache_dtype=kv_dtype, kv_cache_memory=2_000_000) as llm:
        assert plan.kv_bytes_per_token == llm.info.kv_cache_bytes / (llm.info.num_kv_blocks * llm.info.block_size)
        assert llm.info.block_size == BLOCK_SIZE
        assert llm.info.max_num_seqs == plan_module.MAX_NUM_SEQS


def test_numbers_are_the_engines() -> None:
    assert default_block_size(torch.device("cpu")) == BLOCK_SIZE
    assert kv_cache._CACHE_SHARE == CACHE_SHARE
    assert (kv_cache._RESERVED_BYTES, kv_cache._RESERVED_SHARE) == (
        plan_module.RESERVED_BYTES,
        plan_module.RESERVED_SHARE,
    )


def test_the_engine_gives_the_cache_the_same_share(monkeypatch: pytest.MonkeyPatch) -> None:
    small = config_of(num_hidden_layers=2, hidden_size=64, head_dim=64, vocab_size=100, intermediate_size=8)
    plan = make_plan(read_config(small), divided(GIB), Device("cpu", 8 * GIB, 8 * GIB), Wishes())
    after_loading = 8 * GIB - GIB - plan.runtime
    monkeypatch.setattr(kv_cache, "available_memory", lambda device: after_loading)
    config = EngineConfig(max_num_seqs=10**6).resolve(
        max_position_embeddings=131072, checkpoint_dtype="bfloat16", device="cpu", block_size=BLOCK_SIZE, num_cores=1
    )
    groups = engine_groups(
        config_of(num_hidden_layers=2, hidden_size=64, head_dim=64, vocab_size=100, intermediate_size=8),
        "bfloat16",
        0,
        1,
    )
    blocks = blocks_per_group(groups, config)[0]
    assert blocks == plan.kv_default // groups[0].block_bytes


def test_bytes_per_token_by_hand() -> None:
    # Keys and values of 8 heads of 128 in 32 layers, 2 bytes each.
    plan = make_plan(LLAMA, WEIGHTS, GPU, Wishes())
    assert plan.kv_bytes_per_token == 2 * 8 * 128 * 32 * 2 == 131072
    assert plan.rows[0].num_bytes == 2048 * 131072
    assert make_plan(LLAMA, WEIGHTS, GPU, Wishes(kv_cache_dtype="float32")).kv_bytes_per_token == 262144


def test_the_largest_picture_takes_memory_of_a_gpu() -> None:
    model = read_config(PUBLISHED["Qwen3-VL-8B-Instruct"])
    blind = make_plan(model.without_vision(), WEIGHTS, GPU, Wishes()).activations
    for side in (256, 4096):
        wishes = Wishes(max_image_pixels=side**2)
        limits = StepLimits(DEFAULT_MAX_NUM_BATCHED_TOKENS, 0, 10**6, 2, image_pixels=side**2)
        found = make_plan(model, WEIGHTS, GPU, wishes).activations - blind
        assert found == pytest.approx(image_bytes(model, limits) * 9 / 8, abs=2)


def test_windows_by_hand() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    changes = {"use_sliding_window": True, "sliding_window": 100, "layer_types": kinds, "num_hidden_layers": 4}
    model = read_config(config_of(architectures=["Qwen2ForCausalLM"], **changes))
    windowed, full = plan_module.cache_groups(model, cache_dtype="bfloat16")
    assert (windowed.num_layers, full.num_layers, windowed.spec.lookback) == (2, 2, 99)
    block = 2 * 8 * 128 * 32 * 2
    # 99 tokens before a step's 2048 touch 68 blocks, and one more where they begin in the middle of one.
    assert cache_bytes([windowed, full], 100_000) == 2 * block * (69 + 3125)
    assert cache_bytes([windowed, full], 320) == 2 * block * (10 + 10)


def test_latent_attention_keeps_a_latent_on_every_rank() -> None:
    model = read_config(PUBLISHED["DeepSeek-V2-Lite"])
    for size in (1, 8):
        (group,) = plan_module.cache_groups(model, cache_dtype="bfloat16", num_ranks=size)
        assert (group.spec.kind, group.bytes_per_token) == ("latent", (512 + 64) * 27 * 2)
    plans = [make_plan(model, divided(10**9), GPU, Wishes(tensor_parallel_size=size)) for size in (1, 8)]
    assert {plan.kv_bytes_per_token for plan in plans} == {31104}


class TestFits:
    def test_with_room_to_spare(self) -> None:
        plan = make_plan(read_config(config_of(max_position_embeddings=8192)), WEIGHTS, GPU, Wishes())
        assert (plan.flags, plan.missing, plan.fitting_context) == ((), "", 8192)
        assert plan.kv_default + plan.weights + plan.runtime <= 24 * GIB

    def test_more_memory_than_usual_for_the_whole_context(self) -> None:
        device = Device("cpu", 40 * GIB, 64 * GIB)
        plan = make_plan(LLAMA, WEIGHTS, device, Wishes())
        assert plan.kv_default < 16 * GIB <= plan.kv_most
        assert plan.flags == ("--kv-cache-memory", "16384MiB")
        assert plan.fitting_context == 131072
        assert [row.num_sequences for row in plan.rows] == [64, 16, 4, 1]

    def test_a_shorter_context(self) -> None:
        plan = make_plan(LLAMA, WEIGHTS, GPU, Wishes())
        assert plan.flags[:2] == ("--max-model-len", str(plan.fitting_context))
        assert 50_000 < plan.fitting_context < 131072
        assert plan.fitting_context * 131072 <= plan.kv_most < (plan.fitting_context + BLOCK_SIZE) * 131072

    def test_a_memory_that_the_engine_does_not_know_of(self) -> None:
        device = Device("cpu", 20 * GIB, 20 * GIB, is_planned=True)
        shape = read_config(config_of(max_position_embeddings=4096))
        flag, size = make_plan(shape, WEIGHTS, device, Wishes()).flags
        assert (flag, size) == ("--kv-cache-memory", f"{int(size[:-3])}MiB")
        assert int(size[:-3]) * 2**20 <= 20 * GIB - LLAMA_BYTES

    def test_not_at_all(self) -> None:
        plan = make_plan(LLAMA, WEIGHTS, Device("cuda", 12 * GIB, 12 * GIB), Wishes())
        assert plan.short_by > 2 * GIB
        needed, short = format_memory(plan.needed), format_memory(plan.short_by)
        assert plan.missing == f"{needed} are needed, and 12.0 GiB are free: {short} are missing"
        assert list(sizes_that_fit(LLAMA, WEIGHTS, plan.device, Wishes()))[:2] == [2, 4]
        assert list(sizes_that_fit(LLAMA, WEIGHTS, plan.device, Wishes(tensor_parallel_size=4)))[:2] == [8, 16]

    def test_the_weights_and_nothing_else(self) -> None:
        shape = read_config(config_of(max_position_embeddings=8192))
        roomy = make_plan(shape, WEIGHTS, GPU, Wishes())
        tight = make_plan(shape, WEIGHTS, replace(GPU, memory=roomy.needed + 1000), Wishes())
        assert (tight.short_by, tight.fitting_context) == (0, 0)
        assert tight.missing == "32 tokens take 4.0 MiB of KV cache, and 1.0 KiB are left: 4.0 MiB are missing"


class TestRanks:
    def test_every_gpu_has_a_memory(self) -> None:
        one, two = (make_plan(LLAMA, WEIGHTS, GPU, Wishes(tensor_parallel_size=size)) for size in (1, 2))
        assert two.weights == LLAMA_BYTES // 2 == one.weights // 2
        assert two.kv_bytes_per_token == one.kv_bytes_per_token / 2
        assert two.flags[:2] == ("--tensor-parallel-size", "2")

    def test_a_cpu_has_one(self) -> None:
        device = Device("cpu", 60 * GIB, 64 * GIB)
        one, two = (make_plan(LLAMA, WEIGHTS, device, Wishes(tensor_parallel_size=size)) for size in (1, 2))
        assert two.weights == one.weights
        assert two.kv_bytes_per_token == one.kv_bytes_per_token
        assert two.runtime == 2 * one.runtime

    def test_more_ranks_than_kv_heads_store_some_twice(self) -> None:
        plan = make_plan(LLAMA, WEIGHTS, GPU, Wishes(tensor_parallel_size=16))
        assert plan.kv_bytes_per_token == 131072 / 8  # not 16: two ranks have the same head

    def test_sizes(self) -> None:
        assert make_plan(LLAMA, WEIGHTS, GPU, Wishes()).tensor_parallel_sizes == (1, 2, 4, 8, 16)
        with pytest.raises(ConfigError, match=r"3 does not divide the model's 32 attention heads; .* 1, 2, 4, 8, 16"):
            make_plan(LLAMA, WEIGHTS, GPU, Wishes(tensor_parallel_size=3))

    def test_sizes_that_would_cut_a_block_are_not_proposed(self) -> None:
        device = Device("cuda", 12 * GIB, 12 * GIB, 8)
        assert best_plan(LLAMA, WEIGHTS, device, Wishes()).tensor_parallel_size == 2
        assert best_plan(LLAMA, WEIGHTS, device, Wishes(), lambda size: size != 2).tensor_parallel_size == 4
        assert list(sizes_that_fit(LLAMA, WEIGHTS, device, Wishes(), lambda size: size != 2))[:2] == [4, 8]


def test_a_context_longer_than_the_models() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 131073 is longer than the model's context of 131072"):
        make_plan(LLAMA, WEIGHTS, GPU, Wishes(max_model_len=131073))


def test_a_cache_of_selected_tokens_has_no_dtype_with_scales() -> None:
    assert plan_module.cache_dtypes(read_config(PUBLISHED["DeepSeek-V3.2"])) == ["float32", "bfloat16", "float16"]
    assert plan_module.cache_dtypes(read_config(PUBLISHED["DeepSeek-R1"])) == [
        name for name in CACHE_DTYPES if name != "int4"
    ]
    assert plan_module.cache_dtypes(read_config(PUBLISHED["Qwen3-0.6B"])) == list(CACHE_DTYPES)
