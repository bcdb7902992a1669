"""MoondreamSettings: how Moondream 2 wants its images: as a whole, and in crops that overlap, in one picture.

Its repository has no preprocessor_config.json: the sizes are entries of config.json, and the rest is in its code
(https://github.com/vikhyat/moondream, moondream/torch/image_crops.py and vision.py), whose path with Pillow this is.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images.entries import LANCZOS, Entries
from pagewick.images.settings import Box, ImageSettings, View
from pagewick.images.tiles import MAX_TILES

ARCHITECTURES = ("HfMoondream",)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoondreamSettings(ImageSettings):
    """Each image is stretched to a square, and to a grid of squares that overlap; both become one picture.

    crop_side: side of a square in pixels. window: pixels from the edge of a square to that of the next one. max_crops:
    the most squares of a grid.
    """

    crop_side: int
    window: int
    max_crops: int

    @classmethod
    def of(cls, config: Entries) -> Self:
        """Read the entries of config.json. Raises ModelLoadError for impossible ones."""
        entries = config.child("config").child("vision")
        patch_size, crop_side = entries.count("enc_patch_size", 14), entries.count("crop_size", 378)
        window = crop_side - 2 * patch_size * entries.whole("overlap_margin", 4)
        max_crops = entries.count("max_crops", 12)
        if crop_side % patch_size or window < patch_size or max_crops > MAX_TILES:
            raise ModelLoadError(
                f"{entries.source}: crop_size must be a multiple of enc_patch_size and more than 2 * overlap_margin of "
                f"these, and max_crops at most {MAX_TILES}"
            )
        half = (0.5, 0.5, 0.5)
        settings = cls(
            patch_size=patch_size,
            merge_size=1,
            temporal_patch_size=1,
            min_pixels=crop_side**2,
            max_pixels=crop_side**2,
            mean=half,
            std=half,
            rescale_factor=1 / 255,
            resample=LANCZOS,
            crop_side=crop_side,
            window=window,
            max_crops=max_crops,
        )
        return replace(settings, max_pixels=settings.largest_picture)

    @property
    def has_fixed_tokens(self) -> bool:
        return True

    @property
    def only_place(self) -> int:
        return 1

    @property
    def largest_picture(self) -> int:
        return max(
            math.prod(self._picture(rows, columns))
            for rows in range(1, self.max_crops + 1)
            for columns in range(1, self.max_crops // rows + 1)
        )

    @property
    def max_tokens(self) -> int:
        return (self.crop_side // self.patch_size) ** 2

    def most_tokens(self, count: Callable[[str], int]) -> int:
        return self.max_tokens

    def limited(self, max_pixels: int) -> Self:
        """Return settings with so few crops that no picture has more pixels than max_pixels.

        Raises ConfigError for a limit below the pixels of a picture with one crop.
        """
        if max_pixels < (least := math.prod(self._picture(1, 1))):
            raise ConfigError(
                f"--max-image-pixels must be at least {least}, because the model reads at least as many of every image"
                f"; got {max_pixels}"
            )
        fewer = (replace(self, max_crops=number) for number in range(self.max_crops, 0, -1))
        found = next(one for one in fewer if one.largest_picture <= max_pixels)
        return replace(found, max_pixels=found.largest_picture)

    def views(self, height: int, width: int) -> tuple[View, ...]:
        grid = self.resized(height, width)
        square = self.crop_side, self.crop_side
        return (View((grid,), Box(0, 0, *grid), above=square),)

    def tokens_in(self, view: View) -> int:
        return self.max_tokens

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        return self._grid(*self._tiling(height, width))

    def _grid(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the height and width of a grid of squares."""
        seams = self.crop_side - self.window
        return rows * self.window + seams, columns * self.window + seams

    def _picture(self, rows: int, columns: int) -> tuple[int, int]:
        """Return the height and width of a picture: the whole stands above the grid."""
        height, width = self._grid(rows, columns)
        return self.crop_side + height, width

    def _tiling(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of squares for an image (select_tiling of the model's code).

        That exceeds max_crops for images that are very long, and this does not.
        """
        seams, most = self.crop_side - self.window, self.max_crops
        inner_height, inner_width = height - seams, width - seams
        if inner_height <= self.window or inner_width <= self.window:
            return 1, 1
        least_rows, least_columns = math.ceil(inner_height / self.window), math.ceil(inner_width / self.window)
        if (least := least_rows * least_columns) > most:
            ratio = math.sqrt(most / least)
            least_rows, least_columns = (max(1, math.floor(it * ratio)) for it in (least_rows, least_columns))
            return min(least_rows, most), min(least_columns, most)
        rows = max(least_rows, math.floor(math.sqrt(most * inner_height / inner_width)))
        columns = max(least_columns, math.floor(math.sqrt(most * inner_width / inner_height)))
        if rows * columns > most:
            rows, columns = (rows, most // rows) if columns > rows else (most // columns, columns)
        return max(1, rows), max(1, columns)
