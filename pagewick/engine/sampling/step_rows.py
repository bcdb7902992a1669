"""The rows of a step's batch: those of its streams as arrays, and what was drawn for each row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from pagewick.engine.batch import SlotResult, SlotWork, StreamWork
from pagewick.engine.device_copies import Array


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
