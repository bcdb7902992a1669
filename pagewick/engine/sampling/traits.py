"""SampleRow: the inputs of one choice. SlotTraits: properties of sampling parameters, computed once per slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagewick import kernels
from pagewick.engine.batch import SlotSampling
from pagewick.kernels.reference_sampling import Purpose

# Smaller temperatures are not normal numbers in float32, in which logits are divided by them.
LEAST_TEMPERATURE = 2.0**-126
# Random numbers depend only on the seed and the position of the token, so they are computed in groups of this size.
NUM_NOISE_AHEAD = 64


@dataclass(slots=True)
class SlotTraits:
    """Properties of a slot's sampling parameters.

    is_drawn: whether tokens are drawn at random; else the most likely token is taken. is_truncated: whether a parameter
    besides top_k and top_p limits the draw. is_edited: whether the logits of every token are edited. min_position: stop
    tokens are banned before this position. looks_back: whether sampling depends on earlier tokens. noise: the random
    numbers of the tokens from position noise_start on.
    """

    is_drawn: bool
    is_truncated: bool
    is_edited: bool
    min_position: int
    looks_back: bool
    noise_start: int = 0
    noise: list[float] = field(default_factory=list)


# Not frozen: there is one for every token, and making a frozen one takes three times as long.
@dataclass(slots=True)
class SampleRow:
    """Everything besides its logits that the choice of one token depends on.

    position: the place of the token in its sequence, which with the seed determines the noise. The first
        sampling.num_prompt_tokens tokens before it are the prompt's.
    token_ids: all tokens before it, prompt and output (an array is read faster than a list). It may be empty unless
        sampling.params.needs_history.
    allowed_mask: one bit per token of the vocabulary, least significant first; tokens without their bit are excluded.
    mirostat_mu: Sampled.mirostat_mu of the previous token; None for the first token.
    """

    sampling: SlotSampling
    position: int
    token_ids: Sequence[int]
    allowed_mask: bytes | None = None
    mirostat_mu: float | None = None


def traits_of(sampling: SlotSampling) -> SlotTraits:
    """Return the traits of a slot; they are computed for its first token and kept for the others."""
    kept: SlotTraits | None = sampling.__dict__.get("traits")
    if kept is None:
        kept = sampling.__dict__["traits"] = _new_traits(sampling)
    return kept


def _new_traits(sampling: SlotSampling) -> SlotTraits:
    params = sampling.params
    return SlotTraits(
        is_drawn=params.temperature >= LEAST_TEMPERATURE,
        is_truncated=bool(
            params.top_n_sigma or params.min_p or params.typical_p < 1 or params.xtc_probability or params.mirostat
        ),
        is_edited=bool(
            params.allowed_token_ids is not None or params.logit_bias or sampling.bad_word_ids or params.has_penalty
        ),
        min_position=sampling.num_prompt_tokens + params.min_tokens if sampling.stop_token_ids else 0,
        looks_back=bool(params.needs_history or sampling.bad_word_ids),
    )


def noise_at(places: Sequence[tuple[SlotSampling, int]]) -> list[float]:
    """Return the random number for drawing the token at each place (a slot and a position in its sequence)."""
    found: list[float | None] = []
    missing: list[int] = []
    for index, (sampling, position) in enumerate(places):
        traits = traits_of(sampling)
        ahead = position - traits.noise_start
        is_known = 0 <= ahead < len(traits.noise)
        found.append(traits.noise[ahead] if is_known else None)
        if not is_known:
            missing.append(index)
    if missing:
        made = _make_noise([places[index] for index in missing])
        for index, noise in zip(missing, made, strict=True):
            sampling, position = places[index]
            traits = traits_of(sampling)
            traits.noise_start, traits.noise = position, noise
            found[index] = noise[0]
    return [number for number in found if number is not None]


def _make_noise(places: Sequence[tuple[SlotSampling, int]]) -> list[list[float]]:
    """Compute the random numbers of each place and of the places that follow it, [NUM_NOISE_AHEAD] for each.

    They are computed on the CPU, since reading them must not wait for another device.
    """

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).repeat_interleave(NUM_NOISE_AHEAD)

    positions = column([position for _, position in places])
    positions += torch.arange(NUM_NOISE_AHEAD).repeat(len(places))
    uniform = kernels.philox_uniform(
        column([sampling.seed for sampling, _ in places]),
        column([sampling.choice_index for sampling, _ in places]),
        positions,
        Purpose.SAMPLE,
    )
    made: list[list[float]] = uniform.view(len(places), NUM_NOISE_AHEAD).tolist()
    return made
