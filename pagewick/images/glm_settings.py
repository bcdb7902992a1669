"""GlmSettings: how GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR want their images. The resampling is bicubic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pagewick.errors import ModelLoadError
from pagewick.images.entries import CLIP_MEAN, CLIP_STD, FIX, Entries, SettingsFiles
from pagewick.images.settings import ImageSettings

PROCESSORS = tuple(
    f"{family}ImageProcessor{suffix}" for family in ("Glm4v", "Glm46V") for suffix in ("", "Fast", "Pil")
)
# Values of entries that a file leaves out: those of the processors in transformers.
_SHORTEST, _LONGEST = 112 * 112, 28 * 28 * 15000


@dataclass(frozen=True, slots=True)
class GlmSettings(ImageSettings):
    """The limits for pixels decide about the size; an image that is smaller than a token is scaled up first."""

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured.

        Both limits in the file count the pixels of all pictures of a patch.
        """
        entries = files.image
        entries.demand_usual_steps()
        num_pictures = entries.count("temporal_patch_size", 2)
        least, most = _limits(entries, num_pictures)
        return cls(
            patch_size=entries.count("patch_size", 14),
            merge_size=entries.count("merge_size", 2),
            temporal_patch_size=num_pictures,
            min_pixels=least,
            max_pixels=most,
            mean=entries.channels("image_mean", CLIP_MEAN),
            std=entries.channels("image_std", CLIP_STD, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
        )

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Round the sides, within the limits ("smart resize" of the processors)."""
        side = self.token_side
        if height < side or width < side:
            scale = max(side / height, side / width)
            height, width = int(height * scale), int(width * scale)
        # round() rounds halves to even numbers, as the published processors do.
        rounded = round(height / side) * side, round(width / side) * side
        return self._within_limits(rounded, height, width)


def _limits(entries: Entries, num_pictures: int) -> tuple[int, int]:
    """Return the fewest and the most pixels of one picture."""
    size = entries.values.get("size")
    given = size if isinstance(size, dict) else {}
    found = []
    for name, default in (("shortest_edge", _SHORTEST), ("longest_edge", _LONGEST)):
        number = entries.counted(given.get(name), f"size.{name}", default)
        if number % num_pictures:
            raise ModelLoadError(
                f"size.{name} in {entries.source} is {number}, and must be a multiple of temporal_patch_size "
                f"({num_pictures}); {FIX}"
            )
        found.append(number // num_pictures)
    if found[0] > found[1]:
        raise ModelLoadError(f"{entries.source} demands at least {found[0]} and at most {found[1]} pixels; {FIX}")
    return found[0], found[1]
