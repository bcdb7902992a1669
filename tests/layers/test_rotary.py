"""Rotary embedding against transformers, and against the rotation that defines it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pagewick import kernels
from pagewick.layers.rope_config import RopeConfig
from pagewick.layers.rotary import RotaryEmbedding, inverse_frequencies
from tests.layers.ranks import single_context

CASES: dict[str, tuple[RopeConfig, dict[str, Any]]] = {
    "default": (RopeConfig(theta=10000.0), {"rope_type": "default", "rope_theta": 10000.0}),
    "large-theta": (RopeConfig(theta=1e6), {"rope_type": "default", "rope_theta": 1e6}),
    "linear": (
        RopeConfig(theta=10000.0, kind="linear", factor=2.5),
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5},
    ),
    "llama3": (
        RopeConfig(
            theta=500000.0,
            kind="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=8192,
        ),
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    "llama3-short": (
        RopeConfig(
            theta=10000.0,
            kind="llama3",
            factor=32.0,
            low_freq_factor=2.0,
            high_freq_factor=3.0,
            original_max_position_embeddings=64,
        ),
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 32.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 3.0,
            "original_max_position_embeddings": 64,
        },
    ),
}


def reference(parameters: dict[str, Any], head_dim: int) -> LlamaRotaryEmbedding:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        head_dim=head_dim,
        max_position_embeddings=131072,
        rope_parameters=parameters,
    )
    return LlamaRotaryEmbedding(config)


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("name", CASES)
def test_frequencies_and_rotation_are_those_of_transformers(name: str, head_dim: int) -> None:
    config, parameters = CASES[name]
    expected = reference(parameters, head_dim)
    torch.testing.assert_close(inverse_frequencies(config, head_dim), expected.inv_freq, rtol=1e-6, atol=0)

    positions = torch.tensor([0, 1, 2, 63, 64, 1000, 8191])
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(len(positions), 4, head_dim, generator=generator)
    k = torch.randn(len(positions), 2, head_dim, generator=generator)
    cos, sin = expected(q, positions.unsqueeze(0))
    rotated_q, rotated_k = apply_rotary_pos_emb(q.transpose(0, 1), k.transpose(0, 1), cos, sin)

    found_q, found_k = kernels.rotary_embedding(q, k, *RotaryEmbedding(single_context(), config, head_dim)(positions))
    torch.testing.assert_close(found_q, rotated_q.squeeze(0).transpose(0, 1), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found_k, rotated_k.squeeze(0).transpose(0, 1), rtol=1e-4, atol=1e-4)


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    """Of 8,192 tokens: below 2,048 tokens per turn nothing changes, above 8,192 everything is eight times as long."""
    scaled = inverse_frequencies(CASES["llama3"][0], 128)
    plain = inverse_frequencies(RopeConfig(theta=500000.0), 128)
    wavelengths = 2 * torch.pi / plain
    assert torch.equal(scaled[wavelengths < 2048], plain[wavelengths < 2048])
    torch.testing.assert_close(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8)
    between = (wavelengths > 2048) & (wavelengths < 8192)
    assert bool(between.any())
    assert bool((scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all())


def test_scores_depend_on_the_distance_alone() -> None:
    rotary = RotaryEmbedding(single_context(), RopeConfig(), 32)
    q, k = torch.randn(2, 1, 1, 32, generator=torch.Generator().manual_seed(0))

    def score(query_position: int, key_position: int) -> float:
        rotated_q, _ = kernels.rotary_embedding(q, k, *rotary(torch.tensor([query_position])))
        _, rotated_k = kernels.rotary_embedding(q, k, *rotary(torch.tensor([key_position])))
        return float((rotated_q * rotated_k).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-3)
    assert score(7, 3) != pytest.approx(score(7, 2), abs=1e-2)
