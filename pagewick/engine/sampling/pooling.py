"""Pooler: makes one vector, the embedding, of the hidden states of a prompt, which come in chunks; and scores of it.

Hidden states are those after the model's last norm, from which logits are computed otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pagewick.engine.batch import SlotResult, SlotWork
from pagewick.engine.device_copies import Array
from pagewick.engine.sampling.step_results import fail
from pagewick.engine.slots import Slots
from pagewick.layers.context import BatchRows
from pagewick.models.decoder import Decoder

# Rows that are added at a time; temporary memory is some times as much as their float64 numbers take.
_ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class _Scored:
    """A work with the last token of a prompt whose logits are wanted. place: the sequence's in the step's batch."""

    work: SlotWork
    result: SlotResult
    place: int
    hidden_state: Tensor  # [1, H]


class Pooler:
    """Keeps a running sum for each slot whose request wants a mean, and hidden states to score. slots: see Slots.

    model: changes the vectors, if it has layers for this.
    """

    def __init__(self, model: Decoder, slots: Slots) -> None:
        self._model = model
        self._slots = slots
        self._sums: dict[int, Array] = {}
        self._firsts: dict[int, Array] = {}
        self._scored: list[_Scored] = []

    def take(self, work: SlotWork, hidden_states: Tensor, result: SlotResult, place: int) -> None:
        """Read the hidden states [num_tokens, H] of a work. With the prompt's last token, store its embedding.

        place: the sequence's in the batch. Numbers that are infinite or NaN make the result an error. A prompt that
        wants a score waits for `score`.
        """
        sampling = self._slots.sampling(work.slot)
        is_last = work.start + work.num_tokens == sampling.num_prompt_tokens
        if sampling.pooling == "score":
            pooling = "last" if sampling.label_ids else self._model.label_pooling
            found = self._pool(pooling, work, hidden_states, sampling.num_prompt_tokens)
            if is_last:
                row = torch.from_numpy(found)[None].to(hidden_states)
                self._scored.append(_Scored(work, result, place, row))
            return
        found = self._pool(sampling.pooling, work, hidden_states, sampling.num_prompt_tokens)
        if is_last:
            _store(self._changed(found, hidden_states.device), result)

    def _pool(self, pooling: str, work: SlotWork, hidden_states: Tensor, num_prompt_tokens: int) -> Array:
        """Return what the hidden states up to those of a work make, [H] float32; with the last, it is the vector."""
        if pooling == "mean":
            total = self._add(work, hidden_states)
            if work.start + work.num_tokens == num_prompt_tokens:
                del self._sums[work.slot]
            return (total / num_prompt_tokens).astype(np.float32)
        # A copy: the next step may overwrite these hidden states, and the vector would hold all of them in memory.
        row = hidden_states[-1 if pooling == "last" else 0].to(dtype=torch.float32, device="cpu").numpy().copy()
        if pooling == "last":
            return row
        is_last = work.start + work.num_tokens == num_prompt_tokens
        if work.start:
            return self._firsts.pop(work.slot) if is_last else self._firsts[work.slot]
        if not is_last:
            self._firsts[work.slot] = row
        return row

    def _changed(self, found: Array, device: torch.device) -> Array:
        if not len(self._model.dense):
            return found
        changed: Array = self._model.change_pooled(torch.from_numpy(found)[None].to(device))[0].cpu().numpy()
        return changed

    def score(self, model: Decoder, num_seqs: int, device: torch.device) -> None:
        """Store the logits that the prompts taken since the last call want: of tokens, or of the model's labels.

        num_seqs: sequences of the step's batch. Every rank must call this, since they compute the logits together.
        """
        scored, self._scored = self._scored, []
        by_tokens = [one for one in scored if self._slots.sampling(one.work.slot).label_ids]
        by_labels = [one for one in scored if not self._slots.sampling(one.work.slot).label_ids]
        if by_tokens:
            num_rows = [0] * num_seqs
            for one in by_tokens:
                num_rows[one.place] = 1
            logits = model.compute_logits(_rows(by_tokens), BatchRows(num_rows, device))
            for row, one in zip(logits, by_tokens, strict=True):
                _store(row[self._slots.sampling(one.work.slot).label_ids].cpu().numpy(), one.result)
        if by_labels:
            of_labels = model.compute_label_logits(_rows(by_labels)).cpu().numpy()
            for found, one in zip(of_labels, by_labels, strict=True):
                _store(found, one.result)

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


def _rows(scored: list[_Scored]) -> Tensor:
    return torch.cat([one.hidden_state for one in scored])


def _store(found: Array, result: SlotResult) -> None:
    """Store a request's numbers in its result. Numbers that are infinite or NaN make the result an error."""
    if np.isfinite(found).all():
        result.embedding = found.astype("<f4").tobytes()
    else:
        fail(result, is_poisoned=True)
