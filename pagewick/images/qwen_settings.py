"""QwenSettings: how Qwen2-VL, all later models of Qwen's and EXAONE 4.5 want their images, resampled bicubically."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pagewick.errors import ModelLoadError
from pagewick.images.entries import CLIP_MEAN, CLIP_STD, FIX, Entries, SettingsFiles
from pagewick.images.settings import ImageSettings

# Names of the processor of Qwen2-VL and of all later models; the suffix only says how it is implemented. Files of
# EXAONE 4.5 have a name of their own for it, or the first one.
PROCESSORS = tuple(
    f"{family}ImageProcessor{suffix}"
    for family in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL", "Exaone4_5_")
    for suffix in ("", "Fast", "Pil")
)
# Values of entries that a file leaves out: those of Qwen2-VL's processor in transformers.
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280


@dataclass(frozen=True, slots=True)
class QwenSettings(ImageSettings):
    """The limits for pixels alone decide about the size, beside the image's own."""

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured."""
        entries = files.image
        entries.demand_usual_steps()
        min_pixels, max_pixels = read_limits(entries, _MIN_PIXELS, _MAX_PIXELS)
        return cls(
            patch_size=entries.count("patch_size", 14),
            merge_size=entries.count("merge_size", 2),
            temporal_patch_size=entries.count("temporal_patch_size", 2),
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            mean=entries.channels("image_mean", CLIP_MEAN),
            std=entries.channels("image_std", CLIP_STD, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
        )

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Round the sides, within the limits ("smart resize" of Qwen2-VL's processor)."""
        side = self.token_side
        # round() rounds halves to even numbers, as the published processors do.
        rounded = round(height / side) * side, round(width / side) * side
        return self._within_limits(rounded, height, width)


def read_limits(entries: Entries, fewest: int, most: int) -> tuple[int, int]:
    """Return min_pixels and max_pixels. fewest, most: these numbers in files that leave them out.

    Older files have these entries, newer ones size.shortest_edge and size.longest_edge, and some have both; the
    older names then count, as in transformers.
    """
    size = entries.values.get("size")
    given = size if isinstance(size, dict) else {}
    found = []
    for name, newer, default in (
        ("min_pixels", "shortest_edge", fewest),
        ("max_pixels", "longest_edge", most),
    ):
        places = ((entries.values, name, name), (given, newer, f"size.{newer}"), (given, name, f"size.{name}"))
        present = [(values[key], shown) for values, key, shown in places if values.get(key) is not None]
        found.append(entries.counted(*present[0], default) if present else default)
    if found[0] > found[1]:
        raise ModelLoadError(f"{entries.source} demands at least {found[0]} and at most {found[1]} pixels; {FIX}")
    return found[0], found[1]
