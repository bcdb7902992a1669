"""EngineClient with a real engine process and a tiny checkpoint: requests, aborts, and every way to die."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import psutil
import pytest
from msgspec import structs

from pagewick.config import EngineConfig
from pagewick.engine.client import EngineClient
from pagewick.engine.messages import EngineRequest, RequestDelta, RequestOptions
from pagewick.errors import (
    ConfigError,
    ContextLengthError,
    EngineDeadError,
    InvalidRequestError,
    ModelNotFoundError,
    PagewickError,
)
from pagewick.sampling_params import SamplingParams
from tests.engine.deltas import deltas_of
from tests.models.checkpoints import write_checkpoint

NUM_KV_BLOCKS = 24
CONTEXT = 512
LONG: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True}

# A parent that starts an engine and says what a test wants to know of it.
PARENT = """
import asyncio, json, sys
from pagewick.config import EngineConfig
from pagewick.engine.client import EngineClient

async def main():
    client = await EngineClient.start(EngineConfig(model=sys.argv[1], num_threads=1, num_kv_blocks=8))
    print(json.dumps({"pid": client.child.pid, "imports_torch": "torch" in sys.modules}), flush=True)
    await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", directory)
    return directory


def config(checkpoint: Path, **options: Any) -> EngineConfig:
    return EngineConfig(model=str(checkpoint), device="cpu", num_threads=1, num_kv_blocks=NUM_KV_BLOCKS, **options)


def request(prompt_token_ids: Sequence[int], request_id: str = "a", *, seed: int = 1, **params: Any) -> EngineRequest:
    return EngineRequest(
        request_id=request_id, prompt_token_ids=list(prompt_token_ids), params=SamplingParams(**params), seed=seed
    )


def token_ids_of(deltas: Sequence[RequestDelta], index: int = 0) -> list[int]:
    return [token_id for delta in deltas if delta.choice_index == index for token_id in delta.token_ids]


class Served:
    """A client and the event loop that it lives in."""

    def __init__(self, runner: asyncio.Runner, client: EngineClient) -> None:
        self.run = runner.run
        self.client = client


@pytest.fixture(scope="module")
def served(checkpoint: Path) -> Iterator[Served]:
    with asyncio.Runner() as runner:
        client = runner.run(EngineClient.start(config(checkpoint)))
        yield Served(runner, client)
        pid = client.child.pid
        runner.run(client.close())
        assert not psutil.pid_exists(pid)


async def collect(client: EngineClient, wanted: EngineRequest) -> list[RequestDelta]:
    return [delta async for delta in deltas_of(client, wanted)]


async def first_of(client: EngineClient, wanted: EngineRequest, count: int = 1) -> list[RequestDelta]:
    """The first deltas; then the iterator is left."""
    found = []
    async with aclosing(deltas_of(client, wanted)) as deltas:
        async for delta in deltas:
            found.append(delta)
            if len(found) == count:
                break
    return found


async def idle(client: EngineClient) -> None:
    """Wait until the engine has nothing left to do and says so."""
    while client.stats.num_requests_running or client.stats.num_requests_waiting or client.stats.num_referenced_blocks:
        await asyncio.sleep(0.01)


def test_the_client_knows_what_the_engine_loaded(served: Served, checkpoint: Path) -> None:
    info = served.client.info
    assert (info.model_path, info.architecture) == (str(checkpoint), "LlamaForCausalLM")
    assert (info.vocab_size, info.max_model_len, info.num_kv_blocks) == (193, CONTEXT, NUM_KV_BLOCKS)
    assert info.kv_cache_bytes > 0 and info.num_parameters > 0
    assert served.client.is_alive


def test_a_request_is_answered_token_by_token(served: Served) -> None:
    deltas = served.run(
        collect(served.client, request(range(2, 12), max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=0))
    )
    assert [len(delta.token_ids) for delta in deltas] == [1] * 6
    assert [delta.finish_reason for delta in deltas] == [None] * 5 + ["length"]
    assert [len(delta.logprobs or []) for delta in deltas] == [1] * 6
    assert [found.token_id for found in deltas[0].prompt_logprobs or []] == [*range(3, 12)]


