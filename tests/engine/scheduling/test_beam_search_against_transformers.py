"""Beam search against transformers' generate(num_beams=...): the same sequences with the same scores, alone, with so
little memory that beams push each other out, and in company.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.serving import Answer, request, running, serve
from tests.models.checkpoints import write_checkpoint

NUM_NEW_TOKENS = 12
# For the sum of a sequence's log-probabilities, which other kernels compute.
TOLERANCE = 1e-4
WIDTHS = (2, 3, 4)
PENALTIES = (-1.0, 0.0, 1.0, 2.0)
PROMPTS = ([5, 9, 2, 77, 31], [*range(20, 53)], [150])


@dataclass(frozen=True)
class Found:
    """One returned sequence, without the prompt and what follows its end, and its score."""

    token_ids: list[int]
    score: float


class Checkpoint:
    def __init__(self, name: str, directory: Path) -> None:
        self.directory = directory
        self.model = write_checkpoint(name, directory)
        self._known: dict[Any, list[Found]] = {}
        self.eos_token_ids = self._eos_within_reach()

    @torch.no_grad()
    def expected(
        self, prompt: list[int], width: int, penalty: float, is_early: bool, eos: list[int], min_tokens: int = 0
    ) -> list[Found]:
        key = (tuple(prompt), width, penalty, is_early, tuple(eos), min_tokens)
        if key not in self._known:
            output = self.model.generate(  # type: ignore[operator]
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                length_penalty=penalty,
                early_stopping=is_early,
                max_new_tokens=NUM_NEW_TOKENS,
                min_new_tokens=min_tokens or None,
                eos_token_id=eos,
                pad_token_id=0,
                output_scores=True,
                return_dict_in_generate=True,
            )
            self._known[key] = [
                Found(until_end(row[len(prompt) :], eos), score)
                for row, score in zip(output.sequences.tolist(), output.sequences_scores.tolist(), strict=True)
            ]
        return self._known[key]

    def _eos_within_reach(self) -> list[int]:
        """Tokens that end some beams and not others: two from the middle of what is found without any end."""
        rows = [found.token_ids for prompt in PROMPTS for found in self.expected(prompt, 4, 1.0, False, [1])]
        counts = {token_id: sum(token_id in row[2:] for row in rows) for row in rows for token_id in row}
        return sorted(counts, key=lambda token_id: (-counts[token_id], token_id))[:2]


def until_end(token_ids: list[int], eos: list[int]) -> list[int]:
    """A row up to its end-of-sequence token; transformers fills the rest with padding."""
    ends = [place for place, token_id in enumerate(token_ids) if token_id in eos]
    return token_ids[: ends[0] + 1] if ends else token_ids


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint(request.param, tmp_path_factory.mktemp(request.param))


def search(
    request_id: str, prompt: list[int], width: int, penalty: float, is_early: bool, eos: list[int], min_tokens: int = 0
) -> Any:
    return request(
        prompt,
        request_id,
        use_beam_search=True,
        n=width,
        temperature=0.0,
        max_tokens=NUM_NEW_TOKENS,
        min_tokens=min_tokens,
        length_penalty=penalty,
        early_stopping=is_early,
        stop_token_ids=tuple(eos),
        ignore_eos=True,
    )


def check(found: list[Answer], expected: list[Found], penalty: float, eos: list[int]) -> None:
    assert [answer.token_ids for answer in found] == [each.token_ids for each in expected]
    for answer, each in zip(found, expected, strict=True):
        total = each.score * len(each.token_ids) ** penalty
        assert answer.cumulative_logprob == pytest.approx(total, abs=TOLERANCE)
        assert answer.finish_reason == ("stop" if answer.token_ids[-1] in eos else "length")


def test_eos_tokens_end_some_beams_and_not_others(checkpoint: Checkpoint) -> None:
    eos = checkpoint.eos_token_ids
    ends = [
        found.token_ids[-1] in eos
        for prompt in PROMPTS
        for penalty in PENALTIES
        for found in checkpoint.expected(prompt, 3, penalty, False, eos)
    ]
    lengths = {len(found.token_ids) for prompt in PROMPTS for found in checkpoint.expected(prompt, 3, 1.0, False, eos)}
    assert any(ends) and not all(ends) and len(lengths) > 2


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("width", WIDTHS)
def test_alone(checkpoint: Checkpoint, width: int, is_early: bool) -> None:
    with running(checkpoint.directory, max_model_len=64, num_kv_blocks=40) as engine:
        for eos, penalties in ((checkpoint.eos_token_ids, PENALTIES), (checkpoint.eos_token_ids[:1], (1.0,))):
            for penalty in penalties:
                for prompt in PROMPTS:
                    expected = checkpoint.expected(prompt, width, penalty, is_early, eos)
                    found = serve(engine, [search("a", prompt, width, penalty, is_early, eos)])
                    check(list(found.values()), expected, penalty, eos)


@pytest.mark.parametrize("min_tokens", [1, 5, 9])
def test_no_end_before_so_many_tokens(checkpoint: Checkpoint, min_tokens: int) -> None:
    eos = checkpoint.eos_token_ids
    with running(checkpoint.directory, max_model_len=64, num_kv_blocks=40) as engine:
        for prompt in PROMPTS:
            expected = checkpoint.expected(prompt, 3, 0.0, False, eos, min_tokens)
            found = serve(engine, [search("a", prompt, 3, 0.0, False, eos, min_tokens)])
            check(list(found.values()), expected, 0.0, eos)
            assert all(len(each.token_ids) > min_tokens for each in expected)


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 200, "max_num_seqs": 64},
        # A beam needs twelve blocks.
        {"num_kv_blocks": 16, "max_num_seqs": 3, "max_num_batched_tokens": 7},
        {"num_kv_blocks": 17, "max_num_seqs": 8, "enable_prefix_caching": False},
        {"num_kv_blocks": 16, "max_num_seqs": 8, "swap_space": 2**20},
    ],
    ids=["much room", "few slots", "no prefix caching", "host memory"],
)
def test_in_company(checkpoint: Checkpoint, options: dict[str, Any]) -> None:
    width, eos = 3, checkpoint.eos_token_ids
    asked = [(prompt, penalty, is_early) for prompt in PROMPTS for penalty in (0.0, 1.0) for is_early in (False, True)]
    wanted = []
    for number, (prompt, penalty, is_early) in enumerate(asked):
        wanted.append(search(f"b{number}", prompt, width, penalty, is_early, eos))
        wanted.append(request([7 * number, 5, 6], f"r{number}", temperature=0.0, max_tokens=20, priority=number % 2))
    with running(checkpoint.directory, max_model_len=64, block_size=4, **options) as engine:
        found = serve(engine, wanted)
        assert (engine.stats().num_preemptions > 10) == (options["num_kv_blocks"] < 20)
    for number, (prompt, penalty, is_early) in enumerate(asked):
        answers = [found[f"b{number}", index] for index in range(width)]
        check(answers, checkpoint.expected(prompt, width, penalty, is_early, eos), penalty, eos)
