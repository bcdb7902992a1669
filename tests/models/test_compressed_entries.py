"""Compressed entries by blocks and by steps of other sizes: responses stay the same.

Draft tokens that are refused are written over, in keys, in entries and in what these are made from.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from pagewick.engine.messages import EngineRequest
from pagewick.sampling_params import SamplingParams
from tests.models.answers import answers, make_prompts, running
from tests.models.checkpoints import write_checkpoint

# The prompts repeat, so that n-grams propose tokens, mostly wrong ones. The model itself proposes right ones.
PROMPTS = [prompt * 3 for prompt in make_prompts((11, 23))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("deepseek-v4")
    write_checkpoint("deepseek-v4", directory)
    return directory


def responses(directory: Path, **options: object) -> tuple[list[list[int]], int, int]:
    """The tokens of all responses, and the numbers of draft tokens and of accepted ones."""
    with running(directory, **options) as engine:
        for index, prompt in enumerate(PROMPTS):
            params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
            engine.add(EngineRequest(request_id=str(index), prompt_token_ids=prompt, params=params, seed=index))
        found: list[list[int]] = [[] for _ in PROMPTS]
        while engine.has_work:
            for delta in engine.step():
                assert delta.error is None, delta.error
                found[int(delta.request_id)] += delta.token_ids
            assert engine.check_integrity() == []
        stats = engine.stats()
    return found, stats.num_draft_tokens, stats.num_accepted_tokens


def test_responses_with_draft_tokens(checkpoint: Path) -> None:
    alone, num_drafts, _ = responses(checkpoint)
    assert num_drafts == 0
    guessed, num_drafts, num_accepted = responses(checkpoint, speculative_method="ngram", num_speculative_tokens=5)
    assert num_drafts > num_accepted
    assert guessed == alone
    foreseen, num_drafts, num_accepted = responses(
        checkpoint, speculative_model=str(checkpoint), num_speculative_tokens=3
    )
    assert num_drafts >= num_accepted > 0
    assert foreseen == alone


def test_blocks_smaller_than_the_windows_of_entries(checkpoint: Path) -> None:
    """Windows of 16 tokens take blocks of 16, and others of 8; a prefix is reused where both end."""
    alone = responses(checkpoint)[0]
    with running(checkpoint, block_size=8, max_num_batched_tokens=11, num_kv_blocks=40) as engine:
        sizes = {group.spec.block_size for group in engine._ranks.runner.groups}
        found = answers(engine, PROMPTS, num_tokens=32)
        again = answers(engine, PROMPTS, num_tokens=32)
    assert sizes == {8, 16}
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in again] == alone
    assert [answer.num_cached_tokens for answer in again] == [32, 64]
