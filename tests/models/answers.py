"""Responses of an engine with the logits that it computed, and the logits of transformers for the same tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pagewick.config import EngineConfig
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest, RequestOptions
from pagewick.sampling_params import SamplingParams

NUM_NEW_TOKENS = 64
PROMPT_LENS = (1, 33, 7, 64, 40)  # one token, one over a block, a block's edge, ...


@dataclass
class Answer:
    """token_ids: the generated ones. logits: [len(token_ids), vocab_size], from which each token was chosen."""

    token_ids: list[int]
    logits: Tensor
    num_cached_tokens: int = 0


def make_prompts(lens: Sequence[int] = PROMPT_LENS, vocab_size: int = 193) -> list[list[int]]:
    generator = torch.Generator().manual_seed(17)
    return [torch.randint(2, vocab_size, (n,), generator=generator).tolist() for n in lens]


@contextmanager
def running(directory: Path, **options: Any) -> Iterator[Engine]:
    """An engine for the checkpoint in `directory`, in float32 on the CPU."""
    given = {"model": str(directory), "dtype": "float32", "device": "cpu", "num_kv_blocks": 64, **options}
    engine = Engine(EngineConfig.from_options(**given))
    try:
        yield engine
    finally:
        engine.close()


def answers(
    engine: Engine, prompts: Sequence[list[int]], *, cache_salt: str | None = None, num_tokens: int = NUM_NEW_TOKENS
) -> list[Answer]:
    """Give all prompts to the engine at once. cache_salt: with a new one, no prompt finds a prefix in the cache."""
    sampler, slots = engine._ranks.runner._sampler, engine._ranks.runner._slots
    computed: list[Tensor] = []
    take_all = sampler._take_all

    def recorded(streams: Any, pairs: Any, drawn: Any, *rest: Any) -> None:
        computed.append(drawn.logits.clone())
        take_all(streams, pairs, drawn, *rest)

    sampler._take_all = recorded  # type: ignore[method-assign]
    # With several threads, a step that runs ahead would overwrite the logits before they are read.
    are_plain, slots._are_plain = slots._are_plain, lambda _: False  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        options = RequestOptions(cache_salt=cache_salt)
        engine.add(
            EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, seed=index, options=options)
        )
    found = [Answer([], torch.empty(0)) for _ in prompts]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    while engine.has_work:
        computed.clear()
        for row, delta in enumerate(engine.step()):
            assert delta.error is None, delta.error
            answer = found[int(delta.request_id)]
            answer.token_ids += delta.token_ids
            answer.num_cached_tokens = delta.num_cached_tokens
            rows[int(delta.request_id)].append(computed[0][row])
        assert engine.check_integrity() == []
    sampler._take_all, slots._are_plain = take_all, are_plain  # type: ignore[method-assign]
    for answer, logits in zip(found, rows, strict=True):
        answer.logits = torch.stack(logits)
    return found


@torch.no_grad()
def judge(
    model: nn.Module, prompts: Sequence[list[int]], found: Sequence[Answer], *, one_by_one: bool = False
) -> list[Tensor]:
    """The logits from which transformers would have chosen each token of the answers, given all tokens before it.

    Where the likeliest token is each time the answer's own, transformers would have given the same answer.
    """
    sequences = [prompt + answer.token_ids for prompt, answer in zip(prompts, found, strict=True)]
    longest = max(map(len, sequences))
    # Later tokens do not change the logits of a token, so that the shorter ones may be followed by anything.
    token_ids = torch.tensor([sequence + [2] * (longest - len(sequence)) for sequence in sequences])
    logits = _one_by_one(model, token_ids) if one_by_one else model(token_ids, use_cache=False).logits
    return [
        logits[index, len(prompt) - 1 : len(sequence) - 1].float()
        for index, (prompt, sequence) in enumerate(zip(prompts, sequences, strict=True))
    ]


def _one_by_one(model: nn.Module, token_ids: Tensor) -> Tensor:
    """Logits [B, T, V] for token_ids [B, T], each token of a sequence after what the cache holds of those before."""
    cache, logits = None, []
    # Models of Mamba alone have another name for what they keep.
    is_mamba = model.config.model_type in ("mamba", "falcon_mamba", "mamba2")  # type: ignore[union-attr]
    name = "cache_params" if is_mamba else "past_key_values"
    for position in range(token_ids.shape[1]):
        output = model(token_ids[:, position : position + 1], use_cache=True, **{name: cache})
        cache = output[name]
        logits.append(output.logits)
    return torch.cat(logits, dim=1)
