"""A request's tokens and log-probabilities are the same with draft tokens and without, whatever the drafter."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import pytest

from pagewick.config import EngineConfig
from pagewick.engine.engine import Engine
from pagewick.engine.messages import EngineRequest, EngineStats, TokenLogprobs
from pagewick.sampling_params import SamplingParams
from tests.models.checkpoints import write_checkpoint

# Not zero: matrix products of torch are not the same bits for every number of rows.
TOLERANCE = 5e-5
NUM_NEW_TOKENS = 40
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "min_tokens": 5},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 0.6, "presence_penalty": 0.7, "frequency_penalty": 0.2},
    {"temperature": 1.0, "min_p": 0.1, "xtc_probability": 0.5},
    {"temperature": 0.7, "dry_multiplier": 0.8, "n": 2},
    {"temperature": 0.9, "mirostat": 2},
    {"temperature": 0.0, "max_tokens": 2},
]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    directories: dict[str, Path] = {name: tmp_path_factory.mktemp(name) for name in ("qwen3", "llama")}
    for name, directory in directories.items():
        write_checkpoint(name, directory)
    return {name: str(directory) for name, directory in directories.items()}


def requests() -> list[EngineRequest]:
    random = Random(11)
    made = []
    for number, kind in enumerate(KINDS):
        # Prompts that repeat themselves, so that there is something to look up.
        phrase = [random.randrange(2, 193) for _ in range(5 + 2 * number)]
        params = SamplingParams(**{"max_tokens": NUM_NEW_TOKENS, "ignore_eos": True, "logprobs": 2, **kind})
        made.append(
            EngineRequest(request_id=str(number), prompt_token_ids=(phrase * 3)[:-2], params=params, seed=number)
        )
    return made


Answers = dict[tuple[str, int], tuple[list[int], list[TokenLogprobs]]]


def serve(checkpoint: str, **options: Any) -> tuple[Answers, EngineStats]:
    """All requests at once: tokens and log-probabilities of each choice."""
    config = EngineConfig(
        model=checkpoint, dtype="float32", device="cpu", num_threads=1, block_size=8, max_model_len=128,
        **{"num_kv_blocks": 200, "speculative_max_batch": 16, **options},
    )  # fmt: skip
    engine = Engine(config)
    answers: Answers = {}
    try:
        for request in requests():
            engine.add(request)
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None
                token_ids, logprobs = answers.setdefault((delta.request_id, delta.choice_index), ([], []))
                token_ids += delta.token_ids
                logprobs += delta.logprobs or []
        assert engine.check_integrity() == []
        return answers, engine.stats()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def without(checkpoints: dict[str, str]) -> Answers:
    answers, stats = serve(checkpoints["qwen3"])
    assert stats.num_draft_tokens == 0
    assert len(answers) == len(KINDS) + 1
    return answers


def assert_equal(found: Answers, expected: Answers) -> None:
    assert found.keys() == expected.keys()
    for choice, (token_ids, logprobs) in expected.items():
        assert found[choice][0] == token_ids, choice
        assert [each.token_id for each in found[choice][1]] == [each.token_id for each in logprobs]
        assert [each.logprob for each in found[choice][1]] == pytest.approx(
            [each.logprob for each in logprobs], abs=TOLERANCE
        )


@pytest.mark.parametrize("num_tokens", [1, 3, 8])
def test_draft_tokens_from_the_text(checkpoints: dict[str, str], without: Answers, num_tokens: int) -> None:
    found, stats = serve(
        checkpoints["qwen3"], speculative_method="ngram", ngram_prompt_lookup_min=1, num_speculative_tokens=num_tokens
    )
    assert_equal(found, without)
    assert stats.num_draft_tokens > 20


@pytest.mark.parametrize("num_tokens", [1, 4])
def test_draft_tokens_of_the_served_model_itself(
    checkpoints: dict[str, str], without: Answers, num_tokens: int
) -> None:
    """No draft model is better: nearly all draft tokens are accepted."""
    found, stats = serve(
        checkpoints["qwen3"], speculative_model=checkpoints["qwen3"], num_speculative_tokens=num_tokens
    )
    assert_equal(found, without)
    assert stats.num_accepted_tokens > 100
    assert stats.num_accepted_tokens >= 0.95 * stats.num_draft_tokens


def test_draft_tokens_of_another_model(checkpoints: dict[str, str], without: Answers) -> None:
    """A draft model of unrelated weights: nearly all draft tokens are rejected, and few are proposed."""
    found, stats = serve(checkpoints["qwen3"], speculative_model=checkpoints["llama"])
    assert_equal(found, without)
    assert 0 < stats.num_draft_tokens < 0.8 * sum(len(token_ids) for token_ids, _ in without.values())
    assert stats.num_accepted_tokens < 0.1 * stats.num_draft_tokens


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_in_chunks_and_preempted(checkpoints: dict[str, str], without: Answers, method: str) -> None:
    options = (
        {"speculative_method": "ngram", "ngram_prompt_lookup_min": 1}
        if method == "ngram"
        else {"speculative_model": checkpoints["qwen3"]}
    )
    found, stats = serve(checkpoints["qwen3"], num_kv_blocks=24, max_num_batched_tokens=24, **options)
    assert_equal(found, without)
    assert stats.num_preemptions > 0
    assert stats.num_draft_tokens > 0
