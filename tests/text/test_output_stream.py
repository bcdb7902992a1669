"""Stop strings, hidden tokens and log-probabilities, whatever the cuts between deltas."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.engine.messages import RequestDelta, TokenLogprobs
from pagewick.outputs import CompletionOutput
from pagewick.sampling_params import SamplingParams
from pagewick.text.output_stream import LOWEST_LOGPROB, ChoiceDelta, OutputStream
from pagewick.text.tokenizer import Tokenizer
from tests.tiny_text import byte_level_backend

TOKENIZER = Tokenizer(byte_level_backend(), config={"eos_token": "</s>"})
END = TOKENIZER.eos_token_ids[0]
BYTE_IDS = {TOKENIZER.token_bytes(i): i for i in range(TOKENIZER.vocab_size) if len(TOKENIZER.token_bytes(i)) == 1}


def spell(text: str) -> list[int]:
    """One token per byte."""
    return [BYTE_IDS[bytes([byte])] for byte in text.encode()]


def run(
    token_ids: list[int], cuts: list[int] | None = None, *, reason: str = "length", **params: Any
) -> tuple[list[ChoiceDelta], CompletionOutput, OutputStream]:
    """Feed token ids cut at the given places; a final END ends with reason "stop"."""
    stream = OutputStream(TOKENIZER, SamplingParams(**params), index=3)
    borders = sorted({0, *(cut for cut in cuts or range(len(token_ids)) if cut < len(token_ids)), len(token_ids)})
    deltas = []
    for start, end in itertools.pairwise(borders):
        is_last = end == len(token_ids)
        is_stop = is_last and token_ids[-1] in (END, *params.get("stop_token_ids", ()))
        delta = RequestDelta(
            request_id="r",
            token_ids=token_ids[start:end],
            logprobs=[TokenLogprobs(i, -0.5, 1, [(i, -0.5), (END, -2.0)]) for i in token_ids[start:end]],
            finish_reason=("stop" if is_stop else reason) if is_last else None,
            stop_token_id=token_ids[-1] if is_stop else None,
        )
        deltas.append(stream.feed(delta))
        if stream.is_stopped:
            break
    return deltas, stream.output, stream


def reference(text: str, stops: tuple[str, ...]) -> tuple[str, str | None]:
    """Return the text up to the stop string that ends first."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


@given(
    st.text(st.sampled_from("abc😀"), max_size=12),
    st.lists(st.text(st.sampled_from("abc😀"), min_size=1, max_size=4), max_size=3),
    st.lists(st.integers(1, 48)),
)
def test_any_cuts_give_the_text_before_the_first_stop_string(text: str, stops: list[str], cuts: list[int]) -> None:
    token_ids = [*spell(text), END]
    deltas, output, stream = run(token_ids, cuts, stop=tuple(stops))
    expected, stop = reference(text, tuple(stops))
    assert output.text == "".join(delta.text for delta in deltas) == expected
    assert output.token_ids == [i for delta in deltas for i in delta.token_ids]
    assert output.stop_reason == deltas[-1].stop_reason == stop
    assert output.finish_reason == deltas[-1].finish_reason == "stop"
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert stream.is_stopped == (stop is not None)
    if stop is not None:
        assert output.token_ids == spell(expected + stop)


def test_text_is_held_only_while_a_stop_string_is_possible() -> None:
    deltas, _, _ = run(spell("abSTxSTOPyz"), stop=("STOP",))
    assert [delta.text for delta in deltas] == ["a", "b", "", "", "STx", "", "", "", ""]
    deltas, output, _ = run(spell("abST"), stop=("STOP",))
    assert [delta.text for delta in deltas] == ["a", "b", "", "ST"]
    assert (output.text, output.finish_reason, output.stop_reason) == ("abST", "length", None)


def test_stop_string_inside_a_long_token_and_later_deltas_ignored() -> None:
    token_ids = TOKENIZER.encode(" hello", add_special_tokens=False)
    assert len(token_ids) < 4
    _, output, stream = run([*token_ids, *token_ids], stop=("l",))
    assert output.text == " he"
    late = stream.feed(RequestDelta(request_id="r", token_ids=token_ids, finish_reason="abort"))
    assert (late.text, late.token_ids, late.finish_reason) == ("", [], None)
    assert output.text == " he" and output.finish_reason == "stop"


def test_min_tokens_come_before_a_stop_string() -> None:
    _, output, _ = run(spell("axbxc"), stop=("x",), min_tokens=3)
    assert output.text == "axb"
    _, output, _ = run(spell("axbxc"), stop=("x",), min_tokens=1)
    assert output.text == "a"


@pytest.mark.parametrize("skip_special_tokens", [True, False])
def test_the_token_that_ends_is_never_shown(skip_special_tokens: bool) -> None:
    deltas, output, stream = run([*spell("hi"), END], skip_special_tokens=skip_special_tokens, logprobs=1)
    assert output.text == "hi" and output.token_ids == [*spell("hi"), END]
    assert (output.finish_reason, output.stop_reason, stream.is_stopped) == ("stop", None, False)
    assert output.logprobs is not None and len(output.logprobs) == 3
    assert [len(delta.logprobs or []) for delta in deltas] == [1, 1, 0]


@pytest.mark.parametrize(("text", "stops"), [("hello<end>x", ("<end>",)), ("abcd", ("cd", "bc")), ("ab", ("c",))])
def test_a_stop_string_may_stay(text: str, stops: tuple[str, ...]) -> None:
    before, stop = reference(text, stops)
    _, output, _ = run(spell(text), stop=stops, include_stop_str_in_output=True)
    assert (output.text, output.stop_reason) == (before + (stop or ""), stop)


