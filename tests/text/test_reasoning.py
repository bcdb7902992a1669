"""Thoughts and text are separated in the same way however the output is divided into tokens and deltas."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, models
from tokenizers import Tokenizer as Backend

from pagewick.engine.messages import RequestDelta, TokenLogprobs
from pagewick.outputs import PartKind
from pagewick.sampling_params import SamplingParams
from pagewick.text.chat_template import ChatTemplate
from pagewick.text.output_stream import ChoiceDelta, OutputStream
from pagewick.text.reasoning import KNOWN_TAGS, Reasoning, ReasoningSplitter, ReasoningTags, Stage
from pagewick.text.tokenizer import Tokenizer
from tests.tiny_text import QWEN_TEMPLATE, byte_level_backend, sentencepiece_backend


def tokenizer_with(special: Sequence[str] = ()) -> Tokenizer:
    backend = byte_level_backend()
    backend.add_special_tokens([*special])
    return Tokenizer(backend, config={"bos_token": "<s>", "eos_token": "</s>"})


TOKENIZER = tokenizer_with(["[THINK]", "[/THINK]"])
END = TOKENIZER.eos_token_ids[0]
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1}


def tags_of(mention: str, tokenizer: Tokenizer = TOKENIZER) -> ReasoningTags:
    found = ReasoningTags.find(tokenizer, [mention])
    assert found is not None
    return found


PLAIN = tags_of("<think>")  # tokens that are shown
HIDDEN = tags_of("[THINK]")  # tokens that are not
LETTERS = tags_of("<reasoning>")  # no tokens
OPEN_STAGES = (Stage.OPENED, Stage.INSIDE)


def labels(text: str, start: str, end: str, stage: Stage) -> str:
    """The definition, on a whole output: the kind of each character, t(ext), r(easoning) or d(ropped)."""
    opening = re.match(rf"[ \t\r\n]*{re.escape(start)}", text) if stage == Stage.AWAITED else None
    if stage == Stage.OVER or (stage == Stage.AWAITED and opening is None):
        return "t" * len(text)
    begin = opening.end() if opening else 0
    if stage != Stage.INSIDE:
        again = re.compile(rf"(?:[\r\n]*{re.escape(start)})*[\r\n]*").match(text, begin)
        assert again is not None
        begin = again.end()
    thought, tag, answer = text[begin:].partition(end)
    *earlier, last = thought.split(start)
    kept = last
    if not tag:
        sizes = [n for t in (start, end) for n in range(1, len(t)) if last.endswith(t[:n])]
        kept = last[: len(last) - max(sizes, default=0)]
    kept = kept.rstrip("\r\n")
    found = "d" * begin + "".join("r" * len(one) + "d" * len(start) for one in earlier)
    found += "r" * len(kept) + "d" * (len(last) - len(kept) + len(tag))
    blanks = len(answer) - len(answer.lstrip("\r\n"))
    return found + "d" * blanks + "t" * (len(answer) - blanks)


def pick(text: str, found: str, label: str) -> str:
    return "".join(char for char, one in zip(text, found, strict=True) if one == label)


PIECES = st.lists(
    st.sampled_from(["<r>", "</r>", "<", "</", "r", ">", "\n", "\r\n", " ", "a", "é😀", "x\n\n"]), max_size=12
).map("".join)


@given(PIECES, st.sampled_from(Stage), st.lists(st.integers(1, 40)))
def test_the_splitter_equals_the_definition(text: str, stage: Stage, cuts: list[int]) -> None:
    if stage == Stage.CLOSED:
        return
    splitter = ReasoningSplitter("<r>", "</r>", stage)
    borders = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    runs = [run for start, end in itertools.pairwise(borders) for run in splitter.feed(text[start:end])]
    runs += splitter.flush()
    assert "".join(run for _, run in runs) == text
    found = "".join(
        {PartKind.TEXT: "t", PartKind.REASONING: "r", PartKind.DROPPED: "d"}[part] * len(run) for part, run in runs
    )
    assert found == labels(text, "<r>", "</r>", stage)
    if stage != Stage.OVER:
        assert splitter.has_thought == (stage in OPEN_STAGES or re.match(r"[ \t\r\n]*<r>", text) is not None)


@pytest.mark.parametrize(
    ("stage", "fed", "expected"),
    [
        (Stage.INSIDE, "ab <", [(PartKind.REASONING, "ab ")]),
        (Stage.INSIDE, "ab\n", [(PartKind.REASONING, "ab")]),
        (Stage.OPENED, "\na", [(PartKind.DROPPED, "\n"), (PartKind.REASONING, "a")]),
        (Stage.AWAITED, " <", []),
        (Stage.AWAITED, " <a", [(PartKind.TEXT, " <a")]),
        (Stage.INSIDE, "</r>", [(PartKind.DROPPED, "</r>")]),
        (
            Stage.INSIDE,
            "a</r>\nb<",
            [(PartKind.REASONING, "a"), (PartKind.DROPPED, "</r>"), (PartKind.DROPPED, "\n"), (PartKind.TEXT, "b<")],
        ),
        (Stage.OVER, "<r>", [(PartKind.TEXT, "<r>")]),
    ],
)
def test_what_is_known_is_given_out_at_once(stage: Stage, fed: str, expected: list[tuple[PartKind, str]]) -> None:
    assert ReasoningSplitter("<r>", "</r>", stage).feed(fed) == expected


@pytest.mark.parametrize(
    ("stage", "last", "expected"),
    [
        (Stage.AWAITED, "a", [(PartKind.TEXT, "BLANKSa")]),
        (Stage.AWAITED, "<r>", [(PartKind.DROPPED, "BLANKS<r>")]),
        (Stage.INSIDE, "a", [(PartKind.REASONING, "BLANKSa")]),
        (Stage.INSIDE, "</r>", [(PartKind.DROPPED, "BLANKS</r>")]),
        (Stage.INSIDE, "<r>", [(PartKind.REASONING, "BLANKS"), (PartKind.DROPPED, "<r>")]),
    ],
)
def test_white_space_that_is_held_back_is_read_once(
    stage: Stage, last: str, expected: list[tuple[PartKind, str]]
) -> None:
    """If every token caused the text to be read again, this would take a minute."""
    splitter, num_blanks, give_up_at = ReasoningSplitter("<r>", "</r>", stage), 100_000, time.monotonic() + 20
    for _ in range(num_blanks):
        assert splitter.feed("\n") == []
        assert time.monotonic() < give_up_at, "white space is read again and again"
    assert splitter.feed(last) == [(part, text.replace("BLANKS", "\n" * num_blanks)) for part, text in expected]


Item = int | str  # a tag's token id, or text in bytes


def run(
    items: Sequence[Item],
    tags: ReasoningTags,
    stage: Stage,
    cuts: Sequence[int] = (),
    *,
    reason: str = "length",
    **params: Any,
) -> tuple[list[ChoiceDelta], OutputStream, list[int]]:
    token_ids = [i for item in items for i in ([item] if isinstance(item, int) else spell(item))]
    stream = OutputStream(TOKENIZER, SamplingParams(**params), 2, Reasoning(tags, stage))
    borders = sorted({0, *(cut for cut in cuts if cut < len(token_ids)), len(token_ids)})
    deltas = []
    for start, end in itertools.pairwise(borders if token_ids else [0, 0]):
        is_last = end == len(token_ids)
        is_stop = is_last and token_ids[-1:] == [END]
        logprobs = [TokenLogprobs(i, -0.5, 1, []) for i in token_ids[start:end]]
        deltas.append(
            stream.feed(
                RequestDelta(
                    request_id="r",
                    token_ids=token_ids[start:end],
                    logprobs=logprobs,
                    finish_reason=("stop" if is_stop else reason) if is_last else None,
                    stop_token_id=END if is_stop else None,
                )
            )
        )
        if stream.is_stopped:
            break
    return deltas, stream, token_ids


def spell(text: str) -> list[int]:
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


def stopped_at(text: str, stops: Sequence[str]) -> tuple[int, int]:
    """Return start and end of the stop string that ends first; twice the text's length if there is none."""
    for end in range(len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            return end - max(map(len, found)), end
    return len(text), len(text)


ITEMS = st.lists(st.sampled_from(["S", "E", "S", "E", "\n", " ", "a", "b", "<", "</", "é", "😀", "\n\n"]), max_size=10)
STOPS = st.sampled_from([(), ("b",), ("a\n",), ("ab", "\n\n"), ("</think>",), ("hink>a", " "), ("</reas",)])


@given(
    ITEMS,
    st.sampled_from([PLAIN, HIDDEN, LETTERS]),
    st.sampled_from([Stage.AWAITED, Stage.OPENED, Stage.INSIDE, Stage.OVER]),
    STOPS,
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(1, 60)),
)
def test_outputs_equal_the_definition(
    items: list[str],
    tags: ReasoningTags,
    stage: Stage,
    stops: tuple[str, ...],
    is_kept: bool,
    skips_special: bool,
    cuts: list[int],
) -> None:
    # Private-use characters represent tags that are tokens, so that the definition can work on a text.
    marks = {"S": "\ue000", "E": "\ue001"} if tags.are_tokens else {"S": tags.start, "E": tags.end}
    is_hidden = tags is HIDDEN and skips_special
    shown = {"S": "" if is_hidden else tags.start, "E": "" if is_hidden else tags.end}
    ids = {"S": tags.start_ids[0], "E": tags.end_ids[0]}
    fed = [(ids[item] if tags.are_tokens else shown[item]) if item in shown else item for item in items]
    deltas, stream, token_ids = run(
        fed, tags, stage, cuts, stop=stops, include_stop_str_in_output=is_kept,
        skip_special_tokens=skips_special, logprobs=0,
    )  # fmt: skip

    whole = "".join(shown.get(item, item) for item in items)
    start, end = stopped_at(whole, stops)
    is_found = any(stop in whole for stop in stops)
    # Reading ends with the stop string, or with the tag (a token) in which the stop string ends.
    read = spelled = ""
    for item in items:
        if is_found and len(spelled) >= end:
            break
        spelled += (piece := shown.get(item, item))
        num_surplus = max(0, len(spelled) - end)
        read += marks[item] if item in shown and tags.are_tokens else piece[: len(piece) - num_surplus]
    sizes = {mark: len(shown[name]) for name, mark in marks.items()} if tags.are_tokens else {}
    marked = labels(read, marks["S"], marks["E"], stage)
    found = "".join(label * sizes.get(char, 1) for char, label in zip(read, marked, strict=True))
    cut = end if is_kept else start
    output = stream.output
    assert output.text == pick(whole[:cut], found[:cut], "t")
    assert output.reasoning == pick(whole[:cut], found[:cut], "r")
    assert "".join(delta.text for delta in deltas) == output.text
    assert "".join(delta.reasoning for delta in deltas) == output.reasoning
    assert stream.is_stopped == is_found
    assert token_ids[: len(output.token_ids)] == output.token_ids
    if not is_found:
        assert output.token_ids == token_ids

    # Every token either precedes the text or belongs to it.
    positions = [one for delta in deltas for one in delta.logprobs or []]
    assert sum(delta.num_reasoning_tokens for delta in deltas) == output.num_reasoning_tokens
    assert output.num_reasoning_tokens + len(positions) == len(output.token_ids)
    if not is_found:
        assert b"".join(one.chosen.shown for one in positions) == output.text.encode()
    if "r" not in marked and "d" not in marked and stage not in OPEN_STAGES:
        assert output.num_reasoning_tokens == 0


