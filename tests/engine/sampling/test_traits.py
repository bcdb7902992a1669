"""Traits against the sampling parameters that they are computed from."""

from __future__ import annotations

from typing import Any

import pytest

from pagewick.engine.batch import SlotSampling
from pagewick.engine.sampling.traits import traits_of
from pagewick.sampling_params import SamplingParams


def sampling(seed: int = 0, choice_index: int = 0, **fields: Any) -> SlotSampling:
    params = SamplingParams(**fields)
    return SlotSampling(params, seed, choice_index, num_prompt_tokens=5, stop_token_ids=[3])


@pytest.mark.parametrize(
    ("fields", "is_drawn", "is_truncated", "is_edited", "looks_back"),
    [
        ({"temperature": 0.0}, False, False, False, False),
        ({"temperature": 2.0**-127}, False, False, False, False),
        ({"temperature": 2.0**-126, "top_k": 3, "top_p": 0.5}, True, False, False, False),
        ({"temperature": 1.0, "min_p": 0.1}, True, False, False, False),
        ({"temperature": 1.0, "typical_p": 0.9}, True, True, False, False),
        ({"temperature": 1.0, "top_n_sigma": 1.0}, True, True, False, False),
        ({"temperature": 1.0, "xtc_probability": 0.5}, True, True, False, False),
        ({"temperature": 1.0, "mirostat": 2}, True, True, False, False),
        ({"temperature": 0.0, "logit_bias": {4: 1.0}}, False, False, True, False),
        ({"temperature": 0.0, "allowed_token_ids": [4]}, False, False, True, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, False, False, True, True),
    ],
)
def test_traits_say_what_parameters_ask_for(
    fields: dict[str, Any], is_drawn: bool, is_truncated: bool, is_edited: bool, looks_back: bool
) -> None:
    traits = traits_of(sampling(**fields))
    assert (traits.is_drawn, traits.is_truncated) == (is_drawn, is_truncated)
    assert (traits.is_edited, traits.looks_back) == (is_edited, looks_back)
    assert traits.min_position == 5  # its prompt: no output token is too early to stop


def test_stop_tokens_are_banned_up_to_the_minimum_of_output_tokens() -> None:
    assert traits_of(sampling(min_tokens=4)).min_position == 9


def test_bad_words_edit_and_look_back() -> None:
    one = SlotSampling(SamplingParams(), 0, 0, num_prompt_tokens=2, bad_word_ids=[[1, 2]])
    traits = traits_of(one)
    assert (traits.is_edited, traits.looks_back, traits.min_position) == (True, True, 0)
    assert traits_of(one) is traits
