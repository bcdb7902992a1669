"""Gemma3Settings: how Gemma 3 wants its images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from pagewick.errors import ModelLoadError
from pagewick.images.entries import BILINEAR, FIX, Entries, SettingsFiles
from pagewick.images.settings import Placeholder, SquareSettings

PROCESSORS = tuple(f"Gemma3ImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
# Values of entries that a file leaves out: those of the processor in transformers.
_HALF = (0.5, 0.5, 0.5)
_SIZE, _PATCH_SIZE, _NUM_TOKENS = 224, 16, 256
# All filters of Pillow's.
_FILTERS = tuple(range(6))
# Templates write one token. The processor of transformers puts this around the tokens of the image.
_PLACEHOLDER = Placeholder("<start_of_image>", "\n\n<start_of_image>", "<end_of_image>\n\n")


@dataclass(frozen=True, slots=True)
class Gemma3Settings(SquareSettings):
    """Every image becomes a square of the same size, which is stretched where the image is none."""

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured, and for files that contradict each other."""
        entries, processor, config = files
        entries.demand_usual_steps(resample=_FILTERS)
        if entries.values.get("do_pan_and_scan"):
            raise ModelLoadError(
                f"do_pan_and_scan in {entries.source} is true, and Pagewick reads each image as a whole\n"
                "  set it to false, or read text with --language-model-only"
            )
        size, patch_size, num_tokens = _square(config)
        if (found := entries.square("size", _SIZE)) != size:
            raise ModelLoadError(
                f"size in {entries.source} is {found}, and vision_config.image_size in {config.source} is {size}\n"
                "  these files do not belong together; download or copy both again"
            )
        for of_file in (processor, entries):
            if (found := of_file.count("image_seq_length", num_tokens)) != num_tokens:
                raise ModelLoadError(
                    f"image_seq_length in {of_file.source} is {found}, and mm_tokens_per_image in {config.source} is "
                    f"{num_tokens}\n  these files do not belong together; download or copy both again"
                )
        return cls(
            patch_size=patch_size,
            merge_size=size // patch_size // math.isqrt(num_tokens),
            temporal_patch_size=1,
            min_pixels=size**2,
            max_pixels=size**2,
            mean=entries.channels("image_mean", _HALF),
            std=entries.channels("image_std", _HALF, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
            resample=entries.whole("resample", BILINEAR),
            placeholder=_PLACEHOLDER,
        )


def _square(config: Entries) -> tuple[int, int, int]:
    """Return the sides of the image and of a patch in pixels, and the number of an image's tokens."""
    vision = config.child("vision_config")
    size, patch_size = vision.square("image_size", _SIZE), vision.square("patch_size", _PATCH_SIZE)
    num_tokens = config.count("mm_tokens_per_image", _NUM_TOKENS)
    side = math.isqrt(num_tokens)
    if size % patch_size or side**2 != num_tokens or size // patch_size % side:
        raise ModelLoadError(
            f"{config.source}: mm_tokens_per_image is {num_tokens}, and must be the number of squares into which whole "
            f"patches of {patch_size} x {patch_size} pixels divide an image of {size} x {size}; {FIX}"
        )
    return size, patch_size, num_tokens
