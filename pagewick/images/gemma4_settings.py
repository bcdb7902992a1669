"""Gemma4Settings: how Gemma 4 wants its images."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

from pagewick.errors import ModelLoadError
from pagewick.images.entries import BICUBIC, Entries, SettingsFiles
from pagewick.images.settings import ImageSettings, Placeholder

PROCESSORS = tuple(f"Gemma4ImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
# The most tokens of an image: the numbers that the processor of transformers takes.
_NUMBERS_OF_TOKENS = (70, 140, 280, 560, 1120)
# Values of entries that a file leaves out: those of the processor and of the config in transformers.
_NUM_TOKENS, _PATCH_SIZE, _POOLING_SIZE, _NUM_POSITIONS = 280, 16, 3, 10240
_NO_MEAN, _NO_STD = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
# All filters of Pillow's.
_FILTERS = tuple(range(6))
# Templates write the token of images once. The processor of transformers puts one token on either side of its copies.
_PLACEHOLDER = Placeholder("<|image|>", "<|image>", "<image|>")


@dataclass(frozen=True, slots=True)
class Gemma4Settings(ImageSettings):
    """Every image is scaled to about max_pixels, whatever its own size, and keeps its shape."""

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured, and for files that contradict each other."""
        entries = files.image
        entries.demand_one_of("resample", _FILTERS)
        for name in ("do_resize", "do_rescale", "do_convert_rgb"):
            entries.demand_one_of(name, (True,))
        entries.demand_one_of("do_normalize", (True, False))
        is_normalised = bool(entries.values.get("do_normalize"))
        entries.demand_one_of("max_soft_tokens", _NUMBERS_OF_TOKENS)
        num_tokens = entries.count("max_soft_tokens", _NUM_TOKENS)
        patch_size = entries.count("patch_size", _PATCH_SIZE)
        pooling_size = entries.count("pooling_kernel_size", _POOLING_SIZE)
        _check_positions(files, num_tokens * pooling_size)
        side = patch_size * pooling_size
        return cls(
            patch_size=patch_size,
            merge_size=pooling_size,
            temporal_patch_size=1,
            min_pixels=side**2,
            max_pixels=num_tokens * side**2,
            mean=entries.channels("image_mean", _NO_MEAN) if is_normalised else _NO_MEAN,
            std=entries.channels("image_std", _NO_STD, is_divisor=True) if is_normalised else _NO_STD,
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
            resample=entries.whole("resample", BICUBIC),
            placeholder=_PLACEHOLDER,
        )

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Scale both sides by one factor, to the most patches that are allowed, and round them down.

        A side that would become 0 gets one token, and the other as many as its length holds of this side
        (get_aspect_ratio_preserving_size of the processor in transformers).
        """
        side, num_tokens = self.token_side, self.max_tokens
        factor = math.sqrt(num_tokens * side**2 / (height * width))
        rows, columns = (math.floor(factor * length / side) for length in (height, width))
        if not rows:
            rows, columns = 1, min(max(width // height, 1), num_tokens)
        elif not columns:
            rows, columns = min(max(height // width, 1), num_tokens), 1
        return rows * side, columns * side


def _check_positions(files: SettingsFiles, most: int) -> None:
    """most: patches along the longest side of an image. Raises ModelLoadError if the model has fewer positions."""
    vision: Entries = files.config.child("vision_config")
    num_positions = vision.count("position_embedding_size", _NUM_POSITIONS)
    if most > num_positions:
        raise ModelLoadError(
            f"max_soft_tokens in {files.image.source} allows {most} patches in a row, and the model has "
            f"{num_positions} positions (position_embedding_size in {vision.source})\n"
            "  give a smaller max_soft_tokens, or download or copy both files again"
        )