@pytest.mark.parametrize(
    ("tokens", "stop", "reasoning", "text"),
    [
        (["a</reasoning>\n", "Hy"], "\nHx", "a", "Hy"),
        (["a</reasoning>\n", "H", "y"], "\nHx", "a", "Hy"),
        (["a</reasoning>\n", "Hxy"], "\nHx", "a", ""),
        (["a<reb"], "re", "a", ""),
        (["ab</reasoning>c"], "b", "a", ""),
        (["a<stop></reasoning>b"], "<stop>", "a", ""),
        (["a</reas", "oning>b\nc", "d"], "c", "a", "b\n"),
        (["a</reasoning>b</reasoning>"], "</reasoning>", "a", ""),
        (["\n<reasoning>\na</reasoning>\n\nbc"], "c", "a", "b"),
    ],
)
@pytest.mark.parametrize("is_kept", [False, True])
def test_tokens_may_hold_a_tag_a_stop_string_and_more(
    tokens: list[str], stop: str, reasoning: str, text: str, is_kept: bool
) -> None:
    backend = byte_level_backend()
    backend.add_tokens([AddedToken(token, normalized=False) for token in tokens])
    tokenizer = Tokenizer(backend, config={})
    stage = Stage.AWAITED if tokens[0].startswith("\n") else Stage.INSIDE
    params = SamplingParams(stop=stop, include_stop_str_in_output=is_kept)
    stream = OutputStream(tokenizer, params, 0, Reasoning(LETTERS, stage))
    token_ids = [backend.token_to_id(token) for token in tokens]
    stream.feed(RequestDelta(request_id="r", token_ids=token_ids, finish_reason="length"))
    whole = "".join(tokens)
    found = labels(whole[: (whole + stop).find(stop) + len(stop)], LETTERS.start, LETTERS.end, stage)
    cut = len(found) if is_kept or stop not in whole else len(found) - len(stop)
    assert stream.output.reasoning == pick(whole[:cut], found[:cut], "r")
    assert stream.output.text == pick(whole[:cut], found[:cut], "t")
    if not is_kept:
        assert (stream.output.reasoning, stream.output.text) == (reasoning, text)


