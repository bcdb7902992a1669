"""KimiSettings: how Kimi K2.5 and K2.6 want their images. The resampling is bicubic."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from pagewick.errors import ConfigError, ModelLoadError
from pagewick.images.entries import FIX, Entries, SettingsFiles
from pagewick.images.settings import MAX_ASPECT_RATIO, Box, ImageSettings, View

PROCESSORS = tuple(f"Kimi_K25ImageProcessor{suffix}" for suffix in ("", "Fast"))
# The entry of published files that holds all others. These files name no processor of transformers.
MEDIA: Final = "media_proc_cfg"
# Values of entries that a file leaves out: those of the processor in transformers.
_PATCH_SIZE, _MERGE_SIZE, _MAX_PATCHES, _MAX_SIDE = 14, 2, 16384, 512
# The most patches in a row that a file may allow: the largest picture is found row by row.
_MOST_IN_A_ROW: Final = 4096
_HALF = (0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class KimiSettings(ImageSettings):
    """Images keep their size, unless it is too large, and are filled up with black to whole tokens, right and below.

    max_pixels: those of the most patches that an image may have before it is filled up. max_side: the most patches in
    its rows and in its columns.
    """

    max_side: int

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured."""
        entries = files.image
        entries.demand_usual_steps()
        limits = _published(entries.child(MEDIA)) if entries.values.get(MEDIA) is not None else _limits(entries)
        return cls(
            **limits,
            temporal_patch_size=1,
            min_pixels=1,
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
        )

    @property
    def largest_picture(self) -> int:
        return self.max_tokens * self.token_side**2

    @property
    def max_tokens(self) -> int:
        """An upper bound that is nearly reached: what fills up an image depends on its size."""
        columns = longest = -(-self.max_side // self.merge_size)
        most = 1
        for rows in range(1, longest + 1):
            while columns and not self._may_have(rows, columns):
                columns -= 1
            most = max(most, rows * columns)
        return most

    def limited(self, max_pixels: int) -> Self:
        """Return settings by which no picture has more than max_pixels, with what fills it up.

        Raises ConfigError for a limit that a narrow image may exceed however few its patches are.
        """
        if max_pixels >= self.largest_picture:
            return self
        limits = range(1, self._max_patches + 1)
        number = bisect_right(limits, max_pixels, key=lambda limit: self._with_patches(limit).largest_picture)
        if not number:
            least = self._with_patches(1).largest_picture
            raise ConfigError(f"--max-image-pixels must be at least {least} with this model; got {max_pixels}")
        return self._with_patches(number)

    def views(self, height: int, width: int) -> tuple[View, ...]:
        # Pillow fills up with black what is cut out beyond an image.
        return (View((self._scaled(height, width),), Box(0, 0, *self.resized(height, width))),)

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Round the sides of the scaled image up to whole tokens."""
        side = self.token_side
        new_height, new_width = (-(-length // side) * side for length in self._scaled(height, width))
        return new_height, new_width

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        """Scale both sides by one factor, at most 1, by which neither the patches nor those in a row are too many.

        Patches are counted before the image is scaled, without those that are not whole (navit_resize of the processor
        in transformers).
        """
        longest = self.max_side * self.patch_size
        num_patches = max(1, height // self.patch_size) * max(1, width // self.patch_size)
        factor = min(1.0, math.sqrt(self._max_patches / num_patches), longest / height, longest / width)
        new_height, new_width = (min(max(1, int(length * factor)), longest) for length in (height, width))
        return new_height, new_width

    def _may_have(self, rows: int, columns: int) -> bool:
        """Return whether a picture may have this number of rows and of columns of tokens; True for all that exist."""
        lengths = [(number - 1) * self.token_side + 1 for number in (rows, columns)]
        if min(rows, columns) == 1 and max(lengths) <= MAX_ASPECT_RATIO:
            # A side that would become shorter than a pixel gets one.
            return True
        shortest = [max(length, max(lengths) / MAX_ASPECT_RATIO) for length in lengths]
        # The image had at least these patches in a line before it was scaled, and at most `spread` pixels for each.
        patches = [max(1, int(length) // self.patch_size) for length in shortest]
        spread = [(self.patch_size * (number + 1) - 1) / number for number in patches]
        return math.prod(shortest) <= self._max_patches * math.prod(spread)

    @property
    def _max_patches(self) -> int:
        return self.max_pixels // self.patch_size**2

    def _with_patches(self, number: int) -> Self:
        return replace(self, max_pixels=number * self.patch_size**2)


def _published(entries: Entries) -> dict[str, Any]:
    """Return the fields in the form of the files that were published with the models."""
    if entries.values.get("fixed_output_tokens") is not None:
        raise ModelLoadError(f"fixed_output_tokens in {entries.source} is not supported; it must be null")
    patch_size = entries.count("patch_size", _PATCH_SIZE)
    return {
        "patch_size": patch_size,
        "merge_size": entries.square("merge_kernel_size", _MERGE_SIZE),
        "max_pixels": entries.count("in_patch_limit", _MAX_PATCHES) * patch_size**2,
        "max_side": _side(entries, "patch_limit_on_one_side"),
        **_colours(entries),
    }


def _limits(entries: Entries) -> dict[str, Any]:
    """Return the fields in the form of transformers' processor."""
    size = entries.child("size")
    sides = {name: _side(size, name) for name in ("max_height", "max_width")}
    if len(set(sides.values())) > 1 or (size.values and size.values.keys() != sides.keys()):
        raise ModelLoadError(f"{size.source} must have max_height and max_width, the same number; {FIX}")
    patch_size = entries.count("patch_size", _PATCH_SIZE)
    return {
        "patch_size": patch_size,
        "merge_size": entries.count("merge_size", _MERGE_SIZE),
        "max_pixels": entries.count("max_patches", _MAX_PATCHES) * patch_size**2,
        "max_side": sides["max_height"],
        **_colours(entries),
    }


def _side(entries: Entries, name: str) -> int:
    """Return the most patches in a row."""
    side = entries.count(name, _MAX_SIDE)
    if side > _MOST_IN_A_ROW:
        raise ModelLoadError(f"{name} in {entries.source} is {side}; Pagewick knows 1 to {_MOST_IN_A_ROW}; {FIX}")
    return side


def _colours(entries: Entries) -> dict[str, Any]:
    return {
        "mean": entries.channels("image_mean", _HALF),
        "std": entries.channels("image_std", _HALF, is_divisor=True),
    }
