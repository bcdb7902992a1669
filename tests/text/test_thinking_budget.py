"""The constraint for a thinking budget reads tokens as the splitter reads the text."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from pagewick.engine.constraints.factory import KnownConstraints
from pagewick.errors import InvalidRequestError
from pagewick.sampling_params import SamplingParams
from pagewick.text.reasoning import Reasoning, ReasoningTags, Stage
from pagewick.text.thinking_budget import ThinkingBudget
from pagewick.text.tokenizer import Tokenizer
from tests.tiny_text import byte_level_backend, sentencepiece_backend

LETTERS = ("<reasoning>", "</reasoning>")
BACKEND = byte_level_backend()
# Tokens that contain parts of tags.
ODD = [
    "<reas",
    "oning>",
    "</reas",
    "oning>\n",
    "a</",
    ">b",
    " <",
    "\n\n",
    "x<reasoning>y",
    "z</reasoning>",
    "on",
    "reason",
]
BACKEND.add_tokens([AddedToken(text, normalized=False) for text in ODD])
TOKENIZER = Tokenizer(BACKEND, config={})
VOCAB_SIZE = TOKENIZER.vocab_size


def tags_of(mention: str, tokenizer: Tokenizer = TOKENIZER) -> ReasoningTags:
    found = ReasoningTags.find(tokenizer, [mention])
    assert found is not None
    return found


def constraint(budget: Any, tags: ReasoningTags, stage: Stage, **params: Any) -> dict[str, Any] | None:
    maker = ThinkingBudget(TOKENIZER, tags, VOCAB_SIZE)
    maker.check(budget, SamplingParams(**params))
    return maker.constraint(budget, Reasoning(tags, stage))


WISHES = st.lists(
    st.sampled_from(["<", "/", "r", "e", "ason", "ing", ">", "\n", " ", "é", "<reasoning>", "</reasoning>", *ODD]),
    max_size=14,
)


@given(WISHES, st.integers(0, 12), st.sampled_from([Stage.AWAITED, Stage.OPENED]), st.booleans())
def test_the_engine_finds_the_tags_that_are_in_the_text(
    wishes: list[str], budget: int, stage: Stage, are_tokens: bool
) -> None:
    tags = tags_of("<think>" if are_tokens else LETTERS[0])
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(constraint(budget, tags, stage)))
    engine = KnownConstraints(VOCAB_SIZE)(said)
    wanted = [token for wish in wishes for token in TOKENIZER.encode(wish, add_special_tokens=False)]
    if are_tokens:
        wanted[::3] = [tags.end_ids[0] if token % 2 else tags.start_ids[0] for token in wanted[::3]]
    tokens, num_forced = [], 0
    for token in wanted:
        mask = engine.allowed_mask()
        if mask is not None:
            (token,) = (i for i in range(VOCAB_SIZE) if mask[i // 8] >> i % 8 & 1)
            num_forced += 1
        tokens.append(token)
        engine.accept(token)

    # As one text, in which private-use characters represent tags that are tokens.
    marks = {tags.start_ids[0]: "\ue000", tags.end_ids[0]: "\ue001"} if are_tokens else {}
    start, end = ("\ue000", "\ue001") if are_tokens else LETTERS
    parts = [marks.get(i, TOKENIZER.token_bytes(i).decode("latin-1")) for i in tokens]
    text = "".join(parts)
    opening = re.match(rf"[ \t\r\n]*{start}", text)
    if stage == Stage.AWAITED and opening is None:
        assert num_forced == 0
        return
    begin = opening.end() if opening and stage == Stage.AWAITED else 0
    num_before = next(n for n in range(len(parts) + 1) if len("".join(parts[:n])) >= begin)
    place = text.find(end, begin)
    num_thought = len(tokens) - num_before
    if place >= 0:
        num_thought = next(
            n for n in range(num_thought + 1) if len("".join(parts[: num_before + n])) >= place + len(end)
        )
    assert num_thought - num_forced <= budget
    assert num_forced == 0 or num_thought - num_forced == budget


@pytest.mark.parametrize("text", LETTERS)
def test_no_token_that_can_be_part_of_a_tag_is_missing(text: str) -> None:
    said = constraint(1, tags_of(text), Stage.AWAITED)
    assert said is not None
    known = {token_id for token_id, _ in said["spelling"]}
    for token_id in range(VOCAB_SIZE):
        content = TOKENIZER.token_bytes(token_id)
        touches = any(
            content in tag.encode()
            or tag.encode() in content
            or any(
                content.endswith(tag.encode()[:n]) or content.startswith(tag.encode()[n:]) for n in range(1, len(tag))
            )
            for tag in LETTERS
        )
        assert (token_id in known) == (bool(content) and (touches or not content.strip(b" \t\r\n"))), content
    assert all(TOKENIZER.token_bytes(token_id) == content for token_id, content in said["spelling"])


def test_what_is_said_of_tags_that_are_tokens_is_short() -> None:
    tags = tags_of("<think>")
    said = constraint(5, tags, Stage.INSIDE)
    assert said is not None and (said["type"], said["budget"], said["is_open"]) == ("thinking_budget", 5, True)
    assert (said["start_ids"], said["end_ids"]) == ([*tags.start_ids], [*tags.end_ids])
    assert [content for _, content in said["spelling"]] == [b"<think>", b"</think>"]
    said = constraint(5, tags, Stage.AWAITED)
    assert said is not None and not said["is_open"]
    assert {b" ", b"\n", b"\t", b"\r", b"\n\n"} <= {content for _, content in said["spelling"]}


def test_an_answer_that_has_begun_costs_nothing() -> None:
    assert constraint(5, tags_of("<think>"), Stage.OVER) is None


@pytest.mark.parametrize("budget", [-1, 1.5, "3", True, None, 2**31 + 1])
def test_a_budget_is_a_number_of_tokens(budget: Any) -> None:
    with pytest.raises(InvalidRequestError, match="whole number of tokens") as caught:
        constraint(budget, tags_of("<think>"), Stage.AWAITED)
    assert caught.value.param == "thinking_budget"


def test_who_cannot_close_a_thought_has_no_budget() -> None:
    params = SamplingParams()
    with pytest.raises(InvalidRequestError, match="no tags around its thoughts") as caught:
        ThinkingBudget(TOKENIZER, None, VOCAB_SIZE).check(1, params)
    assert caught.value.param == "thinking_budget"
    tags = tags_of("<think>")
    with pytest.raises(InvalidRequestError, match="cannot write </think>"):
        ThinkingBudget(TOKENIZER, tags, tags.end_ids[0]).check(1, params)
    with pytest.raises(InvalidRequestError, match="use_beam_search"):
        constraint(1, tags, Stage.OPENED, use_beam_search=True, n=2)
    # A vocabulary without these letters cannot write the tag.
    poor = Tokenizer(sentencepiece_backend(), config={})
    tags = tags_of("[THINK]", poor)
    assert poor.token_bytes(tags.end_ids[0]) == b"["  # a vocabulary with byte tokens can
    ThinkingBudget(poor, tags, poor.vocab_size).check(1, params)


def test_a_tag_of_unknown_letters_cannot_be_written() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    poor = Tokenizer(Backend(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>")), config={})
    tags = tags_of("<think>", poor)
    with pytest.raises(InvalidRequestError, match="cannot write </think>"):
        ThinkingBudget(poor, tags, 2).check(1, SamplingParams())
