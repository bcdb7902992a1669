"""The engine process's loop over a scripted engine: what is refused, what is aborted, what is not a message."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from pagewick import engine_process
from pagewick.config import EngineConfig
from pagewick.engine.messages import (
    FRAME_HEADER_BYTES,
    Abort,
    Add,
    EngineRequest,
    EngineStats,
    Failed,
    Outputs,
    Ready,
    RequestDelta,
    Start,
    decode_from_engine,
    encode_frame,
    frame_length,
)
from pagewick.engine.progress import Progress, Reading
from pagewick.engine_process import Inbox, ProtocolError
from pagewick.errors import PagewickError, QueueFullError
from pagewick.grammar_queue import GrammarQueue
from pagewick.sampling_params import SamplingParams
from pagewick.text.grammars.constraint import GrammarCompiler
from tests.scripted_engine import ScriptedEngine


class Full(ScriptedEngine):
    """One that takes no request called "late"."""

    def add(self, request: EngineRequest) -> None:
        if request.request_id == "late":
            raise QueueFullError("1 request waits already; try again later", retry_after_s=9)
        super().add(request)


def request(request_id: str, token_id: int = 5, **params: Any) -> EngineRequest:
    params = {"max_tokens": 4, **params}
    return EngineRequest(request_id=request_id, prompt_token_ids=[token_id], params=SamplingParams(**params), seed=1)


class Running:
    """`_serve` in a thread; `said` is every delta until its end."""

    def __init__(self) -> None:
        self.engine = Full(EngineConfig(), script=lambda request: [7] * 100, vocab_size=50, eos_token_id=49)
        self.client, self._connection = socket.socketpair()
        self.inbox: Inbox = engine_process.queue.SimpleQueue()
        self._is_ready = threading.Event()
        self._is_ready.set()
        self.failure: Exception | None = None
        self.progress = Progress.private()
        self._threads = [threading.Thread(target=target) for target in (self._read, self._serve)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def finish(self) -> list[RequestDelta]:
        """Close our end for writing; all that was said."""
        self.client.shutdown(socket.SHUT_WR)
        said = []
        with self.client.makefile("rb") as stream:
            while header := stream.read(FRAME_HEADER_BYTES):
                message = decode_from_engine(stream.read(frame_length(header)))
                assert isinstance(message, Outputs)
                said += message.deltas
        for thread in self._threads:
            thread.join()
        self.client.close()
        self._connection.close()
        return said

    def _read(self) -> None:
        engine_process._read_into(self._connection, self.inbox, self._is_ready)

    def _serve(self) -> None:
        try:
            grammars = GrammarQueue(EngineConfig(), self.inbox.put)
            engine: Any = self.engine
            engine_process._serve(engine, grammars, self.inbox, self._connection, self.progress)
        except Exception as error:
            self.failure = error
        finally:
            self._connection.shutdown(socket.SHUT_WR)


@pytest.fixture
def running() -> Iterator[Running]:
    yield Running()


def test_refusals_are_deltas_with_their_class(running: Running) -> None:
    wrong = [request("late"), request("unknown token", 50), request("too long", max_tokens=600), request("good")]
    running.client.sendall(encode_frame(Add(wrong)))
    running.start()
    while running.failure is None and (not running.engine.requests or running.engine.has_work):
        time.sleep(0.001)
    said = running.finish()
    refused = {delta.request_id: delta for delta in said if delta.error is not None}
    assert {name: delta.error_kind for name, delta in refused.items()} == {
        "late": "QueueFullError",
        "unknown token": "InvalidRequestError",
        "too long": "ContextLengthError",
    }
    assert {delta.finish_reason for delta in refused.values()} == {"error"}
    assert (refused["late"].error, refused["late"].retry_after_s) == ("1 request waits already; try again later", 9)
    assert [delta.token_ids for delta in said if delta.request_id == "good"] == [[7]] * 4
    assert running.failure is None


def test_a_choice_is_aborted_alone(running: Running) -> None:
    long = request("long", n=3, max_tokens=None)
    running.client.sendall(encode_frame(Add([long])) + encode_frame(Abort([], [("long", 1)])))
    running.client.sendall(encode_frame(Abort(["nobody"])))
    running.start()
    said = running.finish()
    assert running.engine.aborted_choices == [("long", 1)]
    assert running.engine.aborted == []
    assert {delta.choice_index for delta in said} <= {0, 1, 2}


def test_a_request_that_is_aborted_during_a_step_has_no_further_one(running: Running) -> None:
    """So that what it holds is free within one step. The other one goes on."""
    wanted = [request("left", max_tokens=None), request("stays", max_tokens=10)]
    num_steps = 0

    def leave_in_the_third_step() -> None:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            running.client.sendall(encode_frame(Abort(["left"])))
            while running.progress.read().num_taken == 1 and running.inbox.empty():
                time.sleep(0.001)

    running.engine.on_step = leave_in_the_third_step
    running.client.sendall(encode_frame(Add(wanted)))
    running.start()
    while running.failure is None and (not running.engine.requests or running.engine.has_work):
        time.sleep(0.001)
    said = running.finish()
    assert running.engine.aborted == ["left"]
    assert sum(len(delta.token_ids) for delta in said if delta.request_id == "left") == 3
    assert sum(len(delta.token_ids) for delta in said if delta.request_id == "stays") == 10


def test_the_client_learns_of_a_session_that_ends_while_the_engine_is_idle(running: Running) -> None:
    running.engine.session_ends = time.monotonic() + 0.2
    running.start()
    with running.client.makefile("rb") as stream:
        message = decode_from_engine(stream.read(frame_length(stream.read(FRAME_HEADER_BYTES))))
    assert isinstance(message, Outputs) and not message.deltas and message.stats.num_sessions == 0
    assert running.finish() == []
    # It slept between the two, and after the second.
    assert running.engine.num_idle_checks == 2


def test_an_idle_engine_prepares_for_grammars(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    prepared: list[bool] = []
    is_prepared = threading.Event()

    def prepare(compiler: GrammarCompiler, vocab_size: int) -> None:
        prepared.append(running.engine.has_work)
        is_prepared.set()

    monkeypatch.setattr(GrammarCompiler, "prepare", prepare)
    monkeypatch.setattr(engine_process, "PREPARE_AFTER_S", 0.01)
    running.engine.on_step = lambda: prepared.append(True)
    running.client.sendall(encode_frame(Add([request("r")])))
    running.start()
    assert is_prepared.wait(30)
    running.finish()
    assert prepared == [True] * 4 + [False]


def test_a_compiled_grammar_is_not_counted_as_a_message(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client compares the number of messages with those that it has sent."""
    monkeypatch.setattr(GrammarCompiler, "compile", lambda *_: None)
    formed = request("formed")
    formed.constraint = {"type": "grammar", "grammar": 'start: "a"'}
    running.client.sendall(encode_frame(Add([formed])))
    running.start()
    while running.failure is None and (not running.engine.requests or running.progress.read().is_busy):
        time.sleep(0.001)
    assert running.progress.read().num_taken == 1
    assert sum(len(delta.token_ids) for delta in running.finish()) == 4