def test_a_stop_token_may_stay() -> None:
    exclamation = spell("!")[0]
    for skips, stays, text in ((True, True, "hi!"), (True, False, "hi"), (False, True, "hi!")):
        deltas, output, _ = run(
            spell("hi!"), stop_token_ids=(exclamation,), include_stop_str_in_output=stays, skip_special_tokens=skips,
            logprobs=0,
        )  # fmt: skip
        assert (output.text, output.stop_reason) == (text, exclamation)
        assert joined_bytes(deltas) == output.text.encode()
    _, output, _ = run([*spell("hi"), END], include_stop_str_in_output=True)
    assert output.text == "hi"
    _, output, _ = run([*spell("hi"), END], include_stop_str_in_output=True, skip_special_tokens=False)
    assert output.text == "hi</s>"


def test_stop_token_id_is_reported() -> None:
    exclamation = spell("!")[0]
    _, output, _ = run(spell("hi!"), stop_token_ids=(exclamation,))
    assert (output.text, output.finish_reason, output.stop_reason) == ("hi", "stop", exclamation)


def test_special_tokens_inside() -> None:
    token_ids = TOKENIZER.encode("a<|im_start|>b<think>", add_special_tokens=False)
    _, output, _ = run(token_ids)
    assert output.text == "ab<think>"
    deltas, output, _ = run(token_ids, skip_special_tokens=False, logprobs=0)
    assert output.text == "a<|im_start|>b<think>"
    assert joined_bytes(deltas) == output.text.encode()


@given(st.text(st.sampled_from("ab😀é"), max_size=8), st.lists(st.integers(1, 32)))
def test_logprobs_bytes_join_to_the_text(text: str, cuts: list[int]) -> None:
    token_ids = [*spell(text), TOKENIZER.encode("<|im_start|>", add_special_tokens=False)[0], END]
    deltas, output, _ = run(token_ids, cuts, logprobs=2)
    assert joined_bytes(deltas) == output.text.encode() == text.encode()
    assert output.logprobs is not None
    assert [next(iter(position)) for position in output.logprobs] == token_ids


def test_logprob_forms() -> None:
    stream = OutputStream(TOKENIZER, SamplingParams(logprobs=2), 0)
    (euro,) = spell("é")[:1]
    a = spell("a")[0]
    position = TokenLogprobs(euro, float("-inf"), 17, [(a, -0.1), (END, -3.0)])
    delta = stream.feed(RequestDelta(request_id="r", token_ids=[euro], logprobs=[position]))
    assert delta.text == ""
    assert delta.logprobs is not None and stream.output.logprobs is not None
    (entry,) = delta.logprobs
    assert (entry.chosen.token, entry.chosen.logprob, entry.chosen.shown) == ("\ufffd", LOWEST_LOGPROB, b"\xc3")
    assert [(choice.token, choice.logprob, choice.shown) for choice in entry.top] == [
        ("a", -0.1, b"a"),
        ("</s>", -3.0, b""),
    ]
    (found,) = stream.output.logprobs
    assert [(i, lp.logprob, lp.rank, lp.decoded_token) for i, lp in found.items()] == [
        (euro, LOWEST_LOGPROB, 17, "\ufffd"),
        (a, -0.1, 1, "a"),
        (END, -3.0, 2, "</s>"),
    ]


def test_no_logprobs_unless_asked_for() -> None:
    deltas, output, _ = run(spell("hi"))
    assert output.logprobs is None and all(delta.logprobs is None for delta in deltas)


def test_the_sum_of_log_probabilities_goes_up_to_the_stop() -> None:
    """The sum is kept whenever log-probabilities are known; the list only if it was requested."""
    _, output, _ = run(spell("abcde"), [5], stop=("d",))
    assert (output.cumulative_logprob, output.logprobs) == (4 * -0.5, None)
    _, output, _ = run([*spell("ab"), END], logprobs=0)
    assert output.cumulative_logprob == 3 * -0.5
    stream = OutputStream(TOKENIZER, SamplingParams(), 0)
    stream.feed(RequestDelta(request_id="r", token_ids=spell("ab")))
    assert stream.output.cumulative_logprob is None
    stream.feed(RequestDelta(request_id="r", cumulative_logprob=-3.25, finish_reason="length"))
    assert stream.output.cumulative_logprob == -3.25


def test_draft_tokens_are_counted_over_the_whole_choice() -> None:
    stream = OutputStream(TOKENIZER, SamplingParams(), 0)
    for num_draft_tokens, num_accepted_tokens, reason in ((3, 1, None), (5, 1, None), (0, 0, "abort")):
        stream.feed(
            RequestDelta(
                request_id="r",
                num_draft_tokens=num_draft_tokens,
                num_accepted_tokens=num_accepted_tokens,
                finish_reason=reason,
            )
        )
    assert (stream.output.num_draft_tokens, stream.output.num_accepted_tokens) == (5, 1)


@pytest.mark.parametrize("reason", ["length", "abort", "error"])
def test_the_engine_names_the_reason(reason: str) -> None:
    _, output, stream = run(spell("ab"), reason=reason, stop=("bc",))
    assert (output.text, output.finish_reason, stream.is_stopped) == ("ab", reason, False)


def test_a_last_delta_without_tokens_finishes() -> None:
    stream = OutputStream(TOKENIZER, SamplingParams(stop=("xy",)), 0)
    assert stream.feed(RequestDelta(request_id="r", token_ids=spell("x"))).text == ""
    last = stream.feed(RequestDelta(request_id="r", finish_reason="length"))
    assert (last.text, last.token_ids, last.finish_reason) == ("x", [], "length")


def joined_bytes(deltas: list[ChoiceDelta]) -> bytes:
    return b"".join(entry.chosen.shown for delta in deltas for entry in delta.logprobs or [])
