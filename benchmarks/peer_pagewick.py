"""Pagewick as a contestant: `python -m benchmarks.peer_pagewick MODEL DEVICE THREADS [CONTEXT] [STREAMS]`."""

from __future__ import annotations

import sys
from pathlib import Path

import pagewick
from benchmarks.peer import answer_requests
from pagewick.cli.bench import open_engine
from pagewick.cli.benchmarking.scenarios import Scenario, Timing, run_scenario
from pagewick.config import EngineConfig

KV_CACHE_MEMORY = "2GiB"


def server_command(model: Path, num_threads: int, port: int, *, max_len: int, num_streams: int) -> list[str]:
    """Return the command of a `pagewick serve` with little logging and without features that other servers lack."""
    command = [sys.executable, "-m", "pagewick", "serve", str(model), "--port", str(port), "--no-ui"]
    command += ["--num-threads", str(num_threads), "--max-model-len", str(max_len), "--max-num-seqs", str(num_streams)]
    command += ["--kv-cache-memory", KV_CACHE_MEMORY, "--no-enable-prefix-caching"]
    return [*command, "--no-log-requests", "--log-level", "warning"]


def main() -> None:
    model, device, num_threads = sys.argv[1:4]
    max_len, num_streams = (int(sys.argv[index]) if len(sys.argv) > index else default for index, default in DEFAULTS)
    config = EngineConfig(model=model, device=device, num_threads=int(num_threads), max_model_len=max_len)
    engine = open_engine(config, shape=None, max_num_seqs=num_streams)

    def run(scenario: Scenario, seed: int) -> Timing:
        return run_scenario(engine, scenario, seed=seed)

    try:
        answer_requests(f"Pagewick {pagewick.__version__}", run)
    finally:
        engine.close()


# Index in sys.argv and default value of the optional arguments.
DEFAULTS = ((4, 4096), (5, 1))


if __name__ == "__main__":
    main()
