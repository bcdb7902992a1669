"""Pagewick as a contestant: `python -m benchmarks.peer_pagewick MODEL DEVICE THREADS`."""

from __future__ import annotations

import sys

import pagewick
from benchmarks.peer import answer_requests
from pagewick.cli.bench import Scenario, Timing, open_engine, run_scenario
from pagewick.config import EngineConfig


def main() -> None:
    model, device, num_threads = sys.argv[1:4]
    config = EngineConfig(model=model, device=device, num_threads=int(num_threads), max_model_len=4096)
    engine = open_engine(config, shape=None, max_num_seqs=1)

    def run(scenario: Scenario, seed: int) -> Timing:
        return run_scenario(engine, scenario, seed=seed)

    try:
        answer_requests(f"Pagewick {pagewick.__version__}", run)
    finally:
        engine.close()


if __name__ == "__main__":
    main()
