"""A thought ends after its budget, whatever tokens its tags are made of and however the engine serves it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.engine.constraints.factory import AllOf, KnownConstraints
from pagewick.engine.sequence import TokenConstraint
from pagewick.errors import InvalidRequestError
from tests.engine.row_by_row import row_by_row
from tests.engine.serving import Answers, assert_same, request, running, serve
from tests.models.checkpoints import COMMON, write_checkpoint

# A vocabulary for tags of letters: one character each, and tokens that hold parts of tags and more.
WORDS = [
    "<",
    "/",
    "t",
    ">",
    "a",
    "b",
    " ",
    "\n",
    "</",
    "t>",
    "</t>",
    "<t>",
    ">a",
    "a<",
    "</t",
    "a</t>b",
    "\n<",
    "<t>a",
    "<t></",
    "ab",
]
IDS = {word: number for number, word in enumerate(WORDS)}
MATTERING = [
    (number, word.encode())
    for number, word in enumerate(WORDS)
    if set(word) <= set("<t/> \n") or "<" in word or ">" in word
]
START, END = "<t>", "</t>"
VOCAB_SIZE = len(WORDS)


def spec(budget: int, *, is_open: bool, end: list[str] | None = None, **changes: Any) -> dict[str, Any]:
    return {
        "type": "thinking_budget",
        "budget": budget,
        "is_open": is_open,
        "start_ids": [IDS["<"], IDS["t>"]],
        "end_ids": [IDS[word] for word in end or ["</", "t>"]],
        "spelling": MATTERING,
        "blanks": b" \n",
        **changes,
    }


def make(said: Any, vocab_size: int = VOCAB_SIZE) -> TokenConstraint:
    """As it comes out of a message."""
    return KnownConstraints(vocab_size)(msgspec.msgpack.decode(msgspec.msgpack.encode(said)))


def allowed(constraint: TokenConstraint, vocab_size: int = VOCAB_SIZE) -> list[int]:
    mask = constraint.allowed_mask()
    if mask is None:
        return list(range(vocab_size))
    assert len(mask) == -(-vocab_size // 8)
    return [number for number in range(vocab_size) if mask[number // 8] >> number % 8 & 1]


def follow(said: Any, wishes: list[int]) -> tuple[list[int], list[bool]]:
    """The tokens of a model that takes its wish where it may, and which of them were forced."""
    constraint, tokens, forced = make(said), [], []
    for wish in wishes:
        choices = allowed(constraint)
        forced.append(constraint.allowed_mask() is not None)
        tokens.append(wish if wish in choices else choices[0])
        constraint.accept(tokens[-1])
    return tokens, forced


def spell(tokens: list[int]) -> str:
    return "".join(WORDS[token] for token in tokens)


def thought_tokens(tokens: list[int], *, is_open: bool) -> tuple[int, int] | None:
    """By the whole text: the number of tokens that come before the thought, and with it; None without a thought."""
    text = spell(tokens)
    opening = None if is_open else re.match(r"[ \n]*<t>", text)
    if not is_open and opening is None:
        return None
    begin = opening.end() if opening else 0
    end = text.find(END, begin)
    ends = [len(spell(tokens[: count + 1])) for count in range(len(tokens))]
    num_before = next(count for count, place in enumerate(ends, 1) if place >= begin) if begin else 0
    if end < 0:
        return num_before, len(tokens)
    return num_before, next(count for count, place in enumerate(ends, 1) if place >= end + len(END))


@given(
    st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=30),
    st.integers(0, 8),
    st.booleans(),
    st.sampled_from([["</t>"], ["</", "t>"], ["<", "/", "t", ">"]]),
)
def test_a_thought_is_closed_after_its_budget_and_never_otherwise(
    wishes: list[int], budget: int, is_open: bool, end: list[str]
) -> None:
    tokens, forced = follow(spec(budget, is_open=is_open, end=end), wishes)
    found = thought_tokens(tokens, is_open=is_open)
    if found is None:
        assert tokens == wishes and not any(forced)
        return
    num_before, num_with = found
    num_thought = num_with - num_before
    # Tokens that were not forced are those wished for; the rest is the whole closing tag, at the end of the thought.
    assert [token for token, is_forced in zip(tokens, forced, strict=True) if not is_forced] == [
        wish for wish, is_forced in zip(wishes, forced, strict=True) if not is_forced
    ]
    num_forced = sum(forced)
    assert forced == [False] * (num_with - num_forced) + [True] * num_forced + [False] * (len(tokens) - num_with)
    assert num_thought - num_forced <= budget
    if num_forced:
        assert num_thought - num_forced == budget
        written = tokens[num_before:num_with]
        is_cut = num_with == len(tokens) and END not in spell(written)
        ids = [IDS[word] for word in end]
        assert is_cut or written[-len(ids) :] == ids


def test_a_tag_that_has_begun_is_only_finished() -> None:
    tokens, forced = follow(spec(2, is_open=True, end=["<", "/", "t", ">"]), [IDS["a"], IDS["<"], *[IDS["a"]] * 5])
    assert (spell(tokens), forced) == ("a</t>aa", [False, False, True, True, True, False, False])


def test_no_budget_at_all() -> None:
    tokens, _ = follow(spec(0, is_open=True), [IDS["a"]] * 4)
    assert spell(tokens) == "</t>aa"
    tokens, _ = follow(spec(0, is_open=False), [IDS["\n"], IDS["<t>"], *[IDS["a"]] * 4])
    assert spell(tokens) == "\n<t></t>aa"
    tokens, _ = follow(spec(0, is_open=False), [IDS["a"], IDS["<t>"], IDS["a"]])
    assert spell(tokens) == "a<t>a"


@pytest.mark.parametrize(
    ("is_open", "wishes", "expected"),
    [
        (True, ["<", "a", "/", "t>", "a", "a", "a"], "<a/t>a</t>"),
        (False, ["<t></", "t>", "a", "a", "a", "a", "a"], "<t></t>aaaaa"),
        (False, ["\n", "<", "t>", "a</t>b", "a", "a", "a"], "\n<t>a</t>baaa"),
        (True, ["</t", ">a", "a", "a", "a", "a", "a"], "</t>aaaaaa"),
        (False, ["<", "a", "t>", "a", "a", "a", "a"], "<at>aaaa"),
    ],
)
def test_a_tag_is_whole_or_none(is_open: bool, wishes: list[str], expected: str) -> None:
    tokens, _ = follow(spec(5, is_open=is_open), [IDS[wish] for wish in wishes])
    assert spell(tokens) == expected


def test_tags_that_are_tokens_are_those_tokens_only() -> None:
    """Letters that spell a tag do not matter then: they are not among the spellings."""
    said = spec(
        3, is_open=True, end=["</t>"], start_ids=[IDS["<t>"]], spelling=[(IDS["<t>"], b"<t>"), (IDS["</t>"], b"</t>")]
    )
    tokens, _ = follow(said, [IDS["</"], IDS["t>"], *[IDS["a"]] * 4])
    assert spell(tokens) == "</t>a</t>aa"
    tokens, _ = follow(said, [IDS["a"], IDS["</t>"], *[IDS["a"]] * 4])
    assert spell(tokens) == "a</t>aaaa"


def test_white_space_before_a_thought_is_read_once() -> None:
    """Read again with every token, this much would take minutes."""
    constraint, give_up_at = make(spec(1, is_open=False)), time.monotonic() + 20
    for _ in range(400_000):
        constraint.accept(IDS["\n"])
        assert time.monotonic() < give_up_at, "white space is read again and again"
    for word in ("<", "t>", "a"):
        assert constraint.allowed_mask() is None
        constraint.accept(IDS[word])
    assert allowed(constraint) == [IDS["</"]]


def test_another_token_than_the_forced_one_is_our_own_mistake() -> None:
    constraint = make(spec(0, is_open=True))
    with pytest.raises(RuntimeError, match=f"token {IDS['a']} was sampled where only {IDS['</']} was allowed"):
        constraint.accept(IDS["a"])


@given(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=30), st.integers(0, 4), st.integers(0, 4))
def test_constraints_in_a_list_apply_together(wishes: list[int], first: int, second: int) -> None:
    """The smaller one of two budgets counts."""
    tokens, _ = follow([spec(first, is_open=True), spec(second, is_open=True)], wishes)
    expected, _ = follow(spec(min(first, second), is_open=True), wishes)
    assert tokens == expected


def test_a_list_of_constraints_allows_what_all_of_them_allow() -> None:
    class Some:
        is_complete = False

        def __init__(self, mask: bytes | None) -> None:
            self.mask = mask

        def allowed_mask(self) -> bytes | None:
            return self.mask

        def accept(self, token_id: int) -> None:
            self.is_complete = token_id == 7

    parts = [Some(b"\x07\xff"), Some(None), Some(b"\x05\x80")]
    both = AllOf(parts)
    assert both.allowed_mask() == b"\x05\x80" and AllOf([Some(None)]).allowed_mask() is None
    both.accept(3)
    assert not both.is_complete
    both.accept(7)
    assert both.is_complete and all(part.is_complete for part in parts)


@pytest.mark.parametrize(
    "wrong",
    [
        3, "x", {}, {"type": "grammar"}, {"type": "thinking_budget"}, spec(-1, is_open=True),
        spec(1, is_open=True, end_ids=[]), spec(1, is_open=True, start_ids=[]), spec(1, is_open=True, spelling=[]),
        spec(1, is_open=True, spelling=[(1, "x")]), [spec(1, is_open=True), {}],
    ],
)  # fmt: skip
def test_what_is_no_constraint_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidRequestError, match="not a constraint") as caught:
        make(wrong)
    assert caught.value.param == "constraint"


def test_a_tag_that_the_model_cannot_write_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="not in the vocabulary"):
        make(spec(1, is_open=True), vocab_size=IDS["t>"])


# In whole engines

MODEL_VOCAB = COMMON["vocab_size"]
OPENING, CLOSING = 60, [61, 62, 63]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("llama")
    write_checkpoint("llama", directory)
    with row_by_row():
        yield directory


def engine_spec(budget: int, *, is_open: bool = True) -> dict[str, Any]:
    spelling = [(OPENING, b"<t>"), *((token, bytes([token])) for token in CLOSING)]
    return spec(budget, is_open=is_open, start_ids=[OPENING], end_ids=CLOSING, spelling=spelling)


def wanted(**changes: Any) -> list[Any]:
    random, asked = Random(3), {"max_tokens": 24, "ignore_eos": True, "logprobs": 1, **changes}
    budgets = [0, 1, 7, 15, 16, 100]
    return [
        request(
            random.choices(range(70, MODEL_VOCAB), k=11 + 7 * number), f"r{number}", seed=number, n=1 + number % 3,
            constraint=engine_spec(budget), temperature=0.9 * (number % 2), **asked,
        )
        for number, budget in enumerate(budgets)
    ]  # fmt: skip


def engine_of(checkpoint: Path, **options: Any) -> Any:
    return running(checkpoint, **{"num_kv_blocks": 40, "block_size": 8, "max_model_len": 96, **options})


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> Answers:
    answers: Answers = {}
    with engine_of(checkpoint) as engine:
        for each in wanted():
            answers |= serve(engine, [each])
    return answers


def test_every_choice_closes_its_thought_where_the_budget_ends(alone: Answers) -> None:
    for each in wanted():
        budget = each.constraint["budget"]
        for index in range(each.params.n):
            tokens = alone[each.request_id, index].token_ids
            assert len(tokens) == 24
            if budget + 3 <= 24:
                assert tokens[budget : budget + 3] == CLOSING
            assert not any(tokens[place : place + 3] == CLOSING for place in range(min(budget, 22)))


@pytest.mark.parametrize(
    "options",
    [
        {"num_kv_blocks": 14},
        {"max_num_batched_tokens": 8, "max_num_prefill_tokens": 8},
        {"speculative_method": "ngram", "num_kv_blocks": 20},
        {"max_num_seqs": 2},
    ],
    ids=["preempted", "in chunks", "speculating", "two at a time"],
)
def test_how_it_is_served_changes_no_token(checkpoint: Path, alone: Answers, options: dict[str, Any]) -> None:
    with engine_of(checkpoint, **options) as engine:
        assert_same(serve(engine, wanted(), arrivals=[0, 0, 1, 2, 2, 5]), alone)
        assert options.get("num_kv_blocks") != 14 or engine.stats().num_preemptions > 0


def test_a_budget_that_is_not_reached_changes_nothing(checkpoint: Path) -> None:
    with engine_of(checkpoint) as engine:
        bounded = serve(engine, [msgspec.structs.replace(one, constraint=engine_spec(99)) for one in wanted()])
        unasked = serve(
            engine, [msgspec.structs.replace(one, constraint=engine_spec(0, is_open=False)) for one in wanted()]
        )
        free = serve(engine, [msgspec.structs.replace(one, constraint=None) for one in wanted()])
    for choice, answer in free.items():
        assert bounded[choice] == answer
        assert answer.token_ids[0] != OPENING and unasked[choice] == answer


def test_the_engine_refuses_what_is_no_constraint(checkpoint: Path) -> None:
    with engine_of(checkpoint) as engine:
        with pytest.raises(InvalidRequestError, match="not a constraint"):
            engine.add(request([5], constraint={"type": "unknown"}))
        with pytest.raises(InvalidRequestError, match="beam search takes no constraint"):
            engine.add(request([5], constraint=engine_spec(1), use_beam_search=True, n=2))
        assert not engine.has_work
