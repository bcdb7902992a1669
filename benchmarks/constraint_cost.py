"""`python -m benchmarks.constraint_cost VOCABULARY`: the cost of a JSON schema, in tokens per second.

VOCABULARY is a tokenizer with as many tokens as the shape: a model's directory, a tokenizer.json, or a GGUF file, which
may hold a vocabulary only. Masks cost as much as they do in use only with a real one.

The model has random weights, so it writes at random what the schema allows, and as many tokens as without a schema: the
schema is that of an array with 1,000 entries, so no response comes to its end. One engine in this process runs the
streams without the schema, with it, and again without it, in turn. A ratio is that of neighbours: tokens per second
with the schema, relative to the mean of the runs before and behind it. The ratio of those two runs is the machine's
noise. The first round is not counted, nor is the time of the prompts. Afterwards one constraint reads a response again
by itself, for the processor time of a mask.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import click
import psutil

from pagewick.cli.random_model import SHAPES, bench_cache_dir, cached_random_model
from pagewick.config import EngineConfig
from pagewick.devices import num_cores
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest
from pagewick.sampling_params import SamplingParams
from pagewick.structured_outputs import StructuredOutputsParams
from pagewick.text.gguf_tokenizer import gguf_tokenizer
from pagewick.text.grammars.constraint import GrammarCompiler
from pagewick.text.grammars.grammar import grammar_of, whole_grammar
from pagewick.text.grammars.limits import GrammarLimits
from pagewick.text.tokenizer import Tokenizer
from pagewick.weights.gguf.header import read_gguf_header

NUM_PROMPT_TOKENS = 64
SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "minLength": 4, "maxLength": 40},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "email": {"type": "string", "pattern": "^[a-z0-9.]{1,20}@[a-z0-9]{1,12}\\.(com|org)$"},
            "tags": {"type": "array", "items": {"enum": ["new", "known", "blocked"]}, "maxItems": 4},
            "address": {
                "type": "object",
                "properties": {"street": {"type": "string"}, "is_home": {"type": "boolean"}},
                "required": ["street", "is_home"],
                "additionalProperties": False,
            },
            "score": {"type": "number"},
        },
        "required": ["name", "age", "email", "tags", "address"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True, slots=True)
class Run:
    """seconds: of each decode step. cpu_s: of all threads in these steps. token_ids: of the first stream."""

    num_seqs: int
    seconds: list[float]
    cpu_s: float
    token_ids: list[int]

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.num_seqs * len(self.seconds) / sum(self.seconds)

    @property
    def step_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds)


def read_vocabulary(place: Path) -> Tokenizer:
    if place.suffix != ".gguf":
        return Tokenizer.from_directory(place)
    backend, config = gguf_tokenizer(read_gguf_header(place).values, str(place))
    return Tokenizer(backend, config=config)


def generate(
    engine: Engine, num_seqs: int, num_tokens: int, temperature: float, constraint: dict[str, Any] | None, seed: int
) -> Run:
    """Run streams that begin and end together; only steps in which each of them decodes are timed."""
    params = SamplingParams(temperature=temperature, max_tokens=num_tokens, ignore_eos=True)
    random = Random(seed)
    vocab_size = engine.info.vocab_size
    for index in range(num_seqs):
        prompt = [random.randrange(vocab_size) for _ in range(NUM_PROMPT_TOKENS)]
        engine.add(
            EngineRequest(
                request_id=f"r{index}", prompt_token_ids=prompt, params=params, seed=seed + index, constraint=constraint
            )
        )
    token_ids: dict[str, list[int]] = {f"r{index}": [] for index in range(num_seqs)}
    seconds: list[float] = []
    started, cpu_before = time.perf_counter(), time.process_time()
    while engine.has_work:
        is_decoding = all(token_ids.values())
        if not is_decoding:
            started, cpu_before = time.perf_counter(), time.process_time()
        for delta in engine.step():
            token_ids[delta.request_id] += delta.token_ids
        ended = time.perf_counter()
        if is_decoding:
            seconds.append(ended - started)
        started = ended
    if {*map(len, token_ids.values())} != {num_tokens} or len(seconds) != num_tokens - 1:
        raise click.ClickException("a response ended too soon, or the streams did not begin together")
    return Run(num_seqs, seconds, time.process_time() - cpu_before, token_ids["r0"])


def measure(
    engine: Engine, num_seqs: int, num_tokens: int, temperature: float, spec: dict[str, Any], rounds: int
) -> Any:
    """Return medians and the rounds' ratios. A ratio above 1 is a gain."""
    triples = []
    num_before, s_before = masks_of(engine)
    for index in range(rounds + 1):
        runs = [generate(engine, num_seqs, num_tokens, temperature, one, 100 * index) for one in (None, spec, None)]
        if index:
            triples.append(runs)
    num_after, s_after = masks_of(engine)
    plain = [run for first, _, last in triples for run in (first, last)]
    held = [middle for _, middle, _ in triples]
    return {
        "ratios": [2 * middle.rate / (first.rate + last.rate) for first, middle, last in triples],
        "step_ratios": [(first.step_ms + last.step_ms) / (2 * middle.step_ms) for first, middle, last in triples],
        "noise": [last.rate / first.rate for first, _, last in triples],
        "plain_rate": statistics.median(run.rate for run in plain),
        "held_rate": statistics.median(run.rate for run in held),
        "plain_step_ms": statistics.median(run.step_ms for run in plain),
        "held_step_ms": statistics.median(run.step_ms for run in held),
        "plain_cpu_ms": 1e3 * statistics.median(run.cpu_s / len(run.seconds) for run in plain),
        "held_cpu_ms": 1e3 * statistics.median(run.cpu_s / len(run.seconds) for run in held),
        "mask_us": 1e6 * (s_after - s_before) / (num_after - num_before),
        "token_ids": held[-1].token_ids,
    }