def test_a_character_that_begins_the_answer_is_of_the_answer() -> None:
    deltas, stream, _ = run([PLAIN.end_ids[0], "\n", "é", END], PLAIN, Stage.INSIDE, range(9), logprobs=0)
    assert (stream.output.text, stream.output.num_reasoning_tokens) == ("é", 2)
    assert [len(delta.logprobs or []) for delta in deltas] == [0, 0, 0, 2, 0]


def test_an_incomplete_character_does_not_go_across_a_tag() -> None:
    for tags in (PLAIN, HIDDEN):
        _, stream, _ = run([BYTE_IDS[b"\xc3"], tags.end_ids[0], BYTE_IDS[b"\xa9"]], tags, Stage.INSIDE)
        assert (stream.output.reasoning, stream.output.text) == ("\ufffd", "\ufffd")


def test_an_unfinished_thought_is_no_text() -> None:
    deltas, stream, _ = run([PLAIN.start_ids[0], "\nhm <\n\n", END], PLAIN, Stage.AWAITED, logprobs=0)
    output = stream.output
    assert (output.text, output.reasoning, output.finish_reason) == ("", "hm <", "stop")
    assert (output.num_reasoning_tokens, len(output.token_ids)) == (8, 9)
    assert [len(delta.logprobs or []) for delta in deltas] == [0]
    assert output.logprobs is not None and len(output.logprobs) == 9


