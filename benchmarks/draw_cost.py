"""`python -m benchmarks.draw_cost`: microseconds to choose the tokens of a step, by sampling parameters.

The logits are random: flat ones are normally distributed, peaked ones have a few tokens far above the others, as those
of a trained model have. The prompt of each sequence has 200 tokens, its output 100. Medians.
"""

from __future__ import annotations

import statistics
import time
from array import array
from typing import Any

import click

from pagewick.engine.batch import SlotSampling
from pagewick.engine.sampling.columns import Draws
from pagewick.engine.sampling.sampler import sample, score_tokens
from pagewick.engine.sampling.traits import SampleRow, traits_of
from pagewick.sampling_params import SamplingParams

import torch  # isort: skip  # after Pagewick, which sets how OpenMP's threads wait

NUM_PROMPT_TOKENS, NUM_TOKENS = 200, 300
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.7, "top_p": 0.95},
    "top_k, top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "top_k 5,000": {"temperature": 0.7, "top_k": 5000},
    "min_p": {"temperature": 0.7, "min_p": 0.05},
    "presence_penalty, top_k, top_p": {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "presence_penalty": 1.5},
    "repetition_penalty": {"temperature": 0.0, "repetition_penalty": 1.1},
    "typical_p": {"temperature": 0.7, "typical_p": 0.9},
    "top_n_sigma": {"temperature": 0.7, "top_n_sigma": 1.0},
    "XTC": {"temperature": 0.7, "xtc_probability": 1.0, "xtc_threshold": 0.1},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
}


def random_logits(num_rows: int, vocab_size: int, *, is_peaked: bool) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if not is_peaked:
        return 2.5 * torch.randn(num_rows, vocab_size, generator=generator)
    logits = 1.5 * torch.randn(num_rows, vocab_size, generator=generator)
    is_likely = torch.rand(logits.shape, generator=generator) < 2e-4
    return logits + is_likely * 20 * torch.rand(logits.shape, generator=generator)


def microseconds(logits: torch.Tensor, fields: dict[str, Any], repeats: int) -> float:
    """Time `sample`, and the scores of its tokens; each sequence is at another place of its output each time."""
    found = []
    for repeat in range(repeats + 3):
        rows = [
            SampleRow(
                SlotSampling(SamplingParams(**fields), index, 0, NUM_PROMPT_TOKENS, []),
                NUM_TOKENS + repeat,
                array("i", range(NUM_TOKENS + repeat)),
            )
            for index in range(len(logits))
        ]
        draws = Draws.of(rows)
        traits = traits_of(rows[0].sampling)
        needed = dict(enumerate(rows)) if traits.is_edited or (traits.is_drawn and traits.is_truncated) else {}
        begin = time.perf_counter()
        token_ids = sample(logits, needed, draws).token_ids
        if (num_top := fields.get("logprobs")) is not None:
            score_tokens(logits, token_ids, num_top).to_list()
        found.append(1e6 * (time.perf_counter() - begin))
    return statistics.median(found[3:])


@click.command(help=__doc__)
@click.option("--rows", "all_rows", default="1,16", show_default=True, help="Numbers of sequences.")
@click.option("--vocab-size", default=151936, show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--repeats", default=50, show_default=True)
def main(all_rows: str, vocab_size: int, threads: int, repeats: int) -> None:
    torch.set_num_threads(threads)
    for num_rows in map(int, all_rows.split(",")):
        for is_peaked in (False, True):
            logits = random_logits(num_rows, vocab_size, is_peaked=is_peaked)
            for name, fields in KINDS.items():
                cost = microseconds(logits, fields, repeats)
                kind = "peaked" if is_peaked else "flat"
                click.echo(f"{num_rows:3} rows, {kind:6}  {name:32} {cost:8.0f} us")


if __name__ == "__main__":
    main()
