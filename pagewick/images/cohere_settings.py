"""CohereSettings: how Command A Vision wants its images: in tiles, and as a whole behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pagewick.errors import ModelLoadError
from pagewick.images.entries import BICUBIC, CLIP_MEAN, CLIP_STD, FIX, SettingsFiles
from pagewick.images.grid_settings import FILTERS, GridSettings, read_numbers_of_tiles
from pagewick.images.tiles import covering_grid

PROCESSORS = tuple(f"Cohere2VisionImageProcessor{suffix}" for suffix in ("", "Fast"))
# Values of entries that files leave out: those of the processor and of the config in transformers. The processor's
# patch_size is the number of tokens in a row of a tile.
_SIZE, _ROW_LENGTH, _DOWNSAMPLE_FACTOR, _PATCH_SIZE = 512, 16, 2, 16
_START, _BREAK, _END = "<|START_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<|END_OF_IMG|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereSettings(GridSettings):
    """Each image has the smallest grid that shrinks neither of its sides, or the one that shrinks it the least."""

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured, and for files that contradict each other."""
        entries, _, config = files
        entries.demand_usual_steps(resample=FILTERS)
        side = entries.square("size", _SIZE)
        patch_size = config.child("vision_config").square("patch_size", _PATCH_SIZE)
        merge_size = config.count("downsample_factor", _DOWNSAMPLE_FACTOR)
        row_length = entries.count("patch_size", _ROW_LENGTH)
        if side != row_length * patch_size * merge_size:
            raise ModelLoadError(
                f"size in {entries.source} is {side}, and patch_size, the tokens in a row, {row_length}; by "
                f"{config.source} a token has {patch_size * merge_size} pixels a side\n"
                "  these files do not belong together; download or copy both again"
            )
        fewest, most = read_numbers_of_tiles(entries)
        if fewest > 1:
            raise ModelLoadError(
                f"min_patches in {entries.source} is {fewest}, which has no effect in transformers; Pagewick knows 1 "
                f"only; {FIX}"
            )
        return cls(
            patch_size=patch_size,
            merge_size=merge_size,
            temporal_patch_size=1,
            min_pixels=side**2,
            max_pixels=side**2,
            mean=entries.channels("image_mean", CLIP_MEAN),
            std=entries.channels("image_std", CLIP_STD, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
            image_start=_START,
            tile_break=_BREAK,
            image_end=_BREAK + _END,
            resample=entries.whole("resample", BICUBIC),
            min_tiles=1,
            max_tiles=most if entries.flag("crop_to_patches", True) else 1,
        )

    @property
    def marks(self) -> tuple[str, ...]:
        return _START, _BREAK, _END

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        return covering_grid(height, width, self._side, self.max_tiles)
