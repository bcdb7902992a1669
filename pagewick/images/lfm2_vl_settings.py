"""Lfm2VlSettings: how LFM2-VL wants its images. Large ones are cut into tiles, and may be added as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from pagewick.errors import ModelLoadError
from pagewick.images.entries import BILINEAR, FIX, Entries, SettingsFiles
from pagewick.images.settings import ImageSettings, View
from pagewick.images.tiles import MAX_TILES, nearest_grid, tiles_of

PROCESSORS = tuple(f"Lfm2VlImageProcessor{suffix}" for suffix in ("", "Fast"))
_HALF = (0.5, 0.5, 0.5)
# All filters of Pillow's.
_FILTERS = tuple(range(6))
# The texts around pictures are those of the processor in transformers; each is one token.
_START, _END, _OVERVIEW = "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2VlSettings(ImageSettings):
    """An image of more than max_pixels * tolerance is cut into tiles; others are scaled to min_pixels .. max_pixels.

    tile_side: in pixels. min_tiles, max_tiles: of an image that is cut; no image is if max_tiles is 0. has_overview:
    the whole image, scaled as one that is not cut, follows the tiles.
    """

    tile_side: int
    min_tiles: int
    max_tiles: int
    tolerance: float
    has_overview: bool

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured.

        do_resize counts for nothing, as in transformers: published files have false.
        """
        entries, processor, _ = files
        entries.demand_one_of("resample", _FILTERS)
        for name in ("do_rescale", "do_normalize", "do_convert_rgb", "do_pad"):
            entries.demand_one_of(name, (True,))
        for of_file in (entries, processor):
            of_file.demand_one_of("use_image_special_tokens", (True,))
        patch_size, merge_size = entries.count("encoder_patch_size", 16), entries.count("downsample_factor", 2)
        side = patch_size * merge_size
        tile_side, min_tiles, max_tiles = _tiles(entries, side)
        num_tokens = entries.count("min_image_tokens", 64), entries.count("max_image_tokens", 256)
        if num_tokens[0] > num_tokens[1]:
            raise ModelLoadError(
                f"min_image_tokens in {entries.source} is {num_tokens[0]}, and max_image_tokens {num_tokens[1]}; {FIX}"
            )
        return cls(
            patch_size=patch_size,
            merge_size=merge_size,
            temporal_patch_size=1,
            min_pixels=num_tokens[0] * side**2,
            max_pixels=num_tokens[1] * side**2,
            mean=entries.channels("image_mean", _HALF),
            std=entries.channels("image_std", _HALF, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
            image_end=_END,
            resample=entries.whole("resample", BILINEAR),
            tile_side=tile_side,
            min_tiles=min_tiles,
            max_tiles=max_tiles,
            tolerance=entries.factor("max_pixels_tolerance", 2.0),
            has_overview=entries.flag("use_thumbnail", True),
        )

    @property
    def depends_on_turning(self) -> bool:
        return self.max_tiles > 0

    @property
    def marks(self) -> tuple[str, ...]:
        of_tiles = (_tile_name(0, 0),) if self.max_tiles else ()
        return (_START, _END, *of_tiles, *((_OVERVIEW,) if of_tiles and self.has_overview else ()))

    @property
    def tile_tokens(self) -> int:
        return self.tokens_of(self.tile_side, self.tile_side) if self.max_tiles else 0

    @property
    def largest_picture(self) -> int:
        return max(self.max_pixels, self.tile_side**2 if self.max_tiles else 0)

    def most_tokens(self, count: Callable[[str], int]) -> int:
        # Every text around pictures is a token.
        of_whole = self.max_pixels // self.token_side**2
        of_tiles = self.max_tiles * (self.tile_tokens + 1) + (of_whole + 1 if self.has_overview else 0)
        return max(of_whole, of_tiles if self.max_tiles else 0) + 2

    def limited(self, max_pixels: int) -> Self:
        """Return settings by which the tiles of an image have at most max_pixels together, and other images, too.

        An image is not cut if its fewest tiles have more.
        """
        limited = ImageSettings.limited(self, max_pixels)
        max_tiles = min(self.max_tiles, max_pixels // self.tile_side**2)
        return replace(limited, max_tiles=max_tiles if max_tiles >= self.min_tiles else 0)

    def views(self, height: int, width: int) -> tuple[View, ...]:
        size = self.resized(height, width)
        if not self._is_cut(height, width):
            return (View.whole(size, before=_START),)
        rows, columns = nearest_grid(height, width, self.tile_side, self.min_tiles, self.max_tiles)
        tiles = [
            tile._replace(before=_tile_name(*divmod(number, columns)))
            for number, tile in enumerate(tiles_of(rows, columns, self.tile_side))
        ]
        tiles[0] = tiles[0]._replace(before=_START + tiles[0].before)
        return (*tiles, View.whole(size, before=_OVERVIEW)) if self.has_overview else tuple(tiles)

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Round the sides, to one token at least, within the limits."""
        side = self.token_side
        # round() rounds halves to even numbers, as the published processors do.
        rounded = max(round(height / side), 1) * side, max(round(width / side), 1) * side
        return self._within_limits(rounded, height, width)

    def _is_cut(self, height: int, width: int) -> bool:
        side = self.token_side
        # A side that rounds to nothing counts as one patch here.
        rounded = [max(self.patch_size, round(length / side) * side) for length in (height, width)]
        return self.max_tiles > 0 and rounded[0] * rounded[1] > self.max_pixels * self.tolerance


def _tile_name(row: int, column: int) -> str:
    return f"<|img_row_{row + 1}_col_{column + 1}|>"


def _tiles(entries: Entries, side: int) -> tuple[int, int, int]:
    """Return the side of a tile in pixels, and the fewest and the most tiles of an image. side: that of a token."""
    tile_side = entries.count("tile_size", 512)
    if tile_side % side:
        raise ModelLoadError(
            f"tile_size in {entries.source} is {tile_side}, and must be a multiple of {side}, the side of a token"
        )
    min_tiles, max_tiles = entries.count("min_tiles", 2), entries.count("max_tiles", 10)
    if not entries.flag("do_image_splitting", True) or min_tiles == max_tiles == 1:
        return tile_side, 2, 0
    if not 2 <= min_tiles <= max_tiles <= MAX_TILES:
        raise ModelLoadError(
            f"min_tiles in {entries.source} is {min_tiles}, and max_tiles {max_tiles}; Pagewick knows 2 to {MAX_TILES}"
        )
    return tile_side, min_tiles, max_tiles
