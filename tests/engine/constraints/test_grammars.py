"""However the engine serves a request with a grammar, its tokens are those that it gets alone, and fit."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest

from pagewick.text.grammars.constraint import GrammarCompiler
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, assert_same, request, running, serve
from tests.models.checkpoints import COMMON, write_checkpoint

VOCAB_SIZE = COMMON["vocab_size"]
EXPECTED = {"words": r"[a-f]{3,8}( [a-f]{3,8}){2}", "forced": "abcdefgh-?[0-9]{4}ijklmnop"}
GRAMMARS = {"words": "start: /[a-f]{3,8}( [a-f]{3,8}){2}/", "forced": 'start: "abcdefgh" "-"? /[0-9]{4}/ "ijklmnop"'}


class Letters:
    """A tokenizer whose tokens are single characters of ASCII."""

    vocab_size = 128
    added_tokens: ClassVar[dict[str, bool]] = {}

    def iterate_token_bytes(self, num_tokens: int) -> Iterator[tuple[int, bytes]]:
        yield from ((value, bytes([value])) for value in range(1, min(num_tokens, 128)))

    def encode_pieces(self, pieces: list[str]) -> list[int]:
        return list("".join(pieces).encode())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", directory)
    with row_by_row():
        yield directory


def wanted() -> list[Any]:
    random = Random(3)
    return [
        request(
            random.choices(range(VOCAB_SIZE), k=9 + 5 * number), f"r{number}", seed=number, n=1 + number % 3,
            constraint={"type": "grammar", "grammar": GRAMMARS[("words", "forced")[number % 2]],
                        "ignores_eos": number == 4},
            temperature=0.9 * (number % 3 > 0), max_tokens=30, ignore_eos=number == 4, logprobs=1,
            min_tokens=29 * (number == 2),
        )
        for number in range(6)
    ]  # fmt: skip


def engine_of(checkpoint: Path, **options: Any) -> Any:
    grammars = GrammarCompiler(Letters, 10)  # type: ignore[arg-type]
    defaults = {"num_kv_blocks": 40, "block_size": 8, "max_model_len": 96, "grammars": grammars}
    return running(checkpoint, **{**defaults, **options})


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Answers:
    answers: Answers = {}
    with engine_of(checkpoint) as engine:
        for each in wanted():
            answers |= serve(engine, [each])
        stats = engine.stats()
    assert stats.num_constrained_requests == 6 and stats.num_compiled_grammars == 2
    assert stats.num_grammar_masks > 100 and stats.num_grammar_violations == 0
    return answers


def test_every_choice_fits_and_ends(alone: Answers) -> None:
    for each in wanted():
        kind = "forced" if each.constraint["grammar"] == GRAMMARS["forced"] else "words"
        for index in range(each.params.n):
            answer = alone[each.request_id, index]
            text = bytes(token for token in answer.token_ids if 0 < token < 128).decode()
            assert re.fullmatch(EXPECTED[kind], text.rstrip("\x01")), text
            assert answer.finish_reason == "stop"


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 14},
        {"max_num_batched_tokens": 8, "max_num_prefill_tokens": 8},
        {"speculative_method": "ngram", "num_kv_blocks": 20},
        {"speculative_method": "ngram", "max_steps_in_flight": 3},
        {"max_steps_in_flight": 2},
        {"max_steps_in_flight": 3, "num_kv_blocks": 14},
        {"max_num_seqs": 2},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
def test_how_it_is_served_changes_no_token(checkpoint: Path, alone: Answers, options: dict[str, Any]) -> None:
    with engine_of(checkpoint, **options) as engine:
        assert_same(serve(engine, wanted(), arrivals=[0, 0, 1, 2, 2, 5]), alone)
        stats = engine.stats()
        assert stats.num_grammar_violations == 0
        assert options.get("num_kv_blocks") != 14 or stats.num_preemptions > 0
        if "speculative_method" in options:
            assert stats.num_accepted_tokens > 30, "forced tokens are drafted"


def test_a_response_that_is_cut_says_so(checkpoint: Path) -> None:
    said = {"type": "grammar", "grammar": 'start: "abcdef"'}
    with engine_of(checkpoint) as engine:
        for max_tokens, reason in ((5, "length"), (6, "stop"), (7, "stop")):
            answers = serve(engine, [request(range(9), constraint=said, max_tokens=max_tokens)])
            assert answers["a", 0].token_ids == list(b"abcdef")[:max_tokens]
            assert answers["a", 0].finish_reason == reason