def test_concurrent_requests_are_answered_as_each_alone(served: Served) -> None:
    wanted = [
        request([*range(2, 5 + 11 * number)], f"r{number}", seed=number, max_tokens=20 + number, temperature=0.8)
        for number in range(8)
    ]

    async def together() -> list[list[RequestDelta]]:
        return await asyncio.gather(*(collect(served.client, each) for each in wanted))

    answers = served.run(together())
    for each, deltas in zip(wanted, answers, strict=True):
        assert token_ids_of(deltas) == token_ids_of(served.run(collect(served.client, each)))
    served.run(idle(served.client))


def test_choices_are_those_of_requests_alone(served: Served) -> None:
    """A choice depends on its index only, and one that is stopped leaves the others as they are."""
    # Long enough that the engine cannot finish a choice before it reads that it should stop.
    options: dict[str, Any] = {"max_tokens": 400, "ignore_eos": True, "seed": 5}

    async def stop_one() -> list[RequestDelta]:
        found = []
        async with aclosing(deltas_of(served.client, request(range(2, 40), "stopped", n=3, **options))) as deltas:
            async for delta in deltas:
                found.append(delta)
                if delta.choice_index == 1 and len(token_ids_of(found, 1)) == 4:
                    served.client.abort([], [("stopped", 1)])
        return found

    alone = served.run(collect(served.client, request(range(2, 40), n=1, **options)))
    both = served.run(collect(served.client, request(range(2, 40), n=2, **options)))
    stopped = served.run(stop_one())
    assert token_ids_of(alone) == token_ids_of(both, 0) == token_ids_of(stopped, 0)
    assert len(token_ids_of(both, 1)) == 400 and token_ids_of(both, 1) != token_ids_of(both, 0)
    assert 4 <= len(token_ids_of(stopped, 1)) < 400
    assert token_ids_of(both, 1)[:4] == token_ids_of(stopped, 1)[:4]
    assert len(token_ids_of(stopped, 2)) == 400
    served.run(idle(served.client))


def test_an_id_can_be_used_again_at_once(served: Served) -> None:
    async def again() -> list[RequestDelta]:
        await first_of(served.client, request([2, 3], "again", **LONG), count=2)
        return await collect(served.client, request([2, 3, 4], "again", max_tokens=3, ignore_eos=True))

    deltas = served.run(again())
    alone = served.run(collect(served.client, request([2, 3, 4], max_tokens=3, ignore_eos=True)))
    assert token_ids_of(deltas) == token_ids_of(alone)
    served.run(idle(served.client))


def test_a_request_whose_time_is_over_says_so(served: Served) -> None:
    late = structs.replace(request([2, 3], "late", **LONG), options=RequestOptions(timeout_s=0.001))
    last = served.run(collect(served.client, late))[-1]
    assert (last.finish_reason, last.error_kind) == ("error", "DeadlineExceededError")
    served.run(idle(served.client))
    assert served.client.stats.num_expired >= 1


def test_leaving_the_iterator_aborts_the_request(served: Served) -> None:
    before = served.client.stats.generation_tokens
    wanted = [request([2, 3, 4 + number], f"left{number}", **LONG) for number in range(6)]

    async def some_leave() -> list[list[RequestDelta]]:
        stays = collect(served.client, request([9, 9], "stays", max_tokens=30, ignore_eos=True))
        answers = await asyncio.gather(stays, *(first_of(served.client, each, count=3) for each in wanted))
        await idle(served.client)
        return answers

    stays, *left = served.run(some_leave())
    assert len(token_ids_of(stays)) == 30
    assert [len(deltas) for deltas in left] == [3] * 6
    assert served.client.stats.generation_tokens - before < 6 * LONG["max_tokens"]
    assert served.client.stats.num_free_blocks + served.client.stats.num_cached_blocks == NUM_KV_BLOCKS


