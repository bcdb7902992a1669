"""`pagewick bench`: its rates, measured on a scripted engine with a scripted clock."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from pagewick.cli import bench, cli
from pagewick.cli.bench import open_engine
from pagewick.cli.benchmarking import scenarios as fixed
from pagewick.cli.benchmarking.scenarios import Scenario, Timing, measure, run_scenario, scenarios
from pagewick.config import EngineConfig
from pagewick.errors import EngineError
from tests.models.encoders import write_encoder
from tests.scripted_engine import ScriptedEngine


def make_engine(max_model_len: int = 4096) -> ScriptedEngine:
    return ScriptedEngine(
        EngineConfig(),
        script=lambda request: [7] * (request.params.max_tokens or 0),
        vocab_size=100,
        eos_token_id=99,
        max_model_len=max_model_len,
    )


def run(engine: ScriptedEngine, scenario: Scenario, seed: int = 0) -> Timing:
    """Run a scenario; every step takes one second."""
    seconds = itertools.count()
    now = [0.0]

    def tick() -> None:
        now[0] = float(next(seconds) + 1)

    engine.on_step = tick
    return run_scenario(engine, scenario, seed=seed, clock=lambda: now[0])  # type: ignore[arg-type]


def test_the_rate_of_a_prefill_is_prompt_tokens_per_second() -> None:
    scenario = Scenario("prefill", 300, 1)
    timing = run(make_engine(), scenario)
    assert timing == Timing(first_token_seconds=1.0, total_seconds=1.0, num_tokens_later=0)
    assert timing.tokens_per_second(scenario) == 300


@pytest.mark.parametrize("num_streams", [1, 5])
def test_the_rate_of_decoding_starts_when_every_stream_has_a_token(num_streams: int) -> None:
    scenario = Scenario("decode", 10, 21, num_streams)
    timing = run(make_engine(), scenario)
    assert timing == Timing(1.0, 21.0, 20 * num_streams)
    assert timing.tokens_per_second(scenario) == num_streams


def test_tokens_before_the_last_stream_starts_are_not_counted() -> None:
    engine = make_engine()
    step = engine.step

    def one_starts_late() -> list[Any]:
        deltas = step()
        return [delta for delta in deltas if delta.request_id != "bench-0-1" or now >= 4]

    now = 0

    def tick() -> None:
        nonlocal now
        now += 1

    engine.on_step = tick
    engine.step = one_starts_late  # type: ignore[method-assign]
    timing = run_scenario(engine, Scenario("d", 10, 9, 2), seed=0, clock=lambda: float(now))  # type: ignore[arg-type]
    assert timing == Timing(4.0, 9.0, 10)


def test_requests_are_greedy_and_their_random_prompts_never_repeated() -> None:
    engine = make_engine()
    scenario = Scenario("decode", 30, 5, 3)
    run(engine, scenario, seed=1)
    run(engine, scenario, seed=2)
    assert len({tuple(request.prompt_token_ids) for request in engine.requests}) == 6
    assert all(request.params.temperature == 0 and request.params.ignore_eos for request in engine.requests)
    assert {len(request.prompt_token_ids) for request in engine.requests} == {30}
    assert scenario.prompts(100, 1) == [request.prompt_token_ids for request in engine.requests[:3]]


def test_a_failing_stream_is_an_error() -> None:
    engine = make_engine()
    engine.failing["bench-0-0"] = {"error": "not a number"}
    with pytest.raises(EngineError, match="not a number"):
        run(engine, Scenario("decode", 3, 3))


def test_scenarios_alternate_and_the_first_round_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[tuple[str, int]] = []

    def run_scenario(engine: object, scenario: Scenario, *, seed: int) -> Timing:
        order.append((scenario.name, seed))
        return Timing(0.0, 1.0 / [1000, 30, 10, 20][seed // 2], 1)

    monkeypatch.setattr(fixed, "run_scenario", run_scenario)
    results = measure(make_engine(), [Scenario("a", 5, 2), Scenario("b", 5, 2)], 3)  # type: ignore[arg-type]
    assert order == [("ab"[index % 2], index) for index in range(8)]
    assert [(result.median, result.low, result.high) for result in results.values()] == [(20, 10, 30)] * 2


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """The arguments of open_engine, which returns an engine with a context of 300 tokens."""
    calls: list[tuple[Any, ...]] = []

    def open_engine(config: EngineConfig, *, shape: str | None, max_num_seqs: int) -> ScriptedEngine:
        calls.append((config.model, shape, max_num_seqs))
        return make_engine(max_model_len=300)

    monkeypatch.setattr(bench, "open_engine", open_engine)
    return calls


def run_command(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_the_command_prints_a_table_of_what_fits(opened: list[tuple[Any, ...]]) -> None:
    output = run_command("some/model", "--repeats", "1", "--batch", "3").output
    assert opened == [("some/model", None, 3)]
    assert "decode, 1 stream" in output
    assert "decode, 3 streams" in output
    assert "omitted, longer than the context of 300 tokens: prefill 512, prefill 2048" in output


def test_the_command_prints_json(opened: list[tuple[Any, ...]]) -> None:
    report = json.loads(run_command("--shape", "qwen3-tiny", "--repeats", "1", "--json").output)
    assert opened == [("pagewick-demo", "qwen3-tiny", 16)]
    assert [result["scenario"] for result in report["results"]] == ["decode, 1 stream", "decode, 16 streams"]
    assert report["model"]["max_model_len"] == 300
    assert all(result["low"] <= result["median"] <= result["high"] for result in report["results"])


def test_a_batch_is_a_workload_of_requests_at_once(opened: list[tuple[Any, ...]]) -> None:
    report = json.loads(run_command("--batch", "3", "--max_tokens", "20", "--repeats", "1", "--json").output)
    workload = {name: report["workload"][name] for name in ("num_prompts", "concurrency", "output_len", "input_len")}
    assert workload == {"num_prompts": 3, "concurrency": 3, "output_len": 20, "input_len": 128}
    assert opened == [("pagewick-demo", None, 3)]
    for flag in ("--concurrency", "--num-prompts"):
        result = CliRunner().invoke(cli, ["bench", "--batch", "3", flag, "3"])
        assert result.exit_code == 2 and "--batch sets --num-prompts and --concurrency" in result.stderr


def test_responses_end_where_the_context_ends(opened: list[tuple[Any, ...]]) -> None:
    result = run_command("--batch", "2", "--output-len", "1000", "--repeats", "1")
    assert "note: responses have 172 tokens, then the context is full" in result.stderr
    assert "172 output tokens each" in result.stdout


@pytest.mark.parametrize("flag", ["--save", "--plot"])
def test_a_place_that_cannot_be_written_is_named_before_the_work(
    opened: list[tuple[Any, ...]], flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = CliRunner().invoke(cli, ["bench", flag, str(tmp_path / "no" / "x.svg")])
    expected = f"error: cannot write {tmp_path}/no/x.svg: the directory {tmp_path}/no does not exist; make it"
    assert result.exit_code == 1 and result.stderr.startswith(expected)
    # The tests may run as root, who may write everywhere.
    monkeypatch.setattr(os, "access", lambda path, mode: path != tmp_path)
    result = CliRunner().invoke(cli, ["bench", flag, str(tmp_path / "x.svg")])
    expected = f"error: cannot write {tmp_path}/x.svg: you may not, or the disk is read-only; choose another {flag}\n"
    assert (result.exit_code, result.stderr, opened) == (1, expected, [])


@pytest.mark.parametrize("content", ["notes", "[]", '{"a": 1}'])
def test_a_result_replaces_no_file_of_another_kind(opened: list[tuple[Any, ...]], content: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_text(content)
    result = CliRunner().invoke(cli, ["bench", "--save", str(tmp_path / "x")])
    assert (result.exit_code, opened, (tmp_path / "x").read_text()) == (1, [], content)
    assert result.stderr.endswith(
        "x exists, and is not a result of bench --save; remove it, or choose another --save\n"
    )


@pytest.mark.parametrize("flag", ["--save", "--plot"])
def test_a_result_is_printed_before_its_file_is_written(
    opened: list[tuple[Any, ...]], flag: str, tmp_path: Path
) -> None:
    (tmp_path / "x.svg").symlink_to("/dev/full")
    small = ("--num-prompts", "2", "--concurrency", "2", "--input-len", "4", "--output-len", "4", "--repeats", "1")
    result = CliRunner().invoke(cli, ["bench", *small, "--json", flag, str(tmp_path / "x.svg")])
    assert "metrics" in json.loads(result.stdout)
    assert result.exit_code == 1
    assert result.stderr == f"error: cannot write {tmp_path}/x.svg: No space left on device; choose another {flag}\n"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["some/model"], "some/model"),
        (["--model", "some/model"], "--model"),
        (["some/model", "--revision", "main"], "some/model"),
        (["--w", "some/model"], "--w"),
    ],
)
def test_a_shape_takes_the_place_of_a_model(opened: list[tuple[Any, ...]], arguments: list[str], named: str) -> None:
    result = CliRunner().invoke(cli, ["bench", *arguments, "--shape", "qwen3-tiny"])
    assert (result.exit_code, opened) == (2, [])
    complaint = f"--shape measures random weights and no model: leave out {named}, or --shape."
    assert complaint in " ".join(result.stderr.split())


def test_what_is_not_typed_may_be_for_other_runs(
    opened: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PAGEWICK_MODEL", "some/model")
    monkeypatch.setenv("PAGEWICK_IGNORE_EOS", "0")
    (tmp_path / "pagewick.toml").write_text("timeout = 9\nrequest-rate = 3\ncompare = ['http://x']\nendpoint = 'chat'")
    monkeypatch.setenv("PAGEWICK_CONFIG", str(tmp_path / "pagewick.toml"))
    report = json.loads(run_command("--repeats", "1", "--shape", "qwen3-tiny", "--num-prompts", "1", "--json").stdout)
    assert report["workload"]["request_rate"] is None
    run_command("--repeats", "1", "--shape", "qwen3-tiny", "--batch", "1")
    assert [shape for _, shape, _ in opened] == ["qwen3-tiny"] * 2
    refused = CliRunner().invoke(cli, ["bench", "--shape", "qwen3-tiny", "--revision", "main"])
    assert refused.exit_code == 2 and "leave out --revision, or --shape" in " ".join(refused.stderr.split())


def test_complete_measures_a_batch_that_is_a_number(
    opened: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def complete(*arguments: str) -> Result:
        return CliRunner().invoke(cli, ["complete", "--batch", "4", *arguments])

    result = complete("--w", "some/model", "--max-tokens", "7")
    assert result.exit_code == 0, result.output
    assert "4 requests, 16 prompt tokens and 7 output tokens each" in " ".join(result.stdout.split())
    assert opened == [("some/model", None, 4)]
    with monkeypatch.context() as patch:
        patch.setenv("PAGEWICK_TEMPERATURE", "1")
        patch.setenv("PAGEWICK_OUTPUT", str(tmp_path / "x"))
        assert complete("--w", "some/model", "--n-predict", "7").exit_code == 0, "variables may be for other runs"
    flags_without_effect = (
        ["--temperature", "1"], ["--output", str(tmp_path / "x")], ["--n", "2"], ["--seed", "3"],
    )  # fmt: skip
    for flags in flags_without_effect:
        result = complete(*flags)
        assert result.exit_code == 2 and "--batch 4 measures greedy tokens" in result.stderr
    # A file of that name is a batch of requests.
    monkeypatch.chdir(tmp_path)
    Path("4").write_text("no request")
    assert complete("--output", "out").exit_code == 1
    assert len(opened) == 2


def test_the_scenarios_are_the_documented_ones() -> None:
    described = [(s.num_prompt_tokens, s.num_output_tokens, s.num_streams) for s in scenarios()]
    assert described == [(512, 1, 1), (2048, 1, 1), (128, 128, 1), (64, 64, 16)]


def test_an_encoder_is_measured_by_the_texts_that_it_reads(tmp_path: Path) -> None:
    write_encoder("bert", tmp_path, max_position_embeddings=140)
    output = run_command(str(tmp_path), "--device", "cpu", "--repeats", "1", "--batch", "3", "--json").output
    report = json.loads(output)
    assert [result["scenario"] for result in report["results"]] == ["embed 128, 1 text", "embed 128, 3 texts"]
    assert all(result["median"] > 0 for result in report["results"])
    result = CliRunner().invoke(cli, ["bench", str(tmp_path), "--device", "cpu", "--num-prompts", "3"])
    assert result.exit_code == 1
    assert "BertModel writes no text, so that a workload of responses cannot be measured" in result.stderr


def test_a_directory_for_prefixes_that_is_meant_for_other_commands(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("pagewick.engine.engine.Engine", lambda config: config)
    opened: Any = open_engine(EngineConfig(kv_cache_disk=str(tmp_path)), shape=None, max_num_seqs=1)
    assert opened.kv_cache_disk is None
    assert not opened.enable_prefix_caching
