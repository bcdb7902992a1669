"""The cost of a server: memory while it serves, processor time while it is idle, and the time of its start.

Only one server runs at a time, and no other program has the model: a shared page would count half for each program.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.contestants import Contestant, Field
from benchmarks.limits import StoredWeights, kv_bytes_per_token
from benchmarks.measurements import MEASUREMENTS
from benchmarks.server_process import ServerProcess
from pagewick.cli.random_model import SHAPES

SAMPLE_S = 0.5
# Some work of a server's start goes on in the background for a moment.
SETTLE_S = 5.0
# The memory budget is the sum of the weights times this factor, the K/V cache in use, and the program's own memory.
WEIGHTS_FACTOR = 1.15
PROGRAM_BYTES = 500_000_000


@dataclass(frozen=True, slots=True)
class ServingCost:
    """pss: the process tree's peak memory while it served, in bytes. idle_cpu: the part of one processor, 0 to 1.

    start_seconds: the time from its start to the first token over HTTP.
    """

    pss: int
    idle_cpu: float
    start_seconds: float


def measure_serving(contestant: Contestant, field: Field, idle_seconds: float) -> ServingCost:
    """Start the server, let it serve the measurement with the most streams, leave it idle, and stop it."""
    assert contestant.server is not None
    server = contestant.server()
    try:
        most = max((one.scenario for one in MEASUREMENTS), key=lambda scenario: scenario.num_streams)
        client = contestant.client(server, field.vocab_size)
        try:
            with sampled_pss(server) as samples:
                client.run(most, 0)
        finally:
            client.close()
        time.sleep(SETTLE_S)
        cpu, start = server.cpu_seconds(), time.monotonic()
        time.sleep(idle_seconds)
        idle_cpu = (server.cpu_seconds() - cpu) / (time.monotonic() - start)
        return ServingCost(max(samples), idle_cpu, server.start_seconds)
    finally:
        server.stop()


@contextmanager
def sampled_pss(server: ServerProcess) -> Iterator[list[int]]:
    """Yields samples of the server's memory, taken until the end of the block."""
    samples, ended = [server.pss()], threading.Event()

    def sample() -> None:
        while not ended.wait(SAMPLE_S):
            samples.append(server.pss())

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def memory_budget(shape_name: str, weights: StoredWeights | None = None) -> float:
    """Return the bytes that serving the most streams should not exceed: 1.15 x weights + K/V in use + 500 MB.

    weights: None means bf16.
    """
    shape = SHAPES[shape_name]
    weights = weights or StoredWeights.in_bf16(shape)
    most = max((one.scenario for one in MEASUREMENTS), key=lambda scenario: scenario.num_streams)
    kv = most.num_streams * most.max_len * kv_bytes_per_token(shape)
    return WEIGHTS_FACTOR * weights.all + kv + PROGRAM_BYTES
