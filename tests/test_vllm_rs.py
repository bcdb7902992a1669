"""pagewick.vllm_rs: the names of vllm.rs, on the built-in model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import pagewick.cli
import pagewick.server.run
from pagewick import config as pagewick_config
from pagewick import vllm_rs
from pagewick.errors import ArgumentError, ConfigError, EngineError, InvalidRequestError
from pagewick.server.settings import ServerSettings
from pagewick.vllm_rs import DType, Engine, EngineConfig, GenerationConfig, Message, SamplingParams
from pagewick.vllm_rs.__main__ import main

HOW = [Message("user", "How are you?")]


@pytest.fixture(scope="module")
def engine(demo_model_dir: Path) -> Iterator[Engine]:
    defaults = GenerationConfig(temperature=0.0, presence_penalty=0.5)
    config = EngineConfig(
        weight_path=str(demo_model_dir),
        max_model_len=256,
        num_blocks=64,
        block_size=16,
        generation_cfg=defaults,
        max_tokens=9,
    )
    engine = Engine(config, DType.F32)
    yield engine
    engine._llm.close()


def test_options_have_the_names_of_vllm_rs() -> None:
    config = EngineConfig("some/model", max_num_seqs=4, num_shards=2, kvcache_mem_gpu=64, seed=3, isq="q4k")
    assert config.config == pagewick_config.EngineConfig(
        model="some/model",
        max_num_seqs=4,
        tensor_parallel_size=2,
        kv_cache_memory=64 * 2**20,
        seed=3,
        quantization="q4_k",
    )
    assert EngineConfig(model_path="m", device_ids=[0, 1]).config.tensor_parallel_size == 2
    assert EngineConfig("m", device_ids=[1]).config.device == "cuda:1"
    assert EngineConfig("m", fp8_kvcache=True).config.kv_cache_dtype == "fp8_e4m3"
    assert EngineConfig("m", fp8_kvcache=False).config.kv_cache_dtype == "auto"
    assert EngineConfig(weight_path="m").sampling == {}
    assert EngineConfig(weight_file="/d/a.gguf").config.model == "/d/a.gguf"
    both = EngineConfig("owner/x", weight_path="/d", weight_file="a.gguf").config
    assert (both.model, both.weight_file) == ("/d", "a.gguf")  # the file has what the id was for


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"isq": "aqlm"}, "such checkpoints cannot be loaded yet"),
        ({"pd_server_prefix_cache_ratio": 0.5}, "the one that decodes with --prefill-url"),
        ({"device_ids": [1, 2]}, "set CUDA_VISIBLE_DEVICES=1,2"),
        ({"max_num_sequences": 3}, "did you mean max_num_seqs"),
    ],
)
def test_an_option_that_is_not_supported_is_refused(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        EngineConfig("m", **options)


def test_prompts_and_conversations_are_completed_in_one_batch(engine: Engine) -> None:
    params = SamplingParams(max_tokens=4)
    prompt = engine.apply_chat_template(HOW, True)
    first, second, third = engine.generate_sync([params, params, SamplingParams()], [prompt, HOW, HOW])
    assert first.decode_output == second.decode_output != ""
    assert third.decode_output.startswith(first.decode_output)
    assert (first.seq_id, second.seq_id, third.seq_id) == (0, 1, 2)
    assert (first.decoded_length, third.decoded_length) == (4, 9)
    assert first.prompt_length == second.prompt_length > 3
    assert first.prompt_start_time <= first.decode_start_time <= first.decode_finish_time
    assert engine.generate_sync(params, [prompt])[0].decode_output == first.decode_output
    with pytest.raises(InvalidRequestError, match="1 prompts and 2"):
        engine.generate_sync([params, params], [prompt])


@pytest.mark.parametrize(
    "call",
    [
        lambda engine: engine.generate_sync(SamplingParams(), "hi"),
        lambda engine: engine.generate_sync(SamplingParams(), HOW),
        lambda engine: engine.generate_stream(SamplingParams(), ["hi"]),
        lambda engine: engine.apply_chat_template("hi"),
        lambda engine: engine.apply_chat_template([{"role": "user", "content": "hi"}]),
    ],
)
def test_a_wrong_type_is_a_type_error(engine: Engine, call: Callable[[Engine], Any]) -> None:
    with pytest.raises(
        ArgumentError, match=r"prompts must be a list; write \[prompt\]|a conversation is a list of Message"
    ):
        call(engine)


def test_a_stream_ends_with_its_times(engine: Engine) -> None:
    (expected,) = engine.generate_sync(SamplingParams(max_tokens=6), [HOW])
    seq_id, prompt_length, stream = engine.generate_stream(SamplingParams(max_tokens=6), HOW)
    assert (seq_id, prompt_length) == (stream.seq_id, stream.prompt_length) == (seq_id, expected.prompt_length)
    *items, last = stream
    assert stream.finished and not stream.cancelled
    assert {item.datatype for item in items} == {"TOKEN"}
    assert "".join(str(item) for item in items) == expected.decode_output
    assert last.datatype == "DONE"
    start, first, finish, length = last.data
    assert isinstance(start, int) and isinstance(first, int) and isinstance(finish, int)
    assert start <= first <= finish and length == 6
    assert engine.generate_stream(SamplingParams(), HOW)[0] == seq_id + 1


def test_a_stream_can_be_cancelled(engine: Engine) -> None:
    _, _, stream = engine.generate_stream(SamplingParams(max_tokens=200), HOW)
    next(stream)
    stream.cancel()
    assert stream.cancelled and stream.finished
    assert list(stream) == []
    assert not engine._llm._engine.has_work


def test_an_error_is_the_last_item(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise EngineError("out of order")

    _, _, stream = engine.generate_stream(SamplingParams(max_tokens=3), HOW)
    with monkeypatch.context() as patch:
        patch.setattr(engine._llm._engine, "step", fail)
        assert [(item.datatype, item.data) for item in stream] == [("ERROR", "out of order")]


def test_parameters_come_from_the_request_then_the_engine_then_the_model(engine: Engine) -> None:
    own = engine._params(SamplingParams(temperature=0.5, frequency_penalty=1.0, top_k=7, top_p=0.9, ignore_eos=True))
    assert (own.temperature, own.frequency_penalty, own.top_k, own.top_p, own.ignore_eos) == (0.5, 1.0, 7, 0.9, True)
    assert (own.presence_penalty, own.max_tokens) == (0.5, 9)
    assert engine._params(SamplingParams(presence_penalty=-1.0, max_tokens=4)).presence_penalty == -1.0
    assert engine._params(own) is own


def test_more_tokens_than_fit_end_with_the_context(engine: Engine) -> None:
    (output,) = engine.generate_sync(SamplingParams(max_tokens=5000, ignore_eos=True), [HOW])
    assert output.prompt_length + output.decoded_length == 256


def test_the_cache_is_counted_in_tokens(engine: Engine) -> None:
    available = engine.get_available_kv_tokens()
    assert available == 64 * 16
    _, _, stream = engine.generate_stream(SamplingParams(max_tokens=40, ignore_eos=True), HOW)
    next(stream)
    assert engine.get_available_kv_tokens() < available
    list(stream)
    assert engine.get_available_kv_tokens() == available
    assert engine.get_num_cached_tokens() >= 40


def test_start_server_serves_the_engine_s_model(demo_model_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        pagewick.server.run, "run_server", lambda config, settings, sampling: calls.append((config, settings, sampling))
    )
    engine = Engine(EngineConfig(weight_path=str(demo_model_dir), num_blocks=8, max_model_len=64, max_tokens=5))
    engine.start_server(8123, False)
    names = (str(demo_model_dir), "*")
    expected = ServerSettings(port=8123, ui=False, served_model_name=names)
    assert calls == [(engine._config, expected, {"max_tokens": 5})]


@pytest.mark.parametrize(
    ("module", "arguments", "expected"),
    [
        ("serve", "--m x --port 8000", "serve --m x --port 8000"),
        ("chat", "--m x", "chat --m x"),
        ("complete", "--m x --prompts a", "complete --chat --m x --prompts a"),
        ("complete", "--m x --batch 8", "complete --m x --batch 8"),
        (None, "--server --m x", "serve --server --m x"),
        (None, "--m x --i", "chat --m x --i"),
        (None, "--m x --prompts=a", "complete --chat --m x --prompts=a"),
        (None, "--m x --batch 8", "bench --m x --batch 8"),
        (None, "--help", "--help"),
    ],
)
def test_flags_select_the_command(
    module: str | None, arguments: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []
    monkeypatch.setattr(pagewick.cli, "cli", lambda args, prog_name: calls.append(args))
    monkeypatch.setattr(sys, "argv", ["x", *arguments.split()])
    main(module)
    assert calls == [expected.split()]


def test_the_data_type_of_the_cache_is_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("pagewick.cli.cli", lambda arguments, prog_name: None)
    for given, is_answered in ((["--m", "x"], False), (["--m", "x", "--dtype", "f16"], True), (["--dtype=fp8"], True)):
        monkeypatch.setattr(sys, "argv", ["x", *given])
        main("serve")
        assert ("write --kv-cache-dtype" in capsys.readouterr().err) == is_answered


def test_a_command_line_that_asks_for_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--m", "some/model"])
    with pytest.raises(SystemExit, match="give one of --server, --i, --batch, --prompts"):
        main()


def test_all_names_of_vllm_rs_are_there() -> None:
    names = "DType GenerationConfig GenerationOutput EngineConfig SamplingParams Message StepOutput StreamItem "
    assert all(hasattr(vllm_rs, name) for name in (names + "EngineStream Engine").split())
    for name in ("generate_sync", "generate_stream", "apply_chat_template", "start_server"):
        assert callable(getattr(Engine, name))
