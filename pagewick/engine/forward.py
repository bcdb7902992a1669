"""A step's forward pass, with those later computations that are the same for all sequences of the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

from torch import Tensor

from pagewick import kernels
from pagewick.engine.device_copies import Array
from pagewick.engine.host_batch import Batch, HostBatch
from pagewick.kernels.options import DrawOptions
from pagewick.layers.context import LayerBatch


class ForwardStage(IntEnum):
    """How far a forward pass goes. All but HIDDEN_STATES are computed for every token of the batch.

    At DRAWN, which is for CPUs only, the batch's extras are the arrays of SamplingColumns.draws_ahead, and
    kernels.sample_tokens draws tokens.
    """

    HIDDEN_STATES = 0
    LOGITS = 1
    MOST_LIKELY = 2
    DRAWN = 3


@dataclass(frozen=True, slots=True)
class ForwardOutput:
    """The results of a forward pass.

    hidden_states: [T, hidden_size]. logits: [T, vocab_size] float32, from stage LOGITS on. token_ids: at stage
    MOST_LIKELY or DRAWN, the ids [T] int64 of the tokens. highest: the logits [T] of the most likely ones; see
    kernels.argmax_rows. extras: those of the batch, on the device. arrays: token_ids and highest, if they are in host
    memory. A recorded step makes these arrays once: to read the tensors instead, every step would call PyTorch several
    times.
    """

    hidden_states: Tensor
    logits: Tensor | None = None
    token_ids: Tensor | None = None
    highest: Tensor | None = None
    extras: Sequence[Tensor] = ()
    arrays: tuple[Array, Array] | None = None


class StepModel(Protocol):
    """A decoder, or a layer of one that runs by itself: makes hidden states of a batch."""

    def __call__(self, batch: Batch) -> Tensor:
        """Return hidden states [T, hidden_size]."""
        ...

    def compute_logits(self, hidden_states: Tensor, batch: LayerBatch | None) -> Tensor:
        """Return logits [N, vocab_size] in float32 for the rows [N, hidden_size]; see Decoder."""
        ...


def forward(model: StepModel, batch: Batch, stage: ForwardStage) -> tuple[Tensor, ...]:
    """Return the fields of ForwardOutput that `stage` asks for."""
    hidden_states = model(batch)
    if stage == ForwardStage.HIDDEN_STATES:
        return (hidden_states,)
    logits = model.compute_logits(hidden_states, batch)
    if stage == ForwardStage.LOGITS:
        return hidden_states, logits
    token_ids, highest = kernels.argmax_rows(logits)
    if stage == ForwardStage.DRAWN:
        token_ids = kernels.sample_tokens(logits, DrawOptions(*batch.extras[: len(DrawOptions._fields)]))
    return hidden_states, logits, token_ids, highest


def output_of(results: Sequence[Tensor], extras: Sequence[Tensor] = ()) -> ForwardOutput:
    """Return results of `forward` as a ForwardOutput."""
    hidden_states, *others = results
    logits, token_ids, highest, *_ = *others, None, None, None
    arrays = None
    if token_ids is not None and highest is not None and token_ids.device.type == "cpu":
        arrays = token_ids.numpy(), highest.numpy()
    return ForwardOutput(hidden_states, logits, token_ids, highest, extras, arrays)


def closed(batch: HostBatch, stage: ForwardStage) -> ForwardOutput:
    """Stand in the place of a forward pass whose graphs were freed."""
    raise RuntimeError("the engine is closed: no step may follow")


def run(model: StepModel, batch: Batch, stage: ForwardStage) -> ForwardOutput:
    """Run the forward pass now, without recording it."""
    return output_of(forward(model, batch, stage), batch.extras)
