"""The deltas of all choices of one request, and the ranking of candidates."""

from __future__ import annotations

import math
from typing import Any

import pytest

from pagewick import errors
from pagewick.engine.messages import EngineRequest, PrefixMiss, RequestDelta, RequestOptions, TokenLogprobs
from pagewick.errors import InvalidRequestError
from pagewick.outputs import PrefixMiss as PrefixMissOutput
from pagewick.sampling_params import SamplingParams
from pagewick.text.output_stream import ChoiceDelta
from pagewick.text.reasoning import Reasoning, ReasoningTags, Stage
from pagewick.text.request_maker import RequestMaker
from pagewick.text.request_stream import RequestStream, engine_request, failure_of
from pagewick.text.token_strings import TokenStrings
from pagewick.text.tokenizer import Tokenizer
from tests.tiny_text import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), config={"eos_token": "</s>"})
STRINGS = TokenStrings(TOKENIZER, TOKENIZER.vocab_size)


def open_stream(**fields: Any) -> tuple[RequestStream, EngineRequest]:
    params = SamplingParams(**fields)
    request = engine_request("me", [1, 2, 3], params, seed=5, options=None, strings=STRINGS)
    return RequestStream(TOKENIZER, request, params, "prompt"), request


def delta(index: int, text: str = "", logprobs: list[float] | None = None, **fields: Any) -> RequestDelta:
    token_ids = [token_id for char in text for token_id in TOKENIZER.encode(char, add_special_tokens=False)]
    found = None
    if logprobs is not None:
        found = [TokenLogprobs(token_id, one, 1, []) for token_id, one in zip(token_ids, logprobs, strict=True)]
    return RequestDelta(request_id="me", choice_index=index, token_ids=token_ids, logprobs=found, **fields)


def said(changes: list[ChoiceDelta]) -> list[tuple[int, str, str | None]]:
    return [(change.index, change.text, change.finish_reason) for change in changes]


def test_choices_are_told_apart() -> None:
    stream, request = open_stream(n=2)
    assert (request.request_id, request.seed, request.params.n, request.options) == ("me", 5, 2, RequestOptions())
    assert said(stream.feed(delta(1, "b"))) == [(1, "b", None)]
    assert said(stream.feed(delta(0, "a", finish_reason="length"))) == [(0, "a", "length")]
    assert not stream.output.finished
    assert said(stream.feed(delta(0, "late"))) == []
    assert said(stream.feed(delta(1, "c", finish_reason="stop"))) == [(1, "c", "stop")]
    assert stream.output.finished and [one.text for one in stream.output.outputs] == ["a", "bc"]
    assert (stream.num_output_tokens, stream.output.prompt, stream.output.prompt_token_ids) == (3, "prompt", [1, 2, 3])


def test_what_a_stop_string_ends_is_to_be_told_once() -> None:
    stream, request = open_stream(n=3, stop="x")
    assert request.params.stop == ()
    stream.feed(delta(0, "ax"))
    stream.feed(delta(1, "b"))
    stream.feed(delta(2, "cx", finish_reason="length"))  # the engine itself has ended this choice
    assert stream.take_stopped() == [("me", 0)]
    assert stream.take_stopped() == []
    assert [one.finish_reason for one in stream.output.outputs] == ["stop", None, "stop"]


def test_the_best_are_those_of_the_highest_mean_up_to_their_stop() -> None:
    """The means are -0.6, -0.5 and -0.55. Tokens after the stop string "x" do not count, or choice 1 would be last."""
    stream, request = open_stream(n=2, best_of=3, stop="x")
    assert (request.params.n, request.params.best_of, request.params.logprobs) == (3, None, 0)
    assert [one.text for one in stream.output.outputs] == ["", ""]
    assert stream.feed(delta(0, "a", [-0.6], finish_reason="length")) == []
    assert stream.feed(delta(1, "b", [-0.75])) == []
    assert stream.feed(delta(1, "xyz", [-0.25, -9.0, -9.0])) == []
    assert stream.take_stopped() == [("me", 1)]
    assert stream.feed(delta(2, "cd", [-0.3, -0.8])) == []
    assert not stream.output.finished
    changes = stream.feed(delta(2, finish_reason="length"))
    assert said(changes) == [(0, "b", "stop"), (1, "cd", "length")]
    assert [change.stop_reason for change in changes] == ["x", None]
    assert [change.logprobs for change in changes] == [None, None]
    outputs = stream.output.outputs
    assert [(one.index, one.text, one.cumulative_logprob) for one in outputs] == [
        (0, "b", -1.0),
        (1, "cd", pytest.approx(-1.1)),
    ]
    assert stream.output.finished and stream.num_output_tokens == 1 + 2 + 2


