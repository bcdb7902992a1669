"""`python -m benchmarks.steady_engine SOCKET PARENT_PID`: an engine process without a model, for benchmarks.

In every step each running request gets one token of a fixed text. A step takes PERIOD_US microseconds for each of
them, so that the process that turns tokens into events always keeps up.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

from pagewick.config import EngineConfig
from pagewick.engine.messages import (
    FRAME_HEADER_BYTES,
    Abort,
    Add,
    EngineRequest,
    EngineStats,
    FromEngine,
    Outputs,
    Ready,
    RequestDelta,
    Start,
    decode_to_engine,
    encode_frame,
    frame_length,
)
from pagewick.engine.model_info import ModelInfo
from pagewick.parallel.launch import die_with_parent
from pagewick.text.tokenizer import Tokenizer

# The environment variable with the microseconds of a step for each request.
PERIOD_VARIABLE = "PAGEWICK_BENCHMARK_PERIOD_US"
TEXT = Path(__file__).with_name("README.md")
MAX_MODEL_LEN = 1 << 20


def info_of(config: EngineConfig) -> ModelInfo:
    model = json.loads((Path(config.model) / "config.json").read_text(encoding="utf-8"))
    return ModelInfo(
        model_path=config.model, architecture="None", dtype="float32", device="cpu", kernels="none",
        vocab_size=model["vocab_size"], embedding_size=model["hidden_size"], max_model_len=MAX_MODEL_LEN,
        max_num_seqs=config.max_num_seqs, max_num_batched_tokens=MAX_MODEL_LEN, block_size=16,
        num_kv_blocks=1 << 20, kv_cache_bytes=0, num_parameters=0, tensor_parallel_size=1,
    )  # fmt: skip


class Steps:
    """The running requests, and their next deltas."""

    def __init__(self, token_ids: list[int]) -> None:
        self._token_ids = token_ids
        self.running: dict[str, tuple[EngineRequest, itertools.count[int], float]] = {}
        self.changed = threading.Condition()

    def receive(self, connection: socket.socket) -> None:
        """Take requests until the connection ends, and with it the process."""
        with contextlib.suppress(ConnectionError), connection.makefile("rb") as stream:
            while len(header := stream.read(FRAME_HEADER_BYTES)) == FRAME_HEADER_BYTES:
                message = decode_to_engine(stream.read(frame_length(header)))
                with self.changed:
                    if isinstance(message, Add):
                        now = time.monotonic()
                        self.running |= {one.request_id: (one, itertools.count(1), now) for one in message.requests}
                    elif isinstance(message, Abort):
                        for request_id in message.request_ids:
                            self.running.pop(request_id, None)
                    self.changed.notify()
        os._exit(0)

    def step(self) -> list[RequestDelta]:
        """Wait until there are requests, and return a delta for each."""
        with self.changed:
            self.changed.wait_for(lambda: bool(self.running))
            deltas = [self._next(request_id) for request_id in self.running]
            for delta in deltas:
                if delta.finish_reason is not None:
                    del self.running[delta.request_id]
            return deltas

    def _next(self, request_id: str) -> RequestDelta:
        request, places, began = self.running[request_id]
        place = next(places)
        return RequestDelta(
            request_id=request_id,
            token_ids=[self._token_ids[(request.seed + place) % len(self._token_ids)]],
            finish_reason="length" if place == request.params.max_tokens else None,
            decode_s=time.monotonic() - began,
        )


def main(connection_fd: int, parent_pid: int) -> None:
    die_with_parent(parent_pid)

    def send(message: FromEngine) -> None:
        connection.sendall(encode_frame(message))

    with contextlib.suppress(ConnectionError), socket.socket(fileno=connection_fd) as connection:
        length = frame_length(connection.recv(FRAME_HEADER_BYTES, socket.MSG_WAITALL))
        start = decode_to_engine(connection.recv(length, socket.MSG_WAITALL))
        assert isinstance(start, Start)
        tokenizer = Tokenizer.from_directory(Path(start.config.model), None)
        steps = Steps(tokenizer.encode(TEXT.read_text(encoding="utf-8"), add_special_tokens=False))
        send(Ready(info_of(start.config)))
        threading.Thread(target=steps.receive, args=(connection,), daemon=True).start()
        period_s = float(os.environ.get(PERIOD_VARIABLE, "100")) / 1e6
        stats, next_at = EngineStats(num_blocks=1 << 20), time.monotonic()
        while True:
            deltas = steps.step()
            stats.num_steps += 1
            stats.generation_tokens += len(deltas)
            stats.num_requests_running = len(deltas)
            send(Outputs(deltas, stats))
            next_at = max(next_at + period_s * len(deltas), time.monotonic())
            time.sleep(max(0.0, next_at - time.monotonic()))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
