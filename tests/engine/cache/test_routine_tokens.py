"""Tokens that change no block table, against the tables' own arithmetic."""

from __future__ import annotations

from random import Random

import pytest

from pagewick.engine.cache.group_tables import RoutineTokens
from tests.engine.requests import full_spec, recurrent_spec, window_spec

LAYOUTS = {
    "full": [full_spec(4)],
    "single": [full_spec(1)],
    "sizes": [full_spec(3), full_spec(4)],
    "window": [full_spec(4), window_spec(9, 4)],
    "windows": [window_spec(7, 2), window_spec(1, 8)],
    "chunks": [full_spec(4), window_spec(8, 4, is_chunked=True)],
    "short chunks": [window_spec(2, 8, is_chunked=True)],
    "states": [full_spec(2), recurrent_spec(6)],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_token_that_is_routine_changes_nothing(layout: str) -> None:
    specs = LAYOUTS[layout]
    routine = RoutineTokens(specs)
    for start in [*range(200), *(Random(1).randrange(10**6) for _ in range(200))]:
        is_full = any(spec.has_snapshots or spec.num_blocks(start) < spec.num_blocks(start + 1) for spec in specs)
        assert routine.is_covered(start) == (not is_full)
        changes = any(
            len(spec.completed_blocks(start, start + 1)) or spec.first_block(start) != spec.first_block(start + 1)
            for spec in specs
        )
        # Before the first block is released, a few tokens are taken for ones that release a block.
        assert routine.changes_blocks(start + 1) == changes or (not changes and start < 20)
