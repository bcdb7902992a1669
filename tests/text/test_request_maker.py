"""RequestMaker makes requests from plans and prompts; these tests check the parts that depend on both."""

from __future__ import annotations

import pytest

from pagewick.engine.messages import RequestDelta, TokenLogprobs
from pagewick.errors import InvalidRequestError
from pagewick.sampling_params import SamplingParams
from pagewick.structured_outputs import StructuredOutputsParams
from pagewick.text.grammars.checker import GrammarChecker
from pagewick.text.reasoning import ReasoningTags
from pagewick.text.request_maker import PlanFields, RequestMaker
from pagewick.text.tokenizer import Tokenizer
from pagewick.text.tool_calls.formats import ToolCallFormat, format_named
from pagewick.text.tool_calls.offer import Tool, ToolOffer
from pagewick.text.tool_calls.written import WrittenCall
from tests.tiny_text import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), config={})
FORM = SamplingParams(structured_outputs=StructuredOutputsParams(regex="\\n?a"))
LINE_BREAK = TOKENIZER.encode_pieces(["", "\n"])


def tags_of(start: str) -> ReasoningTags:
    found = ReasoningTags.find(TOKENIZER, [start])
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Grammars need no process."""
    monkeypatch.setattr(GrammarChecker, "check", lambda *arguments: None)


def opening_ids(
    prompt: str, fields: PlanFields, params: SamplingParams = FORM, vocab_size: int = TOKENIZER.vocab_size
) -> list[int]:
    maker = RequestMaker(TOKENIZER, tags_of("<reasoning>"), vocab_size)
    plan = maker.plan(params, **fields)
    return maker.make("a", TOKENIZER.encode(prompt, add_special_tokens=False), plan, seed=1)[0].opening_ids


@pytest.mark.parametrize("fields", [PlanFields(split_parts=True), PlanFields(split_reasoning=True)])
def test_tokens_that_may_begin_a_thought_are_named_where_one_may_begin(fields: PlanFields) -> None:
    assert opening_ids("a", fields) == [tags_of("<reasoning>").start_ids[0], *LINE_BREAK]
    assert opening_ids("a<reasoning>b</reasoning>", fields) != []
    # A thought has begun, or is over; or nothing is forced.
    assert opening_ids("a<reasoning>", fields) == []
    assert opening_ids("a<reasoning>b</reasoning>c", fields) == []
    assert opening_ids("a", fields, SamplingParams()) == []


def test_outside_a_chat_a_line_break_is_as_good_as_another_first_token() -> None:
    assert opening_ids("a", PlanFields()) == []


def test_tokens_that_only_the_tokenizer_has_are_not_named() -> None:
    """A tokenizer may have more tokens than the model, whose masks and grammars have no place for them."""
    tags, (line_break,) = tags_of("<reasoning>"), LINE_BREAK
    last = max(tags.start_ids + tags.end_ids)
    assert line_break < last
    fields = PlanFields(split_parts=True, split_reasoning=True)
    assert opening_ids("a", fields, vocab_size=last + 1) == [tags.start_ids[0], line_break]
    assert opening_ids("a", fields, vocab_size=last) == []
    maker = RequestMaker(TOKENIZER, tags, last)
    assert maker.kinds == set()
    with pytest.raises(InvalidRequestError, match="no tags around its thoughts"):
        maker.plan(SamplingParams(), thinking_budget=3)


@pytest.mark.parametrize("name", ["llama3_json", "json", "pythonic", "glm4", "hermes"])
@pytest.mark.parametrize("is_opened", [False, True])
def test_calls_are_found_behind_thoughts_that_stay_in_the_text(name: str, is_opened: bool) -> None:
    """Such thoughts are text to the client, but what looks like a call in one is no call."""
    form = format_named(name)
    maker = RequestMaker(TOKENIZER, tags_of("<think>"), TOKENIZER.vocab_size, [ToolCallFormat(form, TOKENIZER)])
    offer = ToolOffer([Tool("now", {})], is_required=True)
    called = form.written([WrittenCall("now", "{}")])
    prompt = "a<think>" if is_opened else "a"
    thought = f"{'' if is_opened else '<think>'}\n{called}\nHm.\n</think>\n\n"
    for split, text in ((False, thought), (True, "")):
        plan = maker.plan(SamplingParams(logprobs=0), offer=offer, split_parts=True, split_reasoning=split)
        request, stream = maker.make("a", TOKENIZER.encode(prompt, add_special_tokens=False), plan, seed=1)
        token_ids = TOKENIZER.encode(thought + called, add_special_tokens=False)
        logprobs = [TokenLogprobs(one, -0.5, 1, []) for one in token_ids]
        finished = RequestDelta(
            request_id=request.request_id, token_ids=token_ids, logprobs=logprobs, finish_reason="stop"
        )
        (change,) = stream.feed(finished)
        assert change.text == text
        assert [part.call.name for part in change.parts if part.call] == ["now"]
        shown = b"".join(one.chosen.shown for one in change.logprobs or [])
        assert shown.decode().rstrip() == text.rstrip()
