"""The supervisor with real engine processes that are killed, stopped, run in circles or are slow; nothing is left."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest
import uvloop
from msgspec import structs

from pagewick.config import EngineConfig
from pagewick.engine.messages import EngineRequest, EngineStats
from pagewick.engine.model_info import ModelInfo
from pagewick.engine.stats_sums import GAUGES, add_totals, without_gauges
from pagewick.engine.supervisor import Delays, Supervisor, Timing
from pagewick.errors import EngineDeadError, ModelLoadError, ModelNotFoundError
from pagewick.sampling_params import SamplingParams
from tests.engine.deltas import deltas_of
from tests.engine.odd_engine import DEADLOCK, LOOP, RAISE, SLOW, SLOW_LAYER_S
from tests.models.checkpoints import COMMON, write_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc, which only Linux has")

# As in life, but sooner.
TIMING = Timing(hang_timeout_s=1.2, hung_after_s=0.8, look_interval_s=0.1, first_delay_s=0.05, longest_delay_s=0.2)
PATIENT = replace(TIMING, hang_timeout_s=0.0)
# Long enough to be still running when another request has made the engine hang. Four of them fit into its 64 blocks.
LONG: dict[str, Any] = {"max_tokens": 480}


def run(body: Coroutine[Any, Any, Any]) -> None:
    """In the loop that the server uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(body)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", directory)
    return directory


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No process, no file in the temporary directory, nothing in shared memory."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    shared_memory = files_in_shared_memory()
    num_files = count_files()
    # Other tests of this process may have left processes that they use again.
    others = set(psutil.Process().children(recursive=True))
    yield
    assert set(psutil.Process().children(recursive=True)) - others == set()
    assert list(temporary.iterdir()) == []
    assert files_in_shared_memory() - shared_memory == set()
    assert count_files() == num_files


