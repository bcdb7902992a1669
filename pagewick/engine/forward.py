"""A step's forward pass, and of what follows as much as is the same for all of its sequences."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from pagewick import kernels
from pagewick.engine.slots import Batch
from pagewick.models.decoder import Decoder


class Ending(IntEnum):
    """How far a forward pass goes. LOGITS and MOST_LIKELY: of every token of the batch."""

    HIDDEN_STATES = 0
    LOGITS = 1
    MOST_LIKELY = 2


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """hidden_states: [T, hidden_size]. logits: [T, vocab_size] float32, from LOGITS on.

    most_likely, highest: with MOST_LIKELY, the ids [T] int64 and the logits [T]; see kernels.argmax_rows.
    """

    hidden_states: Tensor
    logits: Tensor | None = None
    most_likely: Tensor | None = None
    highest: Tensor | None = None


def forward(model: Decoder, batch: Batch, ending: Ending) -> tuple[Tensor, ...]:
    """The fields of ForwardOutput, as far as they are wanted."""
    hidden_states = model(batch)
    if ending == Ending.HIDDEN_STATES:
        return (hidden_states,)
    logits = model.compute_logits(hidden_states, batch)
    if ending == Ending.LOGITS:
        return hidden_states, logits
    return hidden_states, logits, *kernels.argmax_rows(logits)
