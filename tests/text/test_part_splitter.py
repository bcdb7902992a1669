"""Chained splitters find the same parts however the output is divided."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from pagewick.engine.messages import RequestDelta, TokenLogprobs
from pagewick.outputs import PartDelta, PartKind, join_parts
from pagewick.sampling_params import SamplingParams
from pagewick.text.output_stream import ChoiceDelta, OutputStream
from pagewick.text.part_splitter import Run, Splitting, joined
from pagewick.text.reasoning import Reasoning, ReasoningTags, Stage
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tool_calls.formats import ToolCallFormat, format_named
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from tests.fake_parts import FakeSplitter, FakeSplitting, Part, parts_of
from tests.tiny_text import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), config={"eos_token": "</s>"})
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1}


def thoughts(stage: Stage = Stage.AWAITED) -> Reasoning:
    tags = ReasoningTags.find(TOKENIZER, ["<think>"])
    assert tags is not None and tags.are_tokens
    return Reasoning(tags, stage)


START, END = thoughts().tags.start_ids[0], thoughts().tags.end_ids[0]


def spell(text: str) -> list[int]:
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


def run(
    token_ids: Sequence[int], splitting: Splitting | None, cuts: Sequence[int] | None = None, **params: Any
) -> tuple[list[ChoiceDelta], OutputStream]:
    stream = OutputStream(TOKENIZER, SamplingParams(**{"logprobs": 0, **params}), 0, splitting)
    cuts = range(1, len(token_ids)) if cuts is None else cuts
    borders = sorted({0, *(cut for cut in cuts if cut < len(token_ids)), len(token_ids)})
    deltas = []
    for start, end in itertools.pairwise(borders if token_ids else [0, 0]):
        logprobs = [TokenLogprobs(i, -0.5, 1, []) for i in token_ids[start:end]]
        reason = "length" if end == len(token_ids) else None
        delta = RequestDelta(
            request_id="r", token_ids=list(token_ids[start:end]), logprobs=logprobs, finish_reason=reason
        )
        deltas.append(stream.feed(delta))
        if stream.is_stopped:
            break
    return deltas, stream


def plain(parts: Sequence[PartDelta]) -> list[Part]:
    return [(part.kind, part.text, "" if part.call is None else part.call.name) for part in parts]


PIECES = st.lists(
    st.sampled_from(
        ["a", "é😀", "<", "<ca", "</call>", " ", "<call:f>{}</call>", '<call:g>{"x": "</c"}</call>', "<no>n</no>"]
    ),
    max_size=8,
).map("".join)


@given(PIECES, st.sampled_from(["", "hm", "<no>x</no>"]), st.lists(st.integers(1, 99)))
def test_any_cuts_give_the_parts_of_the_whole_text(text: str, thought: str, cuts: list[int]) -> None:
    token_ids = [START, *spell(thought), END, *spell(text)] if thought else spell(text)
    splitting = joined([thoughts(), FakeSplitting()])
    deltas, stream = run(token_ids, splitting, cuts)
    # Text inside a thought that looks like a tool call belongs to the thought.
    expected = [(PartKind.REASONING, thought, "")] if thought else []
    expected += parts_of(text)
    output = stream.output
    assert plain(output.parts) == expected
    assert output.text == "".join(said for kind, said, _ in expected if kind is PartKind.TEXT)
    assert output.reasoning == thought
    whole: list[PartDelta] = []
    for delta in deltas:
        join_parts(whole, delta.parts)
    assert whole == output.parts
    assert [part.call.index for part in output.parts if part.call] == [*range(len([p for p in expected if p[2]]))]


@given(PIECES, st.lists(st.integers(1, 99)))
def test_tokens_of_calls_and_refusals_are_neither_thoughts_nor_shown(text: str, cuts: list[int]) -> None:
    deltas, stream = run(spell(text), FakeSplitting(), cuts)
    positions = [one for delta in deltas for one in delta.logprobs or []]
    spelled = b"".join(one.chosen.shown for one in positions).decode(errors="replace")
    assert stream.output.num_reasoning_tokens == 0
    assert len(stream.output.token_ids) == len(spell(text))
    if "<call:" not in text and "<no>" not in text:
        assert spelled == text
    # A token that closes a tag belongs to the tag; the same letters as text belong to the text.
    assert "x" not in spelled and "f" not in spelled and "n" not in spelled


A = (PartKind.TEXT, "a", "")


def call(arguments: str) -> Part:
    return PartKind.TOOL_CALL, arguments, "f"


@pytest.mark.parametrize(
    ("text", "stop", "parts", "is_stopped"),
    [
        ("ab<call:f>b</call>", "b", [A], True),
        ("a<call:f>bb</call>a", "b", [A, call("bb"), A], False),
        ("a<call:f>b</call>cb", "b", [A, call("b"), (PartKind.TEXT, "c", "")], True),
        ("a<no>cb</no>", "b", [A, (PartKind.REFUSAL, "c", "")], True),
        # Text held back as the possible start of a stop string is emitted when a tool call begins.
        ("a<call:f>{}</call>", "a<call:f>{", [A, call("{}")], False),
    ],
)
def test_stop_strings_end_what_is_written_for_people(text: str, stop: str, parts: list[Part], is_stopped: bool) -> None:
    _, stream = run(spell(text), FakeSplitting(), stop=stop)
    assert (plain(stream.output.parts), stream.is_stopped) == (parts, is_stopped)


def test_parts_are_given_out_as_they_come() -> None:
    deltas, _ = run(spell("a<call:f>{}</call>b"), FakeSplitting())
    said = [plain(delta.parts) for delta in deltas if delta.parts]
    assert said == [
        [(PartKind.TEXT, "a", "")],
        [(PartKind.TOOL_CALL, "", "f")],
        [(PartKind.TOOL_CALL, "{", "f")],
        [(PartKind.TOOL_CALL, "}", "f")],
        [(PartKind.TEXT, "b", "")],
    ]


class LettersOfTags:
    """A splitter with marks of its own: the token of a tag's name becomes a refusal."""

    is_over = False
    kind = PartKind.TEXT

    def __init__(self, token_id: int, mark: str) -> None:
        self.marks = {token_id: mark}
        self._mark = mark

    def feed(self, marked: str) -> list[Run]:
        return [(PartKind.REFUSAL if char == self._mark else PartKind.TEXT, char) for char in marked]

    def flush(self) -> list[Run]:
        return []


