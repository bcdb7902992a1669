"""DeepSeek-V4-Flash as its published config.json has it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from pagewick.engine.entry_memory import ENTRY_SPLIT, entry_splits
from pagewick.engine.step_memory import MAX_SHORT_TOKENS, StepLimits, gpu_graph_bytes, gpu_step_bytes
from pagewick.errors import ModelLoadError
from pagewick.layers.compressed_config import WindowConfig
from pagewick.models.config import ModelConfig
from pagewick.models.registry import read_config
from pagewick.weights.packed.config import packed_rules

FLASH: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 0,
    "eos_token_id": 1, "expert_dtype": "fp4", "hc_eps": 1e-06, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512,
    "hidden_act": "silu",
    "hidden_size": 4096, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 512, "initializer_range": 0.02,
    "max_position_embeddings": 1048576, "model_type": "deepseek_v4", "moe_intermediate_size": 2048,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
    "num_experts_per_tok": 6, "num_hidden_layers": 43, "num_hash_layers": 3, "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 16, "original_max_position_embeddings": 65536, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128,
    "swiglu_limit": 10.0, "tie_word_embeddings": False, "topk_method": "noaux_tc", "torch_dtype": "bfloat16",
    "use_cache": True, "vocab_size": 129280, "compress_rope_theta": 160000,
    "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
}  # fmt: skip


def windows(config: ModelConfig) -> list[WindowConfig]:
    return [layer.attention for layer in config.layers if isinstance(layer.attention, WindowConfig)]


def test_layers_are_those_of_the_paper() -> None:
    config = read_config(FLASH)
    found = windows(config)
    ratios = [0 if window.compressor is None else window.compressor.ratio for window in found]
    assert ratios == FLASH["compress_ratios"][:43]
    kinds = Counter((window.compressor.overlaps, window.indexer is not None) for window in found if window.compressor)
    assert kinds == {(True, True): 21, (False, False): 20}
    assert [mixture.has_expert_table for mixture in config.mixtures] == [True] * 3 + [False] * 40
    assert config.max_position_embeddings == 1048576


def test_only_layers_with_entries_are_stretched() -> None:
    ropes = [layer.rope for layer in read_config(FLASH).layers]
    assert all(rope is not None and rope.rotary_dim == 64 and rope.num_still == 448 for rope in ropes)
    first, second, third = ropes[0], ropes[1], ropes[2]
    assert first == second != third and first is not None and third is not None
    assert (first.kind, first.theta, third.kind, third.theta) == ("default", 10000.0, "yarn", 160000.0)
    # The published code does not make scores of long sequences sharper.
    assert (third.factor, third.attention_factor) == (16.0, 1.0)


def test_iterations_without_end_are_refused() -> None:
    with pytest.raises(ModelLoadError, match="hc_sinkhorn_iters is 1048576, and must be a whole number from 1 to 1000"):
        read_config(FLASH | {"hc_sinkhorn_iters": 2**20})


def test_a_token_takes_little_of_the_cache() -> None:
    """Entries and index keys of 21 layers, one for 4 tokens, and entries of 20 layers, one for 128, in 16 bits."""
    kept = [one for window in windows(read_config(FLASH)) for one in window.kept() if one.lookback is None]
    assert sum(2 * one.dim / one.ratio for one in kept) == 21 * 2 * (512 + 128) / 4 + 20 * 2 * 512 / 128


def test_block_tables_of_single_tokens_take_memory() -> None:
    config = read_config(FLASH)
    limits = [StepLimits(num_tokens=512, num_logits=8, context=context, element_bytes=2) for context in (2**14, 2**20)]
    short, long = (gpu_step_bytes(config, each) for each in limits)
    assert long - short > 8 * 512 * (2**20 - 2**14) // 16


def test_splits_of_entries_take_memory() -> None:
    """Up to 4 tokens of 3 sequences have splits: a window and 1,024 or 2,048 entries by 128, with 2 statistics each."""
    config = read_config(FLASH)
    is_heavy = [ratio == 128 for ratio in FLASH["compress_ratios"]]
    heavy = replace(config, layers=tuple(layer for layer, has in zip(config.layers, is_heavy, strict=False) if has))
    limits = [StepLimits(num_tokens=8, num_logits=3, context=context, element_bytes=2) for context in (2**17, 2**18)]
    few, many = (gpu_graph_bytes(heavy, each) for each in limits)
    assert many - few == 3 * 4 * 64 * (512 + 2) * (17 - 9) * 4
    assert [entry_splits(config.layers[layer_idx], 2**18) for layer_idx in (1, 2, 3)] == [0, 5, 17]
    pytest.importorskip("triton")
    from pagewick.kernels.triton import window_attention

    assert (window_attention.SPLIT, window_attention.MAX_SHORT_TOKENS) == (ENTRY_SPLIT, MAX_SHORT_TOKENS)


def test_kernels_of_graphs_take_memory() -> None:
    """43 layers with windows and streams, of which 41 have entries, and 21 an indexer of entries."""
    config, limits = read_config(FLASH), StepLimits(num_tokens=8, num_logits=3, context=2**17, element_bytes=2)
    twice = replace(config, layers=config.layers * 2)
    added = gpu_graph_bytes(twice, limits) - gpu_graph_bytes(config, limits)
    assert added == 64 * 16 * 1024 * (43 * (16 + 32) + 41 * 12 + 21 * 13)


def test_how_weights_are_packed() -> None:
    rules = packed_rules(FLASH)
    assert rules is not None
    found = [rules.format_of(prefix) for prefix in ("layers.3.ffn.experts.7.w1", "layers.3.attn.wq_b")]
    assert [form.label for form in found if form is not None] == ["MXFP4", "FP8 128x128"]
    with pytest.raises(ModelLoadError, match="expert_dtype"):
        packed_rules({**FLASH, "expert_dtype": "int4"})