def masks_of(engine: Engine) -> tuple[int, float]:
    """Return how many masks were computed so far, and in how many seconds."""
    stats = engine.stats()
    return stats.num_grammar_masks, stats.grammar_mask_s


def alone(grammars: GrammarCompiler, spec: dict[str, Any], token_ids: Sequence[int], vocab_size: int) -> list[float]:
    """Return the microseconds of processor time of each mask of a response, with nothing beside it."""
    constraint = grammars.constraint(spec, vocab_size, ())
    times = []
    for token_id in token_ids:
        started = time.thread_time_ns()
        constraint.allowed_mask()
        times.append((time.thread_time_ns() - started) / 1e3)
        constraint.accept(token_id)
    return times


def report(name: str, row: dict[str, Any]) -> str:
    def spread(name: str) -> str:
        values = row[name]
        return f"{statistics.median(values):.3f} (from {min(values):.3f} to {max(values):.3f})"

    return (
        f"{name}: {spread('ratios')} x the tokens/s, {row['plain_rate']:.1f} -> {row['held_rate']:.1f}; "
        f"of the median steps {spread('step_ratios')}, {row['plain_step_ms']:.1f} -> {row['held_step_ms']:.1f} ms; "
        f"noise {spread('noise')}; {row['mask_us']:.0f} us for a mask in its thread, processor time alone "
        f"{row['mask_cpu_us']:.0f} us, at most {row['mask_cpu_max_us']:.0f}"
    )


@click.command()
@click.argument("vocabulary", type=click.Path(exists=True, path_type=Path))
@click.option("--shape", type=click.Choice(list(SHAPES)), default="qwen3-0.6b", show_default=True)
@click.option("--streams", type=click.IntRange(1), multiple=True, default=(1, 16), show_default=True)
@click.option("--temperature", type=click.FloatRange(0), multiple=True, default=(0.0, 1.0), show_default=True)
@click.option("--tokens", type=click.IntRange(2), default=64, show_default=True, help="Of each response.")
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option("--threads", type=click.IntRange(1), default=num_cores())
@click.option("--output", type=click.Path(dir_okay=False, path_type=Path), help="The result as JSON.")
def main(
    vocabulary: Path, shape: str, streams: tuple[int, ...], temperature: tuple[float, ...], tokens: int, rounds: int,
    threads: int, output: Path | None,
) -> None:  # fmt: skip
    """Measure tokens per second with a JSON schema beside none, with one step in flight."""
    tokenizer = read_vocabulary(vocabulary)
    if tokenizer.vocab_size > SHAPES[shape].vocab_size:
        raise click.ClickException(f"the vocabulary has {tokenizer.vocab_size} tokens, more than the model")
    click.echo(f"{tokenizer.vocab_size} tokens in the vocabulary, {SHAPES[shape].vocab_size} in the model", err=True)
    grammars = GrammarCompiler(lambda: tokenizer, 8)
    config = EngineConfig(
        model=str(cached_random_model(shape)), device="cpu", dtype="bfloat16", num_threads=threads, max_model_len=1024,
        max_num_seqs=max(streams), max_num_batched_tokens=max(2048, NUM_PROMPT_TOKENS * max(streams)),
        max_steps_in_flight=1, enable_prefix_caching=False,
    )  # fmt: skip
    wanted = StructuredOutputsParams(json=SCHEMA)
    spec = {"type": "grammar", "grammar": whole_grammar(grammar_of(wanted, GrammarLimits()), None)}
    engine, rows = Engine(config, grammars=grammars), {}
    for num_seqs in streams:
        for value in temperature:
            name = f"{num_seqs} stream{'s' * (num_seqs > 1)}, temperature {value:g}"
            row = rows[name] = measure(engine, num_seqs, tokens, value, spec, rounds)
            times = alone(grammars, spec, row["token_ids"], engine.info.vocab_size)
            row["text"] = b"".join(map(tokenizer.token_bytes, row["token_ids"])).decode(errors="replace")
            row |= {"mask_cpu_us": statistics.mean(times), "mask_cpu_max_us": max(times)}
            row["load_average"] = psutil.getloadavg()
            click.echo(report(name, row))
    engine.close()
    output = output or bench_cache_dir() / "constraint-cost.json"
    output.write_text(json.dumps({"shape": shape, "tokens": tokens, "threads": threads, "rows": rows}, indent=2) + "\n")
    click.echo(f"result: {output}")


if __name__ == "__main__":
    main()
