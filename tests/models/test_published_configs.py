"""The config.json of well-known published checkpoints, as we read it, against facts worked out by hand.

FACTS has, for each: layers, heads / key and value heads x size of a head; how it is rotated (kind, values of a head @
base); what it sees; how layers are built; the MLP or "experts of a token of all x size + shared"; tokens of a sequence;
and what else is not as in Llama.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import groupby

import pytest

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.layers.config import IndexerConfig, MlaConfig, MoeConfig
from pagewick.layers.state_config import ChannelScanConfig, ConvolutionConfig, DeltaConfig, MambaConfig, StateConfig
from pagewick.models.config import ModelConfig
from pagewick.models.parts import AttentionConfig, LayerConfig, MlpConfig
from pagewick.models.registry import read_config
from tests.models.published import PUBLISHED
from tests.models.published_2025 import FACTS_2025
from tests.models.published_2026 import FACTS_2026
from tests.models.published_early import FACTS_EARLY
from tests.models.published_llama4 import FACTS_LLAMA4
from tests.models.published_states import FACTS_STATES

_LLAMA2 = "32 32/32x128 | default 128@10000 | all | sequential rms 1e-05 | silu 11008"
_LLAMA31 = "32 32/8x128 | llama3 128@500000 | all | sequential rms 1e-05 | silu 14336 | 131072 |"
_MISTRAL = "32 32/8x128 | default 128@1e+06 | all | sequential rms 1e-05"
_PHI3 = "32 32/32x96 |"
_GEMMA3 = "default 256@10000, linear 256@1e+06"
_GEMMA3N = "default 256@10000, default 256@1e+06"
_GEMMA4 = "default 256@10000, proportional 128@1e+06"
_FAR = "131072 to 1048576"
_PHI_END = "2048 | qkv bias, o bias, head bias"
_BIGCODE_END = "tied, learned positions, qkv bias, o bias"
_GPT_OSS, _GPT_OSS_END = "64/8x64 | yarn 64@150000", "131072 | qkv bias, o bias, sinks"
FACTS = {
    **FACTS_2025,
    **FACTS_EARLY,
    **FACTS_2026,
    **FACTS_LLAMA4,
    **FACTS_STATES,
    "llama-7b-hf": "32 32/32x128 | default 128@10000 | all | sequential rms 1e-06 | silu 11008 | 2048 |",
    "Llama-2-7b-hf": f"{_LLAMA2} | 4096 |",
    "vicuna-7b-v1.5-16k": "32 32/32x128 | linear 128@10000 | all | sequential rms 1e-05 | silu 11008 | 4096 to 16384 |",
    "Meta-Llama-3.1-8B": _LLAMA31,
    "DeepSeek-R1-Distill-Llama-8B": _LLAMA31,
    "Llama-3.2-1B": "16 32/8x64 | llama3 64@500000 | all | sequential rms 1e-05 | silu 8192 | 131072 | tied",
    "Yi-6B": "32 32/4x128 | default 128@5e+06 | all | sequential rms 1e-05 | silu 11008 | 4096 |",
    "Yi-1.5-34B": "60 56/8x128 | default 128@5e+06 | all | sequential rms 1e-06 | silu 20480 | 4096 |",
    "granite-3b-code-base": "32 32/32x80 | default 80@10000 | all | sequential rms 1e-05 | silu 10240 | 2048 | "
    "tied, qkv bias, o bias",
    "Mistral-7B-v0.1": "32 32/8x128 | default 128@10000 | 4096 | sequential rms 1e-05 | silu 14336 | 32768 |",
    "Mistral-7B-Instruct-v0.2": f"{_MISTRAL} | silu 14336 | 32768 |",
    "Mistral-7B-v0.3": f"{_MISTRAL} | silu 14336 | 32768 |",
    "Mistral-Nemo-Base-2407": "40 32/8x128 | default 128@1e+06 | all | sequential rms 1e-05 | silu 14336 | 128000 |",
    "Mistral-Small-3.1-24B-Instruct-2503": "40 32/8x128 | default 128@1e+09 | all | sequential rms 1e-05 | "
    "silu 32768 | 131072 |",
    "Mixtral-8x7B-v0.1": f"{_MISTRAL} | 2 of 8 x 14336 | 32768 |",
    "Qwen1.5-0.5B": "24 16/16x64 | default 64@1e+06 | all | sequential rms 1e-06 | silu 2816 | 32768 | tied, qkv bias",
    "Qwen2.5-7B-Instruct with YaRN": "28 28/4x128 | yarn 128@1e+06 | all | sequential rms 1e-06 | silu 18944 | "
    "131072 | qkv bias",
    "QwQ-32B": "64 40/8x128 | default 128@1e+06 | all | sequential rms 1e-05 | silu 27648 | 40960 | qkv bias",
    "Qwen1.5-MoE-A2.7B": "24 16/16x128 | default 128@1e+06 | all | sequential rms 1e-06 | "
    "4 of 60 x 1408 + 5632 gated | 8192 | qkv bias",
    "Qwen3-0.6B": "28 16/8x128 | default 128@1e+06 | all | sequential rms 1e-06 | silu 3072 | 40960 | "
    "tied, rms head norm",
    "DeepSeek-R1-0528-Qwen3-8B": "36 32/8x128 | yarn 128@1e+06 | all | sequential rms 1e-06 | silu 12288 | 131072 | "
    "rms head norm",
    "Qwen3-30B-A3B": "48 32/4x128 | default 128@1e+06 | all | sequential rms 1e-06 | 8 of 128 x 768 | 40960 | "
    "rms head norm",
    "phi-1": f"24 32/32x64 | default 32@10000 | all | parallel layer 1e-05 | plain gelu_tanh 8192 | {_PHI_END}",
    "phi-2": f"32 32/32x80 | default 32@10000 | all | parallel layer 1e-05 | plain gelu_tanh 10240 | {_PHI_END}",
    "Phi-3-mini-4k-instruct": f"{_PHI3} default 96@10000 | 2047 | sequential rms 1e-05 | silu 8192 | 4096 | fused",
    "Phi-3-mini-128k-instruct": f"{_PHI3} longrope 96@10000 | 262144 | sequential rms 1e-05 | silu 8192 | 131072 | "
    "fused",
    "Phi-3-medium-4k-instruct": "40 40/10x128 | default 128@10000 | 2047 | sequential rms 1e-05 | silu 17920 | 4096 | "
    "fused",
    "phi-4": "40 40/10x128 | default 128@250000 | all | sequential rms 1e-05 | silu 17920 | 16384 | fused",
    "Phi-4-mini-instruct": "32 24/8x128 | longrope 96@10000 | 262144 | sequential rms 1e-05 | silu 8192 | 131072 | "
    "tied, fused",
    "Phi-3.5-MoE-instruct": "32 32/8x128 | longrope 128@10000 | 131072 | sequential layer 1e-05 | 2 of 16 x 6400 | "
    "131072 | qkv bias, o bias, head bias",
    "stablelm-3b-4e1t": "32 32/32x80 | default 20@10000 | all | sequential layer 1e-05 | silu 6912 | 4096 |",
    "stable-code-3b": "32 32/32x80 | default 20@1e+06 | all | sequential layer 1e-05 | silu 6912 | 16384 |",
    "stablelm-2-1_6b": "24 32/32x64 | default 16@10000 | all | sequential layer 1e-05 | silu 5632 | 4096 | qkv bias",
    "stablelm-2-12b": "40 32/8x160 | default 40@10000 | all | parallel layer 1e-05 | silu 13824 | 4096 | "
    "layer head norm each",
    "gemma-2b": "18 8/1x256 | default 256@10000 | all | sequential rms 1e-06 + 1 | gelu_tanh 16384 | 8192 | tied",
    "gemma-7b": "28 16/16x256 | default 256@10000 | all | sequential rms 1e-06 + 1 | gelu_tanh 24576 | 8192 | tied",
    "gemma-2-2b": "26 8/4x256 | default 256@10000 | 13 of 4096 | sandwich rms 1e-06 + 1 | gelu_tanh 9216 | 8192 | "
    "tied, caps 50 30",
    "gemma-2-9b, as first published": "42 16/8x256 | default 256@10000 | 21 of 4096 | sandwich rms 1e-06 + 1 | "
    "gelu_tanh 14336 | 8192 | tied, caps 50 30",
    "gemma-2-27b": "46 32/16x128 | default 128@10000 | 23 of 4096 | sandwich rms 1e-06 + 1 | gelu_tanh 36864 | 8192 | "
    "tied, caps 50 30",
    "gemma-3-1b-it": "26 4/1x256 | default 256@10000, default 256@1e+06 | 22 of 512 | sandwich rms 1e-06 + 1 | "
    "gelu_tanh 6912 | 32768 | tied, rms head norm",
    "gemma-3-4b-it": f"34 8/4x256 | {_GEMMA3} | 29 of 1024 | sandwich rms 1e-06 + 1 | gelu_tanh 10240 | {_FAR} | "
    "tied, rms head norm",
    "gemma-3-12b-it": f"48 16/8x256 | {_GEMMA3} | 40 of 1024 | sandwich rms 1e-06 + 1 | gelu_tanh 15360 | {_FAR} | "
    "tied, rms head norm",
    "gemma-3-27b-it": "62 32/16x128 | default 128@10000, linear 128@1e+06 | 52 of 1024 | sandwich rms 1e-06 + 1 | "
    f"gelu_tanh 21504 | {_FAR} | tied, rms head norm",
    "glm-4-9b-chat-hf": "40 32/2x128 | default 64@10000 in pairs | all | sequential rms 1.5625e-07 | silu 13696 | "
    "131072 | qkv bias",
    "GLM-4-9B-0414": "40 32/2x128 | default 64@10000 in pairs | all | sandwich rms 1e-05 | silu 13696 | 32768 | "
    "qkv bias",
    "GLM-4-32B-0414": "61 48/2x128 | default 64@10000 in pairs | all | sandwich rms 1e-05 | silu 23040 | 32768 |",
    "DeepSeek-V2-Lite": "27 16 None/512 128+64 128 | yarn 64@10000 in pairs | all | sequential rms 1e-06 | "
    "1: silu 10944, 26: 6 of 64 x 1408 + 2816 | 163840 |",
    "DeepSeek-V2.5": "60 128 1536/512 128+64 128 | yarn 64@10000 in pairs | all | sequential rms 1e-06 | "
    "1: silu 12288, 59: 6 of 160 x 1536 + 3072 | 163840 |",
    "DeepSeek-R1": "61 128 1536/512 128+64 128 | yarn 64@10000 in pairs | all | sequential rms 1e-06 | "
    "3: silu 18432, 58: 8 of 256 x 2048 + 2048 | 163840 |",
    "DeepSeek-V3.2": "61 128 1536/512 128+64 128 | yarn 64@10000 in pairs | all | sequential rms 1e-06 | "
    "3: silu 18432, 58: 8 of 256 x 2048 + 2048 | 163840 | 61 indexers 64x128 for 2048",
    "Kimi-K2-Instruct": "61 64 1536/512 128+64 128 | yarn 64@50000 in pairs | all | sequential rms 1e-06 | "
    "1: silu 18432, 60: 8 of 384 x 2048 + 2048 | 131072 |",
    "Moonlight-16B-A3B": "27 16 None/512 128+64 128 | default 64@50000 in pairs | all | sequential rms 1e-05 | "
    "1: silu 11264, 26: 6 of 64 x 1408 + 2816 | 8192 |",
    "starcoder": f"40 48/1x128 | none | all | sequential layer 1e-05 | plain gelu 24576 | 8192 | {_BIGCODE_END}, fused",
    "gpt_bigcode-santacoder": "24 16/1x128 | none | all | sequential layer 1e-05 | plain gelu_tanh 8192 | 2048 | "
    f"{_BIGCODE_END}, fused",
    "starcoder2-3b": "30 24/2x128 | default 128@999999 | 4096 | sequential layer 1e-05 | plain gelu_tanh 12288 | "
    "16384 | tied, qkv bias, o bias",
    "starcoder2-15b": "40 48/4x128 | default 128@100000 | 4096 | sequential layer 1e-05 | plain gelu_tanh 24576 | "
    "16384 | tied, qkv bias, o bias",
    "granite-3.0-2b-base": "40 32/8x64 | default 64@10000 | all | sequential rms 1e-05 | silu 8192 | 4096 | "
    "tied, factors 12 0.22 0.125",
    "granite-3.1-8b-instruct": "40 32/8x128 | default 128@1e+07 | all | sequential rms 1e-05 | silu 12800 | 131072 | "
    "tied, factors 12 0.22 0.0625",
    "gemma-3n-E2B-it": f"30 8/2x256 | {_GEMMA3N} | 24 of 512 | altup rms 1e-06 | 10: gelu_tanh 8192 sparse 0.95, "
    "20: gelu_tanh 8192 | 32768 | tied, rms head norm",
    "gemma-3n-E4B-it": f"35 8/2x256 | {_GEMMA3N} | 28 of 512 | altup rms 1e-06 | 10: gelu_tanh 16384 sparse 0.95, "
    "25: gelu_tanh 16384 | 32768 | tied, rms head norm",
    "gemma-4-E2B": f"35 8/1x256 | {_GEMMA4} | 28 of 512 | extended rms 1e-06 | 15: gelu_tanh 6144, "
    "20: gelu_tanh 12288 | 131072 | tied, rms head norm",
    "gemma-4-E4B": f"42 8/2x256 | {_GEMMA4} | 35 of 512 | extended rms 1e-06 | gelu_tanh 10240 | 131072 | "
    "tied, rms head norm",
    "gpt-oss-20b": f"24 {_GPT_OSS} | 12 of 128 | sequential rms 1e-05 | 4 of 32 x 2880 | {_GPT_OSS_END}",
    "gpt-oss-120b": f"36 {_GPT_OSS} | 18 of 128 | sequential rms 1e-05 | 4 of 128 x 2880 | {_GPT_OSS_END}",
}


def described(config: ModelConfig) -> str:
    norm = f"{config.block} {config.norm.kind} {config.norm.eps:g}" + (" + 1" if config.norm.offset else "")
    norm += " in float32" * config.has_wide_residual
    norm += "" if config.norm.has_weight else " no weight"
    context = f"{config.max_position_embeddings}"
    if config.longest_context != config.max_position_embeddings:
        context += f" to {config.longest_context}"
    ropes = ", ".join(dict.fromkeys(rotated(layer) for layer in config.layers))
    runs = [(len(list(run)), mlp) for mlp, run in groupby(fed(layer.mlp) for layer in config.layers if layer.mlp)]
    mlps = ", ".join(mlp if len(runs) == 1 else f"{count}: {mlp}" for count, mlp in runs)
    attention = f"{config.num_layers} {attended(config)}"
    return " | ".join((attention, *kept(config), ropes, seen(config), norm, mlps, context, other(config))).strip()


def kept(config: ModelConfig) -> list[str]:
    """Layers that keep a state."""
    found = Counter(layer.state for layer in config.layers if layer.state is not None)
    return [f"{count} {state_of(state)}" for state, count in found.items()]


def state_of(state: StateConfig) -> str:
    if isinstance(state, MambaConfig):
        sizes = f"{state.num_heads}x{state.head_dim} {state.num_groups}x{state.state_dim}"
        return f"mamba {sizes} over {state.conv_size}"
    if isinstance(state, ChannelScanConfig):
        sizes = f"{state.num_channels}x{state.state_dim} by {state.step_rank} over {state.conv_size}"
        return f"mamba 1 {sizes}" + " normed" * (state.norm_eps is not None)
    if isinstance(state, DeltaConfig):
        keys, values = f"{state.num_key_heads}x{state.key_dim}", f"{state.num_value_heads}x{state.value_dim}"
        found = f"delta rule {keys} {values} over {state.conv_size}" + " by channel" * state.has_channel_decay
        found += "" if state.decay_bound is None else f" within {state.decay_bound:g}"
        return found + f" x {state.strength:g}" * (state.strength != 1)
    assert isinstance(state, ConvolutionConfig)
    return f"convolutions of {state.num_channels} over {state.conv_size}"


def attended(config: ModelConfig) -> str:
    attention = config.attention
    if attention is None:
        return "no heads"
    if isinstance(attention, AttentionConfig):
        return f"{attention.num_heads}/{attention.num_kv_heads}x{attention.head_dim}"
    ranks = f"{attention.q_lora_rank}/{attention.kv_lora_rank}"
    return (
        f"{attention.num_heads} {ranks} {attention.qk_nope_head_dim}+{attention.qk_rope_head_dim} "
        f"{attention.v_head_dim}"
    )


def rotated(layer: LayerConfig) -> str:
    rope = layer.rope
    if rope is None:
        return "none"
    return f"{rope.kind} {rope.rotary_dim}@{rope.theta:g}" + (" in pairs" if rope.interleaved else "")


def seen(config: ModelConfig) -> str:
    windows = [layer.window for layer in config.layers if layer.window is not None]
    if not windows:
        return "all"
    (size,) = set(windows)
    kind = " in chunks" if any(layer.is_chunked for layer in config.layers) else ""
    return (f"{size}" if len(windows) == config.num_layers else f"{len(windows)} of {size}") + kind


def fed(mlp: MlpConfig | MoeConfig) -> str:
    if isinstance(mlp, MlpConfig):
        sparse = f" sparse {mlp.sparsity:g}" if mlp.sparsity else ""
        return ("" if mlp.is_gated else "plain ") + f"{mlp.activation} {mlp.intermediate_size}{sparse}"
    shared = "" if mlp.shared_intermediate_size is None else f" + {mlp.shared_intermediate_size}"
    gated = " gated" if mlp.has_shared_gate else ""
    plain = "" if mlp.is_gated else "plain "
    return f"{plain}{mlp.routing.top_k} of {mlp.num_experts} x {mlp.intermediate_size}{shared}{gated}"


def other(config: ModelConfig) -> str:
    attention = config.attention
    found = ["tied"] if config.tie_word_embeddings else []
    if config.num_position_embeddings == config.max_position_embeddings + config.position_offset:
        found.append("learned positions")
    if isinstance(attention, AttentionConfig):
        found += ["qkv bias"] * attention.qkv_bias + ["o bias"] * attention.o_bias
        found += ["fused"] * (attention.layout == "fused") + ["sinks"] * attention.has_sinks
        if norm := attention.head_norm:
            found.append(f"{norm.kind} head norm" + " each" * norm.is_per_head + " joint" * norm.is_joint)
            found[-1] += "" if norm.has_weight else " plain"
        if attention.logit_soft_cap:
            found.append(f"caps {attention.logit_soft_cap:g} {config.logit_soft_cap:g}")
    elif attention is not None and attention.indexer is not None:
        indexer, num_own = attention.indexer, sum(not one.is_shared for one in indexers(config))
        found.append(f"{num_own} indexers {indexer.num_heads}x{indexer.head_dim} for {indexer.top_k}")
        found[-1] += " in pairs" if indexer.is_interleaved else ""
    rope = config.layers[0].rope
    if rope is not None and rope.query_beta:
        found.append(f"queries {rope.query_beta:g} from {rope.original_max_position_embeddings}")
    if scales := {layer.query_scale for layer in config.layers if layer.query_scale is not None}:
        found += [f"queries {scale.beta:g} from {scale.length}" for scale in scales]
    if config.logit_scale != 1.0:
        found.append(f"factors {config.embedding_scale:g} {config.residual_scale:g} {config.logit_scale:g}")
    return ", ".join(found + ["head bias"] * config.head_bias)


def indexers(config: ModelConfig) -> list[IndexerConfig]:
    found = (layer.latent.indexer for layer in config.layers if layer.latent is not None)
    return [indexer for indexer in found if indexer is not None]


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_read_as_it_is_meant(name: str) -> None:
    assert described(read_config(PUBLISHED[name])) == FACTS[name]


# By hand: DeepSeek's 192 values of a query, and YaRN's factor of 40 with mscale_all_dim 0.707 and 1.
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("gemma-2-2b", 256**-0.5),
        ("gemma-2-9b, as first published", 224**-0.5),
        ("gemma-2-27b", 1 / 12),
        ("gemma-3-27b-it", 168**-0.5),
        ("stablelm-2-12b", 160**-0.5),
        ("granite-3.0-2b-base", 1 / 64),
        ("granite-3.1-8b-instruct", 1 / 128),
        ("Moonlight-16B-A3B", 192**-0.5),
        ("DeepSeek-V2-Lite", 0.114721),
        ("DeepSeek-R1", 0.135234),
    ],
)
def test_scores_are_scaled(name: str, scale: float) -> None:
    for layer in read_config(PUBLISHED[name]).layers:
        assert isinstance(layer.attention, AttentionConfig | MlaConfig)
        assert math.isclose(layer.attention.softmax_scale, scale, rel_tol=1e-5)


@pytest.mark.parametrize(
    ("name", "factor", "original", "sharper"),
    [
        ("Meta-Llama-3.1-8B", 8, 8192, 1),
        ("Llama-3.2-1B", 32, 8192, 1),
        ("Qwen2.5-7B-Instruct with YaRN", 4, 32768, 1.138629),
        ("DeepSeek-R1-0528-Qwen3-8B", 4, 32768, 1),
        ("Phi-3-mini-128k-instruct", 32, 4096, 1.190238),
        ("Phi-4-mini-instruct", 32, 4096, 1.190238),
        ("Phi-3.5-MoE-instruct", 32, 4096, 1.243163),
        ("DeepSeek-V2.5", 40, 4096, 1),
        ("gpt-oss-20b", 32, 4096, 1.346574),
        ("DeepSeek-R1", 40, 4096, 1),
        ("Olmo-3-1025-7B", 8, 8192, 1.207944),
        ("Ministral-3-8B-Instruct-2512", 16, 16384, 1),
    ],
)
def test_positions_are_scaled(name: str, factor: float, original: int, sharper: float) -> None:
    rope = read_config(PUBLISHED[name]).layers[-1].rope
    assert rope is not None
    assert (rope.factor, rope.original_max_position_embeddings) == (factor, original)
    assert math.isclose(rope.attention_factor, sharper, rel_tol=1e-6)


# Experts: whether weights are made to add up to 1; groups, and how many of them are chosen from; the last factor.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Mixtral-8x7B-v0.1", ("softmax", True, 1, 1, 1.0)),
        ("Qwen1.5-MoE-A2.7B", ("softmax", False, 1, 1, 1.0)),
        ("Qwen3-30B-A3B", ("softmax", True, 1, 1, 1.0)),
        ("gpt-oss-120b", ("softmax", True, 1, 1, 1.0)),
        ("DeepSeek-V2-Lite", ("softmax", False, 1, 1, 1.0)),
        ("DeepSeek-V2.5", ("softmax", False, 8, 3, 16.0)),
        ("DeepSeek-R1", ("sigmoid", True, 8, 4, 2.5)),
        ("Moonlight-16B-A3B", ("sigmoid", True, 1, 1, 2.446)),
        ("GLM-4.5", ("sigmoid", True, 1, 1, 2.5)),
        ("GLM-4.7-Flash", ("sigmoid", True, 1, 1, 1.8)),
        ("MiniMax-M2", ("sigmoid", True, 1, 1, 1.0)),
        ("Hy3", ("sigmoid", True, 1, 1, 2.826)),
        ("Laguna-XS-2.1", ("sigmoid", True, 1, 1, 2.5)),
        ("Mellum2.1-12B-A2.5B-Thinking", ("softmax", True, 1, 1, 1.0)),
        ("Phi-3.5-MoE-instruct", ("near", False, 1, 1, 1.0)),
        ("OLMoE-1B-7B-0924", ("softmax", False, 1, 1, 1.0)),
        ("Kimi-Linear-48B-A3B-Instruct", ("sigmoid", True, 1, 1, 2.446)),
        ("Ling-3.0-flash", ("sigmoid", True, 8, 4, 2.5)),
    ],
)
def test_experts_are_chosen(name: str, expected: tuple[str, bool, int, int, float]) -> None:
    mixture = read_config(PUBLISHED[name]).layers[-1].mlp
    assert isinstance(mixture, MoeConfig)
    routing = mixture.routing
    groups = routing.num_groups, routing.top_k_groups
    assert (routing.scoring, routing.renormalize, *groups, routing.scaling) == expected
    assert mixture.has_router_bias == (routing.scoring == "sigmoid")


def test_products_of_the_last_layers_have_bounds() -> None:
    mixtures = [layer.mlp for layer in read_config(PUBLISHED["Ling-3.0-flash"]).layers[2:]]
    bounds = [(each.activation, each.shared_activation) for each in mixtures if isinstance(each, MoeConfig)]
    last = [("silu", "silu_within5"), *[("silu_within4", "silu_within5")] * 5, *[("silu_within4", "silu_within7")] * 2]
    assert bounds == [*[("silu", "silu")] * 32, *last]


@pytest.mark.parametrize(
    ("name", "seeing_all"),
    [
        ("gemma-2-2b", range(1, 26, 2)),
        ("gemma-3-1b-it", (5, 11, 17, 23)),
        ("gemma-3-4b-it", (5, 11, 17, 23, 29)),
        ("Olmo-3-1025-7B", range(3, 32, 4)),
        ("EXAONE-4.0-32B", range(3, 64, 4)),
    ],
)
def test_which_layers_see_all(name: str, seeing_all: range | tuple[int, ...]) -> None:
    layers = read_config(PUBLISHED[name]).layers
    assert [index for index, layer in enumerate(layers) if layer.window is None] == list(seeing_all)


@pytest.mark.parametrize(
    ("name", "dtype"), [("Llama-2-7b-hf", "float16"), ("starcoder", "float32"), ("gemma-3-4b-it", "bfloat16")]
)
def test_weights_have_the_type_that_the_file_says(name: str, dtype: str) -> None:
    assert read_config(PUBLISHED[name]).dtype == dtype


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        ("Mistral-7B-v0.1", ["sliding_attention"] * 32, ["sliding_attention"] * 31 + ["full_attention"]),
        ("Meta-Llama-3.1-8B", ["full_attention"] * 32, ["sliding_attention"] * 32),
        ("granite-3.0-2b-base", ["full_attention"] * 40, ["full_attention"] * 39),
        ("DeepSeek-V2-Lite", ["full_attention"] * 27, ["full_attention"] * 26 + ["linear_attention"]),
    ],
)
def test_layer_types_are_never_ignored(name: str, right: list[str], wrong: list[str]) -> None:
    """Families whose layers all see the same do not read them; a file that says otherwise means another model."""
    config = PUBLISHED[name]
    assert read_config({**config, "layer_types": right}) == read_config(config)
    with pytest.raises(ModelLoadError, match=r"layer_types is \[.*, and must be left out or agree with the other"):
        read_config({**config, "layer_types": wrong})


def test_layers_attend_to_the_keys_of_earlier_ones() -> None:
    borrowing = {
        "gemma-3n-E2B-it": (20, (18, 19)), "gemma-3n-E4B-it": (20, (18, 19)),
        "gemma-4-E2B": (15, (13, 14)), "gemma-4-E4B": (24, (22, 23)),
    }  # fmt: skip
    for name, (first, lenders) in borrowing.items():
        layers = read_config(PUBLISHED[name]).layers
        assert all(layer.lender is None for layer in layers[:first])
        assert {(layer.window, layer.lender) for layer in layers[first:]} == {(512, lenders[0]), (None, lenders[1])}


def test_layer_types_of_windows_that_are_not_used() -> None:
    config = {**PUBLISHED["Qwen1.5-0.5B"], "layer_types": ["full_attention"] * 21 + ["sliding_attention"] * 3}
    assert all(layer.window is None for layer in read_config(config).layers)


def test_ranks_share_out_the_heads_of_all_layers() -> None:
    laguna = read_config(PUBLISHED["Laguna-XS-2.1"])
    laguna.check_ranks(16)
    with pytest.raises(ConfigError, match="3 does not divide the model's 64 attention heads of other layers"):
        laguna.check_ranks(3)
    assert laguna.attention_width == 64 * 128


def test_embeddings_are_scaled_and_layers_that_predict_later_tokens_ignored() -> None:
    gemma = read_config(PUBLISHED["gemma-2b"])
    assert (gemma.embedding_scale, gemma.is_embedding_scale_rounded) == (2048**0.5, True)
    assert read_config(PUBLISHED["DeepSeek-R1"]).ignored == (r"model\.layers\.(61)\..*",)
    assert read_config(PUBLISHED["Moonlight-16B-A3B"]).ignored == ()
    assert read_config(PUBLISHED["GLM-4.5-Air"]).ignored == (r"model\.layers\.(46)\..*",)
    assert read_config(PUBLISHED["gemma-3-4b-it"]).vocab_size == 262208
