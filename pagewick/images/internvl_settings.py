"""InternVLSettings: how InternVL wants its images: in tiles, and as a whole behind them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images.entries import BICUBIC, CLIP_MEAN, CLIP_STD, FIX, SettingsFiles
from pagewick.images.settings import ImageSettings, View
from pagewick.images.tiles import MAX_TILES, nearest_grid, tiles_of

PROCESSORS = tuple(f"GotOcr2ImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
# Values of entries that files leave out: those of the processors and of the config in transformers.
_SIZE, _NUM_TOKENS, _DOWNSAMPLE_RATIO = 384, 256, 0.5
_IMAGE_SIZE, _PATCH_SIZE = 448, 14
# All filters of Pillow's.
_FILTERS = tuple(range(6))
# The texts around an image are those of the processor in transformers; each is one token.
_START, _END = "<img>", "</img>"


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVLSettings(ImageSettings):
    """Each image is stretched to a grid of tiles, each with max_pixels, and to one tile behind them if there are some.

    min_tiles, max_tiles: of an image, without the whole.
    """

    min_tiles: int
    max_tiles: int

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured, and for files that contradict each other.

        crop_to_patches counts for nothing: InternVL's processor in transformers overrules its false.
        """
        entries, processor, config = files
        entries.demand_usual_steps(resample=_FILTERS)
        patch_size, merge_size, side = _square(files)
        if (found := entries.square("size", _SIZE)) != side:
            raise ModelLoadError(
                f"size in {entries.source} is {found}, and vision_config.image_size in {config.source} is {side}\n"
                "  these files do not belong together; download or copy both again"
            )
        num_tokens = (side // (patch_size * merge_size)) ** 2
        for of_file in (processor, config):
            if (found := of_file.count("image_seq_length", _NUM_TOKENS)) != num_tokens:
                raise ModelLoadError(
                    f"image_seq_length in {of_file.source} is {found}, and by {config.source} a tile has {num_tokens} "
                    "tokens\n  these files do not belong together; download or copy both again"
                )
        min_tiles, max_tiles = entries.count("min_patches", 1), entries.count("max_patches", 12)
        if not min_tiles <= max_tiles <= MAX_TILES:
            raise ModelLoadError(
                f"min_patches in {entries.source} is {min_tiles}, and max_patches {max_tiles}; Pagewick knows 1 to "
                f"{MAX_TILES}"
            )
        return cls(
            patch_size=patch_size,
            merge_size=merge_size,
            temporal_patch_size=1,
            min_pixels=side**2,
            max_pixels=side**2,
            mean=entries.channels("image_mean", CLIP_MEAN),
            std=entries.channels("image_std", CLIP_STD, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
            image_end=_END,
            resample=entries.whole("resample", BICUBIC),
            min_tiles=min_tiles,
            max_tiles=max_tiles,
        )

    @property
    def depends_on_turning(self) -> bool:
        return self.max_tiles > 1

    @property
    def marks(self) -> tuple[str, ...]:
        return _START, _END

    @property
    def tile_tokens(self) -> int:
        return self.tokens_of(self._side, self._side) if self.max_tiles > 1 else 0

    def most_tokens(self, count: Callable[[str], int]) -> int:
        # Every text around pictures is a token.
        num_pictures = self.max_tiles + 1 if self.max_tiles > 1 else 1
        return num_pictures * self.tokens_of(self._side, self._side) + 2

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
        rows, columns = nearest_grid(height, width, self._side, self.min_tiles, self.max_tiles)
        tiles = [*tiles_of(rows, columns, self._side), whole] if rows * columns > 1 else [whole]
        return tiles[0]._replace(before=_START), *tiles[1:]

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        return self._side, self._side

    @property
    def _side(self) -> int:
        """The side of a tile."""
        return math.isqrt(self.max_pixels)


def _square(files: SettingsFiles) -> tuple[int, int, int]:
    """Return the side of a patch in pixels, the patches of a token's side, and the side of a tile in pixels."""
    config = files.config
    vision = config.child("vision_config")
    side, patch_size = vision.square("image_size", _IMAGE_SIZE), vision.square("patch_size", _PATCH_SIZE)
    ratio = config.factor("downsample_ratio", _DOWNSAMPLE_RATIO)
    merge_size = round(1 / ratio) if ratio > 0 else 0
    if not merge_size or 1 / ratio != merge_size or side % (patch_size * merge_size):
        raise ModelLoadError(
            f"{config.source}: downsample_ratio is {ratio}, and must make whole squares of patches of {patch_size} x "
            f"{patch_size} pixels in an image of {side} x {side}; {FIX}"
        )
    return patch_size, merge_size, side
