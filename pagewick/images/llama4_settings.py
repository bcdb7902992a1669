"""Llama4Settings: how Llama 4 wants its images: in tiles of one size, and as a whole behind them."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Self

from pagewick.errors import ModelLoadError
from pagewick.images.entries import BILINEAR, FIX, SettingsFiles
from pagewick.images.grid_settings import FILTERS, GridSettings
from pagewick.images.settings import Box, Placeholder, View
from pagewick.images.tiles import MAX_TILES

PROCESSORS = tuple(f"Llama4ImageProcessor{suffix}" for suffix in ("", "Fast"))
# Values of entries that files leave out: those of the processor and of its image processor in transformers.
_SIZE, _PATCH_SIZE, _RATIO, _MOST_TILES, _HALF = 336, 14, 0.5, 16, (0.5, 0.5, 0.5)
# The processor of transformers knows these by their texts.
_START, _NEXT, _ROW_END, _END = "<|image_start|>", "<|tile_x_separator|>", "<|tile_y_separator|>", "<|image_end|>"
# Templates write this for an image, and the model reads it ahead of the whole image.
_WHOLE = "<|image|>"


class _Length(NamedTuple):
    """A length in pixels. is_single: the processor of transformers divides it in float32."""

    pixels: int
    is_single: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama4Settings(GridSettings):
    """Each image is scaled into a canvas of tiles in its own shape, and filled up with black, right and below.

    fills_canvas: images are enlarged as far as the canvases allow; else only to the side of a tile.
    """

    fills_canvas: bool

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured, and for files that contradict each other."""
        entries, processor, config = files
        entries.demand_usual_steps(resample=FILTERS)
        side, most = entries.square("size", _SIZE), entries.count("max_patches", _MOST_TILES)
        if most > MAX_TILES:
            raise ModelLoadError(f"max_patches in {entries.source} is {most}; Pagewick knows 1 to {MAX_TILES}; {FIX}")
        vision = config.child("vision_config")
        patch_size = processor.count("patch_size", vision.count("patch_size", _PATCH_SIZE))
        ratio = processor.factor("pixel_shuffle_ratio", vision.factor("pixel_shuffle_ratio", _RATIO))
        merge_size = round(1 / ratio) if 0.01 < ratio <= 1 else 0
        if not merge_size or side % (patch_size * merge_size):
            raise ModelLoadError(
                f"size in {entries.source} is {side}, and must be a multiple of patch_size ({patch_size}) divided by "
                f"pixel_shuffle_ratio ({ratio})\n  these files do not belong together; download or copy both again"
            )
        return cls(
            patch_size=patch_size,
            merge_size=merge_size,
            temporal_patch_size=1,
            min_pixels=side**2,
            max_pixels=side**2,
            mean=entries.channels("image_mean", _HALF),
            std=entries.channels("image_std", _HALF, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
            image_start=_START,
            image_end=_END,
            resample=entries.whole("resample", BILINEAR),
            placeholder=Placeholder(processor.token("image_token", _WHOLE), "", ""),
            min_tiles=1,
            max_tiles=most,
            fills_canvas=entries.flag("resize_to_max_canvas", False),
        )

    @property
    def marks(self) -> tuple[str, ...]:
        return (_START, _WHOLE, _END, *((_NEXT, _ROW_END) if self.max_tiles > 1 else ()))

    @property
    def depends_on_turning(self) -> bool:
        return True

    def most_tokens(self, count: Callable[[str], int]) -> int:
        tiles = self.max_tiles if self.max_tiles > 1 else 0
        of_picture = self.tokens_of(self._side, self._side)
        return (tiles + 1) * of_picture + tiles + count(_START) + count(_WHOLE) + count(_END)

    def views(self, height: int, width: int) -> tuple[View, ...]:
        side, whole = self._side, self.resized(height, width)
        rows, columns = self._grid(height, width)
        scaled = self._scaled(height, width, rows, columns)
        if rows * columns == 1:
            return (View((scaled,), Box(0, 0, side, side), _START + _WHOLE),)
        tiles = []
        for row in range(rows):
            for column in range(columns):
                before = _NEXT if column else _ROW_END if row else _START
                # Pillow fills up with black what is cut out beyond an image.
                tiles.append(View((scaled,), Box(row * side, column * side, side, side), before))
        return *tiles, View.whole(whole, before=_ROW_END + _WHOLE)

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the canvas that enlarges an image the least, or shrinks it the least if all of them do.

        With fills_canvas it is the one that enlarges it the most. Among equal ones, the smallest counts. Factors are
        compared in float32 (get_best_fit of the processor in transformers).
        """
        numbers = range(1, self.max_tiles + 1)
        grids = [(rows, columns) for rows in numbers for columns in numbers if rows * columns <= self.max_tiles]
        factors = {
            (rows, columns): min(_single(rows * self._side / height), _single(columns * self._side / width))
            for rows, columns in grids
        }
        enlarging = [factor for factor in factors.values() if factor >= 1]
        best = (max if self.fills_canvas or not enlarging else min)(enlarging or factors.values())
        return min((grid for grid, factor in factors.items() if factor == best), key=math.prod)

    def _scaled(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """Return the size of an image within its canvas (get_max_res_without_distortion there)."""
        down, across = self._target(height, rows * self._side), self._target(width, columns * self._side)
        by_height, by_width = _divided(down, height), _divided(across, width)
        is_wide = by_width < by_height
        if down.is_single or across.is_single:
            is_wide = _single(by_width) < _single(by_height)
        if is_wide:
            return max(1, min(_times(height, by_width, across), down.pixels)), across.pixels
        return down.pixels, max(1, min(_times(width, by_height, down), across.pixels))

    def _target(self, length: int, of_canvas: int) -> _Length:
        """Return the length to which a side may be scaled."""
        most = max(length, self._side)
        if self.fills_canvas or of_canvas < most:
            return _Length(of_canvas, is_single=True)
        return _Length(most, is_single=False)


def _single(number: float) -> float:
    """Return a number rounded to float32."""
    return float(struct.unpack("f", struct.pack("f", number))[0])


def _divided(target: _Length, length: int) -> float:
    return _single(target.pixels / length) if target.is_single else target.pixels / length


def _times(length: int, factor: float, of: _Length) -> int:
    """Return a length times a factor that was found with `of`, rounded down."""
    return math.floor(_single(length * factor) if of.is_single else length * factor)
