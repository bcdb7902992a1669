"""The work of a plan, its streams included, as one list."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from pagewick.engine.batch import SlotResult, SlotWork, StepOutput, StepPlan, StreamResults


def works_of(plan: StepPlan, num_groups: int = 1) -> list[SlotWork]:
    """Return the work of every sequence in the batch's order: that of the streams, then the others'."""
    none: list[list[int]] = [[] for _ in range(num_groups)]
    streams = [plan.streams.work(place) for place in range(len(plan.streams.slots))]
    return [replace(work, new_block_ids=work.new_block_ids or none) for work in streams] + plan.work


def output_of(plan: StepPlan, results: Sequence[SlotResult]) -> StepOutput:
    """Return the output of a step, given the results of `works_of`."""
    num_streams = len(plan.streams.slots)
    streams = StreamResults()
    for place, result in enumerate(results[:num_streams]):
        is_plain = result == SlotResult(token_ids=result.token_ids) and len(result.token_ids) == 1
        streams.token_ids.append(result.token_ids[0] if is_plain else -1)
        if not is_plain:
            streams.details[place] = result
    return StepOutput(list(results[num_streams:]), streams=streams)
