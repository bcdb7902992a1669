"""Draft tokens from the past against their definition, and the policy of drafting in simulated texts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewick.engine.speculation.drafting import NgramIndex, SpeculationControl

# The upper limit for the cost of a step with draft tokens, in steps without.
DRAFTING_COST = 1.6


def defined_proposal(token_ids: Sequence[int], min_n: int, max_n: int, num_tokens: int) -> list[int]:
    """Prompt lookup by looking everywhere: long suffixes first, late occurrences first; then token by token."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(token_ids) - 1, n - 1, -1):
            if list(token_ids[end - n : end]) == list(token_ids[len(token_ids) - n :]):
                grown = list(token_ids)
                for _ in range(num_tokens):
                    grown.append(grown[end])
                    end += 1
                return grown[len(token_ids) :]
    return []


@given(
    token_ids=st.lists(st.integers(0, 2), max_size=40) | st.lists(st.sampled_from([0, 1, 2**31 - 1]), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=6),
    min_n=st.integers(1, 4),
    more_n=st.integers(0, 3),
    num_tokens=st.integers(0, 9),
)
def test_draft_tokens_are_the_defined_ones(
    token_ids: list[int], cuts: list[int], min_n: int, more_n: int, num_tokens: int
) -> None:
    """They are checked after every piece of the history, however it was cut."""
    index = NgramIndex(min_n, min_n + more_n)
    ends = sorted({min(cut, len(token_ids)) for cut in cuts} | {len(token_ids)})
    for start, end in zip([0, *ends], ends, strict=False):
        index.extend(token_ids[start:end])
        assert index.num_tokens == end
        assert index.propose(num_tokens) == defined_proposal(token_ids[:end], min_n, min_n + more_n, num_tokens)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abcdXab", "cdX"),  # the continuation, not only of one token
        ("abXabYab", "Yab"),  # the most recent occurrence
        ("zabcQbcRabc", "Qbc"),  # the longest suffix, though a shorter one occurs later
        ("aaaa", "aaa"),  # a loop goes on
        ("xyxyxy", "xyx"),
        ("abcdef", ""),
        ("ab", ""),
        ("", ""),
    ],
)
def test_examples(text: str, expected: str) -> None:
    index = NgramIndex(2, 3)
    index.extend([ord(letter) for letter in text])
    assert "".join(map(chr, index.propose(3))) == expected


def test_a_token_is_looked_at_once() -> None:
    """Extending reads each new token once and proposing reads none: no rescans of the history."""

    class Counted(list[int]):
        num_read = 0

        def __iter__(self):  # type: ignore[no-untyped-def]
            for value in super().__iter__():
                self.num_read += 1
                yield value

    index = NgramIndex(2, 4)
    for _ in range(50):
        piece = Counted([1, 2, 3, 1, 2])
        index.extend(piece)
        index.propose(4)
        assert piece.num_read == len(piece)


def test_the_planner_needs_no_torch() -> None:
    code = "import sys, pagewick.engine.speculation.drafting; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@dataclass
class Run:
    """The cost of a simulated text: steps with draft tokens and without, each number wanted, and each pause."""

    num_tokens: int
    num_drafting_steps: int
    num_plain_steps: int
    wanted: list[int]
    pauses: list[int]

    def overhead(self, drafting_cost: float) -> float:
        cost = self.num_drafting_steps * drafting_cost + self.num_plain_steps
        return cost / self.num_tokens - 1


def simulate(num_speculative_tokens: int, num_tokens: int, holds: Callable[[int], bool]) -> Run:
    """Generate `num_tokens`; `holds(position)` says whether a draft token for that position is right."""
    control = SpeculationControl(num_speculative_tokens)
    run = Run(0, 0, 0, [], [])
    length_of_pause = 0
    while run.num_tokens < num_tokens:
        num_wanted = control.num_wanted()
        if num_wanted == 0:
            control.observe(0, 0)
            run.num_plain_steps += 1
            run.num_tokens += 1
            length_of_pause += 1
            continue
        if length_of_pause:
            run.pauses.append(length_of_pause)
            length_of_pause = 0
        run.wanted.append(num_wanted)
        num_accepted = 0
        while num_accepted < num_wanted and holds(run.num_tokens + num_accepted):
            num_accepted += 1
        control.observe(num_wanted, num_accepted)
        run.num_drafting_steps += 1
        run.num_tokens += num_accepted + 1
    return run


SIZES = (1, 2, 3, 5, 8, 16)


@pytest.mark.parametrize("num_speculative_tokens", SIZES)
@pytest.mark.parametrize("num_tokens", [256, 1000, 8192])
def test_text_that_cannot_be_drafted_costs_two_percent_at_most(num_speculative_tokens: int, num_tokens: int) -> None:
    run = simulate(num_speculative_tokens, num_tokens, lambda position: False)
    assert 0 < run.overhead(DRAFTING_COST) <= 0.02


