"""`python -m benchmarks.speculation`: the gain from draft tokens that are accepted, and the cost of those that are not.

One stream on a random-weight model runs greedily, with and without draft tokens in turn, in one process. The drafter is
an oracle: it knows the tokens that the model will generate and spoils each with a fixed probability, so that the engine
is measured and not a draft model. A step over k + 1 tokens takes longer than one over a single token, which limits the
gain; the step times are reported beside the ratio.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import click
import torch

from pagewick.cli.random_model import SHAPES, bench_cache_dir, cached_random_model
from pagewick.config import EngineConfig
from pagewick.devices import num_cores
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest
from pagewick.engine.speculation.drafting import DraftRequest
from pagewick.sampling_params import SamplingParams

NUM_PROMPT_TOKENS = 128
# Upper limit of runs in which the oracle learns the model's text.
_MAX_LESSONS = 40


class Oracle:
    """A Drafter that knows the text: a draft token is right with probability `acceptance`, decided by its position."""

    def __init__(self, acceptance: float, vocab_size: int) -> None:
        self.text: list[int] = []
        self._acceptance = acceptance
        self._vocab_size = vocab_size

    def start(self, slot: int) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._draft_tokens(len(request.token_ids), request.num_tokens) for request in requests]

    def _draft_tokens(self, start: int, num_tokens: int) -> list[int]:
        truth = self.text[start : start + num_tokens]
        return [token_id if self._is_right(start + i) else self._another(token_id) for i, token_id in enumerate(truth)]

    def _is_right(self, position: int) -> bool:
        return Random(position).random() < self._acceptance

    def _another(self, token_id: int) -> int:
        return (token_id + 1) % self._vocab_size


class Silent:
    """A Drafter that proposes no tokens."""

    def start(self, slot: int) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[] for _ in requests]


class Switch:
    """Lets one engine, whose weights stay in place, run with different drafters in turn."""

    def __init__(self) -> None:
        self.drafter: Oracle | Silent = Silent()

    def start(self, slot: int) -> None:
        self.drafter.start(slot)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return self.drafter.propose(requests)


@dataclass(frozen=True, slots=True)
class Run:
    """token_ids: prompt and output. seconds: from the first output token to the last. num_steps: steps in that time."""

    token_ids: list[int]
    seconds: float
    num_steps: int
    num_drafted: int
    num_accepted: int

    @property
    def step_ms(self) -> float:
        return self.seconds / self.num_steps * 1e3


def generate(engine: Engine, prompt: list[int], num_tokens: int, temperature: float = 0.0) -> Run:
    """Run one stream of `num_tokens` tokens, timed without its prompt."""
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    engine.add(EngineRequest(request_id="r", prompt_token_ids=prompt, params=params, seed=0))
    token_ids, num_steps, num_drafted, num_accepted = list(prompt), 0, 0, 0
    started = time.perf_counter()
    while engine.has_work:
        for delta in engine.step():
            if len(token_ids) == len(prompt):
                started, num_steps = time.perf_counter(), -1
            token_ids += delta.token_ids
            num_drafted, num_accepted = delta.num_draft_tokens, delta.num_accepted_tokens
        num_steps += 1
    return Run(token_ids, time.perf_counter() - started, num_steps, num_drafted, num_accepted)


def teach(engine: Engine, oracle: Oracle, prompt: list[int], num_tokens: int, text: list[int]) -> int:
    """Let the oracle learn the text; return how many more runs that took.

    Matrix products of torch do not give the same bits for one row as for five, and a random model's tokens are nearly
    tied: the text can change at a token that was computed together with draft tokens. The oracle learns the new text.
    """
    oracle.text = text
    for lesson in range(_MAX_LESSONS):
        found = generate(engine, prompt, num_tokens).token_ids
        if found == oracle.text:
            return lesson
        oracle.text = found
    raise click.ClickException(f"the text differed in all {_MAX_LESSONS} runs; try fewer tokens")


def compare(engine: Engine, switch: Switch, oracle: Oracle, prompt: list[int], num_tokens: int, repeats: int) -> Any:
    """Run without and with draft tokens in turn; return medians, and the median of the pairs' ratios."""
    plain, drafting = [], []
    for _ in range(repeats):
        switch.drafter = Silent()
        plain.append(generate(engine, prompt, num_tokens))
        switch.drafter = oracle
        drafting.append(generate(engine, prompt, num_tokens))
    ratios = [without.seconds / drafted.seconds for without, drafted in zip(plain, drafting, strict=True)]
    last = drafting[-1]
    same = [a == b for a, b in zip(plain[-1].token_ids, last.token_ids, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "plain_step_ms": statistics.median(run.step_ms for run in plain),
        "drafting_step_ms": statistics.median(run.step_ms for run in drafting),
        "plain_steps": plain[-1].num_steps,
        "drafting_steps": last.num_steps,
        "drafted": last.num_drafted,
        "accepted": last.num_accepted,
        "first_token_that_differs": same.index(False) - len(prompt) if False in same else None,
    }


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--acceptance", type=click.FloatRange(0, 1), default=0.7, show_default=True, help="Of each draft token.")
@click.option("--k", type=click.IntRange(1), default=4, show_default=True, help="Draft tokens per step.")
@click.option("--tokens", type=click.IntRange(8), default=256, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=num_cores())
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The result as JSON.")
def main(shape: str, acceptance: float, k: int, tokens: int, repeats: int, threads: int, output: Path | None) -> None:
    """Measure one stream with an oracle, with a drafter that is always wrong, and with n-grams on random text."""
    model, vocab_size = cached_random_model(shape), SHAPES[shape].vocab_size
    config = EngineConfig(
        model=str(model), device="cpu", dtype="bfloat16", num_threads=threads, max_model_len=2048, max_num_seqs=4,
        num_speculative_tokens=k, enable_prefix_caching=False,
    )  # fmt: skip
    prompt = [Random(7).randrange(vocab_size) for _ in range(NUM_PROMPT_TOKENS)]
    rows: dict[str, Any] = {}
    switch = Switch()
    engine = Engine(config, drafter=switch)
    text = generate(engine, prompt, tokens).token_ids
    for name, probability in ((f"oracle, {acceptance:.0%} right", acceptance), ("always wrong", 0.0)):
        switch.drafter = oracle = Oracle(probability, vocab_size)
        num_lessons = teach(engine, oracle, prompt, tokens, text)
        rows[name] = compare(engine, switch, oracle, prompt, tokens, repeats) | {"lessons": num_lessons}
    engine.close()
    rows["ngram, random text"] = compare_ngram(config, prompt, tokens, repeats)
    for name, row in rows.items():
        click.echo(
            f"{name:22} {row['ratio']:.2f} x tokens/s (from {min(row['ratios']):.2f} to {max(row['ratios']):.2f}); "
            f"step {row['plain_step_ms']:.0f} -> {row['drafting_step_ms']:.0f} ms, steps {row['plain_steps']} -> "
            f"{row['drafting_steps']}, {row['accepted']} of {row['drafted']} draft tokens accepted"
        )
    output = output or bench_cache_dir() / "speculation.json"
    result = {"shape": shape, "k": k, "tokens": tokens, "threads": threads, "torch": torch.__version__, "rows": rows}
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    click.echo(f"result: {output}")


def compare_ngram(config: EngineConfig, prompt: list[int], num_tokens: int, repeats: int) -> Any:
    """Run two engines in turn, with and without n-gram drafts, at temperature 1, so that nothing repeats.

    A random model that generates greedily soon repeats itself, which n-grams predict well.
    """
    plain_engine, ngram_engine = Engine(config), Engine(replace(config, speculative_method="ngram"))
    pairs = [
        (generate(plain_engine, prompt, num_tokens, 1.0), generate(ngram_engine, prompt, num_tokens, 1.0))
        for _ in range(repeats + 1)
    ][1:]
    ratios = [plain.seconds / drafting.seconds for plain, drafting in pairs]
    plain_engine.close()
    ngram_engine.close()
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "plain_step_ms": statistics.median(plain.step_ms for plain, _ in pairs),
        "drafting_step_ms": statistics.median(drafting.step_ms for _, drafting in pairs),
        "plain_steps": pairs[-1][0].num_steps,
        "drafting_steps": pairs[-1][1].num_steps,
        "drafted": pairs[-1][1].num_drafted,
        "accepted": pairs[-1][1].num_accepted,
    }


if __name__ == "__main__":
    main()
