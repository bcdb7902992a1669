"""Every architecture against transformers, in float32: logits within 1e-4 and 64 greedy tokens equal, however they are
scheduled: alone, in a batch of five, in chunks of seven tokens, on a prefix hit, preempted, on two ranks and on three.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pagewick.config import EngineConfig
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest
from pagewick.sampling_params import SamplingParams
from tests.models.checkpoints import CONFIGS, write_checkpoint

NUM_NEW_TOKENS = 64
PROMPT_LENS = (1, 33, 7, 64, 40)  # one token, one over a block, a block's edge, ...


@dataclass
class Answer:
    """token_ids: generated. logits: [NUM_NEW_TOKENS, vocab_size], those that each token was chosen from."""

    token_ids: list[int]
    logits: Tensor
    num_cached_tokens: int


class Checkpoint:
    """A tiny checkpoint on disk and transformers' answers to its prompts."""

    def __init__(self, name: str, directory: Path) -> None:
        self.directory = directory
        model = write_checkpoint(name, directory)
        generator = torch.Generator().manual_seed(17)
        vocab_size = int(model.config.vocab_size)  # type: ignore[union-attr, arg-type]
        self.prompts = [torch.randint(2, vocab_size, (n,), generator=generator).tolist() for n in PROMPT_LENS]
        self.expected = [_generate(model, prompt) for prompt in self.prompts]


@torch.no_grad()
def _generate(model: nn.Module, prompt: list[int]) -> Answer:
    """Greedy, the whole sequence anew for every token: no cache, nothing shared with what is tested."""
    token_ids, logits = list(prompt), []
    for _ in range(NUM_NEW_TOKENS):
        logits.append(model(torch.tensor([token_ids]), use_cache=False).logits[0, -1])
        token_ids.append(int(logits[-1].argmax()))
    return Answer(token_ids[len(prompt) :], torch.stack(logits), 0)


@pytest.fixture(scope="module", params=list(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    yield Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def run(checkpoint: Checkpoint, prompts: Sequence[list[int]], **options: Any) -> tuple[list[Answer], Engine]:
    """Give all prompts to one engine at once; its answers, with the logits its runner computed on the way."""
    engine = Engine(
        EngineConfig.from_options(
            **{"model": str(checkpoint.directory), "dtype": "float32", "device": "cpu", "num_kv_blocks": 64, **options}
        )
    )
    try:
        return answers(engine, prompts), engine
    finally:
        engine.close()


def answers(engine: Engine, prompts: Sequence[list[int]]) -> list[Answer]:
    sampler = engine._ranks.runner._sampler
    computed: list[Tensor] = []
    take_all = sampler._take_all

    def recorded(pairs: Any, drawn: Any) -> None:
        computed.append(drawn.logits.clone())
        take_all(pairs, drawn)

    sampler._take_all = recorded  # type: ignore[method-assign]
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        engine.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, seed=index))
    found = [Answer([], torch.empty(0), 0) for _ in prompts]
    rows: list[list[Tensor]] = [[] for _ in prompts]
    while engine.has_work:
        computed.clear()
        for row, delta in enumerate(engine.step()):
            answer = found[int(delta.request_id)]
            answer.token_ids += delta.token_ids
            answer.num_cached_tokens = delta.num_cached_tokens
            rows[int(delta.request_id)].append(computed[0][row])
        assert engine.check_integrity() == []
    sampler._take_all = take_all  # type: ignore[method-assign]
    for answer, logits in zip(found, rows, strict=True):
        answer.logits = torch.stack(logits)
    return found


def check(found: Sequence[Answer], expected: Sequence[Answer]) -> None:
    for answer, reference in zip(found, expected, strict=True):
        assert answer.token_ids == reference.token_ids
        torch.testing.assert_close(answer.logits, reference.logits, atol=1e-4, rtol=0)


def test_checkpoint_shows_mistakes(checkpoint: Checkpoint) -> None:
    for answer in checkpoint.expected:
        assert answer.logits.std() >= 1
        assert len(set(answer.token_ids)) > 8


def test_alone(checkpoint: Checkpoint) -> None:
    for prompt, expected in zip(checkpoint.prompts, checkpoint.expected, strict=True):
        check(run(checkpoint, [prompt])[0], [expected])


def test_in_a_batch_of_five(checkpoint: Checkpoint) -> None:
    check(run(checkpoint, checkpoint.prompts)[0], checkpoint.expected)


def test_in_chunks_of_seven_tokens(checkpoint: Checkpoint) -> None:
    check(run(checkpoint, checkpoint.prompts, max_num_batched_tokens=7)[0], checkpoint.expected)


def test_on_a_prefix_hit(checkpoint: Checkpoint) -> None:
    options = {"model": str(checkpoint.directory), "dtype": "float32", "device": "cpu", "num_kv_blocks": 64}
    engine = Engine(EngineConfig.from_options(**options))
    try:
        answers(engine, checkpoint.prompts)
        again = answers(engine, checkpoint.prompts)
    finally:
        engine.close()
    check(again, checkpoint.expected)
    assert [answer.num_cached_tokens for answer in again] == [0, 32, 0, 32, 32]


def test_when_preempted(checkpoint: Checkpoint) -> None:
    found, engine = run(checkpoint, checkpoint.prompts, num_kv_blocks=5, max_num_batched_tokens=16)
    check(found, checkpoint.expected)
    assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("world_size", [2, 3])
def test_on_several_ranks(checkpoint: Checkpoint, world_size: int) -> None:
    """Six query heads: on two ranks three each, on three ranks two each, which split the KV heads unevenly."""
    found, _ = run(checkpoint, checkpoint.prompts, tensor_parallel_size=world_size, max_num_batched_tokens=50)
    check(found, checkpoint.expected)


def test_sharded_files(tmp_path: Path) -> None:
    model = write_checkpoint("llama", tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    expected = _generate(model, [5, 9, 2])
    engine = Engine(EngineConfig(model=str(tmp_path), dtype="float32", device="cpu", num_kv_blocks=8))
    try:
        check(answers(engine, [[5, 9, 2]]), [expected])
    finally:
        engine.close()
