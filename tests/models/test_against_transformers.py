"""Every variant of every architecture against transformers, in float32, however its sequences are scheduled.

Logits are within 1e-4 (2e-4 where experts or latent keys are summed) and 64 greedy tokens equal: in a batch of five,
alone, on a prefix hit, and, one variant of each architecture, in chunks of seven tokens and preempted. 20 tokens are
equal on two ranks and on three, for one variant of each way in which weights are shared out. On one rank bits are equal
too. PAGEWICK_DEEP=1 does all of it with every variant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewick.engine.graph import recorded as graph
from pagewick.engine.graph.recorded import StepGraph
from pagewick.kernels import cpu, recorded_steps
from tests.deep import IS_DEEP
from tests.models.answers import NUM_NEW_TOKENS, Answer, answers, judge, make_prompts, running
from tests.models.checkpoints import VARIANTS, save, write_checkpoint
from tests.models.kept_ranks import kept_ranks

PROMPTS = make_prompts()
# The first variant of each architecture, or all of them.
SCHEDULED = (
    VARIANTS if IS_DEEP else tuple({variant.config: name for name, variant in reversed(VARIANTS.items())}.values())
)
# One of each way in which weights are shared out.
ON_THREE_RANKS = (
    "llama", "mixtral", "phi-3-mini-4k", "stablelm-2-12b", "gemma-2", "deepseek-v2-lite", "starcoder",
    "gpt-bigcode-mha", "falcon-40b", "gemma-4-31b", "gpt-oss", "minimax-m2", "llama4-scout", "mimo-v2-flash",
)  # fmt: skip
# These are shared out as one of those is, but for their experts, states, norms or biases.
ON_TWO_RANKS = (
    "qwen2-moe", "qwen3-next", "qwen3-vl", "gemma-3n", "gemma-4-e2b", "granite-4-h-moe", "falcon-h1", "nemotron-h",
    "lfm2-moe", "lfm3", "ernie-4.5-moe", "glm-5.2", "olmo-hybrid", "kimi-linear", "falcon-mamba", "jamba", "laguna-xs",
    "a.x-k2", "longcat-flash", "ling-3-flash", "mistral-large-4", "deepseek-v4",
    "hy4", "qwen4", "minimax-m3",
)  # fmt: skip


@contextmanager
def recording() -> Iterator[list[str]]:
    """Yield a list that gets the operations because of which a step could not be recorded."""
    foreign: list[str] = []
    record = recorded_steps.record

    def noted(*args: Any) -> Any:
        results, recorded = record(*args)
        foreign.extend([recorded] if isinstance(recorded, str) else [])
        return results, recorded

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph.recorded_steps, "record", noted)
        yield foreign


class Served:
    """A checkpoint, an engine for it, its responses to all prompts at once, and transformers' logits for these."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.variant, self.directory = name, VARIANTS[name], directory
        model = write_checkpoint(name, directory)
        with recording() as self.foreign, self.running() as engine:
            self.batch = answers(engine, PROMPTS)
            self.again = answers(engine, PROMPTS)
            step = engine._ranks.runner._forward
            self.is_recorded = isinstance(step, StepGraph) and bool(step._recorded)
            self.alone = [answers(engine, [prompt], cache_salt="another")[0] for prompt in PROMPTS[:4:3]]
        self.expected = judge(model, PROMPTS, self.batch, one_by_one=self.variant.one_by_one)

    def running(self, **options: Any) -> Any:
        return running(self.directory, **{**self.variant.engine, **options})

    def check(self, found: Sequence[Answer]) -> None:
        """Logits equal those in the batch to the bit; without the native library, which promises that, nearly."""
        if cpu.library() is None:
            self.check_near(found)
            return
        for answer, in_batch in zip(found, self.batch, strict=True):
            assert answer.token_ids == in_batch.token_ids
            assert torch.equal(answer.logits, in_batch.logits)

    def check_near(self, found: Sequence[Answer]) -> None:
        for answer, in_batch, expected in zip(found, self.batch, self.expected, strict=True):
            num_tokens = len(answer.token_ids)
            assert answer.token_ids == in_batch.token_ids[:num_tokens]
            torch.testing.assert_close(answer.logits, expected[:num_tokens], atol=self.variant.tolerance, rtol=0)


