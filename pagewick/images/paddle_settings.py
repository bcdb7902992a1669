"""PaddleSettings: how PaddleOCR-VL wants its images. The resampling is bicubic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pagewick.images.entries import CLIP_MEAN, CLIP_STD, SettingsFiles
from pagewick.images.qwen_settings import QwenSettings, read_limits

PROCESSORS = tuple(f"PaddleOCRVLImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
# Names in config.json. The first files give a name to their image processor that other models have, too.
ARCHITECTURES = ("PaddleOCRVLForConditionalGeneration",)
_FIRST_NAMES = "SiglipImageProcessor", "SiglipImageProcessorFast"
# Values of entries that a file leaves out: those of the processor in transformers.
_MIN_PIXELS, _MAX_PIXELS = 384 * 384, 1536 * 1536


@dataclass(frozen=True, slots=True)
class PaddleSettings(QwenSettings):
    """As Qwen's models, once an image that is smaller than a token is scaled up."""

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured."""
        entries = files.image
        entries.demand_one_of("image_processor_type", (*PROCESSORS, *_FIRST_NAMES))
        entries.demand_usual_steps()
        entries.demand_one_of("temporal_patch_size", (1,))
        min_pixels, max_pixels = read_limits(entries, _MIN_PIXELS, _MAX_PIXELS)
        return cls(
            patch_size=entries.count("patch_size", 14),
            merge_size=entries.count("merge_size", 2),
            temporal_patch_size=1,
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            mean=entries.channels("image_mean", CLIP_MEAN),
            std=entries.channels("image_std", CLIP_STD, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
        )

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Scale up one side after the other until each has a token ("smart resize" of the processor), then round."""
        side = self.token_side
        if height < side:
            height, width = side, round(width * side / height)
        if width < side:
            height, width = round(height * side / width), side
        return QwenSettings._fitted(self, height, width)