@pytest.mark.parametrize("num_speculative_tokens", SIZES)
def test_at_seventy_percent_all_draft_tokens_are_wanted(num_speculative_tokens: int) -> None:
    """Hardly ever a smaller number, and a pause in fewer than one text of 20: three or more misses in a row do occur.

    A single draft token at a time tells the least; there the pauses are short ones.
    """
    wanted: list[int] = []
    num_paused_runs = num_plain_steps = 0
    for seed in range(100):
        random = Random(seed)
        run = simulate(num_speculative_tokens, 1000, lambda position, random=random: random.random() < 0.7)
        wanted += run.wanted
        num_paused_runs += bool(run.pauses)
        num_plain_steps += run.num_plain_steps
    assert wanted.count(num_speculative_tokens) >= 0.99 * len(wanted)
    assert num_paused_runs < 5 or num_speculative_tokens == 1
    assert num_plain_steps <= 0.02 * 100 * 1000


def test_three_misses_at_the_start_do_not_stop_it_and_two_do_not_shrink_it() -> None:
    control = SpeculationControl(5)
    seen = []
    for _ in range(4):
        seen.append(control.num_wanted())
        control.observe(5, 0)
    assert seen[:3] == [5, 5, 5]
    assert 0 < seen[3] < 5
    assert control.num_wanted() == 0


def test_pauses_double_up_to_a_thousand_tokens_with_one_probe_between() -> None:
    run = simulate(4, 6000, lambda position: False)
    assert run.pauses[:8] == [32, 64, 128, 256, 512, 1024, 1024, 1024]
    assert run.num_drafting_steps == 4 + len(run.pauses)


def test_any_success_resumes() -> None:
    control = paused(SpeculationControl(5))
    for _ in range(32):
        assert control.num_wanted() == 0
        control.observe(0, 0)
    control.observe(control.num_wanted(), 0)
    for _ in range(64):
        assert control.num_wanted() == 0
        control.observe(0, 0)
    assert control.num_wanted() > 0
    control.observe(control.num_wanted(), 1)
    assert control.num_wanted() == 5
    for _ in range(4):  # and the next pause is a short one again
        control = paused(control)
    assert num_ticks_until_wanted(control) == 32


@pytest.mark.parametrize("num_speculative_tokens", [5, 8, 16])
def test_low_acceptance_wants_fewer(num_speculative_tokens: int) -> None:
    """One of three proposals fails at once, two after the first draft token: 2 of 5 hold, which is 4/5 of one half."""
    control = SpeculationControl(num_speculative_tokens)
    wanted = []
    for number in range(90):
        control.observe(control.num_wanted(), 1 if number % 3 else 0)
        wanted.append(control.num_wanted())
    assert 0 not in wanted
    average = sum(wanted[-30:]) / 30
    # Rounded up, so up to one more.
    assert (
        0.8 * num_speculative_tokens <= average <= min(0.8 * num_speculative_tokens + 1, num_speculative_tokens - 0.2)
    )


@pytest.mark.parametrize("num_good", [3, 10, 100])
def test_ten_misses_in_a_row_stop_it_whatever_was_before(num_good: int) -> None:
    control = SpeculationControl(5)
    for _ in range(num_good):
        control.observe(5, 5)
    num_missed = 0
    while control.num_wanted():
        control.observe(control.num_wanted(), 0)
        num_missed += 1
    assert num_missed == 10
    assert num_ticks_until_wanted(control) == 32


def test_late_draft_tokens_during_a_pause() -> None:
    """Their failure does not lengthen it; their success ends it."""
    control = paused(SpeculationControl(5))
    control.observe(5, 0)
    control.observe(5, 0)
    assert num_ticks_until_wanted(control) == 32
    control = paused(SpeculationControl(5))
    control.observe(5, 2)
    assert control.num_wanted() == 5


def test_a_step_without_draft_tokens_shortens_a_pause() -> None:
    control = paused(SpeculationControl(5))
    for _ in range(32):
        assert control.num_wanted() == 0
        control.observe(0, 0)
    assert control.num_wanted() > 0


def test_a_limit_of_zero_wants_none() -> None:
    control = SpeculationControl(0)
    assert control.num_wanted() == 0
    control.observe(0, 0)
    assert control.num_wanted() == 0


def paused(control: SpeculationControl) -> SpeculationControl:
    while control.num_wanted():
        control.observe(control.num_wanted(), 0)
    return control


def num_ticks_until_wanted(control: SpeculationControl) -> int:
    num_ticks = 0
    while not control.num_wanted():
        control.observe(0, 0)
        num_ticks += 1
    return num_ticks
