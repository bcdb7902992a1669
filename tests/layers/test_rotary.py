"""Rotary embedding against transformers, and against the rotation that defines it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from pagewick import kernels
from pagewick.layers.rope_config import RopeConfig
from pagewick.layers.rotary import RotaryEmbedding, inverse_frequencies
from tests.layers.ranks import single_context

DIM = 24
ORIGINAL = 50
# Both sides of every original length, and far beyond.
POSITIONS = [0, 1, 2, 31, 48, 49, 50, 51, 99, 1000, 8191]
SHORT = tuple(1.0 + 0.11 * pair for pair in range(DIM // 2))
LONG = tuple(3.0 + 0.7 * pair**1.5 for pair in range(DIM // 2))


def rope(kind: Any = "default", **numbers: Any) -> RopeConfig:
    fields = {"theta": 10000.0, "rotary_dim": DIM, "original_max_position_embeddings": ORIGINAL, **numbers}
    return RopeConfig(kind=kind, **fields)


CASES = {
    "default": rope(),
    "large-theta": rope(theta=1e6, rotary_dim=128),
    "linear": rope("linear", factor=2.5, theta=777.0),
    "llama3": rope(
        "llama3", factor=8.0, original_max_position_embeddings=8192, theta=500000.0, rotary_dim=128, low_freq_factor=1.0
    ),
    "llama3-short": rope("llama3", factor=32.0, low_freq_factor=2.0, high_freq_factor=3.0),
    "yarn": rope("yarn", factor=3.7, attention_factor=1.13, theta=5000.0),
    "yarn-ramp": rope(
        "yarn", factor=40.0, beta_fast=17.0, beta_slow=0.3, rotary_dim=64, original_max_position_embeddings=4096
    ),
    "yarn-untruncated": rope("yarn", factor=4.0, truncate=False, beta_fast=3.0, beta_slow=0.7),
    "yarn-one-step": rope("yarn", factor=4.0, truncate=False, beta_fast=2.0, beta_slow=2.0, rotary_dim=6),
    "yarn-beyond-the-first-pair": rope("yarn", factor=4.0, original_max_position_embeddings=3),
    "longrope": rope("longrope", short_factor=SHORT, long_factor=LONG, factor=6.0, attention_factor=1.31),
}
# What transformers would warn of: entries that the kind has no use for.
USED = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        *("factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "original_max_position_embeddings"),
    },
    "longrope": {"factor", "short_factor", "long_factor", "attention_factor", "original_max_position_embeddings"},
}


def reference(config: RopeConfig) -> LlamaRotaryEmbedding:
    parameters = {name: value for name, value in asdict(config).items() if name in USED[config.kind]}
    for name in {"short_factor", "long_factor"} & parameters.keys():
        parameters[name] = list(parameters[name])
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * config.rotary_dim,
            num_attention_heads=4,
            head_dim=config.rotary_dim,
            max_position_embeddings=ORIGINAL if config.kind == "dynamic" else 131072,
            rope_parameters={"rope_type": config.kind, "rope_theta": config.theta, **parameters},
        )
    )


def rotary(config: RopeConfig, max_model_len: int = 10000) -> RotaryEmbedding:
    return RotaryEmbedding(replace(single_context(), max_model_len=max_model_len), config)


def halves(cos_sin: tuple[Tensor, Tensor]) -> Tensor:
    """transformers repeats each value for both numbers of its pair."""
    stacked = torch.stack(cos_sin).squeeze(1)
    first, second = stacked.chunk(2, dim=-1)
    assert torch.equal(first, second)
    return first


@pytest.mark.parametrize("name", CASES)
def test_frequencies_are_those_of_transformers_to_the_bit(name: str) -> None:
    assert torch.equal(inverse_frequencies(CASES[name]), reference(CASES[name]).inv_freq)


@pytest.mark.parametrize("name", CASES)
def test_angles_and_rotation_are_those_of_transformers(name: str) -> None:
    config = CASES[name]
    positions = torch.tensor(POSITIONS)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(len(positions), 4, config.rotary_dim, generator=generator)
    k = torch.randn(len(positions), 2, config.rotary_dim, generator=generator)
    expected = reference(config)(q, positions.unsqueeze(0))
    rotated_q, rotated_k = apply_rotary_pos_emb(q.transpose(0, 1), k.transpose(0, 1), *expected)

    found = rotary(config)(positions)
    assert [tuple(part.shape) for part in found] == [(len(POSITIONS), config.rotary_dim // 2)] * 2
    assert found[0].dtype == found[1].dtype == torch.float32
    torch.testing.assert_close(torch.stack(found), halves(expected), rtol=0, atol=3e-7)
    found_q, found_k = kernels.rotary_embedding(q, k, *found)
    torch.testing.assert_close(found_q, rotated_q.squeeze(0).transpose(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_k, rotated_k.squeeze(0).transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", ["factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "theta"])
def test_each_of_yarns_numbers_counts(number: str) -> None:
    config = CASES["yarn-untruncated"]
    other = True if number == "truncate" else getattr(config, number) * 1.5
    positions = torch.tensor(POSITIONS)
    before, after = (torch.stack(rotary(one)(positions)) for one in (config, replace(config, **{number: other})))
    assert float((before - after).abs().max()) > 0.01


def test_longrope_chooses_once_by_the_longest_sequence_the_engine_admits() -> None:
    config, positions = CASES["longrope"], torch.tensor([0, 7, 49])
    for max_model_len, last in ((ORIGINAL, ORIGINAL - 1), (ORIGINAL + 1, ORIGINAL)):
        # transformers takes the long factors as soon as one position is beyond the original length.
        expected = halves(reference(config)(torch.empty(0), torch.tensor([[0, 7, 49, last]])))[:, :3]
        found = torch.stack(rotary(config, max_model_len)(positions))
        torch.testing.assert_close(found, expected, rtol=0, atol=3e-7)
    short, long = (rotary(config, max_model_len)(positions)[1] for max_model_len in (ORIGINAL, ORIGINAL + 1))
    assert float((short - long).abs().max()) > 0.1


def test_longrope_divides_by_its_own_factors() -> None:
    config = CASES["longrope"]
    for is_long, factors in ((False, SHORT), (True, LONG)):
        expected = inverse_frequencies(rope()) / torch.tensor(factors)
        torch.testing.assert_close(inverse_frequencies(config, is_long=is_long), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dim", [4, DIM, 128])
def test_dynamic_rotates_a_token_as_if_the_sequence_were_fed_token_by_token(dim: int) -> None:
    config = rope("dynamic", factor=2.5, rotary_dim=dim, theta=3000.0)
    expected = reference(config)
    one_by_one = [halves(expected(torch.empty(0), torch.tensor([[position]]))) for position in POSITIONS]
    found = rotary(config)(torch.tensor(POSITIONS))
    # A float32 frequency times the position: 2 ** -23 of the angle is what either may be off by.
    for position, values in enumerate(one_by_one):
        tolerance = 1e-6 + 4e-7 * POSITIONS[position]
        torch.testing.assert_close(torch.stack(found)[:, position], values[:, 0], rtol=0, atol=tolerance)
    plain = torch.stack(rotary(rope(rotary_dim=dim, theta=3000.0))(torch.tensor(POSITIONS)))
    changed = (torch.stack(found) - plain).abs().amax(dim=(0, 2))
    is_beyond = torch.tensor(POSITIONS) + 1 > ORIGINAL
    assert bool((changed[~is_beyond] < 1e-4).all() and (changed[is_beyond] > 1e-3).all())


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    """Of 8,192 tokens: below 2,048 tokens per turn nothing changes, above 8,192 everything is eight times as long."""
    scaled = inverse_frequencies(CASES["llama3"])
    plain = inverse_frequencies(rope(theta=500000.0, rotary_dim=128))
    wavelengths = 2 * torch.pi / plain
    assert torch.equal(scaled[wavelengths < 2048], plain[wavelengths < 2048])
    torch.testing.assert_close(scaled[wavelengths > 8192], plain[wavelengths > 8192] / 8)
    between = (wavelengths > 2048) & (wavelengths < 8192)
    assert bool(between.any())
    assert bool((scaled[between] < plain[between]).all() and (scaled[between] > plain[between] / 8).all())


def test_scores_depend_on_the_distance_alone() -> None:
    embedding = rotary(rope(rotary_dim=32))
    q, k = torch.randn(2, 1, 1, 32, generator=torch.Generator().manual_seed(0))

    def score(query_position: int, key_position: int) -> float:
        rotated_q, _ = kernels.rotary_embedding(q, k, *embedding(torch.tensor([query_position])))
        _, rotated_k = kernels.rotary_embedding(q, k, *embedding(torch.tensor([key_position])))
        return float((rotated_q * rotated_k).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-3)
    assert score(7, 3) != pytest.approx(score(7, 2), abs=1e-2)


def test_attention_factor_scales_scores_by_its_square() -> None:
    positions = torch.tensor(POSITIONS)
    plain = replace(CASES["yarn"], attention_factor=1.0)
    torch.testing.assert_close(
        torch.stack(rotary(CASES["yarn"])(positions)), 1.13 * torch.stack(rotary(plain)(positions))
    )
