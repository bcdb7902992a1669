"""Idefics3Settings: how Idefics3 and SmolVLM want their images, nearly all of which are cut into tiles."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images.entries import FIX, LANCZOS, Entries, SettingsFiles
from pagewick.images.settings import Box, ImageSettings, View

PROCESSORS = tuple(
    f"{family}ImageProcessor{suffix}" for family in ("Idefics3", "SmolVLM") for suffix in ("", "Fast", "Pil")
)
# Values of entries that files leave out: those of the processors and of the configs in transformers.
_HALF = (0.5, 0.5, 0.5)
_TILE_SIDE, _LONGEST_EDGE, _NUM_TOKENS = 364, 4 * 364, 169
_IMAGE_SIZE, _PATCH_SIZE, _SCALE_FACTOR = 224, 32, 2
# All filters of Pillow's.
_FILTERS = tuple(range(6))
# The processors scale no side beyond this.
_MAX_SIDE = 4096
# Published files have up to 4 tiles in a row.
_MOST_TILES_OF_SIDE = 8
_AROUND, _OVERVIEW = "<fake_token_around_image>", "<global-img>"


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3Settings(ImageSettings):
    """Each image is scaled to a longer side of longest_edge, also a small one, and its sides up to whole tiles.

    If there are several tiles, the whole image follows them in the size of one. Every picture has max_pixels: the part
    of a tile of tile_side pixels that whole patches cover.
    is_cut: whether images are cut; else each becomes one tile. most_tile_pixels: of all tiles of an image; None: any.
    """

    tile_side: int
    longest_edge: int
    is_cut: bool
    most_tile_pixels: int | None = None

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured, and for files that contradict each other."""
        entries, processor, config = files
        entries.demand_usual_steps(resample=_FILTERS)
        tile_side = _edge(entries, "max_image_size", _TILE_SIDE)
        patch_size, merge_size, side = _square(files, tile_side)
        num_tokens = (side // (patch_size * merge_size)) ** 2
        if (found := processor.count("image_seq_len", _NUM_TOKENS)) != num_tokens:
            raise ModelLoadError(
                f"image_seq_len in {processor.source} is {found}, and by {config.source} a tile has {num_tokens} "
                "tokens\n  these files do not belong together; download or copy both again"
            )
        longest_edge = _edge(entries, "size", _LONGEST_EDGE)
        if -(-min(longest_edge, _MAX_SIDE) // tile_side) > _MOST_TILES_OF_SIDE:
            raise ModelLoadError(
                f"{entries.source}: size ({longest_edge}) is more than {_MOST_TILES_OF_SIDE} times max_image_size "
                f"({tile_side}), and images would become too many tiles\n  correct it, or download the file again"
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
            image_end=_AROUND,
            resample=entries.whole("resample", LANCZOS),
            tile_side=tile_side,
            longest_edge=longest_edge,
            is_cut=entries.flag("do_image_splitting", True),
        )

    @property
    def depends_on_turning(self) -> bool:
        return True

    @property
    def marks(self) -> tuple[str, ...]:
        # Idefics3 lacks one for the place of a tile and the whole image, whose names are words to it.
        return (_AROUND,)

    @property
    def tile_tokens(self) -> int:
        return self.tokens_of(self._side, self._side) if self.is_cut else 0

    def most_tokens(self, count: Callable[[str], int]) -> int:
        # Idefics3's tokenizer has no tokens for the names of tiles. The shorter side is rounded up to an even number.
        edge = min(self.longest_edge + self.longest_edge % 2, _MAX_SIDE)
        longest = -(-edge // self.tile_side) if self.is_cut else 1
        numbers = range(1, longest + 1)
        grids = [(rows, columns) for rows in numbers for columns in numbers if self._is_allowed(rows * columns)]
        names = (self._names(rows, columns) for rows, columns in grids or [(1, 1)])
        of_picture = self.tokens_of(self._side, self._side)
        # The tokens of pictures stand between the names, which therefore become tokens by themselves.
        most = max(len(texts) * of_picture + sum(map(count, texts)) for texts in names)
        return most + count(self.image_end)

    def limited(self, max_pixels: int) -> Self:
        """Return settings by which the tiles of an image have at most max_pixels together.

        Raises ConfigError for a limit below one tile.
        """
        if max_pixels < self.tile_side**2:
            raise ConfigError(
                f"--max-image-pixels must be at least {self.tile_side**2}, because the model reads images in tiles of "
                f"{self.tile_side} x {self.tile_side} pixels; got {max_pixels}"
            )
        return replace(self, most_tile_pixels=max_pixels)

    def views(self, height: int, width: int) -> tuple[View, ...]:
        # Refuses an image that is too narrow.
        self.resized(height, width)
        tile, edges = self.tile_side, [self.longest_edge]
        # With a limit, the longest side that is within it counts.
        edges += range((self.longest_edge - 1) // tile * tile, 0, -tile)
        for edge in edges:
            scaled = _scaled(height, width, edge)
            if not self.is_cut:
                return (self._picture((scaled, (tile, tile)), _AROUND + _OVERVIEW),)
            grid = _whole_tiles(*scaled, tile)
            rows, columns = grid[0] // tile, grid[1] // tile
            if self._is_allowed(rows * columns):
                break
        *of_tiles, of_whole = self._names(rows, columns)
        tiles = [
            self._picture((scaled, grid), name, number // columns * tile, number % columns * tile)
            for number, name in enumerate(of_tiles)
        ]
        whole = (scaled, grid, (tile, tile)) if tiles else (scaled, grid)
        return (*tiles, self._picture(whole, of_whole))

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        return self._side, self._side

    @property
    def _side(self) -> int:
        """The side of a picture."""
        return math.isqrt(self.max_pixels)

    def _picture(self, sizes: tuple[tuple[int, int], ...], before: str, top: int = 0, left: int = 0) -> View:
        return View(sizes, Box(top, left, self._side, self._side), before)

    def _names(self, rows: int, columns: int) -> list[str]:
        """Return the texts ahead of the tiles of an image, row by row, and of the whole."""
        if rows * columns == 1:
            return [_AROUND + _OVERVIEW]
        names = [_name(row, column) for row in range(rows) for column in range(columns)]
        return [*names, f"\n\n{_AROUND}{_OVERVIEW}"]

    def _is_allowed(self, num_tiles: int) -> bool:
        return self.most_tile_pixels is None or num_tiles * self.tile_side**2 <= self.most_tile_pixels


def _name(row: int, column: int) -> str:
    """Return the text ahead of a tile: a line ends behind each row of tiles."""
    end = "\n" if row > 0 and column == 0 else ""
    return f"{end}{_AROUND}<row_{row + 1}_col_{column + 1}>"


def _scaled(height: int, width: int, longest_edge: int) -> tuple[int, int]:
    """Return the size with this longer side; the shorter one is rounded down, and then up to an even number."""
    ratio = width / height
    if width >= height:
        height, width = int(longest_edge / ratio), longest_edge
        height = max(height + height % 2, 1)
    else:
        height, width = longest_edge, int(longest_edge * ratio)
        width = max(width + width % 2, 1)
    if max(height, width) <= _MAX_SIDE:
        return height, width
    ratio = width / height
    if width >= height:
        return max(int(_MAX_SIDE / ratio), 1), _MAX_SIDE
    return _MAX_SIDE, max(int(_MAX_SIDE * ratio), 1)


def _whole_tiles(height: int, width: int, tile: int) -> tuple[int, int]:
    """Return a size with the same shape whose longer side has whole tiles; the shorter one is rounded up to them."""
    ratio = width / height
    if width >= height:
        width = -(-width // tile) * tile
        height = int(width / ratio)
    else:
        height = -(-height // tile) * tile
        width = int(height * ratio)
    return -(-height // tile) * tile, -(-width // tile) * tile


def _edge(entries: Entries, name: str, default: int) -> int:
    """Return the longest_edge of an entry. Raises ModelLoadError for one that gives other lengths."""
    value = entries.values.get(name)
    if value is None:
        return default
    if not isinstance(value, dict) or value.keys() != {"longest_edge"}:
        raise ModelLoadError(f"{name} in {entries.source} must have a longest_edge and nothing else; {FIX}")
    return entries.counted(value["longest_edge"], f"{name}.longest_edge", default)


def _square(files: SettingsFiles, tile_side: int) -> tuple[int, int, int]:
    """Return the side of a patch in pixels, the patches of a token's side, and the side that patches cover of a tile.

    Patches at the lower and right edges that are not whole are not seen.
    """
    vision = files.config.child("vision_config")
    image_size, patch_size = vision.square("image_size", _IMAGE_SIZE), vision.square("patch_size", _PATCH_SIZE)
    merge_size = files.config.count("scale_factor", _SCALE_FACTOR)
    if image_size != tile_side:
        raise ModelLoadError(
            f"max_image_size in {files.image.source} is {tile_side}, and vision_config.image_size in "
            f"{files.config.source} is {image_size}\n"
            "  these files do not belong together; download or copy both again"
        )
    if not image_size // patch_size or image_size // patch_size % merge_size:
        raise ModelLoadError(
            f"{files.config.source}: scale_factor is {merge_size}, and must divide the {image_size // patch_size} "
            f"patches in a row; {FIX}"
        )
    return patch_size, merge_size, image_size // patch_size * patch_size
