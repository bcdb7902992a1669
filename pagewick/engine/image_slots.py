"""ImageSlots: the images of running sequences, and what they add to the batch of a step.

A step that computes placeholder tokens of an image needs the rows that the encoder makes of the image. The encoder runs
when the first of these tokens is computed, on every rank, for one image at a time: so its results depend on nothing
else in the step. The rows are kept until the last of the tokens has been computed; a sequence that was preempted brings
the image again.

In models whose layers see images whole, the tokens of an image are all computed in one step, but for those at its
beginning that the prefix cache has; the batch says up to where each token sees (key_ends). In some of them, tokens
ahead of the image see it in the same way.

In models whose positions have three axes, an image takes fewer positions than tokens, and the tokens behind it have
other positions than their indices in the sequence; those behind the last image differ by a constant, the delta. So it
is in models that write captions, whose texts begin at position 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from pagewick.engine.batch import SlotStart, SlotWork, StepPlan
from pagewick.engine.device_copies import Array
from pagewick.engine.host_batch import HostBatch
from pagewick.engine.messages import ImageInput


class EncodedRows(Protocol):
    """rows: [num_tokens, hidden_size]. deepstack: [N, num_tokens, hidden_size], for each of the first N layers."""

    @property
    def rows(self) -> Tensor: ...
    @property
    def deepstack(self) -> Tensor: ...


class AxesOfPrompt(Protocol):
    """Returns the positions [3, num_tokens] int64 of a prompt with images, delta and end.

    The tokens from the position `end` on have positions that are by `delta` larger than their indices.
    """

    def __call__(self, token_ids: Sequence[int], images: Sequence[ImageInput]) -> tuple[Array, int, int]: ...


class _Rows(NamedTuple):
    """Tokens `tokens` of the batch have the rows `rows` of an encoded image."""

    tokens: slice
    encoded: EncodedRows
    rows: slice


@dataclass(slots=True)
class _Images:
    """The images of a slot's sequence. axes: [3, num_prompt_tokens]; None where positions have one axis.

    end: the position behind the last token that has something of an image, its rows or its place. encoded: by the index
    of an image, the results of the encoder that are still needed.
    """

    images: Sequence[ImageInput]
    axes: Array | None
    end: int
    encoded: dict[int, EncodedRows] = field(default_factory=dict)


class ImageSlots:
    """encode: runs the encoder on an image. axes_of: None for models whose positions have one axis.

    sees_whole: whether a layer of the model sees images whole. num_leading: the number of tokens ahead of an image that
    see it then, too. restarts: whether positions are counted from 0 behind a sequence's images; those of the images are
    negative, and nothing reads them.
    """

    def __init__(
        self,
        max_num_seqs: int,
        encode: Callable[[ImageInput], EncodedRows],
        axes_of: AxesOfPrompt | None = None,
        *,
        sees_whole: bool = False,
        num_leading: int = 0,
        restarts: bool = False,
    ) -> None:
        self._encode = encode
        self._axes_of = axes_of
        self._sees_whole, self._restarts = sees_whole, restarts
        self._num_leading = num_leading
        self._slots: dict[int, _Images] = {}
        # By slot, the position of a token behind the images minus its index in the sequence.
        self._deltas = np.zeros(max_num_seqs, np.int64)

    def fill(self, plan: StepPlan, batch: HostBatch) -> HostBatch:
        """Return the batch of a plan with the rows of images, and the positions of sequences that have some."""
        for start in plan.starts:
            self._start(start)
        slots = [*plan.streams.slots, *(work.slot for work in plan.work)]
        deltas = self._deltas[slots]
        if deltas.any():
            batch = replace(batch, positions=batch.positions + np.repeat(deltas, np.diff(batch.cu_seqlens_q)))
        firsts = batch.cu_seqlens_q[len(plan.streams.slots) :].tolist()
        before = [
            (first, work, found)
            for first, work in zip(firsts, plan.work, strict=False)
            if (found := self._slots.get(work.slot)) is not None and work.start < found.end
        ]
        if not before:
            return batch
        if self._axes_of is not None:
            batch = replace(batch, positions=_on_three_axes(batch.positions, before))
        parts = [part for first, work, found in before for part in self._rows(first, work, found)]
        if not parts:
            return batch
        batch = _with_rows(batch, parts)
        return replace(batch, key_ends=self._key_ends(batch, before)) if self._sees_whole else batch

    def _start(self, start: SlotStart) -> None:
        self._slots.pop(start.slot, None)
        self._deltas[start.slot] = 0
        if not start.images:
            return
        axes, end = None, start.images[-1].end
        if self._restarts:
            self._deltas[start.slot] = -end
        if self._axes_of is not None:
            axes, self._deltas[start.slot], end = self._axes_of(start.prompt_ids, start.images)
        self._slots[start.slot] = _Images(start.images, axes, end)

    def _rows(self, first: int, work: SlotWork, found: _Images) -> list[_Rows]:
        """Return the parts of images among the work's tokens, the first of which is token `first` of the batch."""
        parts, end = [], work.start + work.num_tokens
        for index, image in enumerate(found.images):
            runs = list(_runs_within(image, work.start, end))
            if not runs:
                continue
            encoded = found.encoded.get(index)
            if encoded is None:
                assert image.pixels, "an image whose tokens are computed comes with its pixels"
                encoded = found.encoded[index] = self._encode(image)
            offset = first - work.start
            parts += [_Rows(slice(offset + begin, offset + stop), encoded, rows) for begin, stop, rows in runs]
            if runs[-1][2].stop == len(encoded.rows):
                del found.encoded[index]
        return parts

    def _key_ends(self, batch: HostBatch, before: Sequence[tuple[int, SlotWork, _Images]]) -> Array:
        """Return, for each token, how many of its sequence's first tokens it sees: [T] int32."""
        counts = np.diff(batch.cu_seqlens_q)
        # The first token of a sequence in the batch sees the tokens before it and itself; each further one, one more.
        ends = np.arange(1, len(batch.input_ids) + 1) + np.repeat(batch.context_lens - batch.cu_seqlens_q[1:], counts)
        for first, work, found in before:
            for image in found.images:
                start, end = (
                    max(image.start - self._num_leading, work.start),
                    min(image.end, work.start + work.num_tokens),
                )
                if start < end:
                    assert end == image.end, "a step computes an image to its end"
                    ends[first + start - work.start : first + end - work.start] = end
        return np.asarray(ends, np.int32)