def test_thoughts_of_the_best_come_whole() -> None:
    tags = ReasoningTags.find(TOKENIZER, [])
    assert tags is not None
    params = SamplingParams(best_of=2, logprobs=0)
    request = engine_request("me", [1], params, seed=5, options=None, strings=STRINGS)
    stream = RequestStream(TOKENIZER, request, params, None, Reasoning(tags, Stage.AWAITED))
    stream.feed(delta(0, "x", [-3.0], finish_reason="length"))
    think, close = "<think>", "</think>"
    for text in (think, "h", "m", close):
        token_ids = TOKENIZER.encode(text, add_special_tokens=False)
        logprobs = [TokenLogprobs(token_id, -1.0, 1, []) for token_id in token_ids]
        assert stream.feed(RequestDelta(request_id="me", choice_index=1, token_ids=token_ids, logprobs=logprobs)) == []
    (change,) = stream.feed(delta(1, "yo", [-1.0, -1.0], finish_reason="stop"))
    assert (change.reasoning, change.text, change.num_reasoning_tokens) == ("hm", "yo", 4)
    assert [one.chosen.token for one in change.logprobs or []] == ["y", "o"]
    (output,) = stream.output.outputs
    assert (output.reasoning, output.text, output.num_reasoning_tokens) == ("hm", "yo", 4)
    assert output.logprobs is not None and len(output.logprobs) == len(output.token_ids) == 6


def test_how_long_it_took_is_passed_on() -> None:
    stream, _ = open_stream(n=2)
    assert (stream.output.queue_s, stream.output.prefill_s) == (0.0, 0.0)
    stream.feed(delta(0, queue_s=0.5))
    stream.feed(delta(0, "a", prefill_s=0.25))
    stream.feed(delta(1, "b", decode_s=2.5))
    stream.feed(delta(0, "c", decode_s=2.0))
    output = stream.output
    assert (output.queue_s, output.prefill_s, output.decode_s) == (0.5, 0.25, 2.5)


def test_tokens_that_are_dropped_take_no_time() -> None:
    stream, _ = open_stream(stop=("b",))
    stream.feed(delta(0, "ab", decode_s=1.0))
    stream.feed(delta(0, "c", decode_s=2.0))
    assert stream.output.decode_s == 1.0


def test_a_prompt_alone_is_an_answer() -> None:
    stream, request = open_stream(max_tokens=0, prompt_logprobs=0)
    assert request.params.max_tokens == 0
    positions = [TokenLogprobs(2, -1.0, 1, []), TokenLogprobs(3, -1.0, 1, [])]
    assert said(stream.feed(delta(0, prompt_logprobs=positions, finish_reason="length"))) == [(0, "", "length")]
    assert stream.output.finished and stream.output.prompt_logprobs is not None
    assert len(stream.output.prompt_logprobs) == 3


def test_of_equals_the_first_is_the_best_and_the_impossible_the_worst() -> None:
    stream, _ = open_stream(n=3, best_of=4)
    stream.feed(delta(0, finish_reason="abort"))
    stream.feed(delta(1, "b", [float("-inf")], finish_reason="length"))
    stream.feed(delta(2, "c", [-1.0], finish_reason="length"))
    stream.feed(delta(3, "dd", [-1.0, -1.0], finish_reason="length"))
    assert [one.text for one in stream.output.outputs] == ["c", "dd", ""]


def test_best_of_equal_to_n_ranks_nothing() -> None:
    stream, request = open_stream(n=2, best_of=2)
    assert request.params.logprobs is None
    assert said(stream.feed(delta(0, "a"))) == [(0, "a", None)]


def test_the_end_says_what_was_not_finished() -> None:
    stream, _ = open_stream(n=2)
    stream.feed(delta(1, "b", finish_reason="stop"))
    assert said(stream.end("abort")) == [(0, "", "abort")]
    assert stream.output.finished and stream.end("abort") == []


def test_the_end_of_candidates_is_the_end_of_the_best() -> None:
    stream, _ = open_stream(best_of=2)
    stream.feed(delta(0, "a", [-2.0]))
    stream.feed(delta(1, "b", [-1.0]))
    assert said(stream.end("abort")) == [(0, "b", "abort")]
    assert stream.output.outputs[0].text == "b"


