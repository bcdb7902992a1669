"""Pooler: makes one vector, the embedding, of the hidden states of a prompt, which come in chunks.

Hidden states are those after the model's last norm, from which logits are computed otherwise.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagewick.engine.batch import SlotResult, SlotWork
from pagewick.engine.device_copies import Array
from pagewick.engine.sampling.step_results import fail
from pagewick.engine.slots import Slots

# Rows that are added at a time; temporary memory is some times as much as their float64 numbers take.
_ROWS_AT_ONCE = 256


class Pooler:
    """Keeps a running sum for each slot whose request wants a mean. slots: see Slots."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._sums: dict[int, Array] = {}

    def take(self, work: SlotWork, hidden_states: Tensor, result: SlotResult) -> None:
        """Read the hidden states [num_tokens, H] of a work. With the prompt's last token, store its embedding.

        Numbers that are infinite or NaN make the result an error.
        """
        sampling = self._slots.sampling(work.slot)
        is_last = work.start + work.num_tokens == sampling.num_prompt_tokens
        if sampling.pooling == "mean":
            total = self._add(work, hidden_states)
            found = (total / sampling.num_prompt_tokens).astype(np.float32)
        elif is_last:
            found = hidden_states[-1].to(dtype=torch.float32, device="cpu").numpy()
        if not is_last:
            return
        self._sums.pop(work.slot, None)
        if np.isfinite(found).all():
            result.embedding = found.astype("<f4").tobytes()
        else:
            fail(result, is_poisoned=True)

    def _add(self, work: SlotWork, hidden_states: Tensor) -> Array:
        """Return the sum of all hidden states up to those of a work.

        Rows are added one after the other, so that the sum does not depend on how the prompt was cut into chunks.
        """
        if work.start == 0:
            self._sums[work.slot] = np.zeros(hidden_states.shape[1])
        total = self._sums[work.slot]
        for rows in torch.split(hidden_states, _ROWS_AT_ONCE):
            numbers = rows.to(dtype=torch.float64, device="cpu").numpy()
            total = np.cumsum(np.concatenate([total[None], numbers]), axis=0)[-1]
        self._sums[work.slot] = total
        return total
