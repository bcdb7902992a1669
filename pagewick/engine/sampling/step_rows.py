"""The rows of a step's batch: those of its streams as arrays, those of its works, and what was drawn for each row."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pagewick.engine.batch import SlotResult, SlotWork, StreamWork
from pagewick.engine.device_copies import Array
from pagewick.engine.sampling.traits import SampleRow, traits_of
from pagewick.engine.slots import Slots


@dataclass(frozen=True, slots=True)
class Drawn:
    """The batch's logits [N, V] and, for each row, its token and whether it is valid or poisoned.

    on_device: token_ids, on the device. mirostat_mu: as in Sampled; None: no row has one.
    """

    logits: Tensor
    on_device: Tensor
    token_ids: list[int]
    is_valid: list[bool]
    is_poisoned: list[bool]
    mirostat_mu: list[float | None] | None = None


@dataclass(frozen=True, slots=True)
class Streams:
    """The columns of StreamWork as arrays, which are made once for all of the sampling of a step."""

    given: StreamWork
    slots: Array
    starts: Array

    @classmethod
    def of(cls, given: StreamWork) -> Streams:
        return cls(given, np.array(given.slots, np.int64), np.array(given.starts, np.int64))

    def with_works(self, pairs: Sequence[tuple[SlotWork, SlotResult]]) -> Array:
        """Return the slots of the streams and of the works after them."""
        return np.concatenate([self.slots, np.array([work.slot for work, _ in pairs], np.int64)])


def row_of(slots: Slots, work: SlotWork, mask: bytes | None = None) -> SampleRow:
    """Return the row of the first token to be drawn for a work."""
    slot, position = work.slot, work.start + work.num_tokens - work.num_draft_tokens
    return SampleRow(slots.sampling(slot), position, slots.history(slot), mask, slots.mirostat_mu[slot])


def rows_of(slots: Slots, work: SlotWork, masks: Sequence[bytes | None]) -> list[SampleRow]:
    """Return the rows of all tokens to be drawn for a work: one more than it has draft tokens.

    masks: one of each row; none if nothing restricts them.
    """
    first = row_of(slots, work, masks[0] if masks else None)
    rows, history = [first], slots.history(work.slot)
    looks_back = traits_of(first.sampling).looks_back
    for place in range(1, work.num_draft_tokens + 1):
        # Where sampling looks back, this row only counts if the draft tokens before it were drawn.
        known = history + array("i", work.draft_token_ids[:place]) if looks_back else history
        mask = masks[place] if masks else None
        rows.append(SampleRow(first.sampling, first.position + place, known, mask, first.mirostat_mu))
    return rows
