"""Bans, bias and penalties against their definitions: one token at a time, in plain floats."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pagewick.engine.batch import SlotSampling
from pagewick.engine.sampling.logit_edits import MAX_DRY_PENALTY, Breakers, repetitions
from pagewick.engine.sampling.traits import SampleRow
from tests.engine.sample_rows import edit_logits, mixed_rows, packed, random_logits, row

VOCAB_SIZES = [1, 7, 193, 5000]


def defined(logits: list[float], of: SampleRow) -> list[float]:
    """Edit the logits as docs/sampling.md says, in its order."""
    params, sampling, history = of.sampling.params, of.sampling, list(of.token_ids)
    output = history[sampling.num_prompt_tokens :]
    window = history if params.repeat_last_n == -1 else history[len(history) - params.repeat_last_n :]
    window = history if params.repeat_last_n >= len(history) else window
    dry_window = history[max(0, len(history) - params.dry_penalty_last_n) :]
    dry_window = history if params.dry_penalty_last_n == -1 else dry_window
    edited = []
    for token_id, logit in enumerate(logits):
        logit += (params.logit_bias or {}).get(token_id, 0.0)
        if is_banned(token_id, of, history, output):
            edited.append(-math.inf)
            continue
        if token_id in window:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        if token_id in output:
            logit -= params.presence_penalty
        logit -= params.frequency_penalty * output.count(token_id)
        length = repetition_of(token_id, dry_window, breakers_of(sampling)) if params.dry_multiplier else 0
        if length >= params.dry_allowed_length:
            penalty = params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
            logit -= min(penalty, MAX_DRY_PENALTY)
        edited.append(logit)
    return edited


def is_banned(token_id: int, of: SampleRow, history: list[int], output: list[int]) -> bool:
    params, sampling = of.sampling.params, of.sampling
    if of.allowed_mask is not None and not of.allowed_mask[token_id // 8] >> token_id % 8 & 1:
        return True
    if params.allowed_token_ids is not None and token_id not in params.allowed_token_ids:
        return True
    if token_id in sampling.stop_token_ids and len(output) < params.min_tokens:
        return True
    return any([*history, token_id][-len(word) :] == word for word in sampling.bad_word_ids)


def breakers_of(sampling: SlotSampling) -> list[list[int]]:
    mask = sampling.dry_breaker_mask
    alone = [[token_id] for token_id in range(8 * len(mask)) if mask[token_id // 8] >> token_id % 8 & 1]
    return [*alone, *sampling.dry_breaker_ids]


def repetition_of(token_id: int, history: list[int], breakers: Sequence[Sequence[int]]) -> int:
    """The longest end of the history, without any part of a breaker, that precedes the token earlier; 0 for none."""
    if [token_id] in [list(breaker) for breaker in breakers]:
        return 0
    broken = {
        place
        for breaker in breakers
        for start in range(len(history))
        if history[start : start + len(breaker)] == list(breaker)
        for place in range(start, start + len(breaker))
    }
    longest = 0
    for place in range(1, len(history)):
        if history[place] != token_id:
            continue
        length = 0
        while length < place and history[place - 1 - length] == history[-1 - length]:
            if len(history) - 1 - length in broken:
                break
            length += 1
        longest = max(longest, length)
    return longest


def check(logits: torch.Tensor, rows: Sequence[SampleRow]) -> None:
    before = logits.clone()
    edited = edit_logits(logits, rows)
    assert torch.equal(logits, before), "logits are needed afterwards, for log-probabilities"
    assert edited.dtype == torch.float32
    for values, of, found in zip(logits.double().tolist(), rows, edited.tolist(), strict=True):
        assert found == pytest.approx(defined(values, of), rel=1e-5, abs=1e-5)


HISTORY = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5, 0, 3, 1, 4, 1, 5, 2]
CASES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.3},
    "reward": {"repetition_penalty": 0.5},
    "repetition in a window": {"repetition_penalty": 1.3, "repeat_last_n": 4},
    "repetition in a large window": {"repetition_penalty": 1.3, "repeat_last_n": 1000},
    "repetition in none": {"repetition_penalty": 1.3, "repeat_last_n": 0},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "negative": {"presence_penalty": -2, "frequency_penalty": -0.25},
    "all three": {"repetition_penalty": 2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "DRY": {"dry_multiplier": 0.8},
    "DRY from the first": {"dry_multiplier": 1.5, "dry_allowed_length": 1, "dry_base": 1.2},
    "DRY of long ones": {"dry_multiplier": 1.5, "dry_allowed_length": 5},
    "DRY of longer ones": {"dry_multiplier": 1.5, "dry_allowed_length": 7},
    "DRY in a window": {"dry_multiplier": 0.8, "dry_penalty_last_n": 10, "dry_allowed_length": 1},
    "DRY up to tokens of a mask": {"dry_multiplier": 0.8, "dry_allowed_length": 1, "breaker_mask": b"\x10"},
    "DRY up to sequences": {"dry_multiplier": 0.8, "dry_allowed_length": 1, "breakers": [[1, 4], [4, 1], [9, 1, 5]]},
    "DRY up to both": {
        "dry_multiplier": 0.8,
        "dry_allowed_length": 1,
        "breakers": [[0], [3, 1], [2, 6]],
        "breaker_mask": b"\x88\x01",
    },
    "DRY in none": {"dry_multiplier": 0.8, "dry_penalty_last_n": 0},
    "bias": {"logit_bias": {0: 5.0}},
    "bias and bans": {"logit_bias": {0: 100.0}, "bad": [[0]]},
    "allowed": {"allowed_token_ids": (0,)},
    "mask": {"allowed": [0]},
    "both masks": {"allowed_token_ids": (0, 0), "allowed": [0]},
    "bad words": {"bad": [[0], [2, 0], [5, 2, 0], [6, 2, 0], [2]]},
    "a bad word as long as the history": {"bad": [[*HISTORY, 0], [9, *HISTORY, 0]]},
    "too early to stop": {"stop": [0], "min_tokens": 12},
    "just not too early to stop": {"stop": [0], "min_tokens": 11},
}


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("name", CASES)
def test_an_edit_is_that_of_its_definition(name: str, vocab_size: int) -> None:
    history = [token_id % vocab_size for token_id in HISTORY]
    options = {**CASES[name], "vocab_size": vocab_size}
    if "bad" in options:
        options["bad"] = [[token_id % vocab_size for token_id in word] for word in options["bad"]]
    rows = [row(history=history, num_prompt_tokens=count, **options) for count in (6, 0, len(history))]
    check(random_logits(3, vocab_size, seed=vocab_size), rows)


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("seed", range(5))
def test_mixed_rows_are_edited_by_their_definitions(seed: int, vocab_size: int) -> None:
    count = 8 if vocab_size == 5000 else 24
    check(*mixed_rows(seed, vocab_size, count))


@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
def test_a_row_s_bits_do_not_depend_on_the_others(vocab_size: int) -> None:
    logits, rows = mixed_rows(99, vocab_size, 40)
    together = edit_logits(logits, rows)
    for index in range(40):
        assert torch.equal(edit_logits(logits[index : index + 1], [rows[index]])[0], together[index])
    order = Random(0).sample(range(40), 25)
    assert torch.equal(edit_logits(logits[order], [rows[index] for index in order]), together[order])


def test_what_nobody_asked_for_costs_no_copy() -> None:
    logits = random_logits(2, 50)
    rows = [row(history=[], stop=[3]), row(1.0, top_p=0.5, history=[1, 2], stop=[3], min_tokens=2)]
    assert edit_logits(logits, rows) is logits


def test_the_history_is_not_looked_at_in_vain() -> None:
    """A row that needs no history need not bring it."""
    options: dict[str, Any] = {"logit_bias": {1: 2.0}, "bad": [[4]], "allowed": [1, 4], "vocab_size": 50}
    edited = edit_logits(torch.zeros(1, 50), [row(position=17, min_tokens=99, stop=[1], **options)])
    assert edited.isneginf().all()


@pytest.mark.parametrize("vocab_size", [1, 7, 8, 9, 63, 193])
def test_a_mask_has_its_bits_in_order(vocab_size: int) -> None:
    allowed = sorted(Random(vocab_size).sample(range(vocab_size), (vocab_size + 1) // 2))
    of = row(allowed=allowed, vocab_size=vocab_size)
    assert len(packed(allowed, vocab_size)) == (vocab_size + 7) // 8
    for logits in (torch.zeros(1, vocab_size), torch.ones(1, vocab_size)):
        assert (edit_logits(logits, [of])[0] > -math.inf).nonzero().flatten().tolist() == allowed


def test_numpy_arrays_are_histories_too() -> None:
    logits = random_logits(2, 193)
    options: dict[str, Any] = {
        "num_prompt_tokens": 3,
        "repetition_penalty": 1.5,
        "frequency_penalty": 1,
        "dry_multiplier": 1,
        "bad": [[5, 2, 9]],
    }
    lists = edit_logits(logits, [row(history=HISTORY, **options)] * 2)
    for kind in (np.int32, np.int64):
        assert torch.equal(edit_logits(logits, [row(history=np.array(HISTORY, kind), **options)] * 2), lists)  # type: ignore[arg-type]


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.integers(1, 4),
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), max_size=4),
    st.sets(st.integers(0, 20), max_size=1),
)
def test_repetitions_are_those_of_the_definition(
    history: list[int], least: int, breakers: list[list[int]], alone: set[int]
) -> None:
    found_breakers = Breakers(packed([*alone], 21) if alone else b"", breakers)
    token_ids, lengths = repetitions(np.array(history, dtype=np.int64), least, found_breakers)
    found = dict(zip(token_ids.tolist(), lengths.tolist(), strict=True))
    all_breakers = [*breakers, *([token_id] for token_id in alone)]
    expected = {token_id: repetition_of(token_id, history, all_breakers) for token_id in range(5)}
    assert found == {token_id: length for token_id, length in expected.items() if length >= least}


@pytest.mark.parametrize("length", [62, 63, 64, 65, 66, 129, 200])
@pytest.mark.parametrize("breaker_at", [None, 0, 1, 50])
def test_long_repetitions_are_measured_to_their_end(length: int, breaker_at: int | None) -> None:
    text = list(range(length))
    history = [2001, *text, 2002, 2003, *text[5:], 2004, 2005, *text]
    breakers = [] if breaker_at is None else [[text[breaker_at]]]
    token_ids, lengths = repetitions(np.array(history), 2, Breakers(b"", breakers))
    expected = length if breaker_at is None else length - breaker_at - 1
    found = dict(zip(token_ids.tolist(), lengths.tolist(), strict=True))
    assert found == {2002: expected, 2004: min(expected, length - 5)}


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=7), max_size=6),
    st.integers(0, 40),
)
def test_the_last_breaker_is_found_wherever_it_begins(history: list[int], breakers: list[list[int]], most: int) -> None:
    most = min(most, len(history))
    ends = [
        end
        for end in range(1, len(history) + 1)
        for breaker in breakers
        if len(breaker) <= end and history[end - len(breaker) : end] == breaker
    ]
    expected = min(most, len(history) - max(ends, default=0))
    assert Breakers(b"", breakers).num_tokens_after(np.array(history), most) == expected


def test_breakers_like_the_text_are_looked_for_together() -> None:
    """Sixty-four of them that all fail at their first token only: each place is not compared with each of them."""
    history = np.zeros(20_000, dtype=np.int64)
    breakers = Breakers(b"", [[number, *[0] * (64 + number)] for number in range(1, 65)])
    num_compared = 0

    class Counted(np.ndarray):
        def __eq__(self, other: object) -> Any:
            nonlocal num_compared
            num_compared += self.size
            return np.asarray(self) == other

    assert breakers.num_tokens_after(history.view(Counted), 19_000) == 19_000
    assert 0 < num_compared <= (129 + 64) * 19_000


@pytest.mark.parametrize("period", [1, 2, 7])
def test_a_loop_is_one_long_repetition(period: int) -> None:
    history = [index % period for index in range(3000)]
    token_ids, lengths = repetitions(np.array(history), 2, Breakers(b"", []))
    assert (token_ids.tolist(), lengths.tolist()) == ([3000 % period], [3000 - period])


def test_the_penalty_for_a_loop_stays_finite() -> None:
    of = row(history=[1] * 2000, dry_multiplier=100, dry_base=100)
    edited = edit_logits(torch.zeros(1, 7), [of])
    assert edited[0, 1].item() == pytest.approx(-MAX_DRY_PENALTY)
    assert edited[0].count_nonzero() == 1


def test_bad_words_need_the_tokens_before_them() -> None:
    with pytest.raises(AssertionError, match="0 tokens are known before position 5"):
        edit_logits(torch.zeros(1, 7), [row(position=5, bad=[[1, 2]])])


def test_what_is_made_of_a_slot_s_parameters_is_made_once_and_goes_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[weakref.ref[Breakers]] = []
    original = Breakers.__init__

    def init(self: Breakers, *arguments: Any) -> None:
        made.append(weakref.ref(self))
        original(self, *arguments)

    monkeypatch.setattr(Breakers, "__init__", init)
    first = row(history=HISTORY, dry_multiplier=1.0, breakers=[[5]], allowed_token_ids=[3, 1, 4])
    second = row(history=HISTORY, dry_multiplier=1.0, breakers=[[5]], allowed_token_ids=[2])
    for length in (3, 9, len(HISTORY)):
        rows = [replace(one, position=length, token_ids=HISTORY[:length]) for one in (first, second, first)]
        check(random_logits(3, 7), rows)
    assert len(made) == 2
    masks = {name: one.sampling.__dict__["not_allowed"] for name, one in (("first", first), ("second", second))}
    check(random_logits(2, 7), [first, second])
    assert first.sampling.__dict__["not_allowed"] is masks["first"]
    assert second.sampling.__dict__["not_allowed"] is masks["second"]
    # Another model's vocabulary, as a draft model may have it, needs another mask.
    check(random_logits(2, 11), [first, second])
    kept = [weakref.ref(mask) for mask in masks.values()]
    del first, rows, masks
    gc.collect()
    assert [each() is None for each in (*made, *kept)] == [True, False, True, True]


def test_what_is_kept_with_parameters_is_not_sent() -> None:
    of = row(history=HISTORY, dry_multiplier=1.0, allowed_token_ids=[3])
    before = msgspec.msgpack.encode(of.sampling)
    edit_logits(torch.zeros(1, 7), [of])
    assert of.sampling.__dict__ and msgspec.msgpack.encode(of.sampling) == before
    received = msgspec.msgpack.decode(before, type=SlotSampling)
    assert received == of.sampling and not received.__dict__
