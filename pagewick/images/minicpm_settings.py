"""MiniCPMSettings: how MiniCPM-V 4.6 wants its images: as a whole, and if they are large, in slices as well."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Self

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images.entries import BICUBIC, FIX, SettingsFiles
from pagewick.images.settings import MAX_ASPECT_RATIO, MAX_IMAGES, Box, ImageSettings, View
from pagewick.images.tiles import MAX_TILES

PROCESSORS = tuple(f"MiniCPMV4_6ImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
_HALF = (0.5, 0.5, 0.5)
# All filters of Pillow's.
_FILTERS = tuple(range(6))
# Upper limit for the side of the square that has as many pixels as a picture; published models have 448.
_MAX_SIDE = 2**14
# Patches along a side of the square that becomes a token.
_MERGED = {"16x": 4, "4x": 2}
# The texts around pictures are those of the published tokenizers; each is one token, but the number of an image.
_ID, _ID_END = "<image_id>", "</image_id>"
_WHOLE, _WHOLE_END = "<image>", "</image>"
_SLICE, _SLICE_END = "<slice>", "</slice>"
_ROW_END = "\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniCPMSettings(ImageSettings):
    """Every image is scaled to about max_pixels. One of more than these is also cut into slices of about as many.

    most_slices: of an image; with fewer than 2, no image is cut. has_ids: the number of an image stands ahead of it.
    """

    most_slices: int
    has_ids: bool

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured."""
        entries, processor, _ = files
        entries.demand_usual_steps(resample=_FILTERS)
        entries.demand_one_of("downsample_mode", tuple(_MERGED))
        side = entries.count("scale_resolution", 448)
        most_slices = entries.count("max_slice_nums", 9)
        if most_slices > MAX_TILES:
            raise ModelLoadError(
                f"max_slice_nums in {entries.source} is {most_slices}; Pagewick knows at most {MAX_TILES}; {FIX}"
            )
        if side > _MAX_SIDE:
            message = f"scale_resolution in {entries.source} is {side}; Pagewick knows at most {_MAX_SIDE}; {FIX}"
            raise ModelLoadError(message)
        return cls(
            patch_size=entries.count("patch_size", 14),
            merge_size=_MERGED[entries.values.get("downsample_mode") or "16x"],
            temporal_patch_size=1,
            min_pixels=side**2,
            max_pixels=side**2,
            mean=entries.channels("image_mean", _HALF),
            std=entries.channels("image_std", _HALF, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
            resample=entries.whole("resample", BICUBIC),
            most_slices=most_slices if entries.flag("slice_mode", True) else 1,
            has_ids=processor.flag("use_image_id", entries.flag("use_image_id", True)),
        )

    @property
    def depends_on_turning(self) -> bool:
        return True

    @property
    def marks(self) -> tuple[str, ...]:
        of_slices = (_SLICE, _SLICE_END) if self.most_slices > 1 else ()
        return (_WHOLE, _WHOLE_END, *of_slices, *((_ID, _ID_END) if self.has_ids else ()))

    @property
    def largest_picture(self) -> int:
        return self.max_tokens * self.token_side**2

    @property
    def tile_tokens(self) -> int:
        """The number of tokens of a square slice; others have more or fewer, as their sides are rounded."""
        side = self._rounded(self._side)
        return self.tokens_of(side, side) if self.most_slices > 1 else 0

    @property
    def max_tokens(self) -> int:
        """The number of tokens of the largest picture: a narrow one may have many more than a square one."""
        # The longer side of the narrowest image is rounded down to a pixel, then the shorter one.
        least = max(1, int(self._side / math.sqrt(MAX_ASPECT_RATIO) - 1 / MAX_ASPECT_RATIO))
        sizes = ((short, self.max_pixels / short) for short in range(least, self._side + 1))
        return max(self.tokens_of(self._rounded(short), self._rounded(long)) for short, long in sizes)

    def most_tokens(self, count: Callable[[str], int]) -> int:
        slices = self.most_slices if self.most_slices > 1 else 0
        around = count(self.before_image(MAX_IMAGES)) + count(_WHOLE) + count(_WHOLE_END)
        of_slice = self.max_tokens + count(_SLICE) + count(_SLICE_END) + count(_ROW_END)
        return around + self.max_tokens + slices * of_slice

    def before_image(self, number: int) -> str:
        return f"{_ID}{number - 1}{_ID_END}" if self.has_ids else ""

    def limited(self, max_pixels: int) -> Self:
        """Return settings by which the slices of an image have about max_pixels together.

        Raises ConfigError for a limit below one picture.
        """
        if max_pixels < self.max_pixels:
            raise ConfigError(
                f"--max-image-pixels must be at least {self.max_pixels}, because the model scales every image to about "
                f"as many pixels; got {max_pixels}"
            )
        return replace(self, most_slices=min(self.most_slices, max_pixels // self.max_pixels))

    def views(self, height: int, width: int) -> tuple[View, ...]:
        whole = View.whole(self.resized(height, width), before=_WHOLE, after=_WHOLE_END)
        rows, columns = self._grid(height, width)
        if rows * columns == 1:
            return (whole,)
        # The sides are made divisible first, each slice is then scaled by itself.
        shares = max(round(height / rows), 1), max(round(width / columns), 1)
        side_y, side_x = self._scaled(*shares)
        slices = []
        for number in range(rows * columns):
            row, column = divmod(number, columns)
            ends_row = column == columns - 1 and row < rows - 1
            box = Box(row * side_y, column * side_x, side_y, side_x)
            slices.append(
                View(((rows * side_y, columns * side_x),), box, _SLICE, _SLICE_END + (_ROW_END if ends_row else ""))
            )
        return (whole, *slices)

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        return self._scaled(height, width)

    @property
    def _side(self) -> int:
        """The side of a square picture before it is rounded to whole tokens."""
        return math.isqrt(self.max_pixels)

    def _rounded(self, length: float) -> int:
        # round() rounds halves to even numbers, as the published processors do.
        return max(round(length / self.token_side) * self.token_side, self.token_side)

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return the size of about max_pixels with nearly this shape, in whole tokens."""
        ratio = width / height
        new_height = int(self._side / math.sqrt(ratio))
        return self._rounded(new_height), self._rounded(int(new_height * ratio))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of slices, whose shape is the nearest to the image's; 1, 1 if it is not cut.

        Nearness is that of the logarithms of shapes. There are about as many slices as max_pixels are in the image.
        """
        number = min(math.ceil(width * height / self.max_pixels), self.most_slices)
        if number <= 1:
            return 1, 1
        log_ratio = math.log(width / height)
        best, nearest = (1, 1), math.inf
        for count in (number - 1, number, number + 1):
            if count == 1 or count > self.most_slices:
                continue
            for rows in (one for one in range(1, count + 1) if count % one == 0):
                distance = abs(log_ratio - math.log(count // rows / rows))
                # If two grids are equally near, it is the one with more rows.
                if distance < nearest or (distance == nearest and rows > best[0]):
                    best, nearest = (rows, count // rows), distance
        return best
