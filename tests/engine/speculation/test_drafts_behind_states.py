"""Models with running states give the same tokens and bits with draft tokens and without, whatever the drafter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewick.engine.messages import EngineRequest, EngineStats
from tests.engine.foresight import Foresight
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, assert_same, record_plans, request, running, serve
from tests.models.checkpoints import write_checkpoint
from tests.models.predicting import Predicting

# The delta rule, Kimi's, Mamba-2, gated short convolutions, Mamba-1 without any attention, and embeddings of n-grams.
KINDS = ("qwen3-next", "kimi-linear", "granite-4-h", "lfm2", "mamba-1", "qwen4")
VOCAB_SIZE = 190
OPTIONS: dict[str, Any] = {
    "block_size": 8, "max_model_len": 128, "num_kv_blocks": 200, "dtype": "float32", "speculative_max_batch": 16,
}  # fmt: skip


def requests() -> list[EngineRequest]:
    """Return requests whose texts cross multiples of 32 tokens, where states become snapshots; two begin alike."""
    random = Random(8)
    texts = [[random.randrange(2, VOCAB_SIZE) for _ in range(size)] for size in (27, 45, 3, 6)]
    texts += [texts[1][:40] + texts[2], (texts[3] * 9)[:50]]
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 1.0, "n": 2}, {"repetition_penalty": 1.2},
        {"temperature": 0.9, "mirostat": 2}, {},
    ]  # fmt: skip
    return [
        request(text, f"r{number}", seed=number, **{"temperature": 0.0, "max_tokens": 34, "ignore_eos": True, **kind})
        for number, (text, kind) in enumerate(zip(texts, kinds, strict=True))
    ]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[Path, Answers]]]:
    """Yield a checkpoint of each kind, with its answers without draft tokens."""
    found = {}
    with row_by_row():
        for name in (*KINDS, "llama"):
            directory = tmp_path_factory.mktemp(name)
            write_checkpoint(name, directory)
            with running(directory, **OPTIONS) as engine:
                found[name] = directory, serve(engine, requests())
        yield found


def foresight(model: tuple[Path, Answers], share: float) -> Foresight:
    return Foresight(requests(), model[1], share, VOCAB_SIZE)


def check(model: tuple[Path, Answers], **options: Any) -> EngineStats:
    with running(model[0], **{**OPTIONS, **options}) as engine:
        assert_same(serve(engine, requests(), arrivals=[0, 0, 0, 1, 30, 5]), model[1])
        return engine.stats()


@pytest.mark.parametrize("share", [1.0, 0.0, 0.7])
@pytest.mark.parametrize("name", KINDS)
def test_draft_tokens_that_are_right_or_wrong(name: str, share: float, models: dict[str, tuple[Path, Answers]]) -> None:
    stats = check(models[name], drafter=foresight(models[name], share), num_speculative_tokens=5)
    assert stats.num_draft_tokens > 20
    if share == 1.0:
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 100
    else:
        assert (stats.num_accepted_tokens > 0) == (share > 0)
        assert stats.num_accepted_tokens < stats.num_draft_tokens


@pytest.mark.parametrize("name", KINDS)
def test_in_chunks_preempted_and_after_prefix_hits(name: str, models: dict[str, tuple[Path, Answers]]) -> None:
    few = 3 if name == "mamba-1" else 20
    options: dict[str, Any] = {"max_num_batched_tokens": 11, "num_kv_blocks": few, "num_speculative_tokens": 5}
    stats = check(models[name], drafter=foresight(models[name], 0.7), **options)
    assert stats.num_accepted_tokens > 0 and stats.num_preemptions > 0
    # Nothing but states, or blocks of entries that are too long for these prompts.
    assert stats.prefix_cache_hits > 0 or name in ("mamba-1", "qwen4")


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_draft_tokens_from_the_text_and_of_a_draft_model(method: str, models: dict[str, tuple[Path, Answers]]) -> None:
    draft = {"speculative_model": str(models["llama"][0])}
    ngram = {"speculative_method": "ngram", "ngram_prompt_lookup_min": 1}
    assert check(models["qwen3-next"], **(draft if method == "draft" else ngram)).num_draft_tokens > 10


def test_draft_tokens_of_a_layer_of_the_model(tmp_path: Path) -> None:
    """Which runs over accepted tokens once more, too."""
    kinds = ["linear_attention", "full_attention", "linear_attention", "linear_attention"]
    Predicting("qwen3-next", is_like_qwen=True, layer_types=kinds).write(tmp_path)
    with row_by_row():
        with running(tmp_path, **OPTIONS) as engine:
            answers = serve(engine, requests())
        for few in ({}, {"max_num_batched_tokens": 11, "num_kv_blocks": 20}):
            assert check((tmp_path, answers), speculative_method="mtp", **few).num_draft_tokens > 20


def test_a_step_computes_accepted_tokens_again_and_no_state_of_draft_tokens(
    models: dict[str, tuple[Path, Answers]],
) -> None:
    directory, answers = models["lfm2"]
    options = {"drafter": foresight(models["lfm2"], 1.0), "num_speculative_tokens": 4}
    with running(directory, **{**OPTIONS, **options}) as engine:
        plans = record_plans(engine)
        assert_same(serve(engine, requests()[:1]), {("r0", 0): answers["r0", 0]})
    works = [work for plan in plans for work in plan.work]
    steps = [(work.start, work.num_tokens, work.num_draft_tokens, work.num_stored) for work in works]
    # The prompt of 27 tokens, and then five tokens in each step. The state at 32 tokens is to become a snapshot.
    assert steps[:5] == [(0, 27, 0, 0), (27, 5, 4, 1), (28, 9, 4, 4), (32, 10, 4, 6), (38, 9, 4, 5)]
