"""Proposals: what a rank's drafter proposes after a step has been sampled, put into the step's results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

from torch import Tensor

from pagewick.engine.batch import SlotResult, SlotWork, StepPlan
from pagewick.engine.host_batch import HostBatch
from pagewick.engine.sampling.step_results import StepResults
from pagewick.engine.slots import Slots
from pagewick.engine.speculation.drafting import Drafter, DraftRequest


class Proposals(Protocol):
    """Proposes draft tokens for the step after the one that has just been sampled.

    reads_hidden_states: whether it does, after the step.
    """

    reads_hidden_states: ClassVar[bool]

    def start(self, slot: int) -> None:
        """Forget the slot's last sequence: another one moves in."""
        ...

    def add_to(self, found: StepResults, plan: StepPlan, batch: HostBatch, hidden_states: Tensor) -> None:
        """Put draft tokens into the results of the works that want some.

        batch, hidden_states: those of the step, [T, hidden_size] behind the model's last norm.
        """
        ...


class DrafterProposals:
    """Asks a Drafter, which reads nothing but the tokens of sequences.

    expect: is called before it works, which may take as long as a step.
    """

    reads_hidden_states: ClassVar[bool] = False

    def __init__(self, drafter: Drafter, slots: Slots, expect: Callable[[], None]) -> None:
        self._drafter, self._slots, self._expect = drafter, slots, expect

    def start(self, slot: int) -> None:
        self._drafter.start(slot)

    def add_to(self, found: StepResults, plan: StepPlan, batch: HostBatch, hidden_states: Tensor) -> None:
        if not any(work.num_wanted_drafts for work in plan.work):
            return
        wanting = [(work, result) for _, work, result in wanting_works(plan.work, found.get(), self._slots)]
        if not wanting:
            return
        requests = [
            DraftRequest(
                work.slot, self._slots.history(work.slot), self._slots.sampling(work.slot), work.num_wanted_drafts
            )
            for work, _ in wanting
        ]
        self._expect()
        for (_, result), draft_token_ids in zip(wanting, self._drafter.propose(requests), strict=True):
            result.draft_token_ids = draft_token_ids


def wanting_works(
    works: Sequence[SlotWork], results: Sequence[SlotResult], slots: Slots
) -> list[tuple[int, SlotWork, SlotResult]]:
    """Return the works that want draft tokens and whose sequences continue, with their places among the works."""
    return [
        (place, work, result)
        for place, (work, result) in enumerate(zip(works, results, strict=True))
        if work.num_wanted_drafts
        and result.token_ids
        and result.error is None
        and result.token_ids[-1] not in slots.sampling(work.slot).stop_token_ids
    ]
