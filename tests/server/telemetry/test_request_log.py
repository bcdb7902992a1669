"""Log, metrics and the client's own counts agree about requests, and the log never has their text."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from typing import Any

import pytest

from pagewick.errors import EngineError, PagewickError
from pagewick.generation import Generation
from pagewick.log import printable
from pagewick.sampling_params import SamplingParams
from pagewick.server.settings import ServerSettings
from pagewick.server.telemetry.metrics import Metrics
from pagewick.server.telemetry.request_log import MAX_LOGGED_CHARS, Observation, RequestLog, quoted
from tests.fake_engine import DEATH, NAN_ROW, FakeClient, fake_engine, spell
from tests.server.telemetry.test_metrics import MODEL, scrape

SECRET = "my secret prompt"


class Bench:
    """A request log over a fake engine, and its records."""

    def __init__(self, caplog: pytest.LogCaptureFixture, **settings: Any) -> None:
        self.client = FakeClient()
        self.metrics = Metrics(MODEL, self.client.info, lambda: self.client.stats)
        self.log = RequestLog(ServerSettings(served_model_name=(MODEL,), **settings), self.metrics)
        self._caplog = caplog
        self._num_requests = 0

    @property
    def lines(self) -> list[str]:
        return self._caplog.messages

    def run(
        self, *, leave_after: int | None = None, stream: bool = False, adapter: str = "", **params: Any
    ) -> Generation:
        """Run one request as a handler does. leave_after: number of deltas after which the client leaves."""

        async def run() -> Generation:
            engine = fake_engine(self.client)
            self._num_requests += 1
            request_id = f"r{self._num_requests}"
            sampling = SamplingParams(**params)
            prompt = spell(SECRET)
            seen = Observation(
                self.log,
                request_id,
                "chat",
                len(prompt),
                stream,
                sampling.n,
                max_tokens=sampling.max_tokens,
                prompt=SECRET,
            )
            plan = await engine.prepare(sampling, adapter=adapter)
            generation = engine.generation(prompt, plan, request_id=request_id, on_delta=seen.on_delta)
            seen.generation = generation
            if leave_after == 0:
                return generation
            num_deltas = 0
            try:
                async with generation:
                    async for _ in generation:
                        num_deltas += 1
                        if num_deltas == leave_after:
                            raise asyncio.CancelledError
            except (asyncio.CancelledError, PagewickError):
                pass
            return generation

        return asyncio.run(run())

    def leave_at_once(self) -> None:
        """Run a request whose client leaves before the first token."""
        self.client.pause_at = 0

        async def run() -> None:
            engine = fake_engine(self.client)
            seen = Observation(self.log, "gone", "chat", 3, True, 1)
            generation = engine.request([1, 2, 3], SamplingParams(), request_id="gone", on_delta=seen.on_delta)
            seen.generation = generation

            async def read() -> None:
                async with generation:
                    async for _ in generation:
                        pass

            reading = asyncio.create_task(read())
            while not self.client.num_paused:
                await asyncio.sleep(0)
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

        asyncio.run(run())


@pytest.fixture
def caplog_info(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="pagewick"):
        yield caplog


@pytest.fixture
def bench(caplog_info: pytest.LogCaptureFixture) -> Bench:
    return Bench(caplog_info)


TIMES = r"queue 0\.\d{3} s, prefill \d+\.\d\d s, decode \d+\.\d\d s(, \d+\.\d tokens/s)?"


def test_a_line_says_what_a_request_was(bench: Bench, caplog_info: pytest.LogCaptureFixture) -> None:
    bench.client.extras = {"num_cached_tokens": 12, "queue_s": 0.0034, "prefill_s": 1.239}
    bench.run(stream=True)
    (line,) = bench.lines
    # "Hello 😀!" is 11 bytes, a token each, and the end.
    assert re.fullmatch(
        r"request r1 chat stream stop: 16 prompt tokens \(12 cached\), 12 generated, "
        r"queue 0\.003 s, prefill 1\.24 s, decode 0\.11 s, 100\.0 tokens/s",
        line,
    )
    assert caplog_info.records[0].request_id == "r1"  # type: ignore[attr-defined]
    assert caplog_info.records[0].levelno == logging.INFO


def test_the_rate_is_the_engines_even_if_its_deltas_arrive_late(bench: Bench) -> None:
    """The fake engine's deltas all arrive at once, and it says that each token took 10 ms."""
    bench.client.texts = ["x" * 300]
    bench.run()
    assert "301 generated" in bench.lines[0] and bench.lines[0].endswith("decode 3.00 s, 100.0 tokens/s")
    samples = scrape(bench.metrics)
    assert samples["vllm:request_decode_time_seconds_sum"] == 3.0
    assert samples["vllm:inter_token_latency_seconds_sum"] == pytest.approx(3.0)


def test_one_token_has_no_rate(bench: Bench) -> None:
    bench.run(max_tokens=1)
    assert bench.lines[0].endswith("1 generated, queue 0.000 s, prefill 0.00 s, decode 0.00 s")


def test_choices_are_summed_and_the_worst_end_counts(bench: Bench) -> None:
    bench.client.texts = ["ab", "abcdefgh"]
    bench.run(n=2, max_tokens=6)
    (line,) = bench.lines
    assert re.fullmatch(rf"request r1 chat length: 16 prompt tokens \(0 cached\), 9 generated, {TIMES}", line)


def test_candidates_that_were_not_the_best_are_counted(bench: Bench) -> None:
    generation = bench.run(n=1, best_of=3)
    assert generation.stream.num_output_tokens == 36
    assert " 36 generated," in bench.lines[0]
    assert scrape(bench.metrics)["vllm:request_generation_tokens_sum"] == 36


