"""How many draft tokens the sequences of a step get."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from pagewick.engine.cache.block_manager import BlockManager
from pagewick.engine.scheduling.draft_tokens import Speculation
from pagewick.engine.scheduling.plan_builder import PlanBuilder
from pagewick.engine.sequence import Sequence as TokenSequence
from tests.engine.requests import Simulation, full_spec, oracle, recurrent_spec, sequence

NUM_FORCED = 100


class Fixed:
    """A DraftConstraint of a long text that is fixed."""

    is_complete = False

    def allowed_mask(self) -> bytes | None:
        return None

    def accept(self, token_id: int) -> None:
        pass

    def forced_token_ids(self) -> Sequence[int]:
        return range(NUM_FORCED)

    def keep_allowed(self, token_ids: Sequence[int]) -> list[int]:
        return list(token_ids)

    def allowed_masks(self, draft_token_ids: Sequence[int]) -> Sequence[bytes | None]:
        return [None] * (len(draft_token_ids) + 1)


def started(speculation: Speculation, plan: PlanBuilder, blocks: BlockManager, slot: int) -> TokenSequence:
    seq = sequence(range(slot, slot + 9), arrival=slot)
    seq.owner.max_output_tokens = 500
    seq.constraint, seq.slot = Fixed(), slot
    speculation.start(seq)
    blocks.adopt_prefix(seq, 0)
    plan.start(seq)
    new_block_ids = blocks.allocate(seq, 9)
    assert new_block_ids is not None
    plan.add(seq, 9, new_block_ids)
    return seq


@pytest.mark.parametrize(
    ("max_num_logits", "budget", "expected"),
    [
        (1000, 512, [100, 100, 100]),  # there is room for all that is forced
        (160, 512, [100, 57, 0]),
        (15, 512, [12, 0, 0]),
        (3, 512, [0, 0, 0]),
        (2, 512, [0, 0, 0]),
        (160, 127, [100, 0, 0]),
    ],
)
def test_a_step_has_no_more_rows_of_logits_than_it_has_memory_for(
    max_num_logits: int, budget: int, expected: list[int]
) -> None:
    speculation = Speculation(4, False, 1, 1, 8, max_num_logits)
    blocks = BlockManager([full_spec()], [200], hash_key=b"key", enable_prefix_caching=False)
    plan = PlanBuilder(budget, keeps_history=False)
    sequences = [started(speculation, plan, blocks, slot) for slot in range(3)]
    speculation.extend(plan, blocks)
    assert [plan.work[seq].num_draft_tokens for seq in sequences] == expected


def test_accepted_tokens_that_are_computed_again_one_at_a_time() -> None:
    """Sequences that came in a step ahead leave only one token of the budget; the runner checks which one it gets."""
    speculation = oracle(1.0, num_tokens=3)
    simulation = Simulation([full_spec(2), recurrent_spec(8)], (80, 40), budget=3, speculation=speculation, depth=2)
    simulation.add([1, 2, 3], max_tokens=30, priority=1)
    num_cut = 0
    for number in range(7):
        for _ in range(1 + number % 3):
            simulation.step()
            num_cut += any(not work.is_sampled and work.num_tokens == 1 for work in simulation.plan.work)
        simulation.add([4 + number], max_tokens=6, mirostat=2, temperature=0.5)
    simulation.run()
    assert num_cut > 0