@pytest.fixture(scope="module", params=list(VARIANTS))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield Served(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", autouse=True)
def ranks() -> Iterator[None]:
    with kept_ranks():
        yield


def test_checkpoint_shows_mistakes(served: Served) -> None:
    assert all(logits.std() >= 1 for logits in served.expected)
    assert len({token_id for answer in served.batch for token_id in answer.token_ids}) > 16


def test_in_a_batch_of_five(served: Served) -> None:
    assert [len(answer.token_ids) for answer in served.batch] == [NUM_NEW_TOKENS] * 5
    served.check_near(served.batch)
    num_ties = 0
    for answer, expected in zip(served.batch, served.expected, strict=True):
        chosen = expected.gather(1, torch.tensor(answer.token_ids).unsqueeze(1)).squeeze(1)
        behind = expected.amax(-1) - chosen
        # The last bits decide between tokens that are equally likely; they are not the same on every processor.
        assert behind.max() < served.variant.tolerance / 2
        num_ties += int((behind > 0).sum())
    assert num_ties <= 1


@pytest.mark.skipif(cpu.library() is None, reason="needs the native library: make install")
def test_the_decode_step_is_recorded(served: Served) -> None:
    """It consists of native operations and views, without PyTorch's own, but for variants that name one."""
    foreign = served.variant.foreign
    assert served.foreign == ([] if foreign is None else [foreign])
    assert served.is_recorded == (foreign is None)


def test_alone(served: Served) -> None:
    for answer, in_batch in zip(served.alone, served.batch[:4:3], strict=True):
        assert answer.num_cached_tokens == 0
        assert answer.token_ids == in_batch.token_ids
        if cpu.library() is not None:
            assert torch.equal(answer.logits, in_batch.logits)


def test_on_a_prefix_hit(served: Served) -> None:
    served.check(served.again)
    assert [answer.num_cached_tokens for answer in served.again] == [0, 32, 0, 32, 32]


@pytest.mark.parametrize("served", SCHEDULED, indirect=True)
def test_in_chunks_of_seven_tokens(served: Served) -> None:
    # A step of a model that sees images whole must have room for one, unless it reads text only.
    text_only = {"language_model_only": True} if served.name == "gemma-3-multimodal" else {}
    with served.running(max_num_batched_tokens=7, **text_only) as engine:
        served.check(answers(engine, PROMPTS))


@pytest.mark.parametrize("served", SCHEDULED, indirect=True)
def test_when_preempted(served: Served) -> None:
    with served.running(num_kv_blocks=5, max_num_batched_tokens=16) as engine:
        served.check(answers(engine, PROMPTS))
        assert engine.stats().num_preemptions > 0


@pytest.mark.parametrize("served", VARIANTS if IS_DEEP else (*ON_TWO_RANKS, *ON_THREE_RANKS), indirect=True)
def test_on_several_ranks(served: Served) -> None:
    """Six query heads are three on each of two ranks, or two on each of three, which splits the KV heads unevenly."""
    for num_ranks in (2, 3) if served.name in ON_THREE_RANKS else (2,):
        with served.running(tensor_parallel_size=num_ranks, max_num_batched_tokens=50) as engine:
            served.check_near(answers(engine, PROMPTS, num_tokens=20))


def test_sharded_files(tmp_path: Path) -> None:
    model = write_checkpoint("llama", tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    save(model, tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    with running(tmp_path, num_kv_blocks=8) as engine:
        found = answers(engine, [[5, 9, 2]])
    expected = judge(model, [[5, 9, 2]], found)[0]
    torch.testing.assert_close(found[0].logits, expected, atol=1e-4, rtol=0)