def test_progress_tells_work_from_rest(running: Running) -> None:
    readings: list[Reading] = []
    running.engine.on_step = lambda: readings.append(running.progress.read())
    running.start()
    for number in (1, 2):
        running.client.sendall(encode_frame(Add([request(f"r{number}")])))
        while running.progress.read().num_taken < number or running.progress.read().is_busy:
            time.sleep(0.001)
    # A message that makes no work is counted as well.
    running.client.sendall(encode_frame(Abort(["unknown"])))
    while running.progress.read().num_taken < 3 or running.progress.read().is_busy:
        time.sleep(0.001)
    running.finish()
    assert [reading.num_taken for reading in readings] == [1] * 4 + [2] * 4
    assert all(reading.is_busy for reading in readings)
    counts = [reading.count for reading in readings]
    assert counts == sorted(set(counts)), "a step without a mark"


@pytest.mark.parametrize(
    "frame",
    [b"\x00\x00\x00\x03\xc1\xc1\xc1", b"\xff" * 8, encode_frame(Outputs([], EngineStats()))],
    ids=["garbage", "too long", "another message"],
)
def test_what_is_no_message_ends_the_engine_with_the_reason(running: Running, frame: bytes) -> None:
    running.client.sendall(frame)
    running.start()
    assert running.finish() == []
    assert isinstance(running.failure, ProtocolError)
    assert "not a message" in str(running.failure) and not isinstance(running.failure, PagewickError)


@pytest.mark.parametrize("length", [1, 3, 4, 5, 30])
def test_a_connection_that_ends_inside_a_frame_just_ends(running: Running, length: int) -> None:
    running.client.sendall(encode_frame(Add([request("cut off")]))[:length])
    running.start()
    assert running.finish() == []
    assert running.failure is None and running.engine.requests == []


class BrokenDevice(ScriptedEngine):
    """One whose GPU has failed: everything that asks it for something raises."""

    def step(self) -> list[RequestDelta]:
        raise RuntimeError("CUDA error: an illegal memory access")

    def close(self) -> None:
        super().close()
        raise RuntimeError("CUDA error: an illegal memory access, again")


def test_a_device_that_fails_again_while_the_engine_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process still ends with a status, and has told the client."""
    engine = BrokenDevice(EngineConfig(), script=lambda request: [7] * 4, vocab_size=50, eos_token_id=49)
    monkeypatch.setattr(engine_process, "_load", lambda config, grammars: (engine, 0.0))
    monkeypatch.setattr(engine_process, "die_with_parent", lambda parent: None)
    monkeypatch.setattr(engine_process.log, "set_up", lambda: None)
    monkeypatch.setattr(engine_process.signal, "signal", lambda number, action: None)
    thresholds = gc.get_threshold()
    client, connection = socket.socketpair()
    with client, client.makefile("rb") as stream:
        client.sendall(encode_frame(Start(EngineConfig())) + encode_frame(Add([request("a")])))
        try:
            assert engine_process.main(connection.detach(), 1) == 1
        finally:
            gc.set_threshold(*thresholds)
        said = [decode_from_engine(stream.read(frame_length(stream.read(FRAME_HEADER_BYTES)))) for _ in range(2)]
    ready, failed = said
    assert isinstance(ready, Ready) and engine.is_closed
    assert failed == Failed("EngineError", "the engine failed (RuntimeError); the log says more")
