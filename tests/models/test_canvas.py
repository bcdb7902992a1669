"""Positions of MiniCPM-V 4.7 on the canvas of an image, against those of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from transformers.models.minicpmv4_7.modeling_minicpmv4_7 import MiniCPMV4_7Model

from pagewick.models.vision.canvas import Place, canvas_positions
from pagewick.models.vision.merging_config import CanvasMarks

MARKS = CanvasMarks(image_start=10, image_end=11, slice_start=12, slice_end=13, row_end=14)
PAD = 15


def model_of_transformers() -> Any:
    model = MiniCPMV4_7Model.__new__(MiniCPMV4_7Model)
    torch.nn.Module.__init__(model)
    model.config = SimpleNamespace(
        downsample_mode="16x", image_start_id=10, image_end_id=11, slice_start_id=12, slice_end_id=13, newline_id=14
    )
    return model


MODEL = model_of_transformers()
side = st.integers(1, 7)
# The whole's rows and columns, those of the grid of slices, and those of a slice.
image = st.tuples(side, side, st.integers(0, 4), st.integers(1, 4), side, side)
# Text before an image, which may have marks in it.
text = st.lists(st.sampled_from([1, 2, 14, 14]), max_size=5)


def prompt_of(parts: list[tuple[list[int], tuple[int, ...]]], end: list[int]) -> tuple[list[int], list[Place]]:
    """Tokens as the processor writes them, and the pictures."""
    token_ids: list[int] = []
    places = []

    def add(before: int, rows: int, columns: int, after: int) -> None:
        token_ids.append(before)
        places.append(Place(len(token_ids), rows, columns))
        token_ids.extend([*[PAD] * rows * columns, after])

    for before, (rows, columns, grid_rows, grid_columns, slice_rows, slice_columns) in parts:
        token_ids += before
        add(10, rows, columns, 11)
        for row in range(grid_rows):
            if row:
                token_ids.append(14)
            for _ in range(grid_columns):
                add(12, slice_rows, slice_columns, 13)
    return token_ids + end, places


@given(st.lists(st.tuples(text, image), min_size=1, max_size=3), text)
@example([([1], (7, 7, 0, 1, 1, 1))], [])
@example([([], (2, 3, 2, 3, 2, 4)), ([], (3, 3, 1, 2, 3, 3))], [14, 14, 1])
@example([([1, 2], (4, 3, 4, 1, 3, 3)), ([14], (3, 3, 3, 3, 3, 3))], [14])
def test_positions_are_those_of_transformers(parts: list[tuple[list[int], tuple[int, ...]]], end: list[int]) -> None:
    token_ids, places = prompt_of(parts, end)
    ids = torch.tensor([token_ids])
    sizes = torch.tensor([[4 * one.rows, 4 * one.columns] for one in places])
    expected, delta = MODEL.get_rope_index(ids, (ids == PAD).int(), target_sizes=sizes)
    found, found_delta, found_end = canvas_positions(token_ids, places, MARKS)
    assert found.tolist() == expected[:, 0].tolist()
    assert found_delta == int(delta)
    # Behind the end, all axes have the same positions.
    behind = torch.arange(found_end, len(token_ids)) + found_delta
    assert found[:, found_end:].tolist() == [behind.tolist()] * 3
    assert found_end >= places[-1].stop


@pytest.mark.parametrize("places", [[Place(0, 1, 1)], [Place(1, 2, 2), Place(5, 1, 1)], [Place(4, 2, 2)]])
def test_other_places_are_refused(places: list[Place]) -> None:
    with pytest.raises(ValueError, match="a picture at"):
        canvas_positions([1] * 6, places, MARKS)
