"""Command R, R+ (Cohere), Command R7B, A, Aya (Cohere2), and Command A+, North Mini (Cohere2Moe). Llama, except:

- Attention and MLP of a layer read the same layer norm, which has no bias, and are added together.
- Heads are rotated in pairs of neighbours. Logits are multiplied by logit_scale; the head is tied to the embedding.
- Command R+: each head of queries and keys has a layer norm of its own.
- Cohere2: three of four layers have a window, and only these are rotated. Command A Vision also reads images.
- Cohere2Moe: the same with experts, whose sum may be averaged with a shared one. North Mini has RMS norms, and an MLP
  in its first layer, which is rotated without a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from pagewick.layers.config import MoeConfig
from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.deepseek import SHARED_EXPERTS, later_layers, layers_by_kind
from pagewick.models.entries import Entries
from pagewick.models.multimodal import read_text_part, text_entries
from pagewick.models.parts import AttentionConfig, HeadNormConfig, LayerConfig, MlpConfig, NormConfig
from pagewick.models.vision.merging_siglip_entries import with_cohere_siglip

_MOE_DEFAULTS: dict[str, Any] = {
    "head_dim": 128,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "norm_topk_prob": True,
}
# Entries of published files of which only one value is implemented.
_MOE_ONLY = {"use_parallel_block": True, "use_gated_activation": True, "use_qk_norm": False}


def read_cohere(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 8192})
    head_norm = None
    if entries.flag("use_qk_norm", False):
        eps = entries.positive("layer_norm_eps", 1e-5)
        head_norm = HeadNormConfig(kind="layer", eps=eps, is_per_head=True, is_matrix=True)
    attention = _attention(entries, head_norm)
    rope = reading.read_rope_of(entries, attention, interleaved=True, default_theta=5e5)
    num_layers = reading.read_num_layers(entries)
    return _model(entries, reading.same_layers(num_layers, attention, reading.read_mlp(entries), rope))


def read_cohere2(entries: Entries) -> ModelConfig:
    entries = entries.filled({"max_position_embeddings": 8192, "sliding_window": 4096})
    entries.demand("use_qk_norm", False, False)
    attention, mlp = _attention(entries, None), reading.read_mlp(entries)
    rope = reading.read_rope_of(entries, attention, interleaved=True)
    pattern, num_layers = entries.size("sliding_window_pattern", 4), reading.read_num_layers(entries)
    windows = reading.read_windows(entries, [(layer_idx + 1) % pattern != 0 for layer_idx in range(num_layers)])
    return _model(
        entries,
        [
            LayerConfig(attention=attention, mlp=mlp, rope=None if window is None else rope, window=window)
            for window in windows
        ],
    )


def read_cohere2_vision(entries: Entries) -> ModelConfig:
    """Command A Vision. transformers leaves out logit_scale here, by which the text part was trained."""
    text_entries(entries).choice("model_type", ("cohere2",), "cohere2")
    return with_cohere_siglip(read_text_part(entries, read_cohere2, is_tied=True), entries)


def read_cohere2_moe(entries: Entries) -> ModelConfig:
    entries = entries.filled(_MOE_DEFAULTS)
    for name, value in _MOE_ONLY.items():
        entries.demand(name, value, value)
    # The size of experts is that of other families' MLPs.
    size = entries.size("prefix_dense_intermediate_size", entries.size("intermediate_size"))
    mlps = layers_by_kind(entries.replaced({"intermediate_size": size}), _read_experts(entries), default_dense=0)
    num_dense = min(len(mlps), entries.count("first_k_dense_replace", 0))
    dense_pattern = entries.size("prefix_dense_sliding_window_pattern", 1)
    pattern = entries.size("sliding_window_pattern", 4)
    slides = [(layer_idx + 1) % dense_pattern != 0 for layer_idx in range(num_dense)]
    slides += [(layer_idx + 1) % pattern != 0 for layer_idx in range(len(mlps) - num_dense)]
    attention = _attention(entries, None)
    rope = reading.read_rope_of(entries, attention, interleaved=True)
    layers = []
    for mlp, window in zip(mlps, reading.read_windows(entries, slides), strict=True):
        is_rotated = window is not None or (isinstance(mlp, MlpConfig) and dense_pattern == 1)
        layers.append(LayerConfig(attention=attention, mlp=mlp, rope=rope if is_rotated else None, window=window))
    fields: dict[str, Any] = {"names": (SHARED_EXPERTS,), "ignored": later_layers(entries)}
    if (eps := entries.optional_positive("rms_norm_eps")) is not None:
        fields["norm"] = NormConfig(eps=eps)
    return _model(entries, layers, **fields)


def _read_experts(entries: Entries) -> MoeConfig:
    scoring = entries.choice("expert_selection_fn", ("softmax", "sigmoid"), "softmax")
    num_experts, size = entries.size("num_experts", 8), entries.size("intermediate_size")
    num_shared = entries.count("num_shared_experts", 0)
    strategy = entries.choice("shared_expert_combination_strategy", ("average", "sum"), "average")
    share = 0.5 if num_shared and strategy == "average" else 1.0
    return reading.make_moe(
        {
            "top_k": entries.size("num_experts_per_tok", 2, most=num_experts),
            "scoring": scoring,
            # A softmax is that of the chosen experts alone.
            "renormalize": scoring == "softmax" or entries.flag("norm_topk_prob", False),
            "scaling": share,
        },
        num_experts=num_experts,
        intermediate_size=size,
        activation=reading.read_activation(entries),
        shared_intermediate_size=size * num_shared if num_shared else None,
        shared_scale=share,
    )


def _attention(entries: Entries, head_norm: HeadNormConfig | None) -> AttentionConfig:
    has_bias = entries.flag("attention_bias", False)
    return reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=head_norm)


def _model(entries: Entries, layers: Sequence[LayerConfig], **fields: Any) -> ModelConfig:
    usual = {"norm": NormConfig(kind="layer", eps=entries.positive("layer_norm_eps", 1e-5))}
    config = reading.model_config(
        entries,
        tie_word_embeddings=True,
        block="parallel",
        layers=tuple(layers),
        logit_scale=entries.positive("logit_scale", 0.0625),
        **{**usual, **fields},
    )
    # The length that the model was trained for, in files whose max_position_embeddings is smaller.
    length = entries.size("model_max_length", config.max_position_embeddings)
    longest = max(length, config.longest_context)
    return replace(config, max_position_embeddings=length, longest_context=longest)