class LettersSplitting:
    def __init__(self, token_id: int, mark: str) -> None:
        self._arguments = token_id, mark

    def splitter(self) -> LettersOfTags:
        return LettersOfTags(*self._arguments)


@pytest.mark.parametrize("skips_special", [True, False])
def test_marks_of_one_splitter_are_plain_text_to_the_others(skips_special: bool) -> None:
    (special,) = TOKENIZER.encode("<|im_start|>", add_special_tokens=False)
    shown = "" if skips_special else "<|im_start|>"
    token_ids = [START, special, *spell("a"), END, special, *spell("b"), START]
    splitting = joined([thoughts(), LettersSplitting(special, "\ud802")])
    _, stream = run(token_ids, splitting, skip_special_tokens=skips_special)
    refusal = [] if skips_special else [(PartKind.REFUSAL, shown, "")]
    # After the thoughts, a reasoning tag is text.
    assert plain(stream.output.parts) == [
        (PartKind.REASONING, f"{shown}a", ""), *refusal, (PartKind.TEXT, "b<think>", ""),
    ]  # fmt: skip


def test_what_one_splitter_holds_back_ends_where_a_part_of_the_one_before_begins() -> None:
    """A splitter that finds thoughts in the middle of a response, unlike our reasoning splitter."""

    class Alternating:
        marks: ClassVar[dict[int, str]] = {}
        kind = PartKind.TEXT
        is_over = False

        def feed(self, marked: str) -> list[Run]:
            return [(PartKind.REASONING if char.isupper() else PartKind.TEXT, char) for char in marked]

        def flush(self) -> list[Run]:
            return []

    class AlternatingSplitting:
        def splitter(self) -> Alternating:
            return Alternating()

    _, stream = run(spell("a<cAll:f>"), joined([AlternatingSplitting(), FakeSplitting()]))
    assert plain(stream.output.parts) == [
        (PartKind.TEXT, "a<c", ""), (PartKind.REASONING, "A", ""), (PartKind.TEXT, "ll:f>", ""),
    ]  # fmt: skip


