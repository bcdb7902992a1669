"""SamplingParams: every limit, from both sides."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagewick.errors import InvalidRequestError
from pagewick.sampling_params import SamplingParams

# name -> the least and the greatest value, and one step beyond.
LIMITS: dict[str, tuple[Any, Any, Any, Any]] = {
    "n": (1, 128, 0, 129),
    "max_tokens": (1, 2**31, 0, 2**31 + 1),
    "min_tokens": (0, 2**31, -1, 2**31 + 1),
    "temperature": (0, 2.0, -1e-9, 2.0000001),
    "top_k": (-1, 2**31, -2, 2**31 + 1),
    "top_p": (5e-324, 1, 0, 1.0000001),
    "logprobs": (0, 20, -1, 21),
    "prompt_logprobs": (0, 20, -1, 21),
    "seed": (-(2**63), 2**63 - 1, -(2**63) - 1, 2**63),
}
INTEGERS = sorted(set(LIMITS) - {"temperature", "top_p"})


def error_of(**options: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as info:
        SamplingParams(**options)
    return info.value


@pytest.mark.parametrize("name", LIMITS)
def test_limits_hold_on_both_sides(name: str) -> None:
    low, high, below, above = LIMITS[name]
    for value in (low, high):
        SamplingParams(**{name: value})
    for value in (below, above):
        error = error_of(**{name: value})
        assert error.param == name
        assert name in str(error) and repr(value) in str(error)


@pytest.mark.parametrize("name", LIMITS)
@pytest.mark.parametrize("value", [True, "1", [1], {}, math.nan, math.inf, -math.inf, 1j], ids=repr)
def test_other_types_are_refused(name: str, value: Any) -> None:
    assert error_of(**{name: value}).param == name


@pytest.mark.parametrize("name", INTEGERS)
def test_integers_have_no_fraction(name: str) -> None:
    assert error_of(**{name: 1.0}).param == name


@pytest.mark.parametrize("name", ["n", "min_tokens", "temperature", "top_k", "top_p"])
def test_none_is_refused_where_it_means_nothing(name: str) -> None:
    assert error_of(**{name: None}).param == name


def test_the_defaults_are_valid() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.seed, params.logprobs, params.prompt_logprobs) == (None,) * 4


@pytest.mark.parametrize(("given", "kept"), [(-1, 0), (0, 0), (1, 1), (50, 50)])
def test_top_k_has_two_ways_to_say_all(given: int, kept: int) -> None:
    assert SamplingParams(top_k=given).top_k == kept


def test_min_tokens_must_not_be_above_max_tokens() -> None:
    SamplingParams(min_tokens=5, max_tokens=5)
    SamplingParams(min_tokens=5, max_tokens=None)
    error = error_of(min_tokens=6, max_tokens=5)
    assert error.param == "min_tokens" and "(6)" in str(error) and "(5)" in str(error)


@pytest.mark.parametrize(
    ("given", "kept"), [(None, ()), ("end", ("end",)), ("", None), (["a", "b"], ("a", "b")), ((), ()), ([], ())]
)
def test_stop_is_one_string_or_several(given: Any, kept: tuple[str, ...] | None) -> None:
    if kept is None:
        assert error_of(stop=given).param == "stop"
    else:
        assert SamplingParams(stop=given).stop == kept


def test_stop_strings_are_few_and_not_empty() -> None:
    SamplingParams(stop=("x",) * 16)
    for stop in (("x",) * 17, ("x", ""), ("x", 5), (None,)):
        assert error_of(stop=stop).param == "stop"


def test_stop_token_ids_are_token_ids() -> None:
    assert SamplingParams(stop_token_ids=[3, 4]).stop_token_ids == (3, 4)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=None).stop_token_ids == ()  # type: ignore[arg-type]
    for token_id in (-1, 1.0, "1", True, None, 2**31 + 1):
        assert error_of(stop_token_ids=[token_id]).param == "stop_token_ids"


@pytest.mark.parametrize("name", ["stop", "stop_token_ids"])
def test_a_number_is_no_list(name: str) -> None:
    assert error_of(**{name: 5}).param == name