def _runs_within(image: ImageInput, start: int, end: int) -> Iterator[tuple[int, int, slice]]:
    """Yield (begin, stop, rows): placeholder tokens at positions from `start` to `end`, and their encoded rows."""
    row = 0
    for first, last in image.runs():
        begin, stop = max(start, first), min(end, last)
        if begin < stop:
            yield begin, stop, slice(row + begin - first, row + stop - first)
        row += last - first


def _on_three_axes(positions: Array, before: Sequence[tuple[int, SlotWork, _Images]]) -> Array:
    """Return positions [3, T]: those of the prompts' tokens in works that begin before an image's end, and [1, T]."""
    axes = np.repeat(positions, 3, axis=0)
    for first, work, found in before:
        assert found.axes is not None, "these positions have three axes"
        # Behind the prompt, the positions of the batch are right.
        known = found.axes[:, work.start : work.start + work.num_tokens]
        axes[:, first : first + known.shape[1]] = known
    return axes


def _with_rows(batch: HostBatch, parts: Sequence[_Rows]) -> HostBatch:
    num_tokens, sample = len(batch.input_ids), parts[0].encoded
    embeds = sample.rows.new_zeros(num_tokens, sample.rows.shape[1])
    deep = sample.deepstack.new_zeros(len(sample.deepstack), num_tokens, sample.rows.shape[1])
    mask = np.zeros(num_tokens, bool)
    for tokens, encoded, rows in parts:
        mask[tokens] = True
        embeds[tokens] = encoded.rows[rows]
        deep[:, tokens] = encoded.deepstack[:, rows]
    return replace(batch, inputs_embeds=embeds, embeds_mask=mask, deep_embeds=deep if len(deep) else None)


def pixels_of(image: ImageInput, device: torch.device) -> Tensor:
    """Return the pixels of an image, [height, width, 3] uint8, on a device."""
    pixels = np.frombuffer(image.pixels, np.uint8).reshape(image.height, image.width, 3)
    return torch.from_numpy(pixels.copy()).to(device)
