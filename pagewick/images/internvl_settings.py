"""InternVLSettings: how InternVL wants its images: in tiles, and as a whole behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pagewick.errors import ModelLoadError
from pagewick.images.entries import BICUBIC, CLIP_MEAN, CLIP_STD, FIX, SettingsFiles
from pagewick.images.grid_settings import FILTERS, GridSettings, read_numbers_of_tiles
from pagewick.images.tiles import nearest_grid

PROCESSORS = tuple(f"GotOcr2ImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
# Values of entries that files leave out: those of the processors and of the config in transformers.
_SIZE, _NUM_TOKENS, _DOWNSAMPLE_RATIO = 384, 256, 0.5
_IMAGE_SIZE, _PATCH_SIZE = 448, 14
# The texts around an image are those of the processor in transformers; each is one token.
_START, _END = "<img>", "</img>"


@dataclass(frozen=True, slots=True, kw_only=True)
class InternVLSettings(GridSettings):
    """Each image has the grid whose shape is the nearest to its own."""

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured, and for files that contradict each other.

        crop_to_patches counts for nothing: InternVL's processor in transformers overrules its false.
        """
        entries, processor, config = files
        entries.demand_usual_steps(resample=FILTERS)
        patch_size, merge_size, side = _square(files)
        if (found := entries.square("size", _SIZE)) != side:
            raise ModelLoadError(
                f"size in {entries.source} is {found}, and vision_config.image_size in {config.source} is {side}\n"
                "  these files do not belong together; download or copy both again"
            )
        num_tokens = (side // (patch_size * merge_size)) ** 2
        for of_file in (processor, config):
            if (found := of_file.count("image_seq_length", _NUM_TOKENS)) != num_tokens:
                raise ModelLoadError(
                    f"image_seq_length in {of_file.source} is {found}, and by {config.source} a tile has {num_tokens} "
                    "tokens\n  these files do not belong together; download or copy both again"
                )
        min_tiles, max_tiles = read_numbers_of_tiles(entries)
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
            image_end=_END,
            resample=entries.whole("resample", BICUBIC),
            min_tiles=min_tiles,
            max_tiles=max_tiles,
        )

    @property
    def marks(self) -> tuple[str, ...]:
        return _START, _END

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        return nearest_grid(height, width, self._side, self.min_tiles, self.max_tiles)


def _square(files: SettingsFiles) -> tuple[int, int, int]:
    """Return the side of a patch in pixels, the patches of a token's side, and the side of a tile in pixels."""
    config = files.config
    vision = config.child("vision_config")
    side, patch_size = vision.square("image_size", _IMAGE_SIZE), vision.square("patch_size", _PATCH_SIZE)
    ratio = config.factor("downsample_ratio", _DOWNSAMPLE_RATIO)
    merge_size = round(1 / ratio) if ratio > 0 else 0
    if not merge_size or 1 / ratio != merge_size or side % (patch_size * merge_size):
        raise ModelLoadError(
            f"{config.source}: downsample_ratio is {ratio}, and must make whole squares of patches of {patch_size} x "
            f"{patch_size} pixels in an image of {side} x {side}; {FIX}"
        )
    return patch_size, merge_size, side
