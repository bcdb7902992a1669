"""BlipSettings: how BLIP wants its images: stretched to squares of one size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pagewick.errors import ModelLoadError
from pagewick.images.entries import BICUBIC, CLIP_MEAN, CLIP_STD, FIX, SettingsFiles
from pagewick.images.grid_settings import FILTERS
from pagewick.images.settings import SquareSettings

PROCESSORS = tuple(f"BlipImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
# Values of entries that files leave out: those of the processor, and of the encoder's class in transformers.
_SIZE, _PATCH_SIZE = 384, 16
# The number of an image's tokens is a multiple of this (pagewick/models/vision/caption_tokens.py).
_UNIT = 32


@dataclass(frozen=True, slots=True)
class BlipSettings(SquareSettings):
    """Every image has a token for each patch and one more, and others that fill up a block."""

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured, and for files that contradict each other."""
        entries, _, config = files
        entries.demand_usual_steps(resample=FILTERS)
        entries.demand_one_of("do_pad", (False,))
        entries.demand_one_of("do_center_crop", (False,))
        vision = config.child("vision_config")
        size, patch_size = vision.square("image_size", _SIZE), vision.square("patch_size", _PATCH_SIZE)
        if (found := entries.square("size", _SIZE)) != size:
            raise ModelLoadError(
                f"{entries.source} makes images of {found} x {found} pixels, and vision_config.image_size in "
                f"{config.source} is {size}\n  these files do not belong together; download or copy both again"
            )
        if size % patch_size:
            raise ModelLoadError(
                f"{config.source}: vision_config.image_size is {size}, and must be a multiple of patch_size "
                f"({patch_size}); {FIX}"
            )
        return cls(
            patch_size=patch_size,
            merge_size=1,
            temporal_patch_size=1,
            min_pixels=size**2,
            max_pixels=size**2,
            mean=entries.channels("image_mean", CLIP_MEAN),
            std=entries.channels("image_std", CLIP_STD, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
            resample=entries.whole("resample", BICUBIC),
        )

    @property
    def only_place(self) -> int:
        """A caption is one of one image, which stands first."""
        return 0

    def tokens_of(self, height: int, width: int) -> int:
        num_rows = SquareSettings.tokens_of(self, height, width) + 1
        return -(-num_rows // _UNIT) * _UNIT

    @property
    def max_tokens(self) -> int:
        return self.tokens_of(*self._fitted(1, 1))
