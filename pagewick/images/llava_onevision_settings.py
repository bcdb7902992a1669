"""LlavaOnevisionSettings: how LLaVA-OneVision wants its images: one in tiles, and several as squares."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.images.entries import FIX, Entries, SettingsFiles
from pagewick.images.headers import MAX_FILE_PIXELS
from pagewick.images.llava_next_settings import LlavaNextSettings, read_tiled
from pagewick.images.settings import Box, View

PROCESSORS = tuple(f"LlavaOnevisionImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
# Values of entries that files leave out: those of the processor in transformers.
_SIZE, _RATIO = 384, "anyres_max_9"
_CANVASES = [[_SIZE * rows, _SIZE * columns] for rows in range(1, 7) for columns in range(1, 7)]


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaOnevisionSettings(LlavaNextSettings):
    """An image that is alone in its request is read as in LLaVA-NeXT; several are filled up to squares.

    most_tiles: rows and columns of tokens are shrunk if there are more than these tiles have. has_others: whether the
    request has several images.
    """

    most_tiles: int
    has_others: bool = False

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured, and for files that contradict each other."""
        _, processor, config = files
        fields = read_tiled(files, crops=False, size=_SIZE, canvases=_CANVASES)
        most_tiles = _most_tiles(config)
        if _most_tiles(processor) != most_tiles:
            raise ModelLoadError(
                f"vision_aspect_ratio in {processor.source} and {config.source} differ\n"
                "  these files do not belong together; download or copy both again"
            )
        processor.demand_one_of("num_image_tokens", ((fields["tile_side"] // fields["patch_size"]) ** 2,))
        return cls(**fields, most_tiles=most_tiles)

    def for_images(self, number: int) -> Self:
        return replace(self, has_others=number > 1)

    def views(self, height: int, width: int) -> tuple[View, ...]:
        if not self.has_others:
            return LlavaNextSettings.views(self, height, width)
        self.resized(height, width)
        seen = self._per_tile * self.patch_size
        red, green, blue = (int(number * 255) for number in self.mean)
        size = (self.tile_side, self.tile_side)
        return (View((size,), Box(0, 0, seen, seen), has_end=True, around=(red, green, blue)),)

    def tokens_in(self, view: View) -> int:
        if view.edges is None:
            return self.tokens_of(view.box.height, view.box.width) + (1 if view.has_end else 0)
        (down, across), (rows, columns) = view.edges, self._grid(view.box.height, view.box.width)
        rows, columns = rows - 2 * down, columns - 2 * across
        ratio = math.sqrt(rows * columns / (self.most_tiles * self._per_tile**2))
        if ratio > 1.1:
            # As in pagewick/models/vision/shrinking.py.
            rows, columns = max(1, int(rows // ratio)), max(1, int(columns // ratio))
        return rows * (columns + 1)

    def most_tokens(self, count: Callable[[str], int]) -> int:
        """Every canvas within the limit, and one beyond it shrunk to 1.1^2 times as many tokens at most."""
        views = (View((), Box(0, 0, *canvas), edges=(0, 0)) for canvas in self.canvases)
        most = math.ceil(1.21 * self.most_tiles * self._per_tile**2)
        rows = max(height // self.tile_side * self._per_tile for height, _ in self.canvases)
        return self._per_tile**2 + max(*map(self.tokens_in, views), most + rows)

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Raises InvalidRequestError for an image whose square would be too large."""
        side = max(height, width)
        if self.has_others and side**2 > MAX_FILE_PIXELS:
            raise InvalidRequestError(
                f"the model fills its {width} x {height} pixels up to a square, and at most {MAX_FILE_PIXELS} pixels "
                "are read; send a smaller image, or one that is less narrow"
            )
        return LlavaNextSettings._fitted(self, height, width)


def _most_tiles(entries: Entries) -> int:
    value = entries.values.get("vision_aspect_ratio") or _RATIO
    found = re.fullmatch("anyres_max_([1-9][0-9]?)", value) if isinstance(value, str) else None
    if found is None:
        raise ModelLoadError(
            f"vision_aspect_ratio in {entries.source} is {str(value)[:80]!r}; Pagewick knows anyres_max_ with a number "
            f"from 1 to 99; {FIX}"
        )
    return int(found[1])