def test_a_tag_in_the_answer_is_text() -> None:
    start, end = PLAIN.start_ids[0], PLAIN.end_ids[0]
    _, stream, _ = run([start, "a", end, "`", start, "b", end, "`"], PLAIN, Stage.AWAITED)
    assert (stream.output.reasoning, stream.output.text) == ("a", "`<think>b</think>`")
    _, stream, _ = run(["<reasoning>a</reasoning>`<reasoning>`"], LETTERS, Stage.AWAITED)
    assert (stream.output.reasoning, stream.output.text) == ("a", "`<reasoning>`")


def test_the_letters_of_a_tag_that_is_a_token_are_text() -> None:
    _, stream, _ = run(["<think>a</think>"], PLAIN, Stage.AWAITED)
    assert (stream.output.reasoning, stream.output.text) == ("", "<think>a</think>")
    _, stream, _ = run(["a</think>b", PLAIN.end_ids[0], "c"], PLAIN, Stage.OPENED)
    assert (stream.output.reasoning, stream.output.text) == ("a</think>b", "c")


def test_stop_strings_come_after_min_tokens_in_thoughts_too() -> None:
    _, stream, _ = run(["axbx", PLAIN.end_ids[0]], PLAIN, Stage.OPENED, stop=("x",), min_tokens=3)
    assert (stream.output.reasoning, stream.output.text, stream.output.stop_reason) == ("axb", "", "x")


