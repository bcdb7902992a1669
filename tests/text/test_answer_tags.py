"""Tags around an answer are left out in the same way wherever the output is cut, and no text is lost."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.outputs import PartKind
from pagewick.text.answer_tags import CLOSE_MARK, KNOWN_ANSWER_TAGS, OPEN_MARK, AnswerSplitter
from pagewick.text.reasoning import Reasoning, ReasoningTags, Stage
from pagewick.text.tokenizer import Tokenizer
from tests.tiny_text import byte_level_backend

START, END = "<a>", "</a>"


def label_all(text: str, *, are_tokens: bool) -> str:
    """The definition, on a whole output: the kind of each character, t(ext) or d(ropped)."""
    opening = re.match(rf"{START}[\r\n]*", text)
    if opening is None:
        return "t" * len(text)
    begin = opening.end()
    pattern = rf"[\r\n]{{0,8}}{END}[\r\n]*" if are_tokens else rf"[\r\n]{{0,8}}{END}[\r\n]{{0,8}}\Z"
    closing = re.compile(pattern).search(text, begin)
    if closing is None:
        return "d" * begin + "t" * (len(text) - begin)
    rest = text[closing.end() :]
    return "d" * begin + "t" * (closing.start() - begin) + "d" * len(closing[0]) + "t" * len(rest)


def labels(splitter: AnswerSplitter, pieces: Sequence[str]) -> str:
    runs = [run for piece in pieces for run in splitter.feed(piece)] + [*splitter.flush()]
    assert "".join(text for _, text in runs) == "".join(pieces)
    return "".join(("t" if kind is PartKind.TEXT else "d") * len(text) for kind, text in runs)


PIECES = st.lists(
    st.sampled_from([START, END, "<", "</", "a", ">", "\n", "\r\n", " ", "é😀", "x\n\n", "\n" * 5]), max_size=12
)


@given(PIECES.map("".join), st.lists(st.integers(1, 40)), st.booleans())
def test_the_splitter_equals_the_definition(text: str, cuts: list[int], are_tokens: bool) -> None:
    text = START + text
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    splitter = AnswerSplitter(START, END, lambda: True, (1, 2) if are_tokens else ())
    found = labels(splitter, [text[begin:end] for begin, end in itertools.pairwise(borders)])
    assert found == label_all(text, are_tokens=are_tokens)


def test_without_a_thought_or_an_opening_tag_everything_is_text() -> None:
    text = f"{START}\nx\n{END}"
    assert labels(AnswerSplitter(START, END, lambda: False), [text]) == "t" * len(text)
    splitter = AnswerSplitter(START, END, lambda: True)
    assert splitter.feed("<") == [] and splitter.kind is None
    assert splitter.feed("b") == [(PartKind.TEXT, "<b")] and splitter.is_over and splitter.kind is PartKind.TEXT
    assert splitter.feed(text) == [(PartKind.TEXT, text)]


def test_what_is_known_is_given_out_at_once() -> None:
    splitter = AnswerSplitter(START, END, lambda: True)
    assert splitter.feed(f"{START}\n") == [(PartKind.DROPPED, START), (PartKind.DROPPED, "\n")]
    assert splitter.kind is PartKind.DROPPED
    assert splitter.feed("one\n") == [(PartKind.TEXT, "one")]
    assert splitter.feed(f"two{END}") == [(PartKind.TEXT, "\ntwo")]
    assert splitter.feed("?") == [(PartKind.TEXT, END), (PartKind.TEXT, "?")] and splitter.kind is PartKind.TEXT


@pytest.mark.parametrize("ids", [(), (1, 2)])
def test_held_text_is_not_read_again_and_again(ids: tuple[int, ...]) -> None:
    begin = time.process_time()
    splitter = AnswerSplitter(START, END, lambda: True, ids)
    splitter.feed(f"{START}x")
    for _ in range(50_000):
        splitter.feed("\n")
    splitter.feed(END)
    for _ in range(50_000):
        splitter.feed("\n")
    assert time.process_time() - begin < 5


ERNIE = "{{ '<|im_start|>assistant\n<think>\n' }}{# <response> </response> #}"


@pytest.mark.parametrize("are_tokens", [False, True])
def test_an_answer_behind_a_thought(are_tokens: bool) -> None:
    backend = byte_level_backend()
    backend.add_tokens([*KNOWN_ANSWER_TAGS] if are_tokens else [])
    tokenizer = Tokenizer(backend, config={})
    tags = ReasoningTags.find(tokenizer, [ERNIE])
    assert tags is not None and tags.start == "<think>" and tags.has_answer and bool(tags.answer_ids) == are_tokens
    text = "A sum.\n</think>\n\n<response>\nFour.\n</response>\n"
    for cut in range(len(text)):
        splitter = Reasoning(tags, Stage.OPENED).splitter()
        spelled = text
        marks = {"\ud801": "</think>"} if tags.are_tokens else {}
        marks |= dict(zip((OPEN_MARK, CLOSE_MARK), KNOWN_ANSWER_TAGS, strict=True)) if are_tokens else {}
        assert {*splitter.marks.values()} >= marks.keys()
        for mark, tag in marks.items():
            spelled = spelled.replace(tag, mark)
        runs = [*splitter.feed(spelled[:cut]), *splitter.feed(spelled[cut:]), *splitter.flush()]
        shown = {
            kind: "".join(run[1] for run in runs if isinstance(run, tuple) and run[0] is kind) for kind in PartKind
        }
        assert (shown[PartKind.REASONING], shown[PartKind.TEXT]) == ("A sum.", "Four.")
