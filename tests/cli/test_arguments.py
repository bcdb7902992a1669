"""Flags, environment and aliases to EngineConfig and SamplingParams."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

import pagewick.engine.worker
import pagewick.local_models
from pagewick.api_arguments import engine_config
from pagewick.cli import cli
from pagewick.cli.arguments import SAMPLING_ALIASES, EngineCommand
from pagewick.cli.foreign_flags import ForeignOption, foreign_options
from pagewick.config import SECTIONS, EngineConfig
from pagewick.config import SIZES as SIZE_OPTIONS
from pagewick.demo import MODEL_DIR
from pagewick.errors import ConfigError
from pagewick.other_names import ALIASES
from pagewick.parallel.topology import Topology


@click.command(cls=EngineCommand, has_sampling=True)
@click.option("--port", type=int, default=8000)
def probe(**arguments: Any) -> None:
    click.get_current_context().obj.update(arguments)


def call(*arguments: str, environment: dict[str, str] | None = None) -> tuple[Result, dict[str, Any]]:
    """Run the command; return its result and what its function got."""
    got: dict[str, Any] = {}
    result = CliRunner().invoke(probe, list(arguments), env=environment or {}, obj=got)
    return result, got


def config_of(*arguments: str, environment: dict[str, str] | None = None) -> EngineConfig:
    result, got = call(*arguments, environment=environment)
    assert result.exit_code == 0, result.output
    config = got["config"]
    assert isinstance(config, EngineConfig)
    return config


def test_without_flags_everything_has_its_default() -> None:
    result, got = call()
    assert result.exit_code == 0, result.output
    assert got == {"config": EngineConfig(), "sampling": {}, "port": 8000}


SIZES = st.integers(1, 10**6)
CONFIGS = st.builds(
    EngineConfig,
    model=st.sampled_from(["Qwen/Qwen3-0.6B", "./a dir"]),
    revision=st.none() | st.just("main"),
    dtype=st.sampled_from(["auto", "float32", "bfloat16"]),
    device=st.sampled_from(["auto", "cpu", "cuda:1"]),
    batch_invariant=st.booleans(),
    lora=st.none() | st.just("./an adapter"),
    lora_modules=st.sampled_from([(), ("a=/x",), ("a=/x", "b=owner/name")]),
    max_lora_rank=st.none() | SIZES,
    max_model_len=st.none() | SIZES,
    max_num_seqs=SIZES,
    max_num_batched_tokens=SIZES,
    block_size=st.none() | SIZES,
    kv_cache_memory=st.none() | SIZES,
    kv_cache_dtype=st.sampled_from(["auto", "float16"]),
    enable_prefix_caching=st.just(True),
    kv_cache_disk=st.just("/kv"),
    tensor_parallel_size=st.integers(1, 8),
    rank_timeout=st.floats(0, 1e6),
    num_threads=st.none() | st.integers(1, 1024),
    seed=st.none() | st.integers(0, 2**62),
    swap_space=st.none() | st.just(0) | st.integers(2**20, 2**40),
    kv_cache_disk_size=SIZES,
    session_ttl=st.floats(0, 1e6),
    request_timeout=st.none() | st.floats(0.001, 1e6),
    max_waiting_requests=st.none() | SIZES,
    max_waiting_tokens=st.none() | SIZES,
    num_experts_offload_per_rank=st.integers(0, 300),
    speculative_method=st.just("ngram"),
    num_speculative_tokens=SIZES,
    speculative_max_batch=SIZES,
)


def as_flags(config: EngineConfig) -> list[str]:
    flags = []
    for option in fields(EngineConfig):
        name, value = option.name.replace("_", "-"), getattr(config, option.name)
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, tuple):
            flags += [f"--{name}", *value] if value else []
        elif value is not None:
            flags += [f"--{name}", as_text(option.name, value)]
    return flags


def as_text(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return " ".join(value)
    return f"{value}B" if name in SIZE_OPTIONS else str(value)


@given(config=CONFIGS)
@settings(deadline=None, max_examples=40)
def test_every_field_has_a_flag_and_a_variable(config: EngineConfig) -> None:
    assert config_of(*as_flags(config)) == config
    environment = {
        f"PAGEWICK_{option.name.upper()}": as_text(option.name, value)
        for option in fields(EngineConfig)
        if (value := getattr(config, option.name)) not in (None, ())
    }
    assert config_of(environment=environment) == config


def test_vllm_s_variable_asks_for_the_same_bits_in_every_batch() -> None:
    assert config_of(environment={"VLLM_BATCH_INVARIANT": "1"}).batch_invariant
    assert not config_of(environment={"VLLM_BATCH_INVARIANT": "0"}).batch_invariant
    assert not config_of("--no-batch-invariant", environment={"VLLM_BATCH_INVARIANT": "1"}).batch_invariant


@pytest.mark.parametrize(
    ("text", "size"), [("4GiB", 4 * 2**30), ("512M", 512 * 2**20), ("1000B", 1000), ("1.5k", 1536)]
)
def test_sizes_are_given_with_units(text: str, size: int) -> None:
    assert config_of("--kv-cache-memory", text).kv_cache_memory == size
    assert config_of("--kv-cache-disk", "/kv", "--kv-cache-disk-size", text).kv_cache_disk_size == size
    assert config_of(environment={"PAGEWICK_KV_CACHE_MEMORY": text}).kv_cache_memory == size


def test_only_swap_space_is_a_number_without_a_unit() -> None:
    message = "Invalid value for '--kv-cache-memory': 4 has no unit; write 4GiB"
    result, _ = call("--kv-cache-memory", "4")
    assert result.exit_code == 2 and message in result.stderr
    assert config_of("--kv-cache-memory-bytes", "4096").kv_cache_memory == 4096
    assert config_of("--swap-space", "4").swap_space == 4 * 2**30
    assert config_of("--swap-space", "0").swap_space == 0


def test_every_size_is_shown_with_a_unit() -> None:
    assert config_of("--swap-space", "2GiB").swap_space == 2**31
    assert "[default: 16GiB]" in " ".join(call("--help")[0].output.split())


# vLLM's, of Qwen3-Reranker.
OVERRIDES = (
    '{"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"], '
    '"is_original_qwen3_reranker": true}'
)


def _number(value: Any) -> Any:
    return float(value) if value == "0.5" else value


@pytest.mark.parametrize("alias", ALIASES)
def test_every_other_name_is_a_hidden_flag(alias: str) -> None:
    target, convert = ALIASES[alias]
    flag = "--" + alias.replace("_", "-")
    if alias in ("cpu", "disable_prefix_cache", "fp8_kvcache"):
        assert convert is not None
        assert getattr(config_of(flag), target) == convert(True) != getattr(EngineConfig(), target)
    elif "mmproj" in alias:
        switch = flag if convert is None else "--no-" + flag.removeprefix("--")
        assert config_of(switch).language_model_only
    elif target == "enforce_eager" or alias == "reranking":
        assert getattr(config_of(flag), target)
    elif target == "enable_prefix_caching":
        assert config_of("--no-" + alias.replace("_", "-")).enable_prefix_caching is False
    else:
        texts = {"model": "x", "speculative_model": "x", "kv_cache_dtype": "float16", "speculative_method": "ngram"}
        texts |= {"device": "0", "language_model_only": '{"image": 0}'}  # of -ngl, and of vLLM's limits of media
        texts |= {"rerank": OVERRIDES}
        texts |= {"gpu_memory_utilization": "0.5", "weight_file": "m.gguf", "quantization": "q4k"}
        given: Any = "0,1,2" if target == "tensor_parallel_size" and convert else texts.get(target, 3)
        given = '{"method": "ngram"}' if alias == "speculative_config" else given
        partner = {"num_speculative_tokens": {"speculative_method": "ngram"}}.get(target, {})
        arguments = [part for name, value in partner.items() for part in ("--" + name.replace("_", "-"), value)]
        options = {alias: _number(given), **partner}
        assert config_of(flag, str(given), *arguments) == EngineConfig.from_options(**options)
    assert f"{flag} " not in call("--help")[0].output


@pytest.mark.parametrize(
    "arguments", [["some/model"], ["--model", "some/model"], ["-m", "some/model"], ["--w", "some/model"]]
)
def test_the_model_is_given_as_an_argument_or_a_flag(arguments: list[str]) -> None:
    environment = {"PAGEWICK_MODEL": "another"}
    assert config_of(*arguments).model == config_of(*arguments, environment=environment).model == "some/model"
    assert config_of(environment=environment).model == "another"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["a", "--model", "b"], "the model is given twice"),
        (["a", "--m", "b"], "the model is given twice"),
        (["--max-model-len", "5", "--ctx-size", "6"], "--max-model-len is given twice"),
        (["--max-model-len", "5", "--max-model-len", "6"], "--max-model-len is given twice"),
        (["--max-model-len", "5", "--max_model_len=5"], "--max-model-len is given twice"),
        (["--cpu", "--no-cpu"], "--cpu is given twice"),
        (["--max-tokens", "5", "--max-gen-tokens", "6"], "--max-tokens is given twice (once as --max-gen-tokens)"),
        (["--max-tokens", "5", "-n", "5"], "--max-tokens is given twice (once as -n)"),
        (["-n", "5", "--max-gen-tokens", "5"], "-n is given twice (once as --max-gen-tokens)"),
        (["-n", "5", "-n", "5"], "-n is given twice; leave one out"),
        (["--n-predict", "5", "-n", "5"], "--n-predict is given twice (once as -n); leave one out"),
        (["--no-cpu", "--cpu"], "--no-cpu is given twice (once as --cpu); leave one out"),
        (["--d", "2,3"], "set CUDA_VISIBLE_DEVICES=2,3"),
        (["--kvmem", "some"], "'some' is not a valid integer"),
        (["--kv-cache-memory", "lots"], "'lots' is not a size"),
        (["--kv-cache-memory", "1G", "--num-kv-blocks", "3"], "not both"),
        (["--dtype", "int3"], "--dtype must be one of auto, float32"),
        (["--max-num-seqs", "0"], "--max-num-seqs must be a whole number above 0"),
        (["--temperature", "3"], "temperature must be a number from 0 to 2"),
        (["--top-p", "0"], "--top-p must be above 0"),
        (["--stop", ""], "none of them empty"),
    ],
)
def test_a_wrong_command_line_is_status_2_and_says_why(arguments: list[str], complaint: str) -> None:
    result, got = call(*arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())
    assert len(result.output.splitlines()) <= 6
    assert got == {}


@pytest.mark.parametrize(
    "command",
    [
        ["complete", "{model}", "-p", "x"],
        ["serve", "{file}"],
        ["doctor", "{model}"],
        ["quantize", "{model}", "--to", "q8_0"],
        ["imatrix", "{model}", "--text", "{file}", "-o", "{model}/i.gguf"],
        ["convert", "{model}", "{model}/new", "--to", "gptq"],
        ["models", "pull", "{model}"],
        ["models", "path", "pagewick-demo"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("flag", ["--revision=main", "--hub=huggingface"])
def test_flags_about_a_hub_are_refused_for_a_model_on_this_disk(command: list[str], flag: str, tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_text("text")
    arguments = [part.format(model=tmp_path, file=file) for part in command]
    result = CliRunner().invoke(cli, [*arguments, flag], prog_name="pagewick")
    model = arguments[2 if command[0] == "models" else 1]
    place = "built in" if model == "pagewick-demo" else "on this disk"
    name = flag.partition("=")[0]
    assert f"{name} has no effect: {model} is {place}, not a model on a hub; leave it out" in result.stderr
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) <= 6


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--num-speculative-tokens", "4"], "--num-speculative-tokens has no effect without --speculative-method"),
        (["--draft-max", "8", "--spec-method", "none"], "--draft-max has no effect without --speculative-method"),
        (["--speculative-max-batch", "8"], "--speculative-max-batch has no effect without --speculative-method"),
        (["--ngram-prompt-lookup-min", "2"], "has no effect without --speculative-method ngram; give that, too"),
        (["--ngram-prompt-lookup-max=4", "--model-draft", "m"], "has no effect without --speculative-method ngram"),
        (
            ["--kv-cache-disk-size", "1GiB"],
            "--kv-cache-disk-size has no effect without --kv-cache-disk; give that, too",
        ),
        (["-mm", "m.gguf", "--no-mmproj"], "-mm has no effect beside --language-model-only; leave one of them out"),
        (["--quantized-cache-size", "1GiB"], "--quantized-cache-size has no effect without --quantization"),
        (["--quantized-cache-size", "1GiB", "-q", "q8_0", "--no-quantized-cache"], "has no effect without"),
    ],
)
def test_a_flag_without_its_partner_is_refused(arguments: list[str], complaint: str) -> None:
    result, _ = call(*arguments)
    assert result.exit_code == 2
    assert complaint in " ".join(result.output.split())


@pytest.mark.parametrize(
    "options",
    [{"spec_tokens": 3}, {"kv_cache_disk_size": "1GiB"}, {"quantized_cache_size": 5}, {"draft": 5, "quant": "q8_0"}],
)
def test_an_option_without_its_partner_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{next(iter(options))} has no effect without"):
        engine_config("some/model", options)
    with pytest.raises(ConfigError, match="has no effect without"):
        engine_config(EngineConfig.from_options(model="some/model", **options), {})
    with pytest.raises(ConfigError, match=r"^max_model_len must be a whole number above 0; got 'x'"):
        engine_config("some/model", {"max_model_len": "x"})
    partners = {"speculative_method": "ngram", "kv_cache_disk": "/kv", "quantization": "q4_k_m"}
    options = {name: value for name, value in options.items() if name != "quant"}
    config = engine_config("some/model", {**options, **partners})
    assert config.kv_cache_disk == "/kv" and engine_config(config, {}) is config


def test_flags_with_their_partners_are_taken() -> None:
    assert config_of("--speculative-method", "ngram", "--num-speculative-tokens", "4").num_speculative_tokens == 4
    assert config_of("--speculative-model", "m", "--draft-max", "3").num_speculative_tokens == 3
    assert config_of("--kv-cache-disk", "/kv", "--kv-cache-disk-size", "1GiB").kv_cache_disk_size == 2**30
    # A variable may be meant for another command.
    environment = {"PAGEWICK_NUM_SPECULATIVE_TOKENS": "3", "PAGEWICK_KV_CACHE_DISK_SIZE": "1GiB"}
    without_effect = config_of("--speculative-method", "none", environment=environment)
    assert without_effect == EngineConfig(speculative_method="none")
    assert engine_config(without_effect, {}) == without_effect, "LLM takes it"
    with_one = config_of("--speculative-method", "ngram", environment=environment)
    assert with_one == EngineConfig(speculative_method="ngram", num_speculative_tokens=3)


def test_variables_about_a_hub_may_be_meant_for_another_model() -> None:
    environment = {"PAGEWICK_REVISION": "main", "PAGEWICK_HUB": "modelscope"}
    assert config_of(environment=environment) == EngineConfig()
    elsewhere = EngineConfig(model="someone/model", revision="main", hub="modelscope")
    assert config_of("someone/model", environment=environment) == elsewhere
    assert config_of("--hub", "modelscope", "--speculative-model", "someone/small").hub == "modelscope"
    assert config_of("someone/model", "--revision", "main").revision == "main"


def test_flags_override_the_environment_even_under_another_name() -> None:
    environment = {"PAGEWICK_TENSOR_PARALLEL_SIZE": "4", "PAGEWICK_PORT": "9000", "PAGEWICK_TEMPERATURE": "0.5"}
    assert config_of("--tp", "2", environment=environment).tensor_parallel_size == 2
    _, got = call("--port", "1", environment=environment)
    assert (got["port"], got["config"].tensor_parallel_size, got["sampling"]) == (1, 4, {"temperature": 0.5})


def test_sampling_has_only_the_flags_that_were_given() -> None:
    _, got = call(
        "--max-tokens", "5", "--temperature", "0", "--stop", "a", "--stop", "b", "--top-k", "3", "--seed", "9"
    )
    assert got["sampling"] == {"max_tokens": 5, "temperature": 0.0, "stop": ("a", "b"), "top_k": 3, "seed": 9}
    assert got["config"].seed == 9


def test_help_shows_every_field_with_its_default() -> None:
    text = " ".join(call("--help")[0].output.split())
    for option in fields(EngineConfig):
        assert "--" + option.name.replace("_", "-") in text
        assert option.metadata["help"].split("(")[0].strip() in text
    assert "[default: 32]" in text
    assert "[default: true]" in text


def test_a_rank_above_0_runs_a_worker_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[EngineConfig, Topology]] = []
    monkeypatch.setattr(pagewick.engine.worker, "run", lambda config, topology: ran.append((config, topology)))
    monkeypatch.setattr(pagewick.local_models, "resolve_model", lambda model, **_: MODEL_DIR)
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511"}
    result, got = call("m", environment={**ranks, "RANK": "1", "LOCAL_RANK": "1"})
    assert (result.exit_code, got) == (0, {}), result.output
    ((config, topology),) = ran
    assert (config.model, topology.rank, topology.world_size) == (str(MODEL_DIR), 1, 2)
    result, got = call("m", environment={**ranks, "RANK": "0", "LOCAL_RANK": "0"})
    assert got["config"].model == "m"
    assert len(ran) == 1


@pytest.mark.parametrize(("short", "field", "value"), [("-tp", "tensor_parallel_size", 2), ("-c", "max_model_len", 9)])
def test_short_flags_of_other_programs_are_understood(short: str, field: str, value: int) -> None:
    assert getattr(config_of(short, str(value)), field) == value


def test_underscores_in_flags_stand_for_dashes() -> None:
    assert config_of("--max_model_len", "9", "--kvcache_mem_gpu=2") == EngineConfig(
        max_model_len=9, kv_cache_memory=2 * 2**20
    )


@pytest.mark.parametrize("alias", SAMPLING_ALIASES)
def test_sampling_flags_have_other_names(alias: str) -> None:
    _, got = call("--" + alias.replace("_", "-"), "2")
    assert got["sampling"] == {SAMPLING_ALIASES[alias][0]: 2}


@pytest.mark.parametrize("option", foreign_options(is_server=True, is_terminal=True), ids=lambda option: option.flag)
def test_a_flag_without_a_field_is_noted_or_refused(option: ForeignOption) -> None:
    """With a value that asks for what happens anyway, it does nothing; with another one, the sentence is shown."""
    heard: list[str] = []

    @click.command(params=[option])
    def command() -> None:
        heard.append("ran")

    for value in option.harmless:
        assert CliRunner().invoke(command, [option.flag, value]).output == "", value
    heard.clear()
    given = [option.flag] if option.foreign.takes == "none" else [option.flag, "something"]
    result = CliRunner().invoke(command, given)
    is_refused = option.foreign.is_refused or bool(option.harmless)
    assert (result.exit_code, heard) == ((2, []) if is_refused else (0, ["ran"]))
    assert " ".join(option.sentence.split()) in " ".join(result.stderr.split())
    assert option.flag in result.stderr
    assert CliRunner().invoke(command, []).output == ""


def test_layers_on_a_gpu_are_all_or_none() -> None:
    """In llama.cpp, 0 keeps the model on the CPU, and a large number or a word puts all of it on a GPU."""
    for flag in ("-ngl", "--n-gpu-layers", "--gpu-layers"):
        result, got = call(flag, "0")
        assert (result.exit_code, result.stderr, got["config"].device) == (0, "", "cpu")
        for value in ("99", "999", "-1", "all", "auto"):
            assert config_of(flag, value) == EngineConfig()
            assert config_of(flag, value, "--device", "cuda").device == "cuda"
            assert config_of("--device", "cuda", flag, value).device == "cuda"
        refused, _ = call(flag, "20")
        assert refused.exit_code == 2
        assert "a model is not split between a GPU and a CPU; give 0, or 99 or all" in " ".join(refused.stderr.split())


def test_an_optional_value_may_be_left_out() -> None:
    for arguments in (["-fa"], ["-fa", "--max-model-len", "3"], ["--flash-attn", "on"]):
        result, _ = call(*arguments)
        assert result.exit_code == 0, result.output
        assert result.stderr == ""
    # A model that follows would be taken for the value: this is refused.
    assert "-fa: the device determines the attention kernel" in call("-fa", "some/model")[0].stderr


def test_no_flag_of_another_program_has_two_meanings() -> None:
    for is_server, is_terminal in ((True, False), (False, True), (False, False)):
        names = [option.flag for option in foreign_options(is_server=is_server, is_terminal=is_terminal)]
        assert len(names) == len(set(names))


def test_help_shows_every_section_once_and_every_flag_in_one_of_them() -> None:
    text = call("--help")[0].output
    for title in ("Sampling", *SECTIONS):
        assert text.count(f"\n{title}:\n") == 1
    cache = text.partition("\nKV cache:\n")[2].partition("\nQueue:\n")[0]
    flags = [word for line in cache.splitlines() for word in line.split()[:1] if word.startswith("--")]
    assert flags[0] == "--block-size"
    assert flags[-1] == "--session-ttl"
    assert "--enable-prefix-caching" in flags
    assert "\n  -m, --model TEXT" in text.partition("\nModel:\n")[2].partition("\nSequences:\n")[0]
