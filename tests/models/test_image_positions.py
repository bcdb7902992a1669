"""Positions of prompts with images, and the order of patches, against transformers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import vision_utils

from pagewick.models.vision.positions import grid_taps, image_positions, patch_order
from tests.models.checkpoints import make_model

IMAGE_TOKEN = 190
MERGE = 2
# Tokens of the prompt; start, rows and columns of each image.
PROMPTS: list[tuple[int, list[tuple[int, int, int]]]] = [
    (9, []),
    (1, [(0, 1, 1)]),
    (14, [(2, 3, 4)]),
    (40, [(0, 2, 5), (11, 4, 1), (17, 1, 1), (25, 3, 5)]),
    (31, [(5, 1, 7), (14, 7, 2)]),
]


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen2.5-vl-window", "qwen3-vl", "qwen3.5-multimodal"])
def test_positions_are_those_of_transformers(name: str) -> None:
    model: Any = make_model(name)
    for num_tokens, images in PROMPTS:
        ids = torch.full((1, num_tokens), 7)
        for start, rows, columns in images:
            ids[0, start : start + rows * columns] = IMAGE_TOKEN
        grid = torch.tensor([(1, rows * MERGE, columns * MERGE) for _, rows, columns in images])
        expected, delta = model.model.get_rope_index(
            ids, mm_token_type_ids=(ids == IMAGE_TOKEN).int(), image_grid_thw=grid if images else None
        )
        found, found_delta = image_positions(num_tokens, images)
        assert found.dtype == np.int64
        assert found.tolist() == expected[:, 0].tolist(), (num_tokens, images)
        assert found_delta == delta.item()


def test_one_image_follows_another_at_once() -> None:
    """transformers would take them for one."""
    positions, delta = image_positions(6, [(1, 1, 2), (3, 2, 1)])
    assert positions.tolist() == [[0, 1, 1, 3, 3, 5], [0, 1, 1, 3, 4, 5], [0, 1, 2, 3, 3, 5]]
    assert delta == 0


@pytest.mark.parametrize("images", [[(0, 2, 2), (3, 1, 1)], [(8, 1, 2)], [(-1, 1, 1)], [(0, 0, 3)]])
def test_images_that_do_not_fit(images: list[tuple[int, int, int]]) -> None:
    with pytest.raises(ValueError, match="an image of"):
        image_positions(9, images)


@pytest.mark.parametrize("merge_size", [1, 2, 3])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 5), (7, 4), (9, 10)])
def test_patches_are_in_the_order_of_transformers(rows: int, columns: int, merge_size: int) -> None:
    grid = torch.tensor([(1, rows * merge_size, columns * merge_size)])
    order = patch_order(rows * merge_size, columns * merge_size, merge_size, None)
    expected = vision_utils.get_vision_position_ids(grid, merge_size)
    assert np.stack((order.rows, order.columns), axis=1).tolist() == expected.tolist()
    assert order.tokens.tolist() == list(range(rows * columns))
    assert order.windows == (0, len(order.rows))

    for window in (1, 2, 3, 4, 20):
        tokens, bounds = vision_utils.get_vision_window_index(grid, merge_size, window * merge_size * 5, 5)
        windowed = patch_order(rows * merge_size, columns * merge_size, merge_size, window)
        assert windowed.tokens.tolist() == tokens.tolist()
        assert windowed.windows == tuple(bounds.tolist())
        places = expected.view(rows * columns, -1, 2)[tokens].flatten(0, 1)
        assert np.stack((windowed.rows, windowed.columns), axis=1).tolist() == places.tolist()


@pytest.mark.parametrize(("rows", "columns"), [(2, 3), (3, 2), (5, 7), (4, 5)])
def test_patches_that_fill_no_square_come_last(rows: int, columns: int) -> None:
    found, whole = patch_order(rows, columns, 2, None), patch_order(rows // 2 * 2, columns // 2 * 2, 2, None)
    num_whole = len(whole.rows)
    assert found.tokens.tolist() == whole.tokens.tolist() and found.windows == whole.windows == (0, num_whole)
    places = list(zip(found.rows.tolist(), found.columns.tolist(), strict=True))
    assert places[:num_whole] == list(zip(whole.rows.tolist(), whole.columns.tolist(), strict=True))
    assert sorted(places) == [(row, column) for row in range(rows) for column in range(columns)]


@pytest.mark.parametrize("length", [1, 2, 5, 8, 48, 131])
def test_positions_are_stretched_as_in_transformers(length: int) -> None:
    side = 5
    indices, weights = vision_utils.get_vision_interpolation_indices_and_weights(
        torch.tensor([(1, length, 1)]), side, align_corners=True
    )
    low, high, weight = grid_taps(np.arange(length), length, side)
    table = torch.randn(side * side, generator=torch.Generator().manual_seed(1))[::side]
    expected = (table.repeat_interleave(side)[indices] * weights).sum(-1)
    line = table.numpy()
    found = line[low] * (1 - weight) + line[high] * weight
    np.testing.assert_allclose(found, expected.numpy(), atol=1e-6, rtol=0)
    assert low.max() < side and high.max() < side and weight.dtype == np.float32