def files_in_shared_memory() -> set[str]:
    """Return the files in shared memory without a browser's, in which another worker may test the page meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith(".org.chromium")}


def count_files() -> int:
    """Our open files of the kinds that an engine process is given; event loops keep some of other kinds."""
    links = (Path("/proc/self/fd") / name for name in os.listdir("/proc/self/fd"))
    return sum(os.readlink(link).startswith(("socket:", "/memfd:")) for link in links if link.is_symlink())


@asynccontextmanager
async def supervised(model: Path, timing: Timing = TIMING, **options: Any) -> AsyncGenerator[Supervisor]:
    config = EngineConfig(model=str(model), device="cpu", num_threads=1, num_kv_blocks=64, **options)
    async with asyncio.timeout(240):
        supervisor = await Supervisor.start(config, timing=timing, module="tests.engine.odd_engine")
        ranks = [psutil.Process(pid) for pid in supervisor._client.child.process_ids]
        try:
            yield supervisor
        finally:
            ranks += [psutil.Process(pid) for pid in supervisor._client.child.process_ids if psutil.pid_exists(pid)]
            await supervisor.close()
        # Those that are not our children would not be found by who only looks there.
        assert not [rank for rank in ranks if rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE]
        assert supervisor.health.state == "dead"
        with pytest.raises(EngineDeadError, match="shutting down"):
            await collect(supervisor, request("late"))
    assert asyncio.all_tasks() == {asyncio.current_task()}


def request(request_id: str, first_token: int = 2, **params: Any) -> EngineRequest:
    params = {"max_tokens": 5, "ignore_eos": True, "temperature": 0.0, **params}
    prompt = [first_token, *range(2, 10)]
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=SamplingParams(**params), seed=1)


async def collect(supervisor: Supervisor, wanted: EngineRequest) -> list[int]:
    return [token_id async for delta in deltas_of(supervisor, wanted) for token_id in delta.token_ids]


def in_flight(supervisor: Supervisor, count: int = 4, **more: Any) -> list[asyncio.Task[list[int]]]:
    return [asyncio.create_task(collect(supervisor, request(f"r{i}", **{**LONG, **more}))) for i in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def until_state(supervisor: Supervisor, state: str) -> None:
    await until(lambda: supervisor.health.state == state)


async def busy(supervisor: Supervisor, count: int = 4) -> list[asyncio.Task[list[int]]]:
    """Requests of which tokens have come."""
    before = supervisor.stats.generation_tokens
    tasks = in_flight(supervisor, count)
    await until(lambda: supervisor.stats.generation_tokens > before + 8)
    return tasks


async def assert_refused(supervisor: Supervisor, why: str) -> None:
    assert not supervisor.is_alive
    with pytest.raises(EngineDeadError, match=rf"{why}.*; try again in \d+ seconds") as caught:
        await collect(supervisor, request("refused"))
    assert str(caught.value).endswith(f" {caught.value.retry_after_s} seconds")


async def assert_failed(tasks: list[asyncio.Task[list[int]]], why: str) -> None:
    async with asyncio.timeout(10):
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, EngineDeadError)
            assert why in str(result) and "send the request again" in str(result)


def totals(stats: EngineStats) -> dict[str, Any]:
    return {name: getattr(stats, name) for name in EngineStats.__struct_fields__ if name not in GAUGES}


def promised(info: ModelInfo) -> tuple[Any, ...]:
    """The properties of a model that clients have been told."""
    return (info.architecture, info.vocab_size, info.eos_token_ids, info.max_model_len, info.num_kv_blocks)


def assert_grown(before: EngineStats, after: EngineStats) -> None:
    for name, value in totals(before).items():
        now = getattr(after, name)
        pairs = zip(value, now, strict=True) if isinstance(value, list) else [(value, now)]
        assert all(one <= other for one, other in pairs), (name, value, now)


def test_an_engine_that_is_killed_comes_back(checkpoint: Path) -> None:
    async def body() -> None:
        async with supervised(checkpoint) as supervisor:
            expected = await collect(supervisor, request("a"))
            info, stats = supervisor.info, supervisor.stats
            for number in (1, 2):
                tasks = await busy(supervisor)
                pid = supervisor._client.child.pid
                os.kill(pid, signal.SIGKILL)
                await assert_failed(tasks, "was killed")
                assert supervisor.health.state == "restarting" and supervisor.health.retry_after_s >= 1
                await assert_refused(supervisor, "was killed.*it is being restarted")
                assert_grown(stats, supervisor.stats)
                stats = supervisor.stats
                assert {getattr(stats, name) for name in GAUGES} == {0}
                supervisor.abort(["r0", "unknown"])
                await until_state(supervisor, "ready")
                assert supervisor.health.num_restarts == number and supervisor.is_alive
                assert promised(supervisor.info) == promised(info) and not psutil.pid_exists(pid)
                assert totals(supervisor.stats) == totals(stats)
                assert await collect(supervisor, request("a")) == expected
                assert supervisor.stats.generation_tokens == stats.generation_tokens + len(expected)

    run(body())


def test_what_hangs_is_told_from_what_is_slow_or_idle(checkpoint: Path) -> None:
    """One engine, which nobody starts anew."""

    async def body() -> None:
        async with supervised(checkpoint, PATIENT) as supervisor:
            await stop_and_go_on(supervisor, is_idle=False)
            await stop_and_go_on(supervisor, is_idle=True)
            await be_slow(supervisor)
            assert supervisor.health.num_restarts == 0
            await run_in_circles(supervisor)

    run(body())


async def stop_and_go_on(supervisor: Supervisor, *, is_idle: bool) -> None:
    """With requests in flight, or idle, when nobody can know before there is one. Nobody is harmed."""
    expected = await collect(supervisor, request("a", **LONG))
    tasks = [] if is_idle else await busy(supervisor)
    pid = supervisor._client.child.pid
    if is_idle:
        await until(lambda: not supervisor._client.child.progress.read().is_busy)
    os.kill(pid, signal.SIGSTOP)
    if is_idle:
        await asyncio.sleep(1.5 * PATIENT.hung_after_s)
        assert supervisor.health.state == "ready"
        tasks = in_flight(supervisor)
    await until_state(supervisor, "hung")
    await assert_refused(supervisor, "makes no progress")
    assert not any(task.done() for task in tasks)
    os.kill(pid, signal.SIGCONT)
    await until_state(supervisor, "ready")
    assert await asyncio.gather(*tasks) == [expected] * 4


async def be_slow(supervisor: Supervisor) -> None:
    """Steps that take longer than a hang, of layers that take less."""
    assert SLOW_LAYER_S * 2 < PATIENT.hung_after_s < SLOW_LAYER_S * COMMON["num_hidden_layers"] * 4 / 2
    task = asyncio.create_task(collect(supervisor, request("slow", SLOW, max_tokens=4)))
    states = set()
    while not task.done():
        states.add(supervisor.health.state)
        await asyncio.sleep(0.02)
    assert len(await task) == 4 and states == {"ready"}


async def run_in_circles(supervisor: Supervisor) -> None:
    """It stays hung, also when nobody waits for it any more. At the end nobody waits until it hears that it is over."""
    supervisor._client._exit_grace_s = 3600.0
    task = asyncio.create_task(collect(supervisor, request("odd", LOOP)))
    await until_state(supervisor, "hung")
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await until(lambda: supervisor._watchdog.stalled_s > 2 * PATIENT.hung_after_s)
    assert supervisor.health.state == "hung"


def test_an_engine_that_hangs_for_good_is_started_anew(checkpoint: Path) -> None:
    async def body() -> None:
        async with supervised(checkpoint) as supervisor:
            pid = supervisor._client.child.pid
            tasks = await busy(supervisor)
            tasks.append(asyncio.create_task(collect(supervisor, request("odd", DEADLOCK))))
            await until_state(supervisor, "hung")
            assert not any(task.done() for task in tasks)
            await assert_failed(tasks, "made no progress")
            await until_state(supervisor, "ready")
            assert not psutil.pid_exists(pid)
            assert len(await collect(supervisor, request("a"))) == 5
            # The error message of a failing engine contains no details. An engine that is being started ends when we
            # close.
            with pytest.raises(EngineDeadError, match="RuntimeError") as info:
                await collect(supervisor, request("odd", RAISE))
            assert "secret" not in str(info.value) and "/home" not in supervisor.health.reason
            known = {*psutil.Process().children()}
            await until(lambda: bool({*psutil.Process().children()} - known))
            assert supervisor.health.state == "restarting"

    run(body())


def test_failed_starts_are_counted_and_tried_again(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Until it succeeds; but another model is not taken for this one."""
    caplog.set_level(logging.INFO, "pagewick")

    async def fail() -> NoReturn:
        raise ModelLoadError(f"{checkpoint} is not there")

    async def body() -> None:
        async with supervised(checkpoint) as supervisor:
            start, supervisor._start_client = supervisor._start_client, fail
            os.kill(supervisor._client.child.pid, signal.SIGKILL)
            await until(lambda: supervisor.health.num_failed_starts == 2)
            health = supervisor.health
            assert health.state == "restarting" and str(checkpoint) not in health.reason
            await assert_refused(supervisor, "could not be restarted yet")
            said = [record.message for record in caplog.records if "could not be started" in record.message]
            assert len(said) == 2 and all("is not there" in message for message in said)
            supervisor._start_client = asyncio.Event().wait  # type: ignore[assignment]
            supervisor._timing, supervisor._load_s = replace(TIMING, start_timeout_s=0.01), 0.001
            await until(lambda: "the engine was not ready after 0 seconds" in caplog.text)
            supervisor._start_client, supervisor._timing = start, TIMING
            supervisor.info = structs.replace(supervisor.info, max_model_len=9, num_kv_blocks=1)
            await until_state(supervisor, "ready")
            assert (supervisor.health.num_restarts, supervisor.health.num_failed_starts) == (1, 0)
            assert supervisor.info.max_model_len == 512 and "the context is 512 tokens now, not 9" in caplog.text
            before = (checkpoint / "config.json").stat()
            os.utime(checkpoint / "config.json")
            os.kill(supervisor._client.child.pid, signal.SIGKILL)
            await until(lambda: supervisor.health.num_failed_starts == 1)
            assert "have changed since the server started" in caplog.text
            os.utime(checkpoint / "config.json", ns=(before.st_atime_ns, before.st_mtime_ns))
            await until_state(supervisor, "ready")
            other = Other(structs.replace(supervisor.info, vocab_size=7))
            supervisor._start_client = other.start
            supervisor._delays = Delays(Timing(first_delay_s=3600, longest_delay_s=3600))
            os.kill(supervisor._client.child.pid, signal.SIGKILL)
            await until(lambda: supervisor.health.num_failed_starts == 1)
            assert "has changed (vocab_size changed)" in caplog.text and other.is_closed
            # To be closed while it waits for an hour is nothing special.
            assert supervisor.health.retry_after_s == 120

    run(body())


