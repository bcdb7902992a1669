"""Positions of a prompt with images on three axes, and the order of an image's patches. numpy, no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


def image_positions(num_tokens: int, images: Sequence[tuple[int, int, int]]) -> tuple[Integers, int]:
    """Return the positions of a prompt's tokens in time, row and column, [3, num_tokens], and `delta`.

    images: (start, rows, columns) of each, in order: the index of its first token, and how many rows and columns of
    tokens it has; its tokens follow each other row by row. All axes of a token of text have the same position. An
    image's tokens have the position p that a text would have there: in time p, in rows p + row, in columns p + column.
    The text after it goes on after the largest of these (arXiv:2409.12191, section 2.1). The token at the index i >=
    num_tokens has the position i + delta on all axes.
    Raises ValueError for images that overlap or do not lie within the prompt.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    index, position = 0, 0
    for start, rows, columns in images:
        stop = start + rows * columns
        if start < index or stop > num_tokens or rows < 1 or columns < 1:
            raise ValueError(f"an image of {rows} x {columns} tokens from {start} on, in {num_tokens} tokens")
        positions[:, index:start] = np.arange(position, position + start - index)
        position += start - index
        positions[0, start:stop] = position
        positions[1, start:stop] = position + np.repeat(np.arange(rows), columns)
        positions[2, start:stop] = position + np.tile(np.arange(columns), rows)
        position += max(rows, columns)
        index = stop
    positions[:, index:] = np.arange(position, position + num_tokens - index)
    return positions, position - index


class PatchOrder(NamedTuple):
    """The order in which an encoder takes the patches of an image.

    Patches that are merged into one row of the output follow each other. Those that fill no square come last, behind
    all windows.
    rows, columns: [T], each patch's place in the image. tokens: [N], the place of each merged row in the image, which
    is read row by row. windows: where the windows begin, and where the last one ends: [windows + 1].
    """

    rows: Integers
    columns: Integers
    tokens: Integers
    windows: tuple[int, ...]


def patch_order(rows: int, columns: int, merge_size: int, window: int | None) -> PatchOrder:
    """Return the order of rows * columns patches; both numbers are at least merge_size.

    window: the side of a window in merged rows; the windows at the right and lower edges may be smaller. Windows follow
    each other row by row, and so do the merged rows within a window. None: one window, which is the whole image.
    """
    merged_rows, merged_columns = rows // merge_size, columns // merge_size
    row, column = np.divmod(np.arange(merged_rows * merged_columns), merged_columns)
    per_row = 1 if window is None else -(-merged_columns // window)
    of_token = np.zeros_like(row) if window is None else row // window * per_row + column // window
    tokens = np.argsort(of_token, kind="stable")
    counts = np.bincount(of_token) * merge_size**2
    inner_row, inner_column = np.divmod(np.arange(merge_size**2), merge_size)
    all_rows, all_columns = np.divmod(np.arange(rows * columns), columns)
    is_rest = (all_rows >= merged_rows * merge_size) | (all_columns >= merged_columns * merge_size)
    return PatchOrder(
        np.concatenate(((row[tokens, None] * merge_size + inner_row).ravel(), all_rows[is_rest])),
        np.concatenate(((column[tokens, None] * merge_size + inner_column).ravel(), all_columns[is_rest])),
        tokens,
        (0, *np.cumsum(counts).tolist()),
    )


def grid_taps(place: Integers, length: int, side: int) -> tuple[Integers, Integers, NDArray[np.float32]]:
    """Return how a line of `side` learned positions is stretched over `length` patches, for patches at `place` [T].

    The first and the last patch have the first and the last position, those between lie evenly among them: two
    neighbours (low, high), and the weight of the second one in float32. A single patch has the first position.
    """
    target = place.astype(np.float32) * np.float32(side - 1) / np.float32(max(length - 1, 1))
    low = np.floor(target)
    index = low.astype(np.int64)
    return index, np.minimum(index + 1, side - 1), (target - low).astype(np.float32)
