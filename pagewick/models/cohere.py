"""Command R and R+ (Cohere), and Command R7B, A and Aya (Cohere2). Llama, except:

- Attention and MLP of a layer read the same layer norm, which has no bias, and are added together.
- Heads are rotated in pairs of neighbours. Logits are multiplied by logit_scale; the head is tied to the embedding.
- Command R+: each head of queries and keys has a layer norm of its own.
- Cohere2: three of four layers have a window, and only these are rotated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.parts import AttentionConfig, HeadNormConfig, LayerConfig, NormConfig


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


def _attention(entries: Entries, head_norm: HeadNormConfig | None) -> AttentionConfig:
    has_bias = entries.flag("attention_bias", False)
    return reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias, head_norm=head_norm)


def _model(entries: Entries, layers: Sequence[LayerConfig]) -> ModelConfig:
    config = reading.model_config(
        entries,
        tie_word_embeddings=True,
        norm=NormConfig(kind="layer", eps=entries.positive("layer_norm_eps", 1e-5)),
        block="parallel",
        layers=tuple(layers),
        logit_scale=entries.positive("logit_scale", 0.0625),
    )
    # The length that the model was trained for, in files whose max_position_embeddings is smaller.
    length = entries.size("model_max_length", config.max_position_embeddings)
    longest = max(length, config.longest_context)
    return replace(config, max_position_embeddings=length, longest_context=longest)
