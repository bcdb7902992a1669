"""MaskThread: computes the masks of a step's constraints during the step's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from pagewick.engine.batch import StepMasks
from pagewick.engine.sequence import DraftConstraint, TokenConstraint

# A constraint, None where nobody needs the masks, and the draft tokens that a step tries.
Wanted = tuple[TokenConstraint | None, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Computed:
    """masks: those of each constraint. errors: exceptions by the index of the constraint that raised it."""

    masks: StepMasks
    errors: dict[int, Exception] = field(default_factory=dict)


class MaskThread:
    """Starts its thread with the first constraint, so that an engine without constraints has none."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def begin(self, wanted: Sequence[Wanted]) -> Future[Computed]:
        """Begin to compute the masks of each constraint.

        Until the masks are done, nobody else may use these constraints.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        return self._executor.submit(_compute, wanted)

    def close(self) -> None:
        """Wait for the mask that is being computed, if any, and end the thread."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None


def _compute(wanted: Sequence[Wanted]) -> Computed:
    computed = Computed(StepMasks([]))
    for place, (constraint, draft_token_ids) in enumerate(wanted):
        masks: list[bytes | None] = [None] * (1 + len(draft_token_ids))
        try:
            if constraint is not None:
                masks = _masks(constraint, draft_token_ids)
        except Exception as error:  # a constraint may be foreign code: it ends its own sequence only
            computed.errors[place] = error
        computed.masks.masks.append(masks)
    return computed


def _masks(constraint: TokenConstraint, draft_token_ids: Sequence[int]) -> list[bytes | None]:
    if not draft_token_ids:
        return [constraint.allowed_mask()]
    assert isinstance(constraint, DraftConstraint), "other constraints have no draft tokens"
    return list(constraint.allowed_masks(draft_token_ids))