def test_without_a_watch_the_server_is_dead(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(now: float, num_sent: int) -> NoReturn:
        raise ZeroDivisionError("a mistake")

    async def body() -> None:
        async with supervised(checkpoint) as supervisor:
            supervisor._watchdog.look = fail  # type: ignore[method-assign]
            # It looks only while the engine has something to do.
            supervisor._client.stirred.set()
            await until_state(supervisor, "dead")
            assert "restart the server" in supervisor.health.reason
            assert caplog.records[-1].exc_info is not None

    run(body())


class Other:
    """The client of an engine with another model."""

    def __init__(self, info: ModelInfo) -> None:
        self.info = info
        self.is_closed = False

    async def start(self) -> Any:
        return self

    async def close(self) -> None:
        self.is_closed = True


def test_two_ranks_hang_and_die_together(checkpoint: Path) -> None:
    async def body() -> None:
        async with supervised(checkpoint, PATIENT, tensor_parallel_size=2) as supervisor:
            expected = await collect(supervisor, request("a", **LONG))
            first, second = supervisor._client.child.process_ids
            tasks = await busy(supervisor)
            os.kill(second, signal.SIGSTOP)
            await until_state(supervisor, "hung")
            os.kill(second, signal.SIGCONT)
            await until_state(supervisor, "ready")
            assert await asyncio.gather(*tasks) == [expected] * 4
            # With nothing to do, too, one follows the other.
            os.kill(second, signal.SIGKILL)
            await until_state(supervisor, "restarting")
            await until_state(supervisor, "ready")
            assert not {first, second} & set(psutil.pids())
            tasks = await busy(supervisor)
            pids = supervisor._client.child.process_ids
            # A stopped one is killed as well.
            os.kill(pids[1], signal.SIGSTOP)
            os.kill(pids[0], signal.SIGKILL)
            await assert_failed(tasks, "was killed")
            await until(lambda: not set(pids) & set(psutil.pids()))

    run(body())


def test_a_first_start_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        run(Supervisor.start(EngineConfig(model=str(tmp_path / "missing"))))


def test_a_start_can_be_cancelled(checkpoint: Path) -> None:
    others = psutil.Process().children()

    async def body() -> None:
        for seconds in (0.0, 0.001, 0.05, 0.5):
            start = asyncio.create_task(Supervisor.start(EngineConfig(model=str(checkpoint), num_kv_blocks=8)))
            await asyncio.sleep(seconds)
            start.cancel()
            with pytest.raises(asyncio.CancelledError):
                await start
            assert psutil.Process().children() == others

    run(body())


def test_delays_double_and_begin_anew_after_a_healthy_time() -> None:
    delays = Delays(Timing())
    assert [delays.take(9.9) for _ in range(9)] == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
    assert [delays.take(10.0), delays.take(), delays.take(9.0)] == [0, 0.5, 1]


def test_totals_add_up_and_gauges_are_those_of_today() -> None:
    past = EngineStats(num_steps=5, generation_tokens=7, num_blocks=9, iteration_token_counts=[1, 2])
    today = EngineStats(num_steps=1, prompt_tokens=2, num_blocks=4, iteration_token_counts=[0, 5, *range(12)])
    both = add_totals(past, today)
    assert (both.num_steps, both.generation_tokens, both.prompt_tokens, both.num_blocks) == (6, 7, 2, 4)
    assert both.iteration_token_counts == [1, 7, *range(12)]
    assert add_totals(EngineStats(), today) == today
    gone = without_gauges(both)
    assert gone.num_blocks == 0 and totals(gone) == totals(both)
    assert add_totals(gone, EngineStats()) == gone