# Which tags a model has


@pytest.mark.parametrize("tags", KNOWN_TAGS)
def test_known_tags_are_found_in_the_template_and_in_the_vocabulary(tags: tuple[str, str]) -> None:
    plain = Tokenizer(sentencepiece_backend(), config={})
    assert ReasoningTags.find(plain, ["{{ messages }}"]) is None
    for mention in tags:
        found = ReasoningTags.find(plain, ["x", f"{{{{ '{mention}' }}}}"])
        assert found is not None and (found.start, found.end, found.are_tokens) == (*tags, False)
    backend = sentencepiece_backend()
    backend.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    known = ReasoningTags.find(Tokenizer(backend, config={}), [])
    assert known is not None and (known.start, known.end, known.are_tokens) == (*tags, True)
    assert [backend.id_to_token(i) for i in (*known.start_ids, *known.end_ids)] == [*tags]


def test_the_template_decides_between_tags() -> None:
    """The vocabulary of the test has <think> and [THINK]."""
    assert PLAIN.are_tokens and HIDDEN.are_tokens and not LETTERS.are_tokens
    assert (PLAIN.start, HIDDEN.start, LETTERS.start) == ("<think>", "[THINK]", "<reasoning>")
    found = ReasoningTags.find(TOKENIZER, [])
    assert found is not None and found.start == "<think>"
    assert b"".join(TOKENIZER.token_bytes(i) for i in LETTERS.end_ids) == b"</reasoning>"


def test_a_tag_that_the_tokenizer_writes_with_no_token_is_none() -> None:
    backend = Backend(models.BPE({"a": 0}, []))
    assert ReasoningTags.find(Tokenizer(backend, config={}), ["<think>"]) is None


def test_a_single_tag_in_the_vocabulary_is_none() -> None:
    backend = sentencepiece_backend()
    backend.add_tokens(["<think>"])
    assert ReasoningTags.find(Tokenizer(backend, config={}), []) is None


# Where a prompt ends

ASK = {"role": "user", "content": "why?"}


def stage_of(template: str, messages: list[dict[str, Any]], **options: Any) -> Stage:
    chat_template = ChatTemplate({"default": template}, TOKENIZER)
    assert chat_template.reasoning_tags is not None
    token_ids = TOKENIZER.encode_pieces(chat_template.render(messages, **options).pieces)
    return Reasoning.after(token_ids, chat_template.reasoning_tags, TOKENIZER).stage


TURN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
OPENER = "{% if add_generation_prompt %}<|im_start|>assistant\nTAG{% endif %}"
TEMPLATES = {tags: TURN + OPENER.replace("TAG", tags.start + "\n") for tags in (PLAIN, HIDDEN, LETTERS)}
SILENT = {tags: TURN + OPENER.replace("TAG", "{# TAG #}".replace("TAG", tags.start)) for tags in TEMPLATES}
each_kind = pytest.mark.parametrize("tags", TEMPLATES, ids=["plain", "hidden", "letters"])


@each_kind
def test_a_template_that_opens_a_thought_is_seen(tags: ReasoningTags) -> None:
    assert stage_of(TEMPLATES[tags], [ASK]) == Stage.OPENED
    assert stage_of(SILENT[tags], [ASK]) == Stage.AWAITED
    closed = TEMPLATES[tags].replace(tags.start + "\n", f"{tags.start}\n\n{tags.end}\n\n")
    assert stage_of(closed, [ASK]) == Stage.AWAITED


