"""Rotary embedding compared with transformers, and with the rotation that defines it."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import Glm4vTextConfig, LlamaConfig, Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.glm4v import modeling_glm4v
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen2_vl import modeling_qwen2_vl
from transformers.models.qwen3_vl import modeling_qwen3_vl

from pagewick.kernels.options import Rotation
from pagewick.kernels.reference_rope import turn_heads
from pagewick.layers.config import RopeConfig
from pagewick.layers.rotary import RotaryEmbedding, inverse_frequencies
from tests.layers.ranks import single_context

DIM = 24
ORIGINAL = 50
# Positions on both sides of every original length, and far beyond.
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
# transformers would warn about entries that the kind does not use.
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
    """Drop the second half: transformers repeats each value for both numbers of its pair."""
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
    found_q, found_k = (turn_heads(x, None, Rotation(*found)) for x in (q, k))
    torch.testing.assert_close(found_q, rotated_q.squeeze(0).transpose(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found_k, rotated_k.squeeze(0).transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", ["factor", "beta_fast", "beta_slow", "truncate", "attention_factor", "theta"])
def test_each_of_yarns_numbers_changes_the_frequencies(number: str) -> None:
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
    # Either may differ by 2 ** -23 of the angle, which is a float32 frequency times the position.
    for position, values in enumerate(one_by_one):
        tolerance = 1e-6 + 4e-7 * POSITIONS[position]
        torch.testing.assert_close(torch.stack(found)[:, position], values[:, 0], rtol=0, atol=tolerance)
    plain = torch.stack(rotary(rope(rotary_dim=dim, theta=3000.0))(torch.tensor(POSITIONS)))
    changed = (torch.stack(found) - plain).abs().amax(dim=(0, 2))
    is_beyond = torch.tensor(POSITIONS) + 1 > ORIGINAL
    assert bool((changed[~is_beyond] < 1e-4).all() and (changed[is_beyond] > 1e-3).all())


def test_llama3_keeps_short_wavelengths_and_stretches_long_ones() -> None:
    """With 8,192 tokens: up to 2,048 tokens per turn nothing changes, above 8,192 a turn is eight times as long."""
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
        rotated_q = turn_heads(q, None, Rotation(*embedding(torch.tensor([query_position]))))
        rotated_k = turn_heads(k, None, Rotation(*embedding(torch.tensor([key_position]))))
        return float((rotated_q * rotated_k).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-3)
    assert score(7, 3) != pytest.approx(score(7, 2), abs=1e-2)


def test_attention_factor_scales_scores_by_its_square() -> None:
    positions = torch.tensor(POSITIONS)
    plain = replace(CASES["yarn"], attention_factor=1.0)
    torch.testing.assert_close(
        torch.stack(rotary(CASES["yarn"])(positions)), 1.13 * torch.stack(rotary(plain)(positions))
    )


# The sections divide DIM / 2 pairs.
SECTIONS = [(2, 5, 5), (1, 4, 7), (10, 1, 1), (0, 11, 1), (12, 0, 0)]


def axes(num_tokens: int) -> Tensor:
    """Return positions [3, T] that differ between axes: some text, an image of 3 columns, some text."""
    positions = torch.arange(num_tokens).repeat(3, 1) + 5
    image = torch.arange(num_tokens)[2:-2] - 2
    positions[:, 2:-2] = torch.stack((torch.full_like(image, 7), 7 + image // 3, 7 + image % 3))
    return positions


@pytest.mark.parametrize("num_tokens", [1, 13, 63])
@pytest.mark.parametrize("sections", SECTIONS)
@pytest.mark.parametrize("name", ["default", "yarn"])
def test_three_axes_turn_pairs_as_in_qwen2_vl(name: str, sections: tuple[int, ...], num_tokens: int) -> None:
    config = replace(CASES[name], mrope_section=sections)
    parameters = {key: value for key, value in asdict(config).items() if key in USED[name]}
    expected_embedding = modeling_qwen2_vl.Qwen2VLRotaryEmbedding(
        Qwen2VLTextConfig(
            hidden_size=4 * DIM,
            num_attention_heads=4,
            num_key_value_heads=2,
            rope_parameters={
                "rope_type": name, "rope_theta": config.theta, "mrope_section": list(sections), **parameters
            },
        )
    )  # fmt: skip
    positions = axes(num_tokens)
    generator = torch.Generator().manual_seed(4)
    q, k = (torch.randn(num_tokens, heads, DIM, generator=generator) for heads in (4, 2))
    expected = expected_embedding(q, positions.unsqueeze(1))
    rotated = modeling_qwen2_vl.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], *expected)

    found = rotary(config)(positions)
    assert [tuple(part.shape) for part in found] == [(num_tokens, DIM // 2)] * 2
    torch.testing.assert_close(torch.stack(found), halves(expected), rtol=0, atol=3e-7)
    for x, theirs in zip((q, k), rotated, strict=True):
        ours = turn_heads(x, None, Rotation(*found))
        torch.testing.assert_close(ours, theirs.squeeze(0).transpose(0, 1), rtol=1e-5, atol=1e-5)


# Numbers of pairs that can alternate, from the published ones to the smallest and the most uneven.
INTERLEAVED = [(24, 20, 20), (11, 11, 10), (12, 0, 0), (8, 4, 0), (4, 4, 4), (10, 1, 1)]


@pytest.mark.parametrize("num_tokens", [5, 63])
@pytest.mark.parametrize("sections", INTERLEAVED)
def test_axes_that_alternate_turn_pairs_as_in_qwen3_vl(sections: tuple[int, ...], num_tokens: int) -> None:
    head_dim, positions = 2 * sum(sections), axes(num_tokens)
    config = rope(rotary_dim=head_dim, theta=5e6, mrope_section=sections, mrope_interleaved=True)
    expected_embedding = modeling_qwen3_vl.Qwen3VLTextRotaryEmbedding(
        Qwen3VLTextConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            head_dim=head_dim,
            rope_parameters={"rope_type": "default", "rope_theta": 5e6, "mrope_section": list(sections)},
        )
    )
    q = torch.zeros(num_tokens, 1)
    found = rotary(config)(positions)
    torch.testing.assert_close(
        torch.stack(found), halves(expected_embedding(q, positions.unsqueeze(1))), rtol=0, atol=3e-7
    )


@pytest.mark.parametrize("name", ["default", "yarn", "linear", "dynamic"])
def test_equal_positions_that_alternate_give_the_bits_of_plain_rotation(name: str) -> None:
    plain = CASES.get(name) or rope("dynamic", factor=2.5)
    positions = torch.tensor(POSITIONS)
    expected = torch.stack(rotary(plain)(positions))
    embedding = rotary(replace(plain, mrope_section=(4, 4, 4), mrope_interleaved=True))
    assert torch.equal(torch.stack(embedding(positions)), expected)
    assert torch.equal(torch.stack(embedding(positions.repeat(3, 1))), expected)
    assert embedding.rotation not in (rotary(replace(plain, mrope_section=(4, 4, 4))).rotation, rotary(plain).rotation)


@pytest.mark.parametrize("sections", [(1, 5, 6), (0, 11, 1), (5, 2, 5)])
def test_sections_that_cannot_alternate(sections: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        rotary(rope(mrope_section=sections, mrope_interleaved=True))


def test_three_axes_turn_neighbours_in_a_part_of_the_head_as_in_glm_4v() -> None:
    head_dim, sections, positions = 20, (1, 3, 1), axes(17)
    config = rope(rotary_dim=10, theta=500.0, interleaved=True, mrope_section=sections)
    expected_embedding = modeling_glm4v.Glm4vTextRotaryEmbedding(
        Glm4vTextConfig(
            hidden_size=4 * head_dim,
            num_attention_heads=4,
            rope_parameters={
                "rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5, "mrope_section": sections
            },
        )
    )  # fmt: skip
    q = torch.randn(17, 4, head_dim, generator=torch.Generator().manual_seed(5))
    cos, sin = expected_embedding(q, positions.unsqueeze(1))
    rotated, _ = modeling_glm4v.apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)
    found = turn_heads(q, None, Rotation(*rotary(config)(positions), interleaved=True))
    torch.testing.assert_close(found, rotated.squeeze(0).transpose(0, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sections", SECTIONS)
@pytest.mark.parametrize("name", ["default", "yarn", "longrope", "linear", "dynamic"])
def test_one_position_and_three_equal_ones_give_the_bits_of_plain_rotation(name: str, sections: Any) -> None:
    plain = CASES.get(name) or rope("dynamic", factor=2.5)
    positions = torch.tensor(POSITIONS)
    expected = torch.stack(rotary(plain)(positions))
    embedding = rotary(replace(plain, mrope_section=sections))
    assert torch.equal(torch.stack(embedding(positions)), expected)
    assert torch.equal(torch.stack(embedding(positions.repeat(3, 1))), expected)


def test_sections_are_part_of_how_keys_are_rotated() -> None:
    names = [rotary(rope(mrope_section=sections)).rotation for sections in [(), *SECTIONS]]
    assert len(set(names)) == len(names)
    assert "mrope" not in names[0], "blocks of text models on disk would change their names"


@pytest.mark.parametrize("sections", [(12,), (6, 6), (4, 4, 5), (3, 3, 3, 3)])
def test_there_must_be_three_sections_that_cover_the_pairs(sections: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        rotary(rope(mrope_section=sections))


def test_three_axes_need_sections() -> None:
    with pytest.raises(AssertionError, match="mrope_section"):
        rotary(rope())(axes(7))
