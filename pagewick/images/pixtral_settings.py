"""PixtralSettings: how Mistral's models want their images. The resampling is bicubic."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from pagewick.errors import ModelLoadError
from pagewick.images.entries import CLIP_MEAN, CLIP_STD, FIX, Entries, SettingsFiles
from pagewick.images.settings import ImageSettings

PROCESSORS = tuple(f"PixtralImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
# The processor in transformers takes this one if a file has none.
_LONGEST_EDGE = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class PixtralSettings(ImageSettings):
    """longest_edge: the image is scaled down to sides of at most this, which are then rounded up."""

    longest_edge: int

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured.

        The other entries of processor_config.json come first, as in transformers.
        """
        entries, processor, config = files
        entries.demand_usual_steps()
        entries.demand_one_of("do_center_crop", (False,))
        patch_size = processor.count("patch_size", entries.square("patch_size", 16))
        merge_size = processor.count("spatial_merge_size", config.count("spatial_merge_size", 1))
        longest_edge, side = read_longest_edge(entries), patch_size * merge_size
        return cls(
            patch_size=patch_size,
            merge_size=merge_size,
            temporal_patch_size=1,
            min_pixels=1,
            max_pixels=(-(-longest_edge // side) * side) ** 2,
            mean=entries.channels("image_mean", CLIP_MEAN),
            std=entries.channels("image_std", CLIP_STD, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
            longest_edge=longest_edge,
            row_end=processor.token("image_break_token", "[IMG_BREAK]"),
            image_end=processor.token("image_end_token", "[IMG_END]"),
        )

    @property
    def step(self) -> int:
        """Pixels of which both sides are multiples."""
        return self.token_side

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Scale sides that are longer than longest_edge by one factor, and round both up (Pixtral's processor)."""
        step = self.step
        ratio = max(height / self.longest_edge, width / self.longest_edge)
        new_height, new_width = (
            (max(1, math.floor(length / ratio)) for length in (height, width)) if ratio > 1 else (height, width)
        )
        rounded = -(-new_height // step) * step, -(-new_width // step) * step
        return self._within_limits(rounded, height, width)


def read_longest_edge(entries: Entries) -> int:
    """Return size.longest_edge. Raises ModelLoadError for a size that gives other lengths."""
    size = entries.values.get("size")
    if size is None:
        return _LONGEST_EDGE
    if not isinstance(size, dict) or size.get("longest_edge") is None:
        raise ModelLoadError(f"size in {entries.source} has no longest_edge, which Pagewick needs; {FIX}")
    return entries.counted(size["longest_edge"], "size.longest_edge", _LONGEST_EDGE)
