"""`python -m benchmarks.speculation`: what guessing gains when guesses hold, and costs when they do not.

One stream on a random-weight model, greedy, with and without guesses in turn, in one process. The guesser is an oracle:
it knows what the model will say and spoils each guess with a fixed probability, so that the gain is that of the engine,
not of a draft model. The gain is limited by how much a step over k + 1 tokens costs more than one over a single token;
the step times are reported beside the ratio.
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
# At most so often the oracle learns what the model says after another division into steps.
_MAX_LESSONS = 40


class Oracle:
    """A Drafter that knows the text: each guess is right with probability `acceptance`, decided by its position."""

    def __init__(self, acceptance: float, vocab_size: int) -> None:
        self.text: list[int] = []
        self._acceptance = acceptance
        self._vocab_size = vocab_size

    def start(self, slot: int) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._guesses(len(request.token_ids), request.num_tokens) for request in requests]

    def _guesses(self, start: int, num_tokens: int) -> list[int]:
        truth = self.text[start : start + num_tokens]
        return [token_id if self._is_right(start + i) else self._another(token_id) for i, token_id in enumerate(truth)]

    def _is_right(self, position: int) -> bool:
        return Random(position).random() < self._acceptance

    def _another(self, token_id: int) -> int:
        return (token_id + 1) % self._vocab_size


class Silent:
    """A Drafter that never guesses."""

    def start(self, slot: int) -> None:
        pass

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [[] for _ in requests]


class Switch:
    """Lets one engine, with its weights in one place, run with different guessers in turn."""

    def __init__(self) -> None:
        self.drafter: Oracle | Silent = Silent()

    def start(self, slot: int) -> None:
        self.drafter.start(slot)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return self.drafter.propose(requests)


@dataclass(frozen=True, slots=True)
class Run:
    """token_ids: prompt and output. seconds: from the second token to the last. num_steps: in that time."""

    token_ids: list[int]
    seconds: float
    num_steps: int
    num_guessed: int
    num_accepted: int

    @property
    def step_ms(self) -> float:
        return self.seconds / self.num_steps * 1e3


def generate(engine: Engine, prompt: list[int], num_tokens: int, temperature: float = 0.0) -> Run:
    """One stream of `num_tokens` tokens, timed without its prompt."""
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    engine.add(EngineRequest(request_id="r", prompt_token_ids=prompt, params=params, seed=0))
    token_ids, num_steps, num_guessed, num_accepted = list(prompt), 0, 0, 0
    started = time.perf_counter()
    while engine.has_work:
        for delta in engine.step():
            if len(token_ids) == len(prompt):
                started, num_steps = time.perf_counter(), -1
            token_ids += delta.token_ids
            num_guessed, num_accepted = delta.num_draft_tokens, delta.num_accepted_tokens
        num_steps += 1
    return Run(token_ids, time.perf_counter() - started, num_steps, num_guessed, num_accepted)


def teach(engine: Engine, oracle: Oracle, prompt: list[int], num_tokens: int, text: list[int]) -> int:
    """Let the oracle know the text; returns how often it had to be told.

    Matrix products of torch do not give the same bits for one row and for five, and a random model's tokens are nearly
    tied: the text can turn at a token that was computed among guesses. The oracle learns the text of that division.
    """
    oracle.text = text
    for lesson in range(_MAX_LESSONS):
        found = generate(engine, prompt, num_tokens).token_ids
        if found == oracle.text:
            return lesson
        oracle.text = found
    raise click.ClickException("the text never was the same twice")


def compare(engine: Engine, switch: Switch, oracle: Oracle, prompt: list[int], num_tokens: int, repeats: int) -> Any:
    """Runs without and with guesses in turn; medians, and the median of the pairs' ratios."""
    plain, guessing = [], []
    for _ in range(repeats):
        switch.drafter = Silent()
        plain.append(generate(engine, prompt, num_tokens))
        switch.drafter = oracle
        guessing.append(generate(engine, prompt, num_tokens))
    ratios = [without.seconds / with_guesses.seconds for without, with_guesses in zip(plain, guessing, strict=True)]
    last = guessing[-1]
    same = [a == b for a, b in zip(plain[-1].token_ids, last.token_ids, strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "plain_step_ms": statistics.median(run.step_ms for run in plain),
        "guessing_step_ms": statistics.median(run.step_ms for run in guessing),
        "plain_steps": plain[-1].num_steps,
        "guessing_steps": last.num_steps,
        "guessed": last.num_guessed,
        "accepted": last.num_accepted,
        "first_token_that_differs": same.index(False) - len(prompt) if False in same else None,
    }


@click.command()
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--acceptance", type=click.FloatRange(0, 1), default=0.7, show_default=True, help="Of each guess.")
@click.option("--k", type=click.IntRange(1), default=4, show_default=True, help="Guesses per step.")
@click.option("--tokens", type=click.IntRange(8), default=256, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=5, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=num_cores())
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The result as JSON.")
def main(shape: str, acceptance: float, k: int, tokens: int, repeats: int, threads: int, output: Path | None) -> None:
    """Measure one stream with an oracle, with a guesser that is always wrong, and with n-grams on random text."""
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
            f"step {row['plain_step_ms']:.0f} -> {row['guessing_step_ms']:.0f} ms, steps {row['plain_steps']} -> "
            f"{row['guessing_steps']}, {row['accepted']} of {row['guessed']} guesses accepted"
        )
    output = output or bench_cache_dir() / "speculation.json"
    result = {"shape": shape, "k": k, "tokens": tokens, "threads": threads, "torch": torch.__version__, "rows": rows}
    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    click.echo(f"result: {output}")


def compare_ngram(config: EngineConfig, prompt: list[int], num_tokens: int, repeats: int) -> Any:
    """Two engines, with and without n-gram guesses, run in turn; drawn at temperature 1, so that nothing repeats.

    Greedy, a random model soon goes round in circles, which n-grams guess well.
    """
    plain_engine, ngram_engine = Engine(config), Engine(replace(config, speculative_method="ngram"))
    pairs = [
        (generate(plain_engine, prompt, num_tokens, 1.0), generate(ngram_engine, prompt, num_tokens, 1.0))
        for _ in range(repeats + 1)
    ][1:]
    ratios = [plain.seconds / guessing.seconds for plain, guessing in pairs]
    plain_engine.close()
    ngram_engine.close()
    return {
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "plain_step_ms": statistics.median(plain.step_ms for plain, _ in pairs),
        "guessing_step_ms": statistics.median(guessing.step_ms for _, guessing in pairs),
        "plain_steps": pairs[-1][0].num_steps,
        "guessing_steps": pairs[-1][1].num_steps,
        "guessed": pairs[-1][1].num_guessed,
        "accepted": pairs[-1][1].num_accepted,
    }


if __name__ == "__main__":
    main()
