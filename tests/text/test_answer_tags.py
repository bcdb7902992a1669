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
from pagewick.text.answer_tags import CLOSE_MARK, KNOWN_ANSWER_TAGS, OPEN_MARK, AnswerSplitter, AnswerTags
from pagewick.text.reasoning import Reasoning, ReasoningTags, Stage
from pagewick.text.tokenizer import Tokenizer
from tests.tiny_text import byte_level_backend

LETTERS, TOKENS = AnswerTags("<a>", "</a>"), AnswerTags("<a>", "</a>", (1, 2))
each_kind = pytest.mark.parametrize("tags", [LETTERS, TOKENS], ids=["letters", "tokens"])


def fed(tags: AnswerTags, text: str) -> str:
    """The text that a splitter reads in place of this one."""
    return text.replace(tags.start, OPEN_MARK).replace(tags.end, CLOSE_MARK) if tags.ids else text


def label_all(tags: AnswerTags, text: str) -> str:
    """The definition, on a whole output: the kind of each character that is fed, t(ext) or d(ropped)."""
    start, end = (re.escape(fed(tags, tag)) for tag in (tags.start, tags.end))
    opening = re.match(rf"{start}[\r\n]*", text)
    if opening is None:
        return "t" * len(text)
    begin = opening.end()
    behind = r"[\r\n]*" if tags.ids else r"[\r\n]{0,8}\Z"
    closing = re.compile(rf"[\r\n]{{0,8}}{end}{behind}").search(text, begin)
    if closing is None:
        return "d" * begin + "t" * (len(text) - begin)
    rest = text[closing.end() :]
    return "d" * begin + "t" * (closing.start() - begin) + "d" * len(closing[0]) + "t" * len(rest)


def labels(splitter: AnswerSplitter, pieces: Sequence[str]) -> str:
    runs = [run for piece in pieces for run in splitter.feed(piece)] + [*splitter.flush()]
    assert "".join(text for _, text in runs) == "".join(pieces)
    return "".join(("t" if kind is PartKind.TEXT else "d") * len(text) for kind, text in runs)


PIECES = st.lists(
    st.sampled_from(["<a>", "</a>", "<", "</", "a", ">", "\n", "\r\n", " ", "é😀", "x\n\n", "\n" * 5]), max_size=12
)


@each_kind
@given(PIECES.map("".join), st.lists(st.integers(1, 40)))
def test_the_splitter_equals_the_definition(tags: AnswerTags, text: str, cuts: list[int]) -> None:
    text = fed(tags, tags.start + text)
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    found = labels(AnswerSplitter(tags, lambda: True), [text[one:two] for one, two in itertools.pairwise(borders)])
    assert found == label_all(tags, text)


def test_without_a_thought_or_an_opening_tag_everything_is_text() -> None:
    text = "<a>\nx\n</a>"
    assert labels(AnswerSplitter(LETTERS, lambda: False), [text]) == "t" * len(text)
    splitter = AnswerSplitter(LETTERS, lambda: True)
    assert splitter.feed("<") == [] and splitter.kind is None
    assert splitter.feed("b") == [(PartKind.TEXT, "<b")] and splitter.is_over and splitter.kind is PartKind.TEXT
    assert splitter.feed(text) == [(PartKind.TEXT, text)]


def test_what_is_known_is_given_out_at_once() -> None:
    splitter = AnswerSplitter(LETTERS, lambda: True)
    assert splitter.feed("<a>\n") == [(PartKind.DROPPED, "<a>"), (PartKind.DROPPED, "\n")]
    assert splitter.kind is PartKind.DROPPED
    assert splitter.feed("one\n") == [(PartKind.TEXT, "one")]
    assert splitter.feed("two</a>") == [(PartKind.TEXT, "\ntwo")]
    assert splitter.feed("?") == [(PartKind.TEXT, "</a>"), (PartKind.TEXT, "?")] and splitter.kind is PartKind.TEXT