def test_a_call_without_an_end_is_kept_as_far_as_it_came() -> None:
    _, stream = run(spell("a<call:f>{"), FakeSplitting())
    assert plain(stream.output.parts) == [(PartKind.TEXT, "a", ""), (PartKind.TOOL_CALL, "{", "f")]
    _, stream = run(spell("a<call:f"), FakeSplitting())
    assert plain(stream.output.parts) == [(PartKind.TEXT, "a", "")]
    _, stream = run(spell("a<call"), FakeSplitting())
    assert plain(stream.output.parts) == [(PartKind.TEXT, "a<call", "")]


def test_nothing_is_split_where_there_is_nothing_to_tell_apart() -> None:
    assert joined([]) is None
    assert isinstance(joined([FakeSplitting()]), FakeSplitting)
    assert isinstance(FakeSplitting().splitter(), FakeSplitter)


@pytest.mark.parametrize("skips_special", [True, False])
def test_a_marker_within_an_argument_stays_json(skips_special: bool) -> None:
    """The marker of GigaChat 3 is a token with a line break."""
    backend, word = byte_level_backend(), "<|role_sep|>\n"
    backend.add_tokens([AddedToken(word, normalized=False, special=True)])
    tokenizer = Tokenizer(backend, config={})
    splitting = ToolCallFormat(format_named("gigachat3"), tokenizer).splitting([], ToolOffer([Tool("now", {})]))
    params = SamplingParams(skip_special_tokens=skips_special)
    stream = OutputStream(tokenizer, params, 0, splitting)
    text = f'<|message_sep|>\n\nfunction call{word}{{"name": "now", "arguments": {{"a": "1{word}2"}}}}'
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    stream.feed(RequestDelta(request_id="r", token_ids=token_ids, finish_reason="length"))
    (part,) = (part for part in stream.output.parts if part.call)
    assert json.loads(part.text) == {"a": f"1{'' if skips_special else word}2"}


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize(
    ("name", "words", "shown"),
    [
        ("hermes", ["Well", ".\n\n"], "Well.\n\n"),
        ("hermes", ["Well", "\n", "\n"], "Well"),
        ("hermes", ["Well", "\n", ".\n\n", "\n"], "Well\n.\n\n"),
        # This format begins calls with letters.
        ("phi4_mini_json", ["a", "!\nfunc", "day", "\n"], "a!\nfuncday"),
        ("phi4_mini_json", ["a", "\nfunc", "\n"], "a\nfunc"),
        ("phi4_mini_json", ["a", "\nfunc", "\nfunc", "tools"], "a\nfunc"),
        ("phi4_mini_json", ["a", "!\nfunc", "tools"], "a!\nfunc"),
    ],
)
def test_a_token_that_ends_a_text_before_a_call_is_of_the_text(
    name: str, words: list[str], shown: str, is_cut: bool
) -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken(word, normalized=False) for word in (".\n\n", "!\nfunc", "\nfunc")])
    tokenizer = Tokenizer(backend, config={})
    splitting = ToolCallFormat(format_named(name), tokenizer).splitting([], ToolOffer([Tool("now", {})]))
    stream = OutputStream(tokenizer, SamplingParams(logprobs=0), 0, splitting)
    call = '{"name": "now", "arguments": {}}'
    call = f"<tool_call>{call}</tool_call>" if name == "hermes" else f"{'functools' * (words[-1] != 'tools')}[{call}]"
    token_ids = [one for word in (*words, call) for one in tokenizer.encode(word, add_special_tokens=False)]
    found = []
    for group in [[one] for one in token_ids] if is_cut else [token_ids]:
        logprobs = [TokenLogprobs(one, -0.5, 1, []) for one in group]
        found += stream.feed(RequestDelta(request_id="r", token_ids=group, logprobs=logprobs)).logprobs or []
    assert b"".join(one.chosen.shown for one in found).decode() == shown
    assert [part.call.name for part in stream.output.parts if part.call] == ["now"]
