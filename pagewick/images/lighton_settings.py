"""LightOnSettings: how LightOnOCR wants its images. The resampling is bicubic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.images.entries import CLIP_MEAN, CLIP_STD, SettingsFiles
from pagewick.images.pixtral_settings import PROCESSORS, PixtralSettings, read_longest_edge

# Names in config.json. The image processor's name is that of Mistral's models.
ARCHITECTURES = "LightOnOcrForConditionalGeneration", "LightOnOCRForConditionalGeneration"
# Values of entries that files leave out: those of the processor in transformers, and of its image processor.
_PATCH_SIZE, _MERGE_SIZE, _STEP = 14, 2, 16


@dataclass(frozen=True, slots=True, kw_only=True)
class LightOnSettings(PixtralSettings):
    """Rows of tokens follow each other.

    resize_step: see step. It may be less than a token's side. The encoder then sees pixels at the right and lower edges
    that have no token.
    """

    resize_step: int

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured."""
        entries, processor, config = files
        entries.demand_one_of("image_processor_type", PROCESSORS)
        entries.demand_usual_steps()
        entries.demand_one_of("do_center_crop", (False,))
        patch_size = processor.count("patch_size", config.child("vision_config").count("patch_size", _PATCH_SIZE))
        step = entries.square("patch_size", _STEP)
        if step % patch_size:
            raise ModelLoadError(
                f"patch_size in {entries.source} is {step}, and must be a multiple of that of the encoder, {patch_size}"
                "\n  these files do not belong together; download or copy both again"
            )
        longest_edge = read_longest_edge(entries)
        return cls(
            patch_size=patch_size,
            merge_size=processor.count("spatial_merge_size", config.count("spatial_merge_size", _MERGE_SIZE)),
            temporal_patch_size=1,
            min_pixels=1,
            max_pixels=(-(-longest_edge // step) * step) ** 2,
            mean=entries.channels("image_mean", CLIP_MEAN),
            std=entries.channels("image_std", CLIP_STD, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
            longest_edge=longest_edge,
            resize_step=step,
        )

    @property
    def step(self) -> int:
        return self.resize_step

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """As Mistral's models. Raises InvalidRequestError for an image without a whole square."""
        fitted, side = PixtralSettings._fitted(self, height, width), self.token_side
        if min(fitted) < side:
            raise InvalidRequestError(
                f"the model resizes its {width} x {height} pixels to {fitted[1]} x {fitted[0]}, and a token needs "
                f"{side} x {side}; send a larger image, or one that is less narrow"
            )
        return fitted
