"""StepLoop: schedules steps, runs them on the ranks and gives their results to the scheduler.

At most `depth` steps are in flight. With depth 1 the loop schedules a step once it knows the results of the step
before. With depth 2 it submits a step earlier, so that a GPU does not have to wait for the host:

    device   forward k   | sample k | forward k + 1                   | sample k + 1 | ...
    host     masks for k |          | results of k, masks for k + 1   |              | ...

Every request gets the same tokens at any depth.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from pagewick.engine.batch import SlotResult, StepMasks, StepOutput, StepPlan
from pagewick.engine.constraints.masks import Computed, MaskThread
from pagewick.engine.messages import RequestDelta
from pagewick.engine.scheduling.failures import constraint_failure
from pagewick.engine.scheduling.plan_builder import ScheduledStep
from pagewick.engine.scheduling.scheduler import Scheduler


class Handle(Protocol):
    """A submitted step; see model_runner.StepHandle."""

    @property
    def awaits_masks(self) -> bool: ...

    def sample(self, masks: StepMasks) -> None: ...

    def result(self) -> StepOutput: ...


@dataclass(slots=True)
class _StepInFlight:
    """masks: the masks that the step awaits. None for a step that awaits none, and before the results of all earlier
    steps are known.
    """

    step: ScheduledStep
    handle: Handle
    masks: Future[Computed] | None = None


class Ranks(Protocol):
    """All ranks of an engine."""

    def submit(self, plan: StepPlan) -> Handle:
        """Begin a step on each of them."""
        ...


class StepLoop:
    """depth: number of steps that may be in flight, at least 1."""

    def __init__(self, scheduler: Scheduler, ranks: Ranks, depth: int) -> None:
        assert depth >= 1, "without steps in flight nothing is computed"
        self._scheduler = scheduler
        self._ranks = ranks
        self._depth = depth
        self._in_flight: deque[_StepInFlight] = deque()
        self._mask_thread = MaskThread()

    @property
    def has_steps(self) -> bool:
        """Whether steps are in flight."""
        return bool(self._in_flight)

    def advance(self) -> list[RequestDelta]:
        """Begin as many steps as the depth allows, then finish the oldest; return its deltas."""
        if not self._in_flight:
            self._begin_next()
        self._sample(self._in_flight[0])
        while self._may_begin_next() and self._begin_next():
            pass
        return self._finish_oldest()

    def finish(self) -> list[RequestDelta]:
        """Finish the steps in flight, and begin no other step; return their deltas."""
        deltas: list[RequestDelta] = []
        while self._in_flight:
            self._sample(self._in_flight[0])
            deltas += self._finish_oldest()
        return deltas

    def publish(self) -> list[RequestDelta]:
        """Finish the steps in flight, and make all complete blocks visible to the servers that share the disk."""
        deltas = self.finish()
        if not self._ranks.submit(self._scheduler.publish_cache()).result().can_write:
            self._scheduler.stop_writing()
        return deltas

    def close(self) -> None:
        """End the thread that computes masks; may be called twice."""
        self._mask_thread.close()

    def _finish_oldest(self) -> list[RequestDelta]:
        oldest = self._in_flight.popleft()
        output = oldest.handle.result()
        if oldest.masks is not None:
            _report_failed_masks(oldest.step, oldest.masks.result(), output)
        deltas = self._scheduler.update(output)
        if self._in_flight:
            self._in_flight[0].masks = self._begin_masks(self._in_flight[0].step)
        return deltas

    def _may_begin_next(self) -> bool:
        if len(self._in_flight) >= self._depth:
            return False
        # The next forward pass reads the tokens that the last step samples.
        return not self._in_flight[-1].handle.awaits_masks and self._scheduler.can_schedule_ahead

    def _begin_next(self) -> bool:
        """Schedule and submit a step, if there is one; return whether there was."""
        step = self._scheduler.schedule()
        if step is None:
            return False
        # Where nothing is in flight, the masks are computed beside this step's own forward pass.
        masks = None if self._in_flight else self._begin_masks(step)
        self._in_flight.append(_StepInFlight(step, self._ranks.submit(step.plan), masks))
        return True

    def _begin_masks(self, step: ScheduledStep) -> Future[Computed] | None:
        """Begin to compute the masks of a step whose preceding tokens are all known; None if it awaits no mask."""
        wanted = [
            # A finished sequence needs no mask: its result is discarded.
            (None if seq.is_finished else seq.constraint, work.draft_token_ids)
            for seq, work in step.work.items()
            if work.awaits_mask
        ]
        return self._mask_thread.begin(wanted) if wanted else None

    def _sample(self, oldest: _StepInFlight) -> None:
        if oldest.handle.awaits_masks:
            assert oldest.masks is not None, "masks are begun when their step becomes the oldest"
            oldest.handle.sample(oldest.masks.result().masks)


def _report_failed_masks(step: ScheduledStep, computed: Computed, output: StepOutput) -> None:
    """Replace the result of every sequence whose constraint raised an exception by an error."""
    if not computed.errors or output.unreadable:
        return
    places = [place for place, work in enumerate(step.plan.work) if work.awaits_mask]
    for index, error in computed.errors.items():
        failure = constraint_failure(error)
        output.results[places[index]] = SlotResult(error=failure.message, error_kind=failure.kind)