@each_kind
def test_held_text_is_not_read_again_and_again(tags: AnswerTags) -> None:
    begin = time.process_time()
    splitter = AnswerSplitter(tags, lambda: True)
    splitter.feed(fed(tags, "<a>x"))
    for _ in range(50_000):
        splitter.feed("\n")
    splitter.feed(fed(tags, "</a>"))
    for _ in range(50_000):
        splitter.feed("\n")
    assert time.process_time() - begin < 5


TEMPLATES = {
    start: f"{{{{ '<|im_start|>assistant\n<think>\n' }}}}{{# {start} {end} #}}" for start, end in KNOWN_ANSWER_TAGS
}


@pytest.mark.parametrize("are_tokens", [False, True])
@pytest.mark.parametrize("pair", KNOWN_ANSWER_TAGS)
def test_an_answer_behind_a_thought(pair: tuple[str, str], are_tokens: bool) -> None:
    backend = byte_level_backend()
    backend.add_tokens([*pair] if are_tokens else [])
    found = ReasoningTags.find(Tokenizer(backend, config={}), [TEMPLATES[pair[0]]])
    assert found is not None and found.start == "<think>" and found.answer is not None
    assert bool(found.answer.ids) == are_tokens
    answer = f"{pair[0]}\nFour.\n{pair[1]}\n"
    for text, stage, thought in (
        (f"A sum.\n</think>\n\n{answer}", Stage.OPENED, "A sum."),
        (f"\n<think>A sum.</think>{answer}", Stage.AWAITED, "A sum."),
        (answer, Stage.AWAITED, ""),
    ):
        spelled = fed(found.answer, text)
        if found.are_tokens:
            spelled = spelled.replace("<think>", "\ud800").replace("</think>", "\ud801")
        for cut in range(len(spelled)):
            splitter = Reasoning(found, stage).splitter()
            runs = [*splitter.feed(spelled[:cut]), *splitter.feed(spelled[cut:]), *splitter.flush()]
            pairs = [run for run in runs if isinstance(run, tuple)]
            reasoning, shown = (
                "".join(one for kind, one in pairs if kind is wanted) for wanted in (PartKind.REASONING, PartKind.TEXT)
            )
            # Without a thought, <response> could be what the user wants.
            is_kept = not thought and found.answer.follow_thoughts
            assert (reasoning, shown) == (thought, spelled if is_kept else "Four.")


def test_a_model_has_the_tags_of_its_template() -> None:
    tokenizer = Tokenizer(byte_level_backend(), config={})
    assert AnswerTags.find(tokenizer, ["<response>", "{{ messages }}"]) is None
    found = AnswerTags.find(tokenizer, ["x", "<|START_RESPONSE|>{{ m }}<|END_RESPONSE|>"])
    assert found == AnswerTags("<|START_RESPONSE|>", "<|END_RESPONSE|>", follow_thoughts=False)
    # vLLM's template for Hunyuan A13B, whose model writes the tags all the same.
    assert AnswerTags.find(tokenizer, ["{{ m }}<|extra_0|>"]) == AnswerTags("<answer>", "</answer>")


def test_a_thought_that_the_prompt_has_closed_precedes_an_answer() -> None:
    backend = byte_level_backend()
    backend.add_special_tokens(["<|extra_0|>"])
    tokenizer = Tokenizer(backend, config={})
    found = ReasoningTags.find(tokenizer, ["<|extra_0|><reasoning><answer></answer>"])
    assert found is not None and not found.are_tokens
    for prompt, is_closed in (
        ("Hi<|extra_0|><reasoning>\n\n</reasoning>\n", True),
        ("Hi<|extra_0|><reasoning>\n\n</reasoning>\nNo", False),
        ("Hi<|extra_0|>", False),
        ("<reasoning></reasoning>", False),  # letters that a user may have written
    ):
        reasoning = Reasoning.after(tokenizer.encode_pieces(["", prompt]), found, tokenizer)
        assert reasoning.is_closed is is_closed
        splitter = reasoning.splitter()
        runs = [*splitter.feed("<answer>\nx</answer>"), *splitter.flush()]
        shown = "".join(run[1] for run in runs if isinstance(run, tuple) and run[0] is PartKind.TEXT)
        assert shown == ("x" if is_closed else "<answer>\nx</answer>")
