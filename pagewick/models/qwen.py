"""Qwen2 (2.5, QwQ, DeepSeek-R1-Distill-Qwen), Qwen3, and both with experts. Llama, except:

- Qwen2: queries, keys and values have biases.
- Qwen3: none of these; queries and keys are normalised per head, and head_dim is not hidden_size / num_heads.
- With use_sliding_window, the layers from max_window_layers on see a window; in Qwen2-MoE every other layer before it
  does, in Qwen3-MoE all layers do.
- Models for a million tokens (Qwen2.5-1M) attend in chunks of positions. They run up to the first chunk's length.
- Qwen2-MoE: most layers have experts in place of the MLP, and a shared expert weighted by a sigmoid.
- Qwen3-MoE: experts without a shared one.
- Qwen2-VL, 2.5-VL and 3-VL also see images: a token has three positions, which are equal within a text.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from pagewick.layers.config import MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.multimodal import read_flat, read_text_part, text_entries
from pagewick.models.parts import AttentionConfig, HeadNormConfig, MlpConfig, NormConfig
from pagewick.models.vision.entries import (
    read_qwen2_5_vl_vision,
    read_qwen2_vl_vision,
    read_qwen3_vl_vision,
    with_vision,
)


def read_qwen2(entries: Entries) -> ModelConfig:
    entries = entries.filled({"num_key_value_heads": 32, "max_position_embeddings": 32768})
    entries.demand("use_mrope", False, False)
    attention = reading.read_attention(entries, qkv_bias=True)
    first = entries.count("max_window_layers", 28)
    return _read(entries, attention, reading.read_mlp(entries), lambda layer_idx: layer_idx >= first)


def read_qwen3(entries: Entries) -> ModelConfig:
    entries = entries.filled({"num_key_value_heads": 32, "max_position_embeddings": 32768})
    first = entries.count("max_window_layers", 28)
    attention = _normed_attention(entries.filled({"head_dim": 128}))
    return _read(entries, attention, reading.read_mlp(entries), lambda layer_idx: layer_idx >= first)


def read_qwen2_moe(entries: Entries) -> ModelConfig:
    entries = entries.filled({"num_key_value_heads": 16, "max_position_embeddings": 32768})
    attention = reading.read_attention(entries, qkv_bias=entries.flag("qkv_bias", True))
    shared = entries.size("shared_expert_intermediate_size", 5632)
    mlps = sparse_layers(entries, default_top_k=4, default_num_experts=60, shared=shared)
    end = entries.count("max_window_layers", 28)
    return _read(entries, attention, mlps, lambda layer_idx: layer_idx % 2 == 0 and layer_idx < end)


def read_qwen3_moe(entries: Entries) -> ModelConfig:
    # transformers writes the second name since its version 5.
    entries = entries.renamed({"num_experts": "num_local_experts"})
    entries = entries.filled({"num_key_value_heads": 4, "max_position_embeddings": 32768})
    mlps = sparse_layers(entries, default_top_k=8, default_num_experts=128, shared=None)
    return _read(entries, _normed_attention(entries), mlps, lambda layer_idx: True)


def read_qwen2_vl(entries: Entries) -> ModelConfig:
    return with_vision(_read_qwen2_vl(entries), entries, read_qwen2_vl_vision)


def read_qwen2_5_vl(entries: Entries) -> ModelConfig:
    return with_vision(_read_qwen2_vl(entries), entries, read_qwen2_5_vl_vision)


def _read_qwen2_vl(entries: Entries) -> ModelConfig:
    text = text_entries(entries)
    is_tied = text.flag("tie_word_embeddings", False) or entries.flag("tie_word_embeddings", False)
    # Old files have the entries of the text part among the others.
    read = _read_qwen2_vl_text
    config = read_text_part(entries, read) if "text_config" in entries else read_flat(entries, read)
    return replace(config, tie_word_embeddings=is_tied)


def _read_qwen2_vl_text(entries: Entries) -> ModelConfig:
    entries = entries.filled({"num_key_value_heads": 8, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5})
    entries.demand("head_dim", None, None, "heads share out hidden_size")
    attention = reading.read_attention(entries, qkv_bias=True)
    first = entries.count("max_window_layers", 80)
    mlp = reading.read_mlp(entries)
    return _read(entries, attention, mlp, lambda layer_idx: layer_idx >= first, default_theta=1e6, is_mrope=True)


def read_qwen3_vl(entries: Entries) -> ModelConfig:
    config = read_text_part(entries, _read_qwen3_vl_text)
    return with_vision(config, entries, read_qwen3_vl_vision, sections=(24, 20, 20))


def _read_qwen3_vl_text(entries: Entries) -> ModelConfig:
    entries = entries.filled({"num_key_value_heads": 32, "max_position_embeddings": 128000, "head_dim": 128})
    entries.demand("use_sliding_window", False, False)
    mlp = reading.read_mlp(entries)
    return _read(entries, _normed_attention(entries), mlp, lambda _: False, default_theta=5e5, is_mrope=True)


def read_qwen3_vl_moe(entries: Entries) -> ModelConfig:
    config = read_text_part(entries, _read_qwen3_vl_moe_text)
    return with_vision(config, entries, read_qwen3_vl_vision, sections=(24, 20, 20))


def _read_qwen3_vl_moe_text(entries: Entries) -> ModelConfig:
    entries = entries.renamed({"num_experts": "num_local_experts"})
    entries = entries.filled({"num_key_value_heads": 16, "max_position_embeddings": 128000, "norm_topk_prob": True})
    entries.demand("use_sliding_window", False, False)
    entries.demand("norm_topk_prob", True, True)
    mlps = sparse_layers(entries, default_top_k=4, default_num_experts=60, shared=None)
    return _read(entries, _normed_attention(entries), mlps, lambda _: False, default_theta=5e5, is_mrope=True)


def _normed_attention(entries: Entries) -> AttentionConfig:
    has_bias = entries.flag("attention_bias", False)
    norm = HeadNormConfig(eps=entries.positive("rms_norm_eps", 1e-6))
    return reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=norm)


def sparse_layers(
    entries: Entries,
    *,
    default_top_k: int,
    default_num_experts: int,
    shared: int | None,
    has_shared_gate: bool = True,
    scoring: str = "softmax",
) -> list[MlpConfig | MoeConfig]:
    """Experts in every decoder_sparse_step-th layer that mlp_only_layers does not name.

    shared: size of the shared expert; None: there is none. has_shared_gate: it has a gate. scoring: of Routing.
    """
    num_layers = reading.read_num_layers(entries)
    num_experts = entries.renamed({"num_experts": "num_local_experts"}).count("num_experts", default_num_experts)
    step = entries.size("decoder_sparse_step", 1)
    dense = set(entries.sizes("mlp_only_layers", least=0) or ())
    is_sparse = [
        layer_idx not in dense and num_experts > 0 and (layer_idx + 1) % step == 0 for layer_idx in range(num_layers)
    ]
    if not any(is_sparse):
        return [reading.read_mlp(entries)] * num_layers
    routing = {
        "top_k": entries.size("num_experts_per_tok", default_top_k, most=num_experts),
        "renormalize": entries.flag("norm_topk_prob", False),
        "scoring": scoring,
    }
    moe = reading.make_moe(
        routing,
        num_experts=num_experts,
        intermediate_size=entries.size("moe_intermediate_size"),
        activation=reading.read_activation(entries),
        shared_intermediate_size=shared,
        has_shared_gate=has_shared_gate and shared is not None,
    )
    dense_mlp = None if all(is_sparse) else reading.read_mlp(entries)
    return [moe if sparse or dense_mlp is None else dense_mlp for sparse in is_sparse]


def _read(
    entries: Entries,
    attention: AttentionConfig,
    mlps: MlpConfig | list[MlpConfig | MoeConfig],
    slides: Callable[[int], bool],
    **rotation: Any,
) -> ModelConfig:
    """slides: whether a layer sees a window, if the file wants windows and does not list the layers that have one.

    rotation: options of read_rope.
    """
    num_layers = reading.read_num_layers(entries)
    windows: tuple[int | None, ...] = (None,) * num_layers
    if entries.flag("use_sliding_window", False):
        windows = reading.read_windows(
            entries.filled({"sliding_window": 4096}), [slides(layer_idx) for layer_idx in range(num_layers)]
        )
    rope = reading.read_rope_of(entries, attention, **rotation)
    config = reading.model_config(
        entries,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-6)),
        layers=reading.same_layers(num_layers, attention, mlps, rope, windows),
    )
    if (dual := entries.child("dual_chunk_attention_config")) is None:
        return config
    # Within the first chunk it is ordinary attention; sequences beyond the first chunk are not supported.
    size, local_size = dual.size("chunk_size"), dual.count("local_size")
    if local_size >= size:
        raise dual.wrong("local_size", f"a whole number below chunk_size ({size})")
    length = min(config.max_position_embeddings, size - local_size)
    return replace(config, max_position_embeddings=length, longest_context=length)
