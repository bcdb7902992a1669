"""MaskThread: computes the masks of a step's constraints during the step's forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from pagewick.engine.batch import StepMasks
from pagewick.engine.sequence import TokenConstraint


@dataclass(frozen=True, slots=True)
class Computed:
    """masks: one per constraint. errors: exceptions by the index of the constraint that raised it; its mask is None."""

    masks: StepMasks
    errors: dict[int, Exception] = field(default_factory=dict)


class MaskThread:
    """Starts its thread with the first constraint, so that an engine without constraints has none."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None

    def begin(self, constraints: Sequence[TokenConstraint | None]) -> Future[Computed]:
        """Begin to compute one mask for each constraint; for None the mask is None.

        Until the masks are done, nobody else may use these constraints.
        """
        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="masks")
        return self._executor.submit(_compute, constraints)

    def close(self) -> None:
        """Wait for the mask that is being computed, if any, and end the thread."""
        if self._executor is not None:
            self._executor.shutdown(cancel_futures=True)
            self._executor = None


def _compute(constraints: Sequence[TokenConstraint | None]) -> Computed:
    computed = Computed(StepMasks([]))
    for place, constraint in enumerate(constraints):
        mask = None
        try:
            mask = None if constraint is None else constraint.allowed_mask()
        except Exception as error:  # a constraint may be foreign code: it ends its own sequence only
            computed.errors[place] = error
        computed.masks.masks.append(mask)
    return computed
