"""SmolLM3: Llama, except that every fourth layer rotates nothing.

no_rope_layers has a 1 for each layer that rotates. If windows are used, the other layers have them.
"""

from __future__ import annotations

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.parts import LayerConfig, NormConfig


def read_smollm3(entries: Entries) -> ModelConfig:
    entries = entries.filled({"num_key_value_heads": 4, "max_position_embeddings": 32768})
    has_bias = entries.flag("attention_bias", False)
    attention = reading.read_attention(entries, qkv_bias=has_bias, o_bias=has_bias)
    mlp = reading.read_mlp(entries, bias=entries.flag("mlp_bias", False))
    rope = reading.read_rope_of(entries, attention, default_theta=2e6)
    num_layers = reading.read_num_layers(entries)
    rotates = reading.read_rotating_layers(entries, num_layers)
    windows: tuple[int | None, ...] = (None,) * num_layers
    if entries.flag("use_sliding_window", False) and "sliding_window" in entries:
        windows = reading.read_windows(entries, [not turned for turned in rotates])
    layers = [
        LayerConfig(attention=attention, mlp=mlp, rope=rope if turned else None, window=window)
        for turned, window in zip(rotates, windows, strict=True)
    ]
    return reading.model_config(
        entries,
        tie_word_embeddings=True,
        norm=NormConfig(eps=entries.positive("rms_norm_eps", 1e-6)),
        layers=tuple(layers),
    )
