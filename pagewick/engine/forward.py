"""A step's forward pass, with those later computations that are the same for all sequences of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from torch import Tensor

from pagewick import kernels
from pagewick.engine.device_copies import Array
from pagewick.engine.host_batch import Batch, HostBatch
from pagewick.models.decoder import Decoder


class ForwardStage(IntEnum):
    """How far a forward pass goes. LOGITS and MOST_LIKELY are computed for every token of the batch."""

    HIDDEN_STATES = 0
    LOGITS = 1
    MOST_LIKELY = 2


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The results of a forward pass.

    hidden_states: [T, hidden_size]. logits: [T, vocab_size] float32, from stage LOGITS on. most_likely, highest: at
    stage MOST_LIKELY, the ids [T] int64 of the most likely tokens and their logits [T]; see kernels.argmax_rows.
    extras: those of the batch, on the device. arrays: most_likely and highest, if they are in host memory. A recorded
    step makes these arrays once: to read the tensors instead, every step would call PyTorch several times.
    """

    hidden_states: Tensor
    logits: Tensor | None = None
    most_likely: Tensor | None = None
    highest: Tensor | None = None
    extras: Sequence[Tensor] = ()
    arrays: tuple[Array, Array] | None = None


def forward(model: Decoder, batch: Batch, stage: ForwardStage) -> tuple[Tensor, ...]:
    """Return the fields of ForwardOutput that `stage` asks for."""
    hidden_states = model(batch)
    if stage == ForwardStage.HIDDEN_STATES:
        return (hidden_states,)
    logits = model.compute_logits(hidden_states, batch)
    if stage == ForwardStage.LOGITS:
        return hidden_states, logits
    return hidden_states, logits, *kernels.argmax_rows(logits)


def output_of(results: Sequence[Tensor], extras: Sequence[Tensor] = ()) -> ForwardOutput:
    """Return results of `forward` as a ForwardOutput."""
    hidden_states, *others = results
    logits, most_likely, highest, *_ = *others, None, None, None
    arrays = None
    if most_likely is not None and highest is not None and most_likely.device.type == "cpu":
        arrays = most_likely.numpy(), highest.numpy()
    return ForwardOutput(hidden_states, logits, most_likely, highest, extras, arrays)


def closed(batch: HostBatch, stage: ForwardStage) -> ForwardOutput:
    """Stand in the place of a forward pass whose graphs were freed."""
    raise RuntimeError("the engine is closed: no step may follow")


def run(model: Decoder, batch: Batch, stage: ForwardStage) -> ForwardOutput:
    """Run the forward pass now, without recording it."""
    return output_of(forward(model, batch, stage), batch.extras)
