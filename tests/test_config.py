"""EngineConfig: its limits, its other names, and what its errors say."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from pagewick.config import EngineConfig
from pagewick.errors import ConfigError
from pagewick.foreign_names import note
from pagewick.option_checks import parse_bytes
from pagewick.other_names import ALIASES

WHOLE_NUMBERS = (
    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "kv_cache_memory", "num_kv_blocks",
    "tensor_parallel_size", "num_threads", "max_waiting_requests", "max_waiting_tokens", "num_speculative_tokens",
    "speculative_max_batch", "max_num_prefill_tokens",
)  # fmt: skip
MAY_BE_NONE = {
    "max_model_len", "max_num_prefill_tokens", "block_size", "kv_cache_memory", "num_kv_blocks", "num_threads",
    "max_waiting_requests", "max_waiting_tokens", "num_speculative_tokens",
}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (0, 0), (123, 123), ("0", 0), ("123B", 123), ("5b", 5),
        ("1k", 2**10), ("1K", 2**10), ("1KB", 2**10), ("1KiB", 2**10),
        ("512M", 2**29), ("512 MiB", 2**29), (" 4GiB ", 2**32), ("4gib", 2**32), ("1.5g", 3 * 2**29), ("2T", 2**41),
        ("0.5k", 512),
    ],
)  # fmt: skip
def test_sizes_are_texts_with_a_unit_or_numbers_of_bytes(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize(
    "text", ["", "G", "-1", "-1G", "4X", "4 G B", "1e9", ".5G", "5.G", "4,5G", "nan", "0x10", "4.5"]
)
def test_what_is_no_size_is_an_error_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"not a size.*4GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("text", "example"), [("4", "4GiB or 4MiB or 4B"), (" 24 ", "24GiB or 24MiB or 24B"), ("65536", "65536B")]
)
def test_a_text_without_a_unit_is_an_error_with_an_example(text: str, example: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{text.strip()} has no unit; write {example}$"):
        parse_bytes(text)
    assert parse_bytes(text, needs_unit=False) == int(text)
    with pytest.raises(ConfigError, match="has no unit"):
        EngineConfig(kv_cache_memory=text)  # type: ignore[arg-type]
    assert EngineConfig(kv_cache_memory=int(text)).kv_cache_memory == int(text)


def config_with(**options: Any) -> EngineConfig:
    return EngineConfig(**options)


def test_the_defaults_are_valid_and_every_option_explains_itself() -> None:
    EngineConfig()
    assert [option.name for option in fields(EngineConfig) if not option.metadata.get("help")] == []


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, [1]])
def test_whole_numbers_must_be_above_zero(name: str, value: Any) -> None:
    if (name, value) == ("kv_cache_memory", "8"):
        with pytest.raises(ConfigError, match="8 has no unit; write 8GiB"):
            config_with(kv_cache_memory=value)
        return
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} must be a whole number above 0; got"):
        config_with(**{name: value})


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_whole_numbers_may_be_one_and_some_may_be_left_open(name: str) -> None:
    assert getattr(config_with(**{name: 1}), name) == 1
    if name in MAY_BE_NONE:
        assert getattr(config_with(**{name: None}), name) is None
    else:
        with pytest.raises(ConfigError, match="whole number"):
            config_with(**{name: None})


@pytest.mark.parametrize("name", ["dtype", "kv_cache_dtype", "device"])
def test_names_are_checked_against_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} must be one of auto, .*; got 'fp4'"):
        config_with(**{name: "fp4"})


def test_a_device_may_have_a_number() -> None:
    assert EngineConfig(device="cuda:1").device == "cuda:1"


def test_memory_is_given_once() -> None:
    assert EngineConfig(kv_cache_memory="2MiB").kv_cache_memory == 2**21  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="--kv-cache-memory or --num-kv-blocks, not both"):
        EngineConfig(kv_cache_memory=1, num_kv_blocks=1)


# For each name whose values have another meaning: such a value, and the field's value.
CONVERTED: dict[str, tuple[Any, Any]] = {
    "ctx_size": (0, None),
    "threads": (-1, None),
    "cpu": (True, "cpu"),
    "n_gpu_layers": (0, "cpu"),
    "gpu_layers": ("0", "cpu"),
    "fp8_kvcache": (True, "fp8_e4m3"),
    "d": ("0,1,2", 3),
    "device_ids": ("0", 1),
    "kv_cache_memory_bytes": ("7", 7),
    "kvcache_mem_gpu": (7, 7 * 2**20),
    "mem": (7, 7 * 2**20),
    "kvmem": (7, 7 * 2**20),
    "kvcache_mem_cpu": (7, 7 * 2**20),
    "kv_offloading_size": (1.5, 3 * 2**29),
    "spec_method": ("ngram", "ngram"),
    "disable_prefix_cache": (True, False),
    "spec_type": ("ngram-simple", "ngram"),
    "speculative_config": ({"method": "ngram"}, "ngram"),
    "limit_mm_per_prompt": ({"image": 0, "video": 0}, True),
    "mmproj_auto": (False, True),
    "hf_overrides": (
        '{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"], '
        '"is_original_qwen3_reranker": true}',
        True,
    ),
}


def test_overrides_only_make_a_reranker() -> None:
    for value in ({}, "{}", None):
        assert EngineConfig.from_options(hf_overrides=value) == EngineConfig()
    swapped = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["yes", "no"]}
    for other in ('{"max_position_embeddings": 7}', "rope", swapped):
        with pytest.raises(ConfigError, match=r"only overrides of config\.json are .* copy the model's directory"):
            EngineConfig.from_options(hf_overrides=other)


def test_limits_of_media_only_leave_images_out() -> None:
    for value, expected in (('{"image": 0}', True), ('{"video": 0}', False), ({}, False), (None, False)):
        assert EngineConfig.from_options(limit_mm_per_prompt=value).language_model_only is expected
    for value, words in (('{"image": 2}', "the only limit of media is 0"), ("image=2", "must be an object such as")):
        with pytest.raises(ConfigError, match=f"limit_mm_per_prompt: .*{words}|{words}"):
            EngineConfig.from_options(limit_mm_per_prompt=value)


def test_devices_that_are_not_the_first_are_for_the_environment() -> None:
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=2,3 and give --tensor-parallel-size 2"):
        EngineConfig.from_options(d="2,3")


GIVEN: dict[str, Any] = {
    "model": "some/model",
    "speculative_model": "some/model",
    "enable_prefix_caching": False,
    "enforce_eager": True,
    "language_model_only": True,
    "rerank": True,
    "kv_cache_dtype": "float16",
    "gpu_memory_utilization": 0.5,
    "weight_file": "m.gguf",
    "quantization": "q4_k_m",
}


@pytest.mark.parametrize("alias", ALIASES)
def test_every_alias_sets_its_option(alias: str) -> None:
    target, convert = ALIASES[alias]
    assert target in [option.name for option in fields(EngineConfig)]
    assert alias not in [option.name for option in fields(EngineConfig)], "an option's own name is no alias"
    given: Any = GIVEN.get(target, 7)
    value, expected = CONVERTED.get(alias, (given, given))
    assert (alias in CONVERTED) is (convert is not None)
    expected_config = config_with(**{target: expected})
    assert EngineConfig.from_options(**{alias: value}) == expected_config
    if target == "weight_file":
        assert expected_config.model == value  # a file alone is the model


@pytest.mark.parametrize(
    ("spellings", "name"),
    [
        ("q4k q4_k Q4_K Q4K", "q4_k"),
        ("q4_k_m Q4_K_M q4km q4-k-m", "q4_k_m"),
        ("q8_0 Q8_0 q80 q8-0", "q8_0"),
        ("q2k Q2_K", "q2_k"),
        ("q5_1 q51", "q5_1"),
        ("auto AUTO", "auto"),
        ("gguf GGUF", "gguf"),
        ("gptq_marlin GPTQ-Marlin", "gptq_marlin"),
        ("compressed-tensors compressed_tensors", "compressed_tensors"),
        ("none", None),
    ],
)
def test_a_format_of_weights_has_many_spellings(spellings: str, name: str | None) -> None:
    assert {EngineConfig(quantization=spelling).quantization for spelling in spellings.split()} == {name}


@pytest.mark.parametrize(
    ("value", "kinds"),
    [
        ("gguf", {"gguf"}),
        ("gptq", {"gptq", "auto-round"}),
        ("awq-marlin", {"awq", "auto-round"}),
        ("bitsandbytes", {"bitsandbytes"}),
    ],
)
def test_a_format_of_checkpoints_is_a_condition(value: str, kinds: set[str]) -> None:
    config = EngineConfig("some/model", quantization=value)
    for kind in ("", "gguf", "gptq", "auto-round", "awq", "marlin", "bitsandbytes", "fp8"):
        if kind in kinds:
            assert config.for_weights(kind) == EngineConfig("some/model")
            continue
        with pytest.raises(ConfigError, match=f"--quantization {config.quantization}: some/model holds .*\n  leave"):
            config.for_weights(kind)


@pytest.mark.parametrize("stored", [(), ("BF16", "fp8_g128"), ("BF16", "int4_g64")])
def test_marlin_is_int4_unless_weights_are_in_it(stored: tuple[str, ...]) -> None:
    config = EngineConfig("some/model", quantization="Marlin")
    expected = None if "int4_g64" in stored else "int4"
    assert config.for_weights("gptq" if stored else "", stored) == EngineConfig("some/model", quantization=expected)


@pytest.mark.parametrize(
    ("value", "answer"),
    [
        ("aqlm", "--quantization aqlm: such checkpoints cannot be loaded yet; give the unquantized one"),
        ("ggml", "convert_llama_ggml_to_gguf.py converts them"),
        ("int8", "use q8_0, whole numbers"),
        ("q4_k_xl", "must be one of auto, q8_0, q6_k, q5_k_m"),
        ("q6_k_m", "must be one of auto, "),
    ],
)
def test_a_format_that_is_not_there_gets_an_answer(value: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(answer)):
        EngineConfig(quantization=value)


def test_a_file_in_a_directory_with_an_id_that_says_nothing_more(caplog: pytest.LogCaptureFixture) -> None:
    note.cache_clear()
    config = EngineConfig.from_options(model_id="Qwen/QwQ-32B", weight_path="./", weight_file="qwq.gguf")
    assert (config.model, config.weight_file) == ("./", "qwq.gguf")
    assert "model_id changes nothing: the GGUF file has the tokenizer and the configuration" in caplog.text
    with pytest.raises(ConfigError, match="--model is given twice"):
        EngineConfig.from_options(model_id="Qwen/QwQ-32B", weight_path="./")


def test_options_may_come_under_their_own_names() -> None:
    config = EngineConfig.from_options(model="some/model", max_model_len=9, kv_cache_memory="1k")
    assert config == EngineConfig(model="some/model", max_model_len=9, kv_cache_memory=1024)


def test_mebibytes_that_are_no_number_are_an_error() -> None:
    with pytest.raises(ConfigError, match="much"):
        EngineConfig.from_options(mem="much")


@pytest.mark.parametrize(
    ("short", "dtype"), [("bf16", "bfloat16"), ("f16", "float16"), ("half", "float16"), ("f32", "float32")]
)
def test_dtypes_have_short_names(short: str, dtype: str) -> None:
    config = EngineConfig(dtype=short, kv_cache_dtype=short)
    assert (config.dtype, config.kv_cache_dtype) == (dtype, dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("int8", "int8"), ("fp8", "fp8_e4m3"), ("fp8_e4m3", "fp8_e4m3"), ("fp8_e5m2", "fp8_e5m2"),
        ("torch.float8_e4m3fn", "fp8_e4m3"), ("int8_per_token_head", "int8"), ("int4", "int4"), ("turbo4", "int4"),
    ],
)  # fmt: skip
def test_a_cache_may_have_numbers_of_8_or_4_bits_and_weights_may_not(name: str, dtype: str) -> None:
    assert EngineConfig(kv_cache_dtype=name).kv_cache_dtype == dtype
    assert resolve(EngineConfig(dtype="float32", kv_cache_dtype=name)).kv_cache_dtype == dtype
    with pytest.raises(ConfigError, match="--dtype must be one of auto, float32, bfloat16, float16; got"):
        EngineConfig(dtype=name)


def test_an_option_that_is_left_open_is_not_converted() -> None:
    assert EngineConfig.from_options(kvcache_mem_gpu=None) == EngineConfig()


@pytest.mark.parametrize(
    ("name", "near"), [("max_num_seq", "max_num_seqs"), ("ctx_sizes", "ctx_size"), ("modle", "model")]
)
def test_an_unknown_option_is_an_error_that_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"unknown option {name}; did you mean {near}\?"):
        EngineConfig.from_options(**{name: 1})


def test_an_option_like_no_other_is_an_error_that_names_all() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown option zzzzzz; known are model, weight_file, tokenizer, .*seed",
    ):
        EngineConfig.from_options(zzzzzz=1)


def test_an_option_given_under_two_names_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"--max-model-len is given twice \(once as --ctx-size\)"):
        EngineConfig.from_options(max_model_len=1, ctx_size=2)


def resolve(config: EngineConfig, **changes: Any) -> EngineConfig:
    facts = {
        "max_position_embeddings": 512,
        "checkpoint_dtype": "bfloat16",
        "device": "cpu",
        "block_size": 32,
        "num_cores": 3,
    }
    return config.resolve(**{**facts, **changes})


def test_resolve_makes_every_choice_that_was_left_open() -> None:
    resolved = resolve(EngineConfig())
    assert (resolved.device, resolved.dtype, resolved.kv_cache_dtype) == ("cpu", "bfloat16", "bfloat16")
    assert (resolved.max_model_len, resolved.block_size, resolved.num_threads) == (512, 32, 3)
    assert (resolved.kv_cache_memory, resolved.num_kv_blocks) == (None, None)
    assert (resolved.max_num_prefill_tokens, resolved.swap_space) == (512, 0)
    assert resolve(resolved) == resolved
    on_a_gpu = resolve(EngineConfig(), device="cuda:0")
    assert (on_a_gpu.max_num_prefill_tokens, on_a_gpu.swap_space) == (2048, 4 * 2**30)
    assert (resolved.max_steps_in_flight, on_a_gpu.max_steps_in_flight) == (1, 2)


def test_resolve_keeps_every_choice_that_was_made() -> None:
    config = EngineConfig(
        dtype="float32", kv_cache_dtype="float16", max_model_len=512, block_size=16, num_threads=1, num_kv_blocks=5,
        max_num_seqs=2, max_num_batched_tokens=3, seed=4, device="cpu", enable_prefix_caching=False, swap_space=2**30,
        max_num_prefill_tokens=2, max_steps_in_flight=3,
    )  # fmt: skip
    assert resolve(config) == config
    assert resolve(EngineConfig(dtype="float32")).kv_cache_dtype == "float32"


def test_a_context_longer_than_the_model_s_is_an_error() -> None:
    with pytest.raises(ConfigError, match="--max-model-len 513 is longer than the model's context of 512"):
        resolve(EngineConfig(max_model_len=513))


@pytest.mark.parametrize(
    ("given", "expected"), [("2GiB", 2**31), (0, 0), (4, 2**32), (0.5, 2**29), (2**20, 2**20), ("4", 2**32)]
)
def test_host_memory_is_in_gibibytes_as_in_vllm_or_in_bytes(given: Any, expected: int) -> None:
    assert EngineConfig(swap_space=given).swap_space == expected


def test_every_field_checks_its_type() -> None:
    for option in fields(EngineConfig):
        with pytest.raises(ConfigError, match=f"--{option.name.replace('_', '-')} must be "):
            config_with(**{option.name: {"a": 1} if option.name != "rope_scaling" else 5})


def test_a_path_and_a_torch_dtype_are_understood() -> None:
    class Torch:
        def __str__(self) -> str:
            return "torch.bfloat16"

    config = config_with(model=Path("some/model"), dtype=Torch())
    assert (config.model, config.dtype) == ("some/model", "bfloat16")


@pytest.mark.parametrize("share", [0, 1.5, -0.1, "half", True])
def test_a_share_of_memory_is_above_0_and_at_most_1(share: Any) -> None:
    with pytest.raises(ConfigError, match="--gpu-memory-utilization must be"):
        config_with(gpu_memory_utilization=share)


def test_more_threads_than_any_machine_has_are_refused() -> None:
    assert EngineConfig(num_threads=1024).num_threads == 1024
    with pytest.raises(ConfigError, match="--num-threads must be at most 1024, and more threads than cores are slower"):
        EngineConfig(num_threads=1025)


@pytest.mark.parametrize("value", [-1, 1.0, True, "x", None])
def test_experts_in_host_memory_are_a_whole_number(value: Any) -> None:
    with pytest.raises(ConfigError, match="--num-experts-offload-per-rank must be a whole number, 0 or more; got"):
        config_with(num_experts_offload_per_rank=value)


@pytest.mark.parametrize("name", ["swap_space", "session_ttl", "request_timeout", "rank_timeout"])
@pytest.mark.parametrize("value", [-1, float("nan"), float("inf"), True, "x"])
def test_amounts_are_not_negative(name: str, value: Any) -> None:
    with pytest.raises(ConfigError):
        config_with(**{name: value})


@pytest.mark.parametrize("name", ["request_timeout", "grammar_timeout", "rope_theta"])
def test_an_amount_that_would_stop_everything_is_refused(name: str) -> None:
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} must be a number above 0; got 0"):
        config_with(**{name: 0})
    assert config_with(**{name: 0.001, "session_ttl": 0}).session_ttl == 0


def test_a_disk_for_prefixes_needs_prefix_caching() -> None:
    with pytest.raises(ConfigError, match="--kv-cache-disk keeps prefixes, which --no-enable-prefix-caching"):
        EngineConfig(kv_cache_disk="/tmp", enable_prefix_caching=False)


def test_a_draft_model_sets_the_method() -> None:
    assert EngineConfig(speculative_model="small").speculative_method == "draft"
    assert EngineConfig().speculative_method == "none"
    methods = {"ngram": 4, "draft": 4, "mtp": 2}
    for method, number in methods.items():
        model = "small" if method == "draft" else None
        config = EngineConfig(speculative_method=method, speculative_model=model)
        assert config.most_draft_tokens == number
        assert replace(config, num_speculative_tokens=3).most_draft_tokens == 3
    with pytest.raises(ConfigError, match="--speculative-method none turns off what --speculative-model asks for"):
        EngineConfig(speculative_model="small", speculative_method="none")
    with pytest.raises(ConfigError, match="--speculative-method none"):
        EngineConfig.from_options(speculative_model="small", spec_method="none")
    with pytest.raises(ConfigError, match="--speculative-model is for --speculative-method draft"):
        EngineConfig(speculative_model="small", speculative_method="ngram")
    with pytest.raises(ConfigError, match="--speculative-method draft needs a --speculative-model"):
        EngineConfig(speculative_method="draft")
    with pytest.raises(ConfigError, match="--speculative-method must be one of none, ngram, draft, mtp; got 'magic'"):
        EngineConfig(speculative_method="magic")
    with pytest.raises(ConfigError, match="--ngram-prompt-lookup-min 5 is above --ngram-prompt-lookup-max 4"):
        EngineConfig(ngram_prompt_lookup_min=5)
