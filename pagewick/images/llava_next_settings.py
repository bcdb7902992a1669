"""LlavaNextSettings: how LLaVA-NeXT wants its images: as a whole, and in tiles whose tokens stand in common rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images.entries import BICUBIC, CLIP_MEAN, CLIP_STD, FIX, Entries, SettingsFiles
from pagewick.images.grid_settings import FILTERS
from pagewick.images.llava_settings import PATCH_SIZES, read_square
from pagewick.images.settings import Box, ImageSettings, View
from pagewick.images.tiles import MAX_TILES

PROCESSORS = tuple(f"LlavaNextImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
# Values of entries that files leave out: those of the processor in transformers, and of the config.
_SIZE, _CANVASES = 224, [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaNextSettings(ImageSettings):
    """Each image is stretched to one tile, and scaled into a canvas of tiles in its own shape, with black around it.

    tile_side: in pixels, of which only whole patches are seen. canvases: heights and widths in pixels, multiples of
    tile_side. Rows and columns of tokens that lie in what fills the canvas up are left out, and each row has one token
    more.
    """

    tile_side: int
    canvases: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured, and for files that contradict each other."""
        return cls(**read_tiled(files, crops=True, size=_SIZE, canvases=_CANVASES))

    @property
    def depends_on_turning(self) -> bool:
        return True

    @property
    def largest_picture(self) -> int:
        return max(math.prod(canvas) for canvas in self.canvases)

    def most_tokens(self, count: Callable[[str], int]) -> int:
        return self._per_tile**2 + max(
            height // self.tile_side * self._per_tile * (width // self.tile_side * self._per_tile + 1)
            for height, width in self.canvases
        )

    def limited(self, max_pixels: int) -> Self:
        """Return settings with those canvases that have at most max_pixels.

        Raises ConfigError for a limit below all of them.
        """
        kept = tuple(canvas for canvas in self.canvases if math.prod(canvas) <= max_pixels)
        if not kept:
            least = min(math.prod(canvas) for canvas in self.canvases)
            raise ConfigError(
                f"--max-image-pixels must be at least {least}, because the model scales images into canvases of at "
                f"least as many pixels; got {max_pixels}"
            )
        return replace(self, canvases=kept)

    def views(self, height: int, width: int) -> tuple[View, ...]:
        side, seen = self.tile_side, self._per_tile * self.patch_size
        self.resized(height, width)
        canvas = self._canvas(height, width)
        scaled = _scaled(height, width, canvas)
        # Pillow fills up with black what is cut out beyond an image.
        top, left = ((whole - length) // 2 for whole, length in zip(canvas, scaled, strict=True))
        whole = View(((side, side),), Box(0, 0, seen, seen))
        tiled = View((scaled,), Box(-top, -left, *canvas), edges=self._edges(height, width, canvas))
        # A very wide image has no rows there. Those of a very high one have no tokens but the last.
        return (whole, tiled) if self.tokens_in(tiled) else (whole,)

    def tokens_in(self, view: View) -> int:
        if view.edges is None:
            return self.tokens_of(view.box.height, view.box.width)
        (down, across), (rows, columns) = view.edges, self._grid(view.box.height, view.box.width)
        return (rows - 2 * down) * (columns - 2 * across + 1)

    @property
    def _per_tile(self) -> int:
        """Tokens of a tile's side."""
        return self.tile_side // self.patch_size

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of tokens of a canvas."""
        return height // self.tile_side * self._per_tile, width // self.tile_side * self._per_tile

    def _canvas(self, height: int, width: int) -> tuple[int, int]:
        """Return the canvas that keeps the most of an image's pixels, the first of the smallest among equal ones.

        The source is select_best_resolution of transformers.
        """

        def fitness(canvas: tuple[int, int]) -> tuple[int, int]:
            scale = min(canvas[1] / width, canvas[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - math.prod(canvas)

        return max(self.canvases, key=fitness)

    def _edges(self, height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
        """Return the rows and columns of tokens at each edge of a canvas that are left out.

        The source is unpad_image of transformers.
        """
        rows, columns = self._grid(*canvas)
        if width / height > columns / rows:
            return (rows - int(round(height * (columns / width), 7))) // 2, 0
        return 0, (columns - int(round(width * (rows / height), 7))) // 2

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        return self.tile_side, self.tile_side


def read_tiled(files: SettingsFiles, *, crops: bool, size: int, canvases: list[list[int]]) -> dict[str, Any]:
    """Return the fields of LlavaNextSettings. crops, size, canvases: what files mean where they leave entries out."""
    entries, processor, config = files
    entries.demand_usual_steps(resample=FILTERS)
    shortest_edge, side = read_square(entries, crops=crops, default=size)
    vision = config.child("vision_config")
    kind = vision.text("model_type", "clip_vision_model" if crops else "siglip_vision_model")
    patch_size = vision.square("patch_size", PATCH_SIZES.get(kind, 16))
    if (wanted := vision.square("image_size", _SIZE)) != side or shortest_edge not in (None, side):
        raise ModelLoadError(
            f"size and crop_size in {entries.source} must both be {wanted}, which is vision_config.image_size in "
            f"{config.source}\n  these files do not belong together; download or copy both again"
        )
    if side < patch_size:
        raise ModelLoadError(f"{config.source}: vision_config.patch_size is {patch_size}, more than image_size")
    processor.demand_one_of("num_additional_image_tokens", (1 if kind == "clip_vision_model" else 0,))
    processor.demand_one_of("patch_size", (patch_size,))
    found = _canvases(entries, side, canvases)
    if _canvases(config, side, canvases) != found:
        raise ModelLoadError(
            f"image_grid_pinpoints in {entries.source} and {config.source} differ\n"
            "  these files do not belong together; download or copy both again"
        )
    return {
        "patch_size": patch_size,
        "merge_size": 1,
        "temporal_patch_size": 1,
        "min_pixels": side**2,
        "max_pixels": side**2,
        "mean": entries.channels("image_mean", CLIP_MEAN),
        "std": entries.channels("image_std", CLIP_STD, is_divisor=True),
        "rescale_factor": entries.factor("rescale_factor", 1 / 255),
        "resample": entries.whole("resample", BICUBIC),
        "tile_side": side,
        "canvases": found,
    }


def _scaled(height: int, width: int, canvas: tuple[int, int]) -> tuple[int, int]:
    """Return the size of an image within its canvas (get_patch_output_size of transformers)."""
    across, down = canvas[1] / width, canvas[0] / height
    if across < down:
        return min(math.ceil(height * across), canvas[0]), canvas[1]
    return canvas[0], min(math.ceil(width * down), canvas[1])


def _canvases(entries: Entries, side: int, default: list[list[int]]) -> tuple[tuple[int, int], ...]:
    """Return the canvases that a file names."""
    given: Any = entries.values.get("image_grid_pinpoints") or default
    if not isinstance(given, list) or not all(_is_canvas(one, side) for one in given):
        raise ModelLoadError(
            f"image_grid_pinpoints in {entries.source} must be a list of heights and widths, multiples of {side} with "
            f"at most {MAX_TILES} tiles; {FIX}"
        )
    return tuple((height, width) for height, width in given)


def _is_canvas(value: Any, side: int) -> bool:
    if not isinstance(value, list) or len(value) != 2:
        return False
    is_divided = all(type(length) is int and length > 0 and length % side == 0 for length in value)
    return is_divided and math.prod(value) <= MAX_TILES * side**2
