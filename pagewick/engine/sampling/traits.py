"""SlotTraits: what a slot's sampling parameters come to, worked out once for all of its tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pagewick import kernels
from pagewick.engine.batch import SlotSampling

# Smaller ones are no normal numbers in float32, in which logits are divided by them.
LEAST_TEMPERATURE = 2.0**-126
# A random number depends on nothing but the seed and the place of its token: as many are made at a time.
NUM_NOISE_AHEAD = 64


@dataclass(slots=True)
class SlotTraits:
    """is_drawn: at random; else the most likely token is taken. is_truncated: something besides top_k and top_p says
    what may be drawn. is_edited: the logits of every token. min_position: before it, stop tokens are banned.
    looks_back: the tokens before this one matter. noise: of the tokens from noise_start on.
    """

    is_drawn: bool
    is_truncated: bool
    is_edited: bool
    min_position: int
    looks_back: bool
    noise_start: int = 0
    noise: list[float] = field(default_factory=list)


def traits_of(sampling: SlotSampling) -> SlotTraits:
    """Made for the slot's first token and kept for the others."""
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
    """The random number by which the token at each place (a slot, a position in its sequence) is drawn."""
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
    """Of each place and of those that follow it. Made on the CPU: to read it must not wait for another device."""

    def column(values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64).repeat_interleave(NUM_NOISE_AHEAD)

    positions = column([position for _, position in places])
    positions += torch.arange(NUM_NOISE_AHEAD).repeat(len(places))
    uniform = kernels.philox_uniform(
        column([sampling.seed for sampling, _ in places]),
        column([sampling.choice_index for sampling, _ in places]),
        positions,
        kernels.Purpose.SAMPLE,
    )
    made: list[list[float]] = uniform.view(len(places), NUM_NOISE_AHEAD).tolist()
    return made