def test_nothing_is_said_of_what_was_said(bench: Bench) -> None:
    bench.client.texts = ["the secret answer"]
    bench.run()
    assert "secret" not in "".join(bench.lines) and "Hello" not in "".join(bench.lines)


def test_no_lines_if_nobody_wants_them(caplog_info: pytest.LogCaptureFixture) -> None:
    bench = Bench(caplog_info, log_requests=False)
    bench.run()
    bench.log.refused("r9", "POST", "/v1/chat/completions", 400, "invalid_request")
    assert bench.lines == [] and scrape(bench.metrics)["vllm:request_success_total stop"] == 1


def test_texts_are_logged_on_request_only_and_harmless(caplog_info: pytest.LogCaptureFixture) -> None:
    bench = Bench(caplog_info, log_prompts=True)
    bench.client.texts = ["an\r\nINFO forged \x1b[2J 😀"]
    bench.run()
    _, prompt, answer = bench.lines
    assert prompt == f"request r1 prompt: '{SECRET}'"
    assert answer == r"request r1 answer 0: 'an\r\nINFO forged \x1b[2J 😀'"


@pytest.mark.parametrize("length", [MAX_LOGGED_CHARS - 1, MAX_LOGGED_CHARS, MAX_LOGGED_CHARS + 1])
def test_long_texts_are_cut(length: int) -> None:
    text = quoted("é" * length)
    assert text.count("é") == min(length, MAX_LOGGED_CHARS)
    assert text.endswith(f"'... ({length} characters)") == (length > MAX_LOGGED_CHARS)
    assert printable(text) == text


def test_refusals_have_a_line(bench: Bench) -> None:
    bench.log.refused("r9", "POST", "/v1/chat/completions", 429, "queue_full")
    assert bench.lines == ["request r9 POST /v1/chat/completions refused: 429 queue_full"]


# The books


def reasons(bench: Bench) -> dict[str, float]:
    samples = scrape(bench.metrics)
    start = "vllm:request_success_total "
    found = {name.removeprefix(start): value for name, value in samples.items() if name.startswith(start) and value}
    assert sum(found.values()) == samples["pagewick:requests_accepted_total"]
    assert sum(found.values()) == samples["vllm:e2e_request_latency_seconds_count"]
    return found


def test_every_request_ends_once_whatever_happens(bench: Bench) -> None:
    bench.run()
    assert reasons(bench) == {"stop": 1}
    bench.run(max_tokens=2, n=3)
    assert reasons(bench) == {"stop": 1, "length": 1}
    bench.run(leave_after=1, stream=True)
    bench.run(leave_after=2, n=4)
    assert reasons(bench) == {"stop": 1, "length": 1, "abort": 2}
    for failure in (NAN_ROW, DEATH, {"error": "full", "error_kind": "QueueFullError", "retry_after_s": 3},
                    {"error": "late", "error_kind": "DeadlineExceededError"}):  # fmt: skip
        for pause_at in (0, 3):
            bench.client.failure, bench.client.pause_at = failure, pause_at
            bench.run(n=2)
    assert reasons(bench) == {"stop": 1, "length": 1, "abort": 2, "error": 8}
    said = [line.partition(":")[0].split()[-1] for line in bench.lines]
    assert said == ["stop", "length", "abort", "abort", *["error"] * 8]


def test_the_adapter_is_named(bench: Bench) -> None:
    bench.client.info.adapters = {"a\nb": "/path"}
    bench.run(stream=True, adapter="a\nb")
    bench.run(stream=True)
    assert bench.lines[0].startswith("request r1 chat stream with a\\nb stop: ")
    assert bench.lines[1].startswith("request r2 chat stream stop: ")


def test_one_that_left_before_the_first_token_was_aborted(bench: Bench) -> None:
    bench.leave_at_once()
    assert reasons(bench) == {"abort": 1}
    assert bench.lines[0].startswith("request gone chat stream abort: 3 prompt tokens (0 cached), 0 generated, queue")
    samples = scrape(bench.metrics)
    assert samples["vllm:time_to_first_token_seconds_count"] == samples["vllm:request_prefill_time_seconds_count"] == 0


def test_one_that_never_started_was_never_accepted(bench: Bench) -> None:
    """The first of two prompts never starts if the second is refused."""
    bench.run(leave_after=0)
    assert reasons(bench) == {} and bench.lines == []


def test_tokens_are_those_that_the_client_got(bench: Bench) -> None:
    num_generated = num_first = num_between = 0
    for params in ({}, {"n": 3}, {"max_tokens": 5}, {"stop": ("lo",)}, {"n": 2, "max_tokens": 1}):
        generation = bench.run(**params)
        counts = [len(one.token_ids) for one in generation.output.outputs]
        num_generated += sum(counts)
        num_first += 1
        num_between += sum(count - 1 for count in counts)
    samples = scrape(bench.metrics)
    assert samples["vllm:request_generation_tokens_sum"] == num_generated
    assert samples["vllm:request_prompt_tokens_sum"] == 5 * len(SECRET)
    assert samples["vllm:time_to_first_token_seconds_count"] == num_first
    assert samples["vllm:inter_token_latency_seconds_count"] == num_between
    assert samples["vllm:request_params_n_sum"] == 1 + 3 + 1 + 1 + 2
    assert samples["vllm:request_params_max_tokens_count"] == 2


def test_an_error_of_ours_is_an_error(bench: Bench) -> None:
    bench.client.failure, bench.client.pause_at = EngineError("x"), 0
    bench.run()
    assert reasons(bench) == {"error": 1}
