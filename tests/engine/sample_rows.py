"""Rows to be sampled: at a glance for one, at random for many that have nothing in common."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Tensor

from pagewick.engine.batch import SlotSampling
from pagewick.engine.sampling import logit_edits, sampler
from pagewick.engine.sampling.columns import Draws
from pagewick.engine.sampling.traits import SampleRow
from pagewick.sampling_params import SamplingParams


def sample(logits: Tensor, rows: Sequence[SampleRow]) -> sampler.Sampled:
    return sampler.sample(logits, dict(enumerate(rows)), Draws.of(rows))


def edit_logits(logits: Tensor, rows: Sequence[SampleRow]) -> Tensor:
    return logit_edits.edit_logits(logits, dict(enumerate(rows)))


def row(
    temperature: float = 0.0,
    *,
    history: Sequence[int] = (),
    num_prompt_tokens: int = 0,
    position: int | None = None,
    seed: int = 0,
    choice_index: int = 0,
    stop: Sequence[int] = (),
    bad: Sequence[Sequence[int]] = (),
    breakers: Sequence[Sequence[int]] = (),
    breaker_mask: bytes = b"",
    allowed: Sequence[int] | None = None,
    vocab_size: int = 0,
    mu: float | None = None,
    **params: Any,
) -> SampleRow:
    """allowed: token ids, which become a mask for vocab_size tokens. stop: stop tokens, bad: bad words."""
    sampling = SlotSampling(
        SamplingParams(temperature=temperature, **params),
        seed=seed,
        choice_index=choice_index,
        num_prompt_tokens=num_prompt_tokens,
        stop_token_ids=list(stop),
        bad_word_ids=[list(word) for word in bad],
        dry_breaker_ids=[list(breaker) for breaker in breakers],
        dry_breaker_mask=breaker_mask,
    )
    mask = None if allowed is None else packed(allowed, vocab_size)
    return SampleRow(sampling, len(history) if position is None else position, history, mask, mu)


def packed(token_ids: Sequence[int], vocab_size: int) -> bytes:
    """One bit per token, least significant first."""
    return sum(1 << token_id for token_id in set(token_ids)).to_bytes(-(-vocab_size // 8), "little")


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def mixed_rows(seed: int, vocab_size: int, count: int) -> tuple[Tensor, list[SampleRow]]:
    """Rows that have nothing in common, each with a few of all the things that can be asked for."""
    random = Random(seed)
    return random_logits(count, vocab_size, seed), [random_row(random, vocab_size) for _ in range(count)]


def random_row(random: Random, vocab_size: int) -> SampleRow:
    history = [random.randrange(min(vocab_size, 9)) for _ in range(random.choice([0, 1, 5, 40, 300]))]

    def some_ids(most: int) -> list[int]:
        return [random.randrange(vocab_size) for _ in range(random.randrange(1, most))]

    choices: dict[str, Any] = {
        "repetition_penalty": random.choice([0.8, 1.2]),
        "repeat_last_n": random.choice([-1, 0, 3]),
        "presence_penalty": random.uniform(-2, 2),
        "frequency_penalty": random.uniform(-2, 2),
        "dry_multiplier": 0.8,
        "dry_penalty_last_n": random.choice([-1, 0, 20]),
        "logit_bias": {token_id: random.uniform(-9, 9) for token_id in some_ids(5)},
        "allowed_token_ids": some_ids(vocab_size + 1),
        "min_tokens": random.choice([3, 10**6]),
        "bad": [some_ids(3) for _ in range(3)] + [[*history[-2:], random.randrange(vocab_size)]],
        "allowed": some_ids(vocab_size + 1),
    }
    mirostat = random.choice([0, 0, 0, 1, 2])
    if mirostat:
        choices["mu"] = random.uniform(0, 10)
    else:
        choices |= {
            "top_k": random.choice([1, 5, 1000]),
            "top_p": random.choice([0.9, 0.3, 1e-9]),
            "min_p": random.choice([0.05, 0.3]),
            "typical_p": random.choice([0.9, 0.2]),
            "top_n_sigma": random.choice([0.5, 2.0]),
            "xtc_probability": random.choice([0.5, 1.0]),
            "xtc_threshold": random.choice([0.02, 0.1, 0.3]),
        }
    asked = {name: choices[name] for name in random.sample(sorted(choices), random.choice([0, 1, 3, 6]))}
    return row(
        random.choice([0.0, 0.7, 1.0, 2.0]),
        history=history,
        num_prompt_tokens=random.randrange(len(history) + 1),
        seed=random.choice([0, -1, 2**63 - 1, -(2**63), random.getrandbits(40)]),
        choice_index=random.randrange(4),
        stop=some_ids(4),
        breakers=[[2], [3, 4]],
        vocab_size=vocab_size,
        mirostat=mirostat,
        **asked,
    )
