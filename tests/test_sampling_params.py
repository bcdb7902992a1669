"""SamplingParams: every limit, from both sides."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import msgspec
import numpy as np
import pytest

from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.sampling_params import SamplingParams, default_sampling_params, with_changes
from pagewick.structured_outputs import StructuredOutputsParams

# name -> the least and the greatest value, and one step beyond.
LIMITS: dict[str, tuple[Any, Any, Any, Any]] = {
    "n": (1, 128, 0, 129),
    "max_tokens": (0, 2**31, -1, 2**31 + 1),
    "min_tokens": (0, 2**31, -1, 2**31 + 1),
    "temperature": (0, 2.0, -1e-9, 2.0000001),
    "top_k": (-1, 2**31, -2, 2**31 + 1),
    "top_p": (5e-324, 1, 0, 1.0000001),
    "logprobs": (0, 20, -1, 21),
    "prompt_logprobs": (0, 20, -1, 21),
    "seed": (-(2**63), 2**63 - 1, -(2**63) - 1, 2**63),
    "min_p": (0, 1, -1e-9, 1.0000001),
    "typical_p": (5e-324, 1, 0, 1.0000001),
    "top_n_sigma": (0, 100, -0.5, 100.0001),
    "repetition_penalty": (0.01, 10, 0.0099, 10.01),
    "presence_penalty": (-2, 2, -2.0000001, 2.0000001),
    "frequency_penalty": (-2, 2, -2.0000001, 2.0000001),
    "repeat_last_n": (-1, 2**31, -2, 2**31 + 1),
    "dry_multiplier": (0, 100, -1e-9, 100.01),
    "dry_base": (1, 100, 0.99, 100.01),
    "dry_allowed_length": (1, 2**31, 0, 2**31 + 1),
    "dry_penalty_last_n": (-1, 2**31, -2, 2**31 + 1),
    "xtc_probability": (0, 1, -1e-9, 1.0000001),
    "xtc_threshold": (0, 1, -1e-9, 1.0000001),
    "mirostat": (0, 2, -1, 3),
    "mirostat_tau": (0, 100, -1e-9, 100.01),
    "mirostat_eta": (0, 10, -1e-9, 10.01),
    "best_of": (1, 128, 0, 129),
}
OPTIONAL = {"max_tokens", "seed", "logprobs", "prompt_logprobs", "best_of"}
BOOLEANS = ["ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "use_beam_search", "early_stopping"]
INTEGERS = sorted(
    OPTIONAL | {"n", "min_tokens", "top_k", "repeat_last_n", "dry_allowed_length", "dry_penalty_last_n", "mirostat"}
)
# A value of every field that is not its default and can stand beside the others of the same row.
EVERY_FIELD: list[dict[str, Any]] = [
    {
        "n": 3,
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.75,
        "seed": -(2**63),
        "stop": ("a", "b"),
        "stop_token_ids": (5, 6),
        "ignore_eos": True,
        "min_tokens": 2,
        "logprobs": 4,
        "prompt_logprobs": 5,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "min_p": 0.125,
        "typical_p": 0.1,
        "repetition_penalty": 1.3,
        "repeat_last_n": 64,
        "presence_penalty": -1.5,
        "frequency_penalty": 0.7,
        "logit_bias": {0: -100.0, 2**31: 1e-3},
        "top_n_sigma": 1.7,
        "dry_multiplier": 0.8,
        "dry_base": 2.5,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 100,
        "dry_sequence_breakers": ("\n\n", "€"),
        "xtc_probability": 0.3,
        "xtc_threshold": 0.2,
        "bad_words": ("ein Wort", "\0"),
        "allowed_token_ids": (3, 1, 2),
        "best_of": 5,
    },
    {"mirostat": 2, "mirostat_tau": 3.5, "mirostat_eta": 0.25},
    {"use_beam_search": True, "length_penalty": 0.5, "early_stopping": True},
    {"structured_outputs": StructuredOutputsParams(choice=("a", "b"))},
]


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


@pytest.mark.parametrize("name", sorted(set(LIMITS) - OPTIONAL))
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


def test_no_tokens_leave_nothing_to_search_for_or_to_wait_for() -> None:
    SamplingParams(max_tokens=0, n=3, best_of=4, stop=("a",), logprobs=2, prompt_logprobs=0)
    assert error_of(max_tokens=0, min_tokens=1).param == "min_tokens"
    error = error_of(max_tokens=0, use_beam_search=True, n=2)
    assert error.param == "max_tokens" and "at least 1" in str(error)


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


@pytest.mark.parametrize(("name", "limit"), [("stop_token_ids", 64), ("allowed_token_ids", 2**20)])
def test_token_ids_are_kept_once_and_not_too_many(name: str, limit: int) -> None:
    assert getattr(SamplingParams(**{name: [7, 3, 7, 2**31, 3]}), name) == (7, 3, 2**31)
    repeated = (*range(limit), *range(limit))
    assert getattr(SamplingParams(**{name: repeated}), name) == repeated[:limit]
    error = error_of(**{name: [*range(limit + 1)]})
    assert error.param == name and f"at most {limit} tokens; got {limit + 1}" in str(error)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("equal", [1.0, True, 1 + 0j], ids=repr)
def test_what_equals_a_token_id_is_none(name: str, equal: Any) -> None:
    """It must not be dropped as if it were the same, or be kept in its place."""
    for token_ids in ([1, equal], [equal, 1]):
        error = error_of(**{name: token_ids})
        assert error.param == name and repr(equal) in str(error)


@pytest.mark.parametrize(
    "name", ["stop", "stop_token_ids", "bad_words", "dry_sequence_breakers", "allowed_token_ids", "logit_bias"]
)
def test_a_number_is_no_list(name: str) -> None:
    assert error_of(**{name: 5}).param == name


@pytest.mark.parametrize("name", BOOLEANS)
@pytest.mark.parametrize("value", [0, 1, "true", None], ids=repr)
def test_a_switch_is_true_or_false(name: str, value: Any) -> None:
    assert error_of(**{name: value}).param == name


@pytest.mark.parametrize("name", LIMITS)
def test_numbers_of_numpy_become_plain_ones(name: str) -> None:
    """Parameters come from arrays, too; a plain number crosses the process border and is the same everywhere."""
    *_, below, above = LIMITS[name]
    is_integer = name in INTEGERS
    value = np.uint8(1) if is_integer else np.float32(1)
    params = SamplingParams(**{name: value})
    kept = getattr(params, name)
    assert (kept, type(kept)) == (1, int if is_integer else float)
    kinds = (np.int64, np.float64) if not is_integer else (np.int64,)
    for kind in kinds:
        assert type(getattr(SamplingParams(**{name: kind(1)}), name)) in (int, float)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    wrong = [np.bool_(True), np.float32("nan"), np.float64("inf"), np.complex64(1), np.array([1])]
    wrong += [np.float64(1)] if is_integer else [np.float64(below), np.float64(above)]
    for value in wrong:
        assert error_of(**{name: value}).param == name


def test_token_ids_and_biases_of_numpy_become_plain_ones() -> None:
    params = SamplingParams(
        stop_token_ids=[np.int64(3), 3, np.uint8(4)],  # type: ignore[arg-type]
        allowed_token_ids=list(np.array([5, 6])),  # type: ignore[arg-type]
        logit_bias={np.int32(7): np.float32(0.5)},
    )
    assert (params.stop_token_ids, params.allowed_token_ids, params.logit_bias) == ((3, 4), (5, 6), {7: 0.5})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


@pytest.mark.parametrize("values", EVERY_FIELD, ids=lambda values: next(iter(values)))
def test_every_field_crosses_the_process_border(values: dict[str, Any]) -> None:
    params = SamplingParams(**values)
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams)
    assert decoded == params
    for name, value in values.items():
        assert getattr(decoded, name) == value
        assert type(getattr(decoded, name)) is type(value)


def test_the_border_test_leaves_no_field_out() -> None:
    changed = {name for values in EVERY_FIELD for name in values}
    assert changed == {field.name for field in fields(SamplingParams)}
    for values in EVERY_FIELD:
        assert all(value != getattr(SamplingParams(), name) for name, value in values.items())


def test_top_n_sigma_has_two_ways_to_say_off() -> None:
    assert SamplingParams(top_n_sigma=-1).top_n_sigma == 0


def test_the_keys_of_logit_bias_may_be_strings() -> None:
    assert SamplingParams(logit_bias={"17": 1, 3: -0.5}).logit_bias == {17: 1, 3: -0.5}  # type: ignore[dict-item]
    given = {1: 2.0}
    params = SamplingParams(logit_bias=given)
    given[5] = 1.0
    assert params.logit_bias == {1: 2.0}


@pytest.mark.parametrize(
    "bias",
    [
        {-1: 1}, {"-1": 1}, {" 1": 1}, {"1_0": 1}, {"²": 1}, {"1.0": 1}, {1.0: 1}, {True: 1}, {2**31 + 1: 1}, {"": 1},
        {1: 100.001}, {1: -100.001}, {1: math.nan}, {1: math.inf}, {1: True}, {1: None}, {1: "1"}, {"1": 1, 1: 1},
        {"9" * 5000: 1}, [1], "1",
    ],
)  # fmt: skip
def test_other_logit_biases_are_refused(bias: Any) -> None:
    assert error_of(logit_bias=bias).param == "logit_bias"


def test_logit_biases_are_at_most_1024() -> None:
    SamplingParams(logit_bias=dict.fromkeys(range(1024), 100))
    assert error_of(logit_bias=dict.fromkeys(range(1025), 0.0)).param == "logit_bias"


@pytest.mark.parametrize("name", ["bad_words", "dry_sequence_breakers"])
def test_words_are_few_short_and_not_empty(name: str) -> None:
    kept = SamplingParams(**{name: ["x" * 128, "€" * 42] * 32})
    assert getattr(kept, name) == ("x" * 128, "€" * 42) * 32
    for words in (["x"] * 65, ["x" * 129], ["€" * 43], [""], [b"x"], [None], "word"):
        assert error_of(**{name: words}).param == name


def test_allowed_token_ids_are_token_ids_and_some() -> None:
    assert SamplingParams(allowed_token_ids=[4, 0]).allowed_token_ids == (4, 0)  # type: ignore[arg-type]
    for token_ids in ([], [-1], [1.0], ["1"], [True], [None]):
        assert error_of(allowed_token_ids=token_ids).param == "allowed_token_ids"


def test_best_of_is_at_least_n() -> None:
    SamplingParams(n=5, best_of=5)
    error = error_of(n=5, best_of=4)
    assert error.param == "best_of" and "(4)" in str(error) and "(5)" in str(error)


TRUNCATIONS = {"top_k": 5, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "top_n_sigma": 1.0, "xtc_probability": 0.5}
PENALTIES = {
    "repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1, "dry_multiplier": 0.8,
}  # fmt: skip


@pytest.mark.parametrize("name", TRUNCATIONS)
@pytest.mark.parametrize("version", [1, 2])
def test_mirostat_stands_alone(name: str, version: int) -> None:
    error = error_of(mirostat=version, **{name: TRUNCATIONS[name]})
    assert error.param == name and "mirostat" in str(error)
    SamplingParams(mirostat=version, temperature=0.7, **PENALTIES)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *TRUNCATIONS.items(), *PENALTIES.items(),
        ("mirostat", 1), ("seed", 0), ("best_of", 32), ("stop", "x"), ("temperature", 0.99), ("n", 33),
    ],
)  # fmt: skip
def test_beam_search_refuses_what_has_no_meaning_there(name: str, value: Any) -> None:
    error = error_of(use_beam_search=True, **{name: value})
    assert error.param == name and name in str(error)
    SamplingParams(**{name: value})


def test_beam_search_takes_the_rest() -> None:
    rest = {"logprobs": 3, "prompt_logprobs": 1, "logit_bias": {1: 2.0}, "stop_token_ids": (4,), "min_tokens": 2}
    for temperature in (0, 1, 1.0):
        SamplingParams(use_beam_search=True, n=32, temperature=temperature, length_penalty=-10, **rest)  # type: ignore[arg-type]
    for penalty in (-10.01, 10.01, math.nan, True):
        assert error_of(use_beam_search=True, length_penalty=penalty).param == "length_penalty"


@pytest.mark.parametrize(("name", "value"), [("length_penalty", 1.1), ("early_stopping", True)])
def test_what_only_beams_have_needs_beam_search(name: str, value: Any) -> None:
    assert error_of(**{name: value}).param == name


@pytest.mark.parametrize("name", [*PENALTIES, "bad_words"])
def test_history_is_needed_by_what_looks_back(name: str) -> None:
    value: Any = {**PENALTIES, "bad_words": ("x",)}[name]
    assert SamplingParams(**{name: value}).needs_history


def test_history_is_not_needed_by_the_rest() -> None:
    rest = {name: value for values in EVERY_FIELD[:1] for name, value in values.items()}
    rest = {name: value for name, value in rest.items() if name not in {*PENALTIES, "bad_words"}}
    assert not SamplingParams(**rest).needs_history
    assert not SamplingParams().needs_history


def test_a_generation_config_gives_the_defaults() -> None:
    config = {
        "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.05,
        "do_sample": True, "typical_p": 0.3,
    }  # fmt: skip
    expected = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05)
    assert default_sampling_params(config) == expected
    assert default_sampling_params({"repetition_penalty": None}) == SamplingParams()
    with pytest.raises(ModelLoadError, match="repetition_penalty"):
        default_sampling_params({"repetition_penalty": 0})


@pytest.mark.parametrize("others", [{}, {"temperature": 0.6, "top_p": 0.95}, {"temperature": None, "top_k": 20}])
def test_without_do_sample_the_default_is_greedy(others: dict[str, Any]) -> None:
    """The other values stay for a request that gives a temperature."""
    defaults = default_sampling_params({"do_sample": False, **others})
    rest = {name: value for name, value in others.items() if name != "temperature"}
    assert defaults == SamplingParams(temperature=0, **rest)
    assert with_changes(defaults, {"temperature": 0.7}) == SamplingParams(temperature=0.7, **rest)
    for given in (True, None):
        assert default_sampling_params({"do_sample": given}).temperature == 1


@pytest.mark.parametrize(
    "changes",
    [{"mirostat": 2}, {"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"typical_p": 0.9}, {"top_n_sigma": 1.0},
     {"xtc_probability": 0.5}],
    ids=lambda changes: next(iter(changes)),
)  # fmt: skip
def test_who_wants_a_way_of_sampling_samples(changes: dict[str, Any]) -> None:
    """Also where the model's default is greedy: the same words give the same SamplingParams in Python."""
    defaults = default_sampling_params({"do_sample": False, "repetition_penalty": 1.05})
    assert with_changes(defaults, changes) == SamplingParams(**changes, repetition_penalty=1.05)
    assert with_changes(defaults, {**changes, "temperature": 0}).temperature == 0
    assert with_changes(defaults, changes, kept={"temperature"}).temperature == 0
    assert with_changes(replace(defaults, temperature=0.6), changes).temperature == 0.6
    nothing = {name: getattr(SamplingParams(), name) for name in changes}
    for others in ({}, nothing, {"presence_penalty": 1.0, "seed": 3}):
        assert with_changes(defaults, others).temperature == 0


def test_a_model_s_defaults_give_way_to_what_replaces_them() -> None:
    defaults = SamplingParams(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.05)
    assert with_changes(defaults, {"top_k": 5}) == replace(defaults, top_k=5)
    assert with_changes(defaults, {"mirostat": 2}) == SamplingParams(
        mirostat=2, temperature=0.6, repetition_penalty=1.05
    )
    assert with_changes(defaults, {"use_beam_search": True, "n": 4}) == SamplingParams(use_beam_search=True, n=4)
    for changes in ({"mirostat": 2, "top_p": 0.9}, {"use_beam_search": True, "top_p": 0.9}):
        with pytest.raises(InvalidRequestError) as info:
            with_changes(defaults, changes)
        assert info.value.param == "top_p"


def test_an_error_does_not_repeat_all_of_a_long_value() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(dry_sequence_breakers=("9" * 5000,))
    assert len(str(caught.value)) < 250 and "128 bytes; got '999" in str(caught.value)
