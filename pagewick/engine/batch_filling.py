"""Chooses the part that adds to the batch of a step: the rows of images, or how far the tokens of an encoder see."""

from __future__ import annotations

from typing import Protocol

import torch

from pagewick.engine.batch import StepPlan
from pagewick.engine.encoder_slots import EncoderSlots
from pagewick.engine.host_batch import HostBatch
from pagewick.engine.image_encoding import image_slots
from pagewick.engine.progress import Progress
from pagewick.engine.slots import Slots
from pagewick.models.config import ModelConfig
from pagewick.models.decoder import Decoder


class BatchFiller(Protocol):
    def fill(self, plan: StepPlan, batch: HostBatch) -> HostBatch: ...


def batch_filler(
    model: Decoder,
    config: ModelConfig,
    slots: Slots,
    max_num_seqs: int,
    device: torch.device,
    num_ranks: int,
    progress: Progress,
) -> BatchFiller | None:
    """Return what completes the batches of a model; None if they are complete."""
    if config.encoder is not None:
        return EncoderSlots(config, slots)
    return image_slots(model, config, max_num_seqs, device, num_ranks, progress)
