"""RopeConfig: which rotary embedding a model has. Imports no torch, so that a config.json can be judged without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """theta: base of the frequencies. The other numbers belong to the scaling `kind`; names are Hugging Face's."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192
