"""`pagewick bench --url`: arithmetic by hand, the client on bytes at known times, the command on stand-in servers."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import re
import socket
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from pagewick.cli import cli
from pagewick.cli.benchmarking.http_load import LoadClient, _ResponseReader
from pagewick.cli.benchmarking.measurement import (
    METRICS,
    Distribution,
    RequestTiming,
    Runs,
    Spread,
    Summary,
    paired_ratios,
)
from pagewick.cli.benchmarking.saved import compare, load_report, save_report
from pagewick.cli.benchmarking.workload import Workload, run_round, run_workload
from pagewick.cli.server_address import ServerAddress
from pagewick.config import EngineConfig
from pagewick.errors import ConfigError, EngineError
from tests.cli.stand_in_server import ODD_CHUNKS, StandInServer, chat_chunk, events, usage_chunk
from tests.scripted_engine import ScriptedEngine


def timing(first: float, total: float, num_tokens: int | None = 1, error: str | None = None) -> RequestTiming:
    return RequestTiming(first, total, [], 10, num_tokens, error)


def test_distributions_by_hand() -> None:
    assert Distribution.of([]) is None
    assert Distribution.of([4.0]) == Distribution(4, 4, 4, 4)
    # For p90, 0.9 * 6 = 5.4: four tenths of the way from 60 to 70.
    assert Distribution.of([70.0, 10, 20, 30, 40, 50, 60]) == Distribution(40, 40, *map(pytest.approx, (64, 69.4)))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=40))
def test_percentiles_are_those_of_numpy(values: list[float]) -> None:
    distribution = Distribution.of(values)
    assert distribution is not None
    found = [distribution.mean, distribution.p50, distribution.p90, distribution.p99]
    expected = [np.mean(values), *np.percentile(values, [50, 90, 99])]
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_summary_by_hand() -> None:
    timings = [
        replace(timing(0.5, 2.5, 5), gaps=[0.25, 0.75]),
        replace(timing(1.0, 2.0, 3), gaps=[0.5]),
        timing(0.1, 0.2, 1),
        timing(9.0, 9.0, 99, error="timeout"),
        timing(9.0, 9.0, 99, error="timeout"),
    ]
    summary = Summary.of(timings, 4.0)
    assert (summary.num_finished, summary.errors) == (3, {"timeout": 2})
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (30, 9)
    assert (summary.requests_per_second, summary.output_tokens_per_second) == (0.75, 2.25)
    assert summary.total_tokens_per_second == 39 / 4
    assert summary.time_to_first_token is not None
    assert summary.time_to_first_token.p50 == 0.5
    # (2.5 - 0.5) / 4 and (2.0 - 1.0) / 2; the third has no second token.
    assert summary.time_per_output_token == Distribution(0.5, 0.5, 0.5, 0.5)
    assert summary.gap_between_pieces is not None
    assert (summary.gap_between_pieces.mean, summary.gap_between_pieces.p50) == (0.5, 0.5)
    assert summary.end_to_end is not None
    assert summary.end_to_end.mean == pytest.approx((2.5 + 2 + 0.2) / 3)


def test_without_token_counts_there_are_no_token_rates() -> None:
    summary = Summary.of([timing(0.1, 0.2, 5), timing(0.1, 0.2, None)], 1.0)
    assert summary.output_tokens_per_second is None
    assert summary.number(METRICS[0].path) is None
    assert paired_ratios([summary], [summary], METRICS[0]) is None
    assert Runs("x", [summary]).metrics()["output tokens"] is None


def test_ratios_compare_rounds_that_ran_one_after_the_other() -> None:
    """The machine is three times as fast in the last round, which must not change the ratio."""
    mine = [Summary.of([timing(0.1, 1.0)] * count, 1.0) for count in (10, 12, 33)]
    theirs = [Summary.of([timing(0.1, 1.0)] * count, 1.0) for count in (10, 10, 30)]
    ratio = paired_ratios(mine, theirs, METRICS[1])
    assert ratio == Spread(pytest.approx(1.1), 1.0, pytest.approx(1.2))
    assert Runs("x", mine).spread("requests_per_second") == Spread(12, 10, 33)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def fed(*parts: tuple[float, bytes]) -> RequestTiming:
    """Return the times of a response whose bytes arrive at these seconds; the connection ends one second later."""

    async def main() -> RequestTiming:
        clock = Clock()
        reader = _ResponseReader(clock)
        for clock.now, data in parts:
            reader.data_received(data)
        clock.now += 1
        reader.connection_lost(None)
        await reader.ended
        return reader.timing

    return asyncio.run(main())


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def test_times_are_those_of_the_arriving_bytes() -> None:
    text = events(chat_chunk(content="a"), end="")
    assert fed(
        (1.0, HEAD + chunked(events(chat_chunk(role="assistant", content=""), end=""))),
        (2.0, chunked(events(chat_chunk(reasoning_content="hm"), end=""))),
        (2.5, chunked(text[:20])),
        (3.0, chunked(text[20:])),
        (3.25, chunked(events({"choices": [{"text": "b"}]}, end=""))),
        (7.0, chunked(events(usage_chunk(11, 4)))),
    ) == RequestTiming(2.0, 3.25, [1.0, 0.25], 11, 4, None)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        ([(1.0, HEAD + chunked(events(chat_chunk(content="a"), end="")))], "the response ended early"),
        ([(1.0, HEAD + chunked(events(end="")) + b"0\r\n\r\n")], "the response ended early"),
        ([(1.0, HEAD + chunked(b"data: nonsense\n"))], "not a response of an OpenAI-compatible server"),
        *(
            ([(1.0, HEAD + chunked(events(chunk, end="")))], "not a response of an OpenAI-compatible server")
            for chunk in ODD_CHUNKS
        ),
        ([(1.0, b"SSH-2.0-OpenSSH\r\n")], "not a response of an OpenAI-compatible server"),
        ([(1.0, HEAD + chunked(events({"error": {"message": "died"}})))], "error in the stream: died"),
        (
            [(1.0, b"HTTP/1.1 429 X\r\ncontent-length: 30\r\n\r\n"), (2.0, b'{"error": {"message": "full"}}')],
            "HTTP 429: full",
        ),
        ([], "the response ended early"),
    ],
)
def test_every_failure_is_described(parts: list[tuple[float, bytes]], error: str) -> None:
    assert fed(*parts).error == error


def test_prompts_are_new_in_every_round_and_repeatable() -> None:
    workload = Workload(input_len=7, num_prompts=5, request_rate=2.0, seed=3)
    assert workload.prompts(1) == workload.prompts(1)
    assert {len(prompt.split()) for prompt in workload.prompts(1)} == {7}
    assert len({*workload.prompts(1), *workload.prompts(2), *replace(workload, seed=4).prompts(1)}) == 15
    assert list(workload.start_times(1)) == list(workload.start_times(1))
    assert list(replace(workload, request_rate=None).start_times(1)) == [0] * 5


def test_the_report_says_at_which_pace_requests_start() -> None:
    workload = Workload(input_len=7, output_len=3, num_prompts=5, concurrency=2)
    lengths = "5 requests of 7 words and up to 3 new tokens"
    assert workload.describe("words") == f"{lengths}, 2 at a time"
    rated = replace(workload, request_rate=2.5)
    assert rated.describe("words") == f"{lengths}, 2.5 per second, at most 2 at a time"
    assert replace(rated, concurrency=5).describe("words") == f"{lengths}, 2.5 per second"


def test_arrivals_are_a_poisson_process() -> None:
    """The mean of 4000 gaps is within 5 standard errors of 1 / rate, and their deviation is exponential."""
    times = list(Workload(num_prompts=4001, request_rate=4.0).start_times(1))
    gaps = np.diff(times)
    assert abs(gaps.mean() - 0.25) < 5 * 0.25 / 4000**0.5
    assert statistics.stdev(gaps) == pytest.approx(0.25, rel=0.1)


def test_concurrency_is_limited() -> None:
    running = most = 0

    async def send(body: dict[str, Any]) -> RequestTiming:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.001)
        running -= 1
        return timing(0.1, 0.2)

    bodies: list[dict[str, Any]] = [{}] * 13
    summary = asyncio.run(run_round(send, bodies, [0.0] * 13, concurrency=3))
    assert (summary.num_finished, most) == (13, 3)


def test_a_workload_on_an_engine_by_hand() -> None:
    """Every step takes a second; three requests of four tokens, two at a time."""
    engine = ScriptedEngine(EngineConfig(), script=lambda request: [7] * 9, vocab_size=50, eos_token_id=49)
    clock = Clock()

    def tick() -> None:
        clock.now += 1

    engine.on_step = tick
    workload = Workload(input_len=6, output_len=4, num_prompts=3, concurrency=2)
    summary = run_workload(engine, workload, 1, clock=clock)  # type: ignore[arg-type]
    assert summary.duration == 8
    assert (summary.num_prompt_tokens, summary.num_output_tokens) == (18, 12)
    assert summary.time_to_first_token == Distribution(1, 1, 1, 1)
    assert summary.time_per_output_token == Distribution(1, 1, 1, 1)
    assert summary.end_to_end == Distribution(4, 4, 4, 4)
    assert len({tuple(request.prompt_token_ids) for request in engine.requests}) == 3
    engine.failing["bench-2-0"] = {"error": "not a number"}
    with pytest.raises(EngineError, match="not a number"):
        run_workload(engine, workload, 2)  # type: ignore[arg-type]


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[StandInServer]]:
    niced: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda *arguments: niced.append(arguments[-1]))
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("PAGEWICK_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with ExitStack() as stack:
        yield [stack.enter_context(StandInServer().running()) for _ in range(2)]
    assert set(niced) <= {5}


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["bench", *arguments], prog_name="pagewick")


SMALL = ("--num-prompts", "3", "--input-len", "4", "--output-len", "6")


def test_a_server_is_measured(servers: list[StandInServer], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_KEY", "secret")
    server = servers[0]
    result = bench("--url", server.url, *SMALL, "--repeats", "2", "--json", "--seed", "5", "--api-key-env", "MY_KEY")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert "secret" not in result.output
    assert report["servers"][0]["model"] == "stand-in"
    assert report["servers"][0]["errors"] == {}
    assert [one["num_finished"] for one in report["servers"][0]["rounds"]] == [3, 3]
    assert [one["num_prompt_tokens"] for one in report["servers"][0]["rounds"]] == [9, 9]
    assert report["workload"]["seed"] == 5
    assert len(server.requests) == 9
    path, headers, body = server.requests[0]
    assert (path, headers["authorization"]) == ("/v1/chat/completions", "Bearer secret")
    assert len(body.pop("messages")[0]["content"].split()) == 4
    assert body == {
        "model": "stand-in", "max_tokens": 6, "temperature": 0, "stream": True, "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip


def test_completions_without_ignore_eos(servers: list[StandInServer]) -> None:
    result = bench("--url", servers[0].url, *SMALL, "--repeats", "1", "--endpoint", "completions", "--no-ignore-eos")
    assert result.exit_code == 0, result.output
    path, _, body = servers[0].requests[0]
    assert path == "/v1/completions"
    assert len(body["prompt"].split()) == 4
    assert "ignore_eos" not in body
    assert "3 requests, 3 prompt tokens and 1 output tokens each; 0 failed" in result.stdout


def test_servers_are_measured_in_turn_with_the_same_prompts(servers: list[StandInServer]) -> None:
    order: list[int] = []
    for index, server in enumerate(servers):
        server.reply = lambda body, reply=server.reply, index=index: (order.append(index), reply(body))[1]  # type: ignore[misc]
    result = bench("--url", servers[0].url, "--compare", f"{servers[1].url}=other", *SMALL, "--concurrency", "3")
    assert result.exit_code == 0, result.output
    # A warm-up and five rounds; another server begins each time.
    assert order == [0, 0, 0, 1, 1, 1, 1, 1, 1, 0, 0, 0] * 3
    prompts = [sorted(body["messages"][0]["content"] for _, _, body in server.requests) for server in servers]
    assert prompts[0] == prompts[1]
    assert len(set(prompts[0])) == 18
    assert " / other" in result.stdout
    assert "other: stand-in on http://127.0.0.1" in result.stderr


def test_a_models_name_is_neither_markup_nor_control_characters(servers: list[StandInServer]) -> None:
    servers[0].models = ["[/x]\x1b]0;title\x07"]
    result = bench("--url", servers[0].url, *SMALL, "--repeats", "1")
    assert result.exit_code == 0, result.output
    assert "[/x]�]0;title�: 3 requests" in result.stdout
    assert "[/x]�]0;title� on http" in result.stderr
    assert "\x1b" not in result.output
    assert servers[0].requests[0][2]["model"] == servers[0].models[0]


def test_errors_are_counted_by_kind(servers: list[StandInServer]) -> None:
    count = 0
    good = servers[0].reply

    def reply(body: dict[str, Any]) -> tuple[int, bytes]:
        nonlocal count
        count += 1
        return good(body) if count % 3 else (429, b'{"error": {"message": "too many"}}')

    servers[0].reply = reply
    result = bench("--url", servers[0].url, *SMALL, "--repeats", "2")
    assert result.exit_code == 0, result.output
    assert "2 failed" in result.stdout
    assert "2 x HTTP 429: too many" in result.stdout


def test_a_server_that_refuses_every_request_is_an_error(servers: list[StandInServer]) -> None:
    servers[0].reply = lambda body: (400, b'{"error": {"message": "unknown field ignore_eos"}}')
    result = bench("--url", servers[0].url, *SMALL)
    assert result.exit_code == 1
    assert "HTTP 400: unknown field ignore_eos\n--no-ignore-eos omits" in result.stderr
    result = bench("--url", "http://127.0.0.1:9/v1")
    assert result.stderr.startswith("error: cannot connect to http://127.0.0.1:9/v1: Connection refused")


def test_a_refused_connection_is_a_failure() -> None:
    async def main() -> RequestTiming:
        return await LoadClient(ServerAddress.parse("http://127.0.0.1:9"), "/x", timeout=5).send({})

    assert "no connection" in str(asyncio.run(main()).error)


def test_a_silent_server_times_out() -> None:
    async def main(port: int) -> RequestTiming:
        return await LoadClient(ServerAddress.parse(f"http://127.0.0.1:{port}"), "/x", timeout=0.05).send({})

    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert asyncio.run(main(silent.getsockname()[1])).error == "timeout"


def test_levels_share_no_prompts() -> None:
    found = [prompt for one in Workload(concurrency=4, num_prompts=16).levels() for prompt in one.prompts(1)]
    assert len(set(found)) == len(found) > 16


def test_results_are_saved_and_compared(servers: list[StandInServer], tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    assert bench("--url", servers[0].url, *SMALL, "--repeats", "1", "--save", str(path)).exit_code == 0
    result = bench("--url", servers[0].url, *SMALL, "--repeats", "1", "--against", str(path))
    assert "Not the same run" in result.stdout
    assert "differs" not in result.stdout
    assert "requests: " in result.stdout
    seeds = {load_report(path)["workload"]["seed"]}
    path_again = tmp_path / "again.json"
    assert bench("--url", servers[0].url, *SMALL, "--repeats", "1", "--save", str(path_again)).exit_code == 0
    assert load_report(path_again)["workload"]["seed"] not in seeds
    other = bench(
        "--url", servers[0].url, *SMALL, "--repeats", "1", "--against", str(path), "--endpoint", "completions"
    )
    assert "The endpoint differs: chat then, completions now" in other.stdout
    changed = bench("--url", servers[0].url, "--num-prompts", "2", "--repeats", "1", "--against", str(path))
    assert "The workload differs: input_len was 4 and is 128" in changed.stdout
    assert json.loads(path.read_text())["format"] == 1


def test_a_seed_that_was_chosen_is_compared(servers: list[StandInServer], tmp_path: Path) -> None:
    """Other prompts are another workload; drawn seeds differ in any two runs."""

    def differences(*flags: str) -> list[str]:
        result = bench("--url", servers[0].url, *SMALL, "--repeats", "1", "--against", str(path), *flags)
        assert result.exit_code == 0, result.output
        return [line for line in result.stdout.splitlines() if "differs" in line]

    path = tmp_path / "result.json"
    assert bench("--url", servers[0].url, *SMALL, "--repeats", "1", "--seed", "1", "--save", str(path)).exit_code == 0
    assert differences("--seed", "1") == []
    assert differences("--seed", "2") == ["The workload differs: seed was 1 and is 2"]
    assert differences() == ["The workload differs: seed was 1 and is drawn"]
    path.unlink()
    assert bench("--url", servers[0].url, *SMALL, "--repeats", "1", "--save", str(path)).exit_code == 0
    assert differences() == []
    assert differences("--seed", "0") == ["The workload differs: seed was drawn and is 0"]


def test_an_earlier_result_outlives_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result"
    save_report(path, {"metrics": {"speed": None}})
    (tmp_path / "link").symlink_to(path)
    save_report(tmp_path / "link", {"metrics": {}})
    before = path.read_text()

    def is_full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", is_full)
    with pytest.raises(ConfigError, match=r"cannot write .*link: No space left on device"):
        save_report(tmp_path / "link", {"metrics": {"speed": None}})
    assert path.read_text() == before and (tmp_path / "link").is_symlink()
    assert {entry.name for entry in tmp_path.iterdir()} == {"result", "link"}


def test_a_comparison_by_hand(tmp_path: Path) -> None:
    spread = {"median": 10.0, "low": 9.0, "high": 11.0}
    save_report(tmp_path / "x", {"model": "a", "metrics": {"speed": spread, "gone": spread, "none": None}})
    now = {"model": "b", "metrics": {"speed": {**spread, "median": 12.5}, "none": spread, "new": spread}}
    _, difference, *lines = compare(now, load_report(tmp_path / "x"))
    assert difference == "The model differs: a then, b now"
    assert lines == ["speed: 10 then, 12.5 now, now / then 1.250"]
    model = {"architecture": "Fake", "dtype": "bfloat16", "timeline": [["load", 1.0]]}
    later = {**model, "timeline": [["load", 2.0]]}
    assert len(list(compare({"model": later, "metrics": {}}, {"model": model, "metrics": {}}))) == 1
    _, difference = compare({"model": {**later, "dtype": "float32"}, "metrics": {}}, {"model": model, "metrics": {}})
    assert difference == "The model differs: dtype was bfloat16 and is float32"
    (tmp_path / "y").write_text("[]")
    for name, complaint in (("y", "is not a result"), ("z", "cannot read")):
        with pytest.raises(ConfigError, match=complaint):
            load_report(tmp_path / name)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--compare", "http://x"], "--compare needs --url"),
        (["--request-rate", "3"], "--request-rate needs --url"),
        (["--endpoint", "chat"], "--endpoint needs --url"),
        (["--url", "http://x", "--shape", "qwen3-tiny"], "--shape has no meaning"),
        (["--num-prompts", "3", "--batch", "2"], "--batch sets --num-prompts and --concurrency"),
        (["--no-ignore-eos"], "--ignore-eos needs a workload"),
        (["--url", "http://x", "--compare", "http://y", "--repeats", "4"], "at least --repeats 5"),
    ],
)
def test_options_without_effect_are_refused(arguments: list[str], complaint: str) -> None:
    result = bench(*arguments)
    assert result.exit_code == 2
    assert complaint in result.stderr


@pytest.mark.parametrize("command", ["bench", "chat"])
def test_flags_of_an_engine_in_this_process_are_refused_beside_a_url(
    command: str, servers: list[StandInServer], tmp_path: Path
) -> None:
    def run(*arguments: str, **environment: str) -> Result:
        line = [command, "--url", servers[0].url, *arguments]
        return CliRunner().invoke(cli, line, input="", env=environment, prog_name="pagewick")

    refused = run("-q", "q4_k_m", "--max_model_len", "9", "--tp=2", "--no-enable-prefix-caching")
    flags = "-q, --max-model-len, --tp and --no-enable-prefix-caching have no effect with --url"
    assert refused.exit_code == 2
    assert f"{flags}: the server has its own engine; leave them out." in " ".join(refused.stderr.split())
    assert len(refused.stderr.splitlines()) <= 6
    one = run("--device", "cpu")
    assert "--device has no effect with --url: the server has its own engine; leave it out." in one.stderr
    assert servers[0].requests == []
    # Variables and config files may be meant for `serve`; the model and the seed are for requests, too.
    file = tmp_path / "flags.toml"
    file.write_text("quantization = 'q4_k_m'")
    workload = ("--num-prompts", "1", "--repeats", "1") if command == "bench" else ()
    model = ("--model", servers[0].models[0])
    taken = run(*model, "--seed", "3", "--config", str(file), *workload, PAGEWICK_MAX_MODEL_LEN="9")
    assert taken.exit_code == 0, taken.output


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("ftp://x", "write http://host:port/v1"),
        ("x", "write http://host:port/v1"),
        ("http://", "write http://host:port/v1"),
        ("http://x/v1?a=b", "write http://host:port/v1"),
        ("http://x:99999", "write http://host:port/v1"),
        ("http://u:p@x/v1", "must not contain a password"),
        ("http://a..b:80/v1", "not a host name"),
        (f"http://{'x' * 64}/v1", "not a host name"),
        ("http://a b/v1", "not a host name"),
        ("http://a\0b/v1", "not a host name"),
        ("http://\udcff/v1", "not a host name"),
        ("http://x/\udcff", "characters that a URL cannot contain"),
        ("http://127.0.0.1:9/ü", "http://127.0.0.1:9/%C3%BC"),
        ("http://x/a b", "http://x/a%20b"),
        ("http://x:0/v1", "write http://host:port/v1"),
    ],
)
@pytest.mark.parametrize("command", ["bench", "chat"])
def test_wrong_addresses(url: str, complaint: str, command: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(complaint)):
        ServerAddress.parse(url)
    result = CliRunner().invoke(cli, [command, "--url", url])
    assert result.exit_code == 1
    assert complaint in result.stderr


def test_addresses() -> None:
    assert str(ServerAddress.parse("http://[::1]:8000/")) == "http://[::1]:8000/v1"
    assert str(ServerAddress.parse("https://api.example.org/openai/v1/")) == "https://api.example.org/openai/v1"
    assert ServerAddress.parse("https://x").port == 443
    assert ServerAddress.parse("http://bücher.example/v1/%C3%BC").host_header == "xn--bcher-kva.example"
    assert "secret" not in repr(ServerAddress.parse("http://x", "secret"))