def test_what_is_said_of_the_prompt_is_gathered(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "pagewick")
    stream, _ = open_stream(n=2, prompt_logprobs=0)
    positions = [[TokenLogprobs(2, -1.0, 4, [])], [TokenLogprobs(3, -2.0, 5, [])]]
    stream.feed(delta(0, prompt_logprobs=positions[0], num_cached_tokens=2, prefix_miss=PrefixMiss(2, 3, 77)))
    stream.feed(delta(0, "a", prompt_logprobs=positions[1]))
    stream.feed(delta(1, "b"))
    logprobs = stream.output.prompt_logprobs
    assert logprobs is not None and logprobs[0] is None
    assert [[*one] for one in logprobs[1:] if one] == [[2], [3]]
    assert stream.output.num_cached_tokens == 2
    assert stream.output.prefix_miss == PrefixMissOutput(2, 3, 77)
    # The token of the other prompt must not be revealed.
    assert "up to token 2" in caplog.text and "77" not in caplog.text


@pytest.mark.parametrize("kind", sorted(name for name in vars(errors) if name.endswith("Error")))
def test_a_failure_has_the_class_that_the_engine_names(kind: str) -> None:
    failure = failure_of(delta(0, error="because", error_kind=kind, retry_after_s=3), "request 1: ")
    assert type(failure) is getattr(errors, kind) and str(failure) == "request 1: because"
    assert getattr(failure, "retry_after_s", 3) == 3


def test_no_failure_and_one_of_an_unknown_kind() -> None:
    assert failure_of(delta(0, "a")) is None
    assert type(failure_of(delta(0, error="x", error_kind="NewError"))) is errors.EngineError


@pytest.mark.parametrize(
    ("text", "num_tokens", "num_accepted"),
    [("abcd", 7, 5), ("abcx", 7, 5), ("abxd", 6, 5), ("axcd", 5, 4), ("xbcd", 4, 3)],
)
def test_draft_tokens_after_a_stop_string_were_not_accepted(text: str, num_tokens: int, num_accepted: int) -> None:
    """The first step accepts two of four draft tokens, the second three; each samples one more token."""
    stream, _ = open_stream(stop="x")
    stream.feed(delta(0, "123", num_draft_tokens=4, num_accepted_tokens=2))
    stream.feed(delta(0, text, num_draft_tokens=8, num_accepted_tokens=5))
    assert (stream.num_output_tokens, stream.num_accepted_tokens) == (num_tokens, num_accepted)
    assert stream.num_draft_tokens == 8


def checked(**options: Any) -> None:
    RequestMaker(TOKENIZER, None, TOKENIZER.vocab_size).plan(SamplingParams(), options=RequestOptions(**options))


@pytest.mark.parametrize("name", ["cache_salt", "session_id"])
def test_names_are_of_256_bytes_at_most(name: str) -> None:
    for text in ("x", "x" * 256, "€" * 85 + "x", "😀" * 64):
        checked(**{name: text})
    for text in ("", "x" * 257, "€" * 86, "😀" * 65, "\ud800", b"x", 5):
        with pytest.raises(InvalidRequestError, match=f"{name} must be a Unicode text of 1 to 256 bytes") as caught:
            checked(**{name: text})
        assert caught.value.param == name


def test_a_timeout_is_at_most_a_day() -> None:
    for timeout in (5e-324, 1, 86400, 86400.0):
        checked(timeout_s=timeout)
    for wrong in (0, -1, 86400.001, math.inf, math.nan, "1"):
        with pytest.raises(InvalidRequestError, match=r"timeout must be seconds, .* at most 86400; got ") as caught:
            checked(timeout_s=wrong)
        assert caught.value.param == "timeout"


def test_python_may_be_as_urgent_as_it_likes() -> None:
    for priority in (-(2**31), -1, 0, 2**31 - 1):
        checked(priority=priority)


@pytest.mark.parametrize(("options", "expected"), [(None, False), (RequestOptions(cache_salt="s"), True)])
def test_whether_there_is_a_salt_is_known(options: RequestOptions | None, expected: bool) -> None:
    params = SamplingParams()
    request = engine_request("me", [1], params, seed=5, options=options, strings=STRINGS)
    assert RequestStream(TOKENIZER, request, params, None).has_cache_salt == expected


def test_a_string_that_is_no_text_is_refused() -> None:
    for fields in ({"bad_words": ["\ud800"]}, {"dry_multiplier": 1.0, "dry_sequence_breakers": ["\ud800"]}):
        with pytest.raises(InvalidRequestError, match="surrogate") as caught:
            open_stream(**fields)
        assert caught.value.param in fields