@each_kind
@pytest.mark.parametrize("source", [TEMPLATES, SILENT], ids=["opening", "silent"])
def test_tags_of_earlier_messages_mean_nothing(tags: ReasoningTags, source: dict[ReasoningTags, str]) -> None:
    expected = stage_of(source[tags], [ASK])
    for text in (tags.start, tags.end, f"{tags.end}{tags.start}", f"a{tags.start}b{tags.end}", f"{tags.start}\n"):
        for role in ("user", "system", "assistant", "tool"):
            assert stage_of(source[tags], [ASK, {"role": role, "content": text}]) == expected, (role, text)
        assert stage_of(source[tags], [{"role": "assistant", "content": text}, ASK]) == expected


@each_kind
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("S\nlet me", Stage.INSIDE),
        ("S\n", Stage.OPENED),
        ("S\nlet me\nE\n\n", Stage.AWAITED),
        ("S\nlet me\nE\n\nThe", Stage.OVER),
        ("The", Stage.AWAITED),
    ],
)
def test_a_message_that_is_continued_may_end_in_a_thought(tags: ReasoningTags, content: str, expected: Stage) -> None:
    message = {"role": "assistant", "content": content.replace("S", tags.start).replace("E", tags.end)}
    assert stage_of(TEMPLATES[tags], [ASK, message], continue_final_message=True) == expected


def test_a_user_can_write_no_tag_where_turns_have_no_tokens() -> None:
    """Turns that are separated by letters, or by tokens that end texts."""
    for tags in (PLAIN, HIDDEN, LETTERS):
        for turn in ("[U]{{ m.content }}[/U]", "<s>[U]{{ m.content }}[/U]", "</s>{{ m.content }} A:"):
            template = "{% for m in messages %}" + turn + "{% endfor %}{# " + tags.start + " #}"
            for text in (tags.start, f"a{tags.start}b", f"{tags.end}{tags.start}x"):
                assert stage_of(template, [{"role": "user", "content": text}]) == Stage.AWAITED


def test_qwen_thinks_or_does_not() -> None:
    assert stage_of(QWEN_TEMPLATE, [ASK]) == Stage.AWAITED
    assert stage_of(QWEN_TEMPLATE, [ASK], enable_thinking=False) == Stage.AWAITED
    assert stage_of(QWEN_TEMPLATE + "{{ '<think>\n' }}", [ASK]) == Stage.OPENED


# Families


def family_tokenizer(*words: str) -> Tokenizer:
    backend = byte_level_backend()
    backend.add_special_tokens([AddedToken(word, normalized=False) for word in words])
    return Tokenizer(backend, config={})


GEMMA_4 = (
    "{{ '<|turn>system\n<|think|>' }}{{ '<turn|>\n<|turn>model\n' }}"
    "{% if not enable_thinking %}{{ '<|channel>thought\n<channel|>' }}{% endif %}"
)


APRIEL = (
    "{# with <thinking> #}{% for m in messages %}<|begin_user|>\n{{ m.content }}\n{% endfor %}"
    "<|begin_assistant|>\nHere are my reasoning steps:\n{# up to [BEGIN FINAL RESPONSE] #}"
)


def test_apriel_thinks_in_steps_from_the_prompts_end_on() -> None:
    tokenizer = family_tokenizer("<|begin_user|>", "<|begin_assistant|>")
    tags = tags_of(APRIEL, tokenizer)
    token_ids = tokenizer.encode_pieces(ChatTemplate({"default": APRIEL}, tokenizer).render([ASK]).pieces)
    assert Reasoning.after(token_ids, tags, tokenizer).stage == Stage.OPENED
    for stage, before in ((Stage.OPENED, ""), (Stage.AWAITED, "Here are my reasoning steps:\n")):
        _, stream, _ = run([f"{before}I add.\n[BEGIN FINAL RESPONSE]\nFour."], tags, stage)
        assert (stream.output.reasoning, stream.output.text) == ("I add.", "Four.")


