"""transformers as a contestant: `python -m benchmarks.peer_transformers MODEL DEVICE THREADS`."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LogitsProcessor, LogitsProcessorList

from benchmarks.peer import answer_requests
from pagewick.cli.benchmarking.scenarios import Scenario, Timing


class Stopwatch(LogitsProcessor):
    """Records the time of every step, when the logits of the whole batch have been computed."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if scores.is_cuda:
            torch.cuda.synchronize()
        self.times.append(time.perf_counter())
        return scores


def main() -> None:
    model_path, device, num_threads = sys.argv[1:4]
    torch.set_num_threads(int(num_threads))
    torch.set_grad_enabled(False)
    logging: Any = transformers.utils.logging
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    model.eval().to(device)

    def run(scenario: Scenario, seed: int) -> Timing:
        """Run `generate` greedily with one static batch."""
        input_ids = torch.tensor(scenario.prompts(model.config.vocab_size, seed), device=device)
        stopwatch = Stopwatch()
        start = time.perf_counter()
        model.generate(
            input_ids,
            attention_mask=torch.ones_like(input_ids),
            max_new_tokens=scenario.num_output_tokens,
            do_sample=False,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([stopwatch]),
        )
        num_later = scenario.num_streams * (scenario.num_output_tokens - 1)
        return Timing(stopwatch.times[0] - start, stopwatch.times[-1] - start, num_later)

    answer_requests(f"transformers {transformers.__version__}", run)


if __name__ == "__main__":
    main()
