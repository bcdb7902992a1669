"""Every argument of vLLM's constructors is accepted with its meaning, noted with a reason, or refused with a reason."""

from __future__ import annotations

import logging
from dataclasses import fields
from typing import Any

import pytest

from pagewick import foreign_names
from pagewick.config import EngineConfig
from pagewick.errors import ArgumentError, ConfigError, UnsupportedError
from pagewick.foreign_names import ENGINE_ARGUMENTS, SAMPLING_ARGUMENTS, ForeignName
from pagewick.other_names import ALIASES
from pagewick.sampling_params import SamplingParams
from tests.vllm_arguments import ENGINE, REMOVED_ENGINE, REMOVED_SAMPLING, SAMPLING

FIELDS = {option.name for option in fields(EngineConfig)}
ALL_ENGINE = ENGINE | REMOVED_ENGINE
ALL_SAMPLING = SAMPLING | REMOVED_SAMPLING
# Arguments of LLM and AsyncEngine.start themselves.
OF_THE_CLASSES = {"chat_template", "hf_token"}
SAMPLING_FIELDS = {option.name for option in fields(SamplingParams)}


@pytest.fixture(autouse=True)
def notes(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    foreign_names.note.cache_clear()
    caplog.set_level(logging.WARNING, logger="pagewick")
    return caplog


def unlike(default: Any) -> Any:
    """Return a value that differs from a default and is as true as can be."""
    if isinstance(default, bool):
        return not default
    return default + 7 if isinstance(default, int | float) else "something"


@pytest.mark.parametrize("name", sorted(ALL_ENGINE.keys() - OF_THE_CLASSES))
def test_an_engine_argument_of_vllm_is_accepted_noted_or_refused(name: str, notes: pytest.LogCaptureFixture) -> None:
    default = ALL_ENGINE[name]
    # vLLM's default never fails.
    config = EngineConfig.from_options(**{name: default})
    if name in ALIASES or name in FIELDS:
        assert name not in ENGINE_ARGUMENTS
        assert notes.text == ""
        return
    assert config == EngineConfig()
    notes.clear()
    foreign_names.note.cache_clear()
    foreign = ENGINE_ARGUMENTS[name]
    if foreign.verdict("something") == "refused":
        with pytest.raises(ConfigError, match=f"^{name}: ") as refusal:
            EngineConfig.from_options(**{name: unlike(default)})
        assert "\n" not in str(refusal.value)
    else:
        EngineConfig.from_options(**{name: True if foreign.takes == "none" else unlike(default)})
        assert [record.getMessage().startswith(f"{name} changes nothing: ") for record in notes.records] == [True]


@pytest.mark.parametrize("name", sorted(ALL_SAMPLING))
def test_a_sampling_argument_of_vllm_is_accepted_noted_or_refused(name: str, notes: pytest.LogCaptureFixture) -> None:
    default = ALL_SAMPLING[name]
    params = SamplingParams(**{name: default})
    if name in SAMPLING_FIELDS:
        assert name not in SAMPLING_ARGUMENTS
        assert notes.text == ""
        return
    assert params == SamplingParams()
    notes.clear()
    foreign_names.note.cache_clear()
    foreign = SAMPLING_ARGUMENTS[name]
    given = {name: True if foreign.takes == "none" else unlike(default)}
    if foreign.verdict("something") == "refused":
        with pytest.raises(UnsupportedError, match=f"^{name}: "):
            SamplingParams(**given)
    else:
        # Thousands of requests are noted once.
        assert SamplingParams(**given) == SamplingParams(**given) == SamplingParams()
        assert [record.getMessage().startswith(f"{name} changes nothing: ") for record in notes.records] == [True]


@pytest.mark.parametrize(
    ("name", "value", "changes"),
    [
        ("gpu_memory_utilization", 0.8, {"gpu_memory_utilization": 0.8}),
        ("swap_space", 4, {"swap_space": 4 * 2**30}),
        ("kv_offloading_size", 1.5, {"swap_space": 3 * 2**29}),
        ("kv_cache_memory_bytes", 2**30, {"kv_cache_memory": 2**30}),
        ("kv_cache_memory_bytes", str(2**30), {"kv_cache_memory": 2**30}),
        ("kv_cache_memory_bytes", "1GiB", {"kv_cache_memory": 2**30}),
        ("swap_space", "4", {"swap_space": 4 * 2**30}),
        ("num_gpu_blocks_override", 8, {"num_kv_blocks": 8}),
        ("device_ids", [0, 1], {"tensor_parallel_size": 2}),
        ("max_num_queued_reqs", 3, {"max_waiting_requests": 3}),
        ("spec_method", "ngram", {"speculative_method": "ngram"}),
        ("spec_type", "draft-mtp", {"speculative_method": "mtp"}),
        ("spec_method", "qwen3_next_mtp", {"speculative_method": "mtp"}),
        (
            "speculative_config",
            {"method": "deepseek_mtp", "num_speculative_tokens": 2, "disable_by_batch_size": 5, "model": None},
            {"speculative_method": "mtp", "num_speculative_tokens": 2, "speculative_max_batch": 5},
        ),
        (
            "speculative_config",
            '{"model": "small", "num_speculative_tokens": 2}',
            {"speculative_model": "small", "num_speculative_tokens": 2},
        ),
        (
            "speculative_config",
            '{"method": "ngram", "prompt_lookup_max": 5, "prompt_lookup_min": 3}',
            {"speculative_method": "ngram", "ngram_prompt_lookup_max": 5, "ngram_prompt_lookup_min": 3},
        ),
        ("spec_tokens", 3, {"num_speculative_tokens": 3}),
        ("seed", 0, {"seed": 0}),
        ("dtype", "half", {"dtype": "float16"}),
        ("enable_prefix_caching", False, {"enable_prefix_caching": False}),
    ],
)
def test_an_argument_with_a_field_keeps_its_meaning(name: str, value: Any, changes: dict[str, Any]) -> None:
    assert EngineConfig.from_options(**{name: value}) == EngineConfig(**changes)


def test_a_draft_model_has_the_names_of_vllm() -> None:
    config = EngineConfig.from_options(spec_method="draft_model", spec_model="small", spec_tokens=2)
    assert config == EngineConfig(speculative_method="draft", speculative_model="small", num_speculative_tokens=2)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("mtp", r"must be an object such as \{\"method\": \"mtp\"\}; got 'mtp'"),
        ("[1]", "must be an object"),
        ({"method": "mtp", "quantization": "fp8"}, "unknown setting of speculation 'quantization'; the settings are"),
        ({"method": "eagle3"}, "eagle3"),
    ],
)
def test_settings_of_speculation_that_are_not_known(value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig.from_options(speculative_config=value)


def test_a_usual_constructor_call_of_vllm_says_what_has_no_effect(notes: pytest.LogCaptureFixture) -> None:
    config = EngineConfig.from_options(
        model="m", tokenizer="m", trust_remote_code=True, tensor_parallel_size=2, device_ids=[0, 1], quantization=None,
        gpu_memory_utilization=0.9, max_model_len=4096, enforce_eager=True, enable_lora=False, cpu_offload_gb=0.0,
    )  # fmt: skip
    assert (config.model, config.tensor_parallel_size, config.gpu_memory_utilization) == ("m", 2, 0.9)
    assert config.enforce_eager
    assert [record.getMessage().partition(":")[0] for record in notes.records] == ["trust_remote_code changes nothing"]


def test_the_opposite_of_what_always_happens_is_noted(notes: pytest.LogCaptureFixture) -> None:
    EngineConfig.from_options(enable_chunked_prefill=False)
    assert "enable_chunked_prefill changes nothing: prompts are always computed in chunks" in notes.text


def test_a_reason_names_arguments_and_not_flags() -> None:
    with pytest.raises(ConfigError) as refusal:
        EngineConfig.from_options(cpu_offload_gb=2)
    assert str(refusal.value) == (
        "cpu_offload_gb: give num_experts_offload_per_rank for experts and swap_space for KV blocks; other weights are "
        "not offloaded yet"
    )


def test_the_models_own_tokenizer_may_be_named() -> None:
    assert EngineConfig.from_options(model="m", tokenizer="m").tokenizer is None
    assert EngineConfig.from_options(model="m", tokenizer="other").tokenizer == "other"


def test_an_unknown_engine_argument_is_answered_with_the_nearest_one_of_either_program() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown option gpu_memory_utilisation; did you mean gpu_memory_utilization\?"
    ):
        EngineConfig.from_options(gpu_memory_utilisation=0.5)
    with pytest.raises(ConfigError, match=r"unknown option trust_remote_cod; did you mean trust_remote_code\?"):
        EngineConfig.from_options(trust_remote_cod=True)


def test_an_unknown_sampling_argument_is_a_type_error_that_names_the_nearest() -> None:
    with pytest.raises(TypeError, match=r"^SamplingParams has no argument temprature; did you mean temperature\?$"):
        SamplingParams(temprature=1)  # type: ignore[call-arg]
    with pytest.raises(ArgumentError, match="known are n, max_tokens, temperature"):
        SamplingParams(zzzzzz=1)  # type: ignore[call-arg]


def test_no_name_is_in_two_tables() -> None:
    assert not ENGINE_ARGUMENTS.keys() & (FIELDS | ALIASES.keys())
    assert not SAMPLING_ARGUMENTS.keys() & SAMPLING_FIELDS


def test_a_value_that_asks_for_what_happens_anyway_is_silent() -> None:
    foreign = ForeignName("--x", "why", is_refused=True, takes="one", harmless=("1", "auto"))
    assert [foreign.verdict(value) for value in (1, "auto", 2)] == ["", "", "refused"]
