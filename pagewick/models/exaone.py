"""EXAONE 4. Llama, except:

- The norms of a layer come after attention and MLP, not before them. Queries and keys are normalised per head.
- With a sliding_window (32B), three of four layers have one, and only these are rotated.
"""

from __future__ import annotations

import re

from pagewick.models import reading
from pagewick.models.config import ModelConfig
from pagewick.models.entries import Entries
from pagewick.models.parts import HeadNormConfig, LayerConfig, NormConfig


def read_exaone4(entries: Entries) -> ModelConfig:
    entries = entries.filled(
        {
            "num_key_value_heads": 32,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "sliding_window_pattern": 4,
        }
    )
    eps = entries.positive("rms_norm_eps", 1e-5)
    attention = reading.read_attention(entries, head_norm=HeadNormConfig(eps=eps))
    mlp, rope = reading.read_mlp(entries), reading.read_rope_of(entries, attention)
    num_layers = reading.read_num_layers(entries)
    if "sliding_window" in entries:
        pattern = _pattern(entries)
        windows = reading.read_windows(entries, [(layer_idx + 1) % pattern != 0 for layer_idx in range(num_layers)])
        layers = [
            LayerConfig(attention=attention, mlp=mlp, rope=None if window is None else rope, window=window)
            for window in windows
        ]
    else:
        layers = list(reading.same_layers(num_layers, attention, mlp, rope))
    return reading.model_config(entries, norm=NormConfig(eps=eps), block="post_norm", layers=tuple(layers))


def _pattern(entries: Entries) -> int:
    """Every how many layers one sees everything: a number, or a string such as LLLG."""
    pattern = entries.get("sliding_window_pattern")
    if isinstance(pattern, str) and re.fullmatch("L*G", pattern):
        return len(pattern)
    return entries.size("sliding_window_pattern")