def test_the_label_of_gemmas_channel_is_no_thought() -> None:
    tokenizer = family_tokenizer("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>")
    tags = tags_of(GEMMA_4, tokenizer)
    assert (tags.start, tags.end, tags.are_tokens) == ("<|channel>", "<channel|>", True)
    template = ChatTemplate({"default": GEMMA_4}, tokenizer)
    for thinks in (True, False):
        token_ids = tokenizer.encode_pieces(template.render([ASK], enable_thinking=thinks).pieces)
        assert Reasoning.after(token_ids, tags, tokenizer).stage == Stage.AWAITED
    for begun, stage in (("<|channel>thought\n", Stage.OPENED), ("<|channel>thought\nSo", Stage.INSIDE)):
        token_ids = tokenizer.encode_pieces(["<|turn>model\n" + begun])
        assert Reasoning.after(token_ids, tags, tokenizer).stage == stage
    for text, reasoning in (
        ("\ud800thought\n\nIt is a sum.\n\ud801Four.", "It is a sum."),
        ("\ud800thoughts help\ud801Four.", "thoughts help"),
        ("\ud800thought\n\ud801Four.", ""),
    ):
        for cut in range(len(text) + 1):
            splitter = Reasoning(tags, Stage.AWAITED).splitter()
            runs = [*splitter.feed(text[:cut]), *splitter.feed(text[cut:]), *splitter.flush()]
            pairs = [one for one in runs if isinstance(one, tuple)]
            shown = ["".join(one for kind, one in pairs if kind is wanted) for wanted in PartKind]
            assert dict(zip(PartKind, shown, strict=True))[PartKind.REASONING] == reasoning, cut
            assert dict(zip(PartKind, shown, strict=True))[PartKind.TEXT] == "Four.", cut


@pytest.mark.parametrize("are_tokens", [False, True])
def test_a_response_of_minimax_m3_without_a_thought_begins_with_the_closing_tag(are_tokens: bool) -> None:
    words = ["<mm:think>", "</mm:think>"] if are_tokens else []
    tokenizer = family_tokenizer("]~b]", "[e~[", *words)
    tags = tags_of("<mm:think>", tokenizer)
    assert (tags.start, tags.end, tags.are_tokens) == ("<mm:think>", "</mm:think>", are_tokens)
    for begun, stage in (("", Stage.AWAITED), ("<mm:think>", Stage.OPENED), ("</mm:think>", Stage.AWAITED)):
        assert Reasoning.after(tokenizer.encode_pieces([f"]~b]ai\n{begun}"]), tags, tokenizer).stage == stage
    start, end = ("\ud800", "\ud801") if are_tokens else (tags.start, tags.end)
    for text, reasoning, answer in (
        (f"{end}Four.", "", "Four."),
        (f" {end}\n\nFour.", "", "Four."),
        (f"{start}A sum.{end}Four.", "A sum.", "Four."),
        (f"Four.{end}", "", f"Four.{end}"),
        (f"{end}{end}", "", end),
    ):
        for cut in range(len(text) + 1):
            splitter = Reasoning(tags, Stage.AWAITED).splitter()
            runs = [*splitter.feed(text[:cut]), *splitter.feed(text[cut:]), *splitter.flush()]
            pairs = [one for one in runs if isinstance(one, tuple)]
            found = [
                "".join(one for kind, one in pairs if kind is wanted) for wanted in (PartKind.REASONING, PartKind.TEXT)
            ]
            assert found == [reasoning, answer], (text, cut)
    other = Reasoning(PLAIN, Stage.AWAITED).splitter()
    assert [*other.feed("\ud801Four."), *other.flush()] == [(PartKind.TEXT, "\ud801Four.")]


@pytest.mark.parametrize("reflects", [False, True])
def test_a_thought_of_seed_may_begin_with_its_budget(reflects: bool) -> None:
    """The token that begins such a remark ends no turn, though it is special."""
    tokenizer = family_tokenizer(
        "<seed:bos>", "<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>"
    )
    tags = tags_of("<seed:think>", tokenizer)
    begun = "<seed:bos>assistant\n<seed:think><seed:cot_budget_reflect>"
    closed = f"{begun}None is left.</seed:cot_budget_reflect>\n</seed:think>"
    token_ids = tokenizer.encode_pieces([closed if reflects else begun])
    assert Reasoning.after(token_ids, tags, tokenizer).stage == (Stage.AWAITED if reflects else Stage.INSIDE)
