"""Grids of tiles: which one fits an image, and the views of an image that is cut."""

from __future__ import annotations

import math

from pagewick.images.settings import Box, View

# The most tiles of an image in grids: 64 images, with the whole of each, then have fewer than MAX_PICTURES.
MAX_TILES = 60


def nearest_grid(height: int, width: int, tile_side: int, fewest: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of tiles whose shape is the nearest to the image's; 1, 1 if `most` is below `fewest`.

    A grid with more tiles and the same shape goes before one with fewer if the image has over half of its pixels.
    fewest, most: tiles. tile_side: in pixels.
    """
    numbers = range(1, most + 1)
    grids = [(rows, columns) for columns in numbers for rows in numbers]
    best, nearest = (1, 1), math.inf
    for rows, columns in sorted(grids, key=math.prod):
        if not fewest <= rows * columns <= most:
            continue
        distance = abs(width / height - columns / rows)
        is_filled = height * width > 0.5 * rows * columns * tile_side**2
        if distance < nearest or (distance == nearest and is_filled):
            best, nearest = (rows, columns), distance
    return best


def covering_grid(height: int, width: int, tile_side: int, most: int) -> tuple[int, int]:
    """Return the rows and columns of the grid of tiles that enlarges an image the least.

    The smaller factor of both sides counts. If all grids shrink the image, the one that does so the least is returned.
    Among equal grids, it is one with the fewest tiles, and then with the fewest columns. most: tiles. tile_side: in
    pixels.
    """
    numbers = range(1, most + 1)
    grids = [(rows, columns) for columns in numbers for rows in numbers if rows * columns <= most]
    factors = {
        (rows, columns): min(columns * tile_side / width, rows * tile_side / height)
        for rows, columns in sorted(grids, key=math.prod)
    }
    enlarging = {grid: factor for grid, factor in factors.items() if factor >= 1}
    return min(enlarging, key=enlarging.__getitem__) if enlarging else max(factors, key=factors.__getitem__)


def tiles_of(rows: int, columns: int, side: int) -> list[View]:
    """Return the tiles of an image, row by row, without texts."""
    size = rows * side, columns * side
    return [
        View((size,), Box(row * side, column * side, side, side)) for row in range(rows) for column in range(columns)
    ]