def test_a_cancelled_task_aborts_its_request(served: Served) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(collect(served.client, request([2, 3], "cancelled", **LONG)))
        while not served.client.stats.num_requests_running:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await idle(served.client)

    served.run(cancel())


def test_abort_ends_the_iterators(served: Served) -> None:
    async def abort() -> list[RequestDelta]:
        task = asyncio.create_task(collect(served.client, request([2, 3], "aborted", **LONG)))
        while not served.client.stats.num_requests_running:
            await asyncio.sleep(0.01)
        served.client.abort(["aborted", "unknown"])
        deltas = await task
        await idle(served.client)
        return deltas

    assert served.run(abort())[-1].finish_reason == "abort"


def test_what_can_never_be_served_is_refused_before_it_is_sent(served: Served) -> None:
    for wrong, error in (
        (request([]), InvalidRequestError),
        (request([193]), InvalidRequestError),
        (request([2] * 100, max_tokens=CONTEXT), ContextLengthError),
    ):
        with pytest.raises(error):
            served.run(collect(served.client, wrong))


def test_a_request_id_that_is_in_use_is_refused(served: Served) -> None:
    async def twice() -> None:
        async with aclosing(deltas_of(served.client, request([2, 3], "twice", **LONG))) as deltas:
            await anext(deltas)
            try:
                with pytest.raises(InvalidRequestError, match="in use"):
                    await collect(served.client, request([2, 3], "twice", max_tokens=1))
                assert len((await anext(deltas)).token_ids) == 1
            finally:
                served.client.abort(["twice"])

    served.run(twice())


@pytest.mark.parametrize("death", ["killed", "closed"])
def test_when_the_engine_ends_requests_in_flight_fail(
    death: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def live_and_die() -> None:
        client = await EngineClient.start(config(checkpoint))
        assert list(tmp_path.iterdir()) == [], "the socket is left behind"
        pid = client.child.pid
        async with aclosing(deltas_of(client, request([2, 3], **LONG))) as deltas:
            await anext(deltas)
            waiting = asyncio.create_task(collect(client, request([4, 5], "other", **LONG)))
            if death == "killed":
                os.kill(pid, signal.SIGKILL)
            else:
                await client.close()
            with pytest.raises(EngineDeadError):
                async for _ in deltas:
                    pass
            with pytest.raises(EngineDeadError):
                await waiting
        assert not client.is_alive
        with pytest.raises(EngineDeadError):
            await collect(client, request([2, 3]))
        await client.close()
        assert not psutil.pid_exists(pid)

    asyncio.run(live_and_die())


@pytest.mark.parametrize("wrong", ["directory", "context"])
def test_what_the_engine_raises_at_its_start_reaches_the_client(wrong: str, checkpoint: Path, tmp_path: Path) -> None:
    bad, error = {
        "directory": (config(tmp_path / "missing"), ModelNotFoundError),
        "context": (config(checkpoint, max_model_len=CONTEXT + 1), ConfigError),
    }[wrong]
    before = psutil.Process().children()
    with pytest.raises(PagewickError) as info:
        asyncio.run(EngineClient.start(bad))
    assert type(info.value) is error
    assert psutil.Process().children() == before


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux, which ends a process together with its parent")
@pytest.mark.parametrize("is_stopped", [False, True])
def test_the_engine_ends_with_its_parent_which_never_imports_torch(is_stopped: bool, checkpoint: Path) -> None:
    """Also one that could not do so by itself."""
    with subprocess.Popen([sys.executable, "-c", PARENT, str(checkpoint)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        said = json.loads(parent.stdout.readline())
        engine = psutil.Process(said["pid"])
        if is_stopped:
            engine.suspend()
        parent.kill()
    assert said["imports_torch"] is False
    psutil.wait_procs([engine], timeout=60)
    assert not engine.is_running() or engine.status() == psutil.STATUS_ZOMBIE
