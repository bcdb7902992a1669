"""EncoderSlots: what the prompts of encoders add to the batch of a step: how far tokens see, and the tokens' types.

A step computes every prompt of an encoder as a whole: each token sees the prompt to its end, or as far ahead as back in
layers with a window.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pagewick.engine.batch import StepPlan
from pagewick.engine.device_copies import Array
from pagewick.engine.host_batch import HostBatch
from pagewick.engine.slots import Slots
from pagewick.errors import ModelLoadError
from pagewick.models.config import ModelConfig


class EncoderSlots:
    """slots: has the requests of the sequences. Raises ModelLoadError for windows of several sizes."""

    def __init__(self, config: ModelConfig, slots: Slots) -> None:
        assert config.encoder is not None, "the model is an encoder"
        self._slots = slots
        self._has_types = config.encoder.num_token_types > 1
        windows = {layer.window for layer in config.layers if layer.window is not None}
        if len(windows) > 1:
            raise ModelLoadError(f"{config.architecture}: its layers have windows of {sorted(windows)} tokens, not one")
        self._window = next(iter(windows), None)

    def fill(self, plan: StepPlan, batch: HostBatch) -> HostBatch:
        """Return the batch of a plan with the ends of what its tokens see, and their types."""
        for work in plan.work:
            is_whole = work.start == 0 and work.num_tokens == self._slots.sampling(work.slot).num_prompt_tokens
            assert is_whole, "a step computes a prompt to its end"
        ends = np.repeat(batch.context_lens, np.diff(batch.cu_seqlens_q)).astype(np.int32)
        windows = None
        if self._window is not None:
            # A token sees as many tokens on either side, itself included.
            windows = np.minimum(ends, batch.positions[0] + self._window).astype(np.int32)
        types = self._types(plan, batch) if self._has_types else None
        return replace(batch, key_ends=ends, window_key_ends=windows, token_types=types)

    def _types(self, plan: StepPlan, batch: HostBatch) -> Array | None:
        """Return the type of each token, 1 behind the end of a pair's first text; None if all have type 0."""
        types = np.zeros(len(batch.input_ids), np.int64)
        for first, last, work in zip(batch.cu_seqlens_q, batch.cu_seqlens_q[1:], plan.work, strict=False):
            separator = self._slots.sampling(work.slot).separator_id
            places = np.flatnonzero(batch.input_ids[first:last] == separator)
            if separator >= 0 and len(places):
                types[first + places[0] + 1 : last] = 1
        return types if types.any() else None
