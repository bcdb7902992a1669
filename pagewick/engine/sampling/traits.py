"""SampleRow: the inputs of one choice. SlotTraits: properties of sampling parameters, computed once per slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pagewick import kernels
from pagewick.engine.batch import SlotSampling
from pagewick.engine.device_copies import Array
from pagewick.kernels.reference_sampling import Purpose

# Smaller temperatures are not normal numbers in float32, in which logits are divided by them.
LEAST_TEMPERATURE = 2.0**-126


@dataclass(slots=True)
class SlotTraits:
    """Properties of a slot's sampling parameters.

    is_drawn: whether tokens are drawn at random; else the most likely token is taken. is_truncated: whether a parameter
    besides min_p, top_k and top_p limits the draw. is_edited: whether the logits of every token are edited.
    min_position: stop tokens are banned before this position. looks_back: whether sampling depends on earlier tokens.
    """

    is_drawn: bool
    is_truncated: bool
    is_edited: bool
    min_position: int
    looks_back: bool


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
        is_truncated=bool(params.top_n_sigma or params.typical_p < 1 or params.xtc_probability or params.mirostat),
        is_edited=bool(
            params.allowed_token_ids is not None or params.logit_bias or sampling.bad_word_ids or params.has_penalty
        ),
        min_position=sampling.num_prompt_tokens + params.min_tokens if sampling.stop_token_ids else 0,
        looks_back=bool(params.needs_history or sampling.bad_word_ids),
    )


def noise_from(seeds: Array, positions: Array, number: int) -> Array:
    """Return the random numbers for drawing `number` tokens from each of these positions [N] on, [N, number] float64.

    seeds: [N, 2], the seed and the choice index of each sequence. The numbers are computed on the CPU, since reading
    them must not wait for another device.
    """
    seed, choice_index = (torch.from_numpy(column).repeat_interleave(number) for column in seeds.T)
    places = torch.from_numpy(positions).unsqueeze(1) + torch.arange(number)
    uniform = kernels.philox_uniform(seed, choice_index, places.flatten(), Purpose.SAMPLE)
    return uniform.view(len(positions), number).double().numpy()
