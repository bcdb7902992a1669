"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864) and the scalings of its frequencies."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from pagewick import kernels
from pagewick.layers.context import LayerContext
from pagewick.layers.rope_config import RopeConfig

CosSin = tuple[Tensor, Tensor]


def inverse_frequencies(config: RopeConfig, rotary_dim: int) -> Tensor:
    """Angle per position of each pair of dimensions: [rotary_dim / 2], float32.

    linear: every frequency divided by `factor` (position interpolation, arXiv:2306.15595). llama3: long wavelengths
    divided by `factor`, short ones kept, those between blended (Llama 3.1's model card and reference code).
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim
    frequencies = 1.0 / (config.theta**exponents)
    if config.kind == "linear":
        return frequencies / config.factor
    if config.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = config.low_freq_factor, config.high_freq_factor
        smooth = (config.original_max_position_embeddings / wavelengths - low) / (high - low)
        smooth = smooth.clamp(0.0, 1.0)
        return (1 - smooth) * frequencies / config.factor + smooth * frequencies
    return frequencies


class RotaryEmbedding(nn.Module):
    """positions [T] -> (cos, sin), each [T, rotary_dim / 2] in float32: computed once per step, used by every layer."""

    def __init__(self, context: LayerContext, config: RopeConfig, rotary_dim: int) -> None:
        super().__init__()
        self._frequencies = inverse_frequencies(config, rotary_dim).to(context.device)

    def forward(self, positions: Tensor) -> CosSin:
        return kernels.rotary_angles(positions, self._frequencies)
