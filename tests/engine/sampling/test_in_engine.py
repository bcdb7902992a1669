"""Bans, bias and breakers through a whole engine: what they must not harm, and what is told of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from tests.engine.row_by_row import row_by_row
from tests.engine.sample_rows import packed
from tests.engine.serving import deltas_of, request, running, serve
from tests.models.checkpoints import COMMON, write_checkpoint

VOCAB_SIZE = COMMON["vocab_size"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", directory)
    with row_by_row():
        yield directory


def test_bans_that_leave_nothing_take_no_prefix_from_others(checkpoint: Path) -> None:
    prompt = [*range(40, 73)]
    nothing: dict[str, Any] = {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2, "max_tokens": 5}
    with running(checkpoint, num_kv_blocks=40, block_size=8, max_model_len=64) as engine:
        serve(engine, [request(prompt, "first", max_tokens=1)])
        for number, kind in enumerate([{}, {"temperature": 0.0}, {"use_beam_search": True, "n": 2}, {"n": 2}]):
            (answer, *_) = serve(engine, [request(prompt, f"r{number}", **nothing, **kind)]).values()
            assert answer.finish_reason == "error" and "no token was allowed next" in (answer.error or "")
            (delta, *_) = deltas_of(engine, [request(prompt, "others", max_tokens=1)])
            assert delta.num_cached_tokens == 32


def test_breakers_come_as_a_mask_or_as_a_list(checkpoint: Path) -> None:
    """A prompt that repeats itself, and everything allowed only to go on with it: what breaks, decides the answer."""
    prompt = [5, 6, 7, 8, 9, 5, 6, 7, 8]
    dry: dict[str, Any] = {
        "dry_multiplier": 50.0, "dry_allowed_length": 1, "temperature": 0.0, "max_tokens": 12, "ignore_eos": True,
        "allowed_token_ids": tuple(range(5, 13)),
    }  # fmt: skip
    wanted = [
        request(prompt, "none", **dry),
        request(prompt, "list", dry_breaker_ids=[[7], [8], [9]], **dry),
        structs.replace(request(prompt, "mask", **dry), dry_breaker_mask=packed([7, 8, 9], VOCAB_SIZE)),
        structs.replace(
            request(prompt, "both", dry_breaker_ids=[[8]], **dry), dry_breaker_mask=packed([7, 9], VOCAB_SIZE)
        ),
    ]
    with running(checkpoint, num_kv_blocks=40) as engine:
        found = serve(engine, wanted)
    token_ids = {name: found[name, 0].token_ids for name in ("none", "list", "mask", "both")}
    assert token_ids["mask"] == token_ids["both"] == token_ids["list"] != token_ids["none"]


@pytest.mark.parametrize("num_kv_blocks", [40, 6])
def test_beams_are_ranked_with_a_bias_and_reported_without(checkpoint: Path, num_kv_blocks: int) -> None:
    prompt = [*range(20, 31)]
    bias = {3: 2.5, 17: 3.0, 90: 2.0}
    beams: dict[str, Any] = {"n": 3, "max_tokens": 9, "use_beam_search": True, "ignore_eos": True, "logprobs": 4}
    with running(checkpoint, num_kv_blocks=num_kv_blocks, block_size=8, max_model_len=40) as engine:
        found = serve(engine, [request(prompt, "a", logit_bias=bias, **beams)])
        answers = [found["a", index] for index in range(3)]
        for answer in answers:
            # The log-probabilities that the model itself gives the same text.
            whole = [*prompt, *answer.token_ids]
            own = serve(engine, [request(whole, "own", prompt_logprobs=4, max_tokens=1)])["own", 0]
            expected = own.prompt_logprobs[len(prompt) - 1 :]
            assert [(one.token_id, one.rank) for one in answer.logprobs] == [
                (one.token_id, one.rank) for one in expected
            ]
            for one, other in zip(answer.logprobs, expected, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
                assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
                assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)
            biased = sum(one.logprob + bias.get(one.token_id, 0.0) for one in answer.logprobs)
            assert answer.cumulative_logprob == pytest.approx(biased, abs=1e-3)
    assert set(bias) & {token_id for answer in answers for token_id in answer.token_ids}
    scores = [answer.cumulative_logprob for answer in answers]
    assert scores == sorted(scores, key=lambda score: -(score or 0.0))


def test_bad_words_may_come_as_tokens_alone(checkpoint: Path) -> None:
    greedy: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    with running(checkpoint, num_kv_blocks=40, speculative_method="ngram") as engine:
        plain = serve(engine, [request([5, 6, 7], "plain", **greedy)])["plain", 0].token_ids
        found = serve(engine, [request([5, 6, 7], "banned", bad_word_ids=[plain[2:4]], **greedy)])[
            "banned", 0
        ].token_ids
    assert found[:3] == plain[:3] and found[3] != plain[3]
