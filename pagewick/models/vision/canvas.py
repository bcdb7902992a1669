"""Positions of MiniCPM-V 4.7: an image and its slices lie on one canvas, with the tokens around them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from pagewick.models.vision.merging_config import CanvasMarks
from pagewick.models.vision.positions import Integers


class Place(NamedTuple):
    """A picture in a prompt: the index of its first token, and how many rows and columns of tokens it has."""

    start: int
    rows: int
    columns: int

    @property
    def stop(self) -> int:
        return self.start + self.rows * self.columns


def canvas_positions(
    token_ids: Sequence[int], pictures: Sequence[Place], marks: CanvasMarks
) -> tuple[Integers, int, int]:
    """Return the positions of a prompt's tokens in time, row and column, [3, num_tokens], `delta` and `end`.

    All axes of a token of text have the same position. Those of an image, of its slices and of the marks around them
    have the same one in time, and lie on a canvas of rows and columns, which has the tokens of all slices, or those of
    the image if there are none. The text behind goes on one position after the larger side of the canvas. The token at
    the index i >= end has the position i + delta on all axes. The source is get_rope_index of transformers'
    MiniCPMV4_7Model.

    pictures: in order, each behind a mark. Raises ValueError for others.
    """
    num_tokens, last = len(token_ids), 0
    for one in pictures:
        if one.start <= last or one.stop > num_tokens:
            raise ValueError(f"a picture at {one.start} without a token before it, or beyond {num_tokens} tokens")
        last = one.stop
    positions = np.empty((3, num_tokens), np.int64)
    known, index, position = marks.all, 0, 0
    for whole, slices in _images(token_ids, pictures, marks):
        # The mark before an image is a part of it, also if the marks behind the image before include it.
        first = whole.start - 1
        if first > index:
            positions[:, index:first] = np.arange(position, position + first - index)
            position += first - index
        index = (slices[-1] if slices else whole).stop
        while index < num_tokens and token_ids[index] in known:
            index += 1
        # Views of the tokens of this image alone; the pictures begin behind the first mark.
        moved = [one._replace(start=one.start - first) for one in (whole, *slices)]
        position += _lay_out(positions[:, first:index], position, moved[0], moved[1:])
    positions[:, index:] = np.arange(position, position + num_tokens - index)
    return positions, position - index, index


def _images(
    token_ids: Sequence[int], pictures: Sequence[Place], marks: CanvasMarks
) -> Iterator[tuple[Place, list[Place]]]:
    """Yield each image and its slices."""
    found: list[tuple[Place, list[Place]]] = []
    for one in pictures:
        if found and token_ids[one.start - 1] == marks.slice_start:
            found[-1][1].append(one)
        else:
            found.append((one, []))
    yield from found


def _lay_out(positions: Integers, origin: int, whole: Place, slices: Sequence[Place]) -> int:
    """Set the positions of an image's tokens, and return how many positions the canvas takes.

    positions: [3, tokens]. origin: the first position of the canvas.
    """
    num_columns = _num_columns(slices)
    rows, columns = (slices[0].rows, slices[0].columns) if slices else (whole.rows, whole.columns)
    height, width = (len(slices) // num_columns * rows, num_columns * columns) if slices else (rows, columns)
    positions[:] = origin
    positions[1:, 0] = max(origin - 1, 0)
    _mark(positions, whole.stop, origin + height, origin + width)
    _fill(positions, whole, origin + _spread(whole.rows, height), origin + _spread(whole.columns, width))
    for number, one in enumerate(slices):
        row, column = divmod(number, num_columns)
        top, left = origin + row * rows, origin + column * columns
        _mark(positions, one.start - 1, top, left)
        _mark(positions, one.stop, top + one.rows - 1, left + one.columns - 1)
        _fill(positions, one, top + np.arange(one.rows), left + np.arange(one.columns))
        following = slices[number + 1].start if number + 1 < len(slices) else 0
        # Between the mark behind this slice and the one before the next.
        for index in range(one.stop + 1, following - 1):
            _mark(positions, index, top + rows - 1, origin + width)
    return max(height, width) + 1


def _num_columns(slices: Sequence[Place]) -> int:
    """Return the number of slices in a row: a third mark stands behind the first row."""
    gaps = (after.start - before.stop for before, after in pairwise(slices))
    columns = next((number for number, gap in enumerate(gaps, start=1) if gap > 2), len(slices))
    return len(slices) if columns and len(slices) % columns else columns


def _spread(number: int, length: int) -> Integers:
    """Return places of `number` tokens along a side of the canvas, which has `length` of them: [number]."""
    # By transformers' own operation: the middle between two places is rounded as there.
    return torch.linspace(0, length - 1, number).round().long().numpy()


def _mark(positions: Integers, index: int, row: int, column: int) -> None:
    if index < positions.shape[1]:
        positions[1:, index] = row, column


def _fill(positions: Integers, picture: Place, rows: Integers, columns: Integers) -> None:
    positions[1, picture.start : picture.stop] = np.repeat(rows, len(columns))
    positions[2, picture.start : picture.stop] = np.tile(columns, len(rows))
