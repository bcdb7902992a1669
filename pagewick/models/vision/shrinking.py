"""The number of rows and columns to which those of a picture in tiles are shrunk. No numpy, no torch."""

from __future__ import annotations

import math


def shrunk(rows: int, columns: int, of_tile: int, most_tiles: int | None) -> tuple[int, int]:
    """Return the rows and columns to which a picture's are shrunk, in its own shape; None: they are not.

    of_tile: rows of a tile. If there are more than 1.1^2 times as many as most_tiles tiles have, both are divided by
    one number (LlavaOnevisionModel of transformers, which cannot read pictures of which nothing would be left).
    """
    if most_tiles is None:
        return rows, columns
    ratio = math.sqrt(rows * columns / (most_tiles * of_tile**2))
    return (max(1, int(rows // ratio)), max(1, int(columns // ratio))) if ratio > 1.1 else (rows, columns)
