"""Where prompts are cut: at multiples that layers need, and where a running state becomes a snapshot."""

from __future__ import annotations

import pytest

from pagewick.engine.cache.prompt_chunks import PromptChunks
from tests.engine.requests import full_spec, recurrent_spec


def lengths(chunks: PromptChunks, start: int, end: int, budget: int) -> list[int]:
    """The chunks of the tokens from start to end."""
    found: list[int] = []
    while start < end:
        found.append(chunks.length(start, end - start, budget))
        start += found[-1]
    return found


def test_without_states_a_prompt_takes_the_whole_budget() -> None:
    assert lengths(PromptChunks([full_spec(4)], keeps_snapshots=True), 0, 21, 8) == [8, 8, 5]


@pytest.mark.parametrize(
    ("start", "end", "budget", "expected"),
    [
        (0, 7, 64, [7]),
        (0, 8, 64, [8]),
        (0, 16, 64, [8, 8]),
        (0, 16, 8, [8, 8]),
        (0, 21, 64, [16, 5]),
        (0, 21, 9, [8, 8, 5]),
        (3, 21, 64, [13, 5]),
        (5, 30, 6, [3, 6, 2, 6, 2, 6]),
        (16, 17, 64, [1]),
    ],
)
def test_with_states_it_is_cut_where_they_become_snapshots(
    start: int, end: int, budget: int, expected: list[int]
) -> None:
    """At the last such place within a step; those before it would cost a step each."""
    chunks = PromptChunks([full_spec(4), recurrent_spec(8)], keeps_snapshots=True)
    found = lengths(chunks, start, end, budget)
    assert found == expected


def test_nobody_needs_snapshots() -> None:
    assert lengths(PromptChunks([recurrent_spec(8)], keeps_snapshots=False), 0, 21, 64) == [21]


def test_alignments_hold_as_well() -> None:
    chunks = PromptChunks([recurrent_spec(4, chunk_alignment=6)], keeps_snapshots=True)
    assert chunks.alignment == 6
    assert lengths(chunks, 0, 31, 64) == [24, 7]
    assert lengths(chunks, 0, 31, 8) == [6, 6, 6, 6, 7]


@pytest.mark.parametrize(
    ("start", "end", "budget", "expected"),
    [
        (0, 40, 64, [40]),
        (0, 40, 8, [5, 8, 8, 8, 8, 3]),
        (0, 40, 13, [13, 13, 13, 1]),
        (0, 40, 12, [12, 12, 12, 4]),
        (0, 40, 10, [5, 8, 10, 10, 7]),
        (0, 17, 16, [13, 4]),
        (7, 40, 8, [6, 8, 8, 8, 3]),
        (15, 40, 8, [8, 8, 8, 1]),
    ],
)
def test_images_are_computed_whole(start: int, end: int, budget: int, expected: list[int]) -> None:
    """Images at 5 to 11 and 13 to 20, and one of a token; a cached prefix may end within one."""
    chunks = PromptChunks([full_spec(4)], keeps_snapshots=True)
    whole = [(5, 11), (13, 20), (20, 21)]
    found = []
    while start < end:
        found.append(chunks.length(start, end - start, budget, whole))
        start += found[-1]
    assert found == expected


def test_an_image_waits_for_a_step_with_room_for_all_of_it() -> None:
    chunks = PromptChunks([full_spec(4)], keeps_snapshots=True)
    assert chunks.length(5, 30, 5, [(5, 11)]) == 0
    assert chunks.length(5, 30, 6, [(5, 11)]) == 6
