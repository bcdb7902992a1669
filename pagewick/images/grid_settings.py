"""GridSettings: how models want their images that cut them into a grid of tiles, with the whole behind these."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images.entries import FIX, Entries
from pagewick.images.settings import ImageSettings, View
from pagewick.images.tiles import MAX_TILES, tiles_of

# All filters of Pillow's.
FILTERS = tuple(range(6))


@dataclass(frozen=True, slots=True, kw_only=True)
class GridSettings(ImageSettings):
    """Each image is stretched to a grid of tiles, each with max_pixels, and to one tile behind them if there are some.

    min_tiles, max_tiles: of an image, without the whole. image_start: the token ahead of all others of an image.
    tile_break: the token behind each picture, with which image_end therefore begins; empty if there is none. One more
    is the end of image_end.
    """

    min_tiles: int
    max_tiles: int
    image_start: str
    tile_break: str = ""

    @property
    def depends_on_turning(self) -> bool:
        return self.max_tiles > 1

    @property
    def tile_tokens(self) -> int:
        return self.tokens_of(self._side, self._side) if self.max_tiles > 1 else 0

    def most_tokens(self, count: Callable[[str], int]) -> int:
        num_pictures = self.max_tiles + 1 if self.max_tiles > 1 else 1
        of_picture = self.tokens_of(self._side, self._side) + (1 if self.tile_break else 0)
        return num_pictures * of_picture + 2

    def limited(self, max_pixels: int) -> Self:
        """Return settings by which the tiles of an image have at most max_pixels together.

        Raises ConfigError for a limit below one tile.
        """
        if max_pixels < self.max_pixels:
            raise ConfigError(
                f"--max-image-pixels must be at least {self.max_pixels}, because the model reads images in tiles of "
                f"{self._side} x {self._side} pixels; got {max_pixels}"
            )
        max_tiles = min(self.max_tiles, max_pixels // self.max_pixels)
        return replace(self, max_tiles=max_tiles, min_tiles=min(self.min_tiles, max_tiles))

    def views(self, height: int, width: int) -> tuple[View, ...]:
        whole = View.whole(self.resized(height, width))
        rows, columns = self._grid(height, width)
        tiles = [*tiles_of(rows, columns, self._side), whole] if rows * columns > 1 else [whole]
        first, *others = tiles
        return first._replace(before=self.image_start), *(one._replace(before=self.tile_break) for one in others)

    @abstractmethod
    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tiles of an image."""

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        return self._side, self._side

    @property
    def _side(self) -> int:
        """The side of a tile."""
        return math.isqrt(self.max_pixels)


def read_numbers_of_tiles(entries: Entries) -> tuple[int, int]:
    """Return min_patches and max_patches. Raises ModelLoadError."""
    fewest, most = entries.count("min_patches", 1), entries.count("max_patches", 12)
    if not fewest <= most <= MAX_TILES:
        raise ModelLoadError(
            f"min_patches in {entries.source} is {fewest}, and max_patches {most}; Pagewick knows 1 to {MAX_TILES}; "
            f"{FIX}"
        )
    return fewest, most
