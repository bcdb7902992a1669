"""LlavaSettings: how LLaVA 1.5 and its relatives want their images: as squares of one size, cut from the middle."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from pagewick.errors import InvalidRequestError, ModelLoadError
from pagewick.images.entries import BICUBIC, CLIP_MEAN, CLIP_STD, FIX, Entries, SettingsFiles
from pagewick.images.grid_settings import FILTERS
from pagewick.images.headers import MAX_FILE_PIXELS
from pagewick.images.settings import Box, SquareSettings, View

CROPPING = tuple(f"{family}ImageProcessor{suffix}" for family in ("CLIP", "Llava") for suffix in ("", "Fast", "Pil"))
STRETCHING = tuple(f"SiglipImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
PROCESSORS = (*CROPPING, *STRETCHING)
# Values of entries that files leave out: those of the processors in transformers, and of both encoders.
_SIZE, _HALF = 224, (0.5, 0.5, 0.5)
PATCH_SIZES = {"clip_vision_model": 32, "siglip_vision_model": 16}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaSettings(SquareSettings):
    """Every image becomes a square of the same size.

    shortest_edge: pixels of an image's shorter side before a square is cut from the middle; None: the image is
    stretched. cut: the side of that square. The encoder sees only whole patches of it, at the upper left.
    """

    shortest_edge: int | None
    cut: int

    @classmethod
    def of(cls, files: SettingsFiles) -> Self:
        """Raises ModelLoadError for settings that cannot be honoured, and for files that contradict each other."""
        entries, processor, config = files
        entries.demand_usual_steps(resample=FILTERS)
        entries.demand_one_of("do_pad", (False,))
        crops = entries.values.get("image_processor_type") in CROPPING
        shortest_edge, cut = read_square(entries, crops=crops)
        vision = config.child("vision_config")
        kind = vision.text("model_type", "clip_vision_model")
        patch_size = vision.square("patch_size", PATCH_SIZES.get(kind, 16))
        if (wanted := vision.square("image_size", _SIZE)) != cut:
            raise ModelLoadError(
                f"{entries.source} makes images of {cut} x {cut} pixels, and vision_config.image_size in "
                f"{config.source} is {wanted}\n  these files do not belong together; download or copy both again"
            )
        if cut < patch_size:
            raise ModelLoadError(f"{config.source}: vision_config.patch_size is {patch_size}, more than image_size")
        # CLIP's row that no patch makes is counted there, and left out again.
        processor.demand_one_of("num_additional_image_tokens", (1 if kind == "clip_vision_model" else 0,))
        processor.demand_one_of("patch_size", (patch_size,))
        seen = cut // patch_size * patch_size
        mean, std = (CLIP_MEAN, CLIP_STD) if crops else (_HALF, _HALF)
        return cls(
            patch_size=patch_size,
            merge_size=1,
            temporal_patch_size=1,
            min_pixels=seen**2,
            max_pixels=seen**2,
            mean=entries.channels("image_mean", mean),
            std=entries.channels("image_std", std, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
            resample=entries.whole("resample", BICUBIC),
            shortest_edge=shortest_edge,
            cut=cut,
        )

    def views(self, height: int, width: int) -> tuple[View, ...]:
        seen, _ = self.resized(height, width)
        if self.shortest_edge is None:
            return (View(((self.cut, self.cut),), Box(0, 0, seen, seen)),)
        scaled = self._scaled(height, width, self.shortest_edge)
        top, left = ((length - self.cut) // 2 for length in scaled)
        return (View((scaled,), Box(top, left, seen, seen)),)

    def _scaled(self, height: int, width: int, short: int) -> tuple[int, int]:
        if height <= width:
            return short, int(short * width / height)
        return int(short * height / width), short

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Raises InvalidRequestError for an image that has too many pixels once its shorter side is as wanted."""
        if self.shortest_edge is not None:
            new_height, new_width = self._scaled(height, width, self.shortest_edge)
            if new_height * new_width > MAX_FILE_PIXELS:
                raise InvalidRequestError(
                    f"the model scales its {width} x {height} pixels to {new_width} x {new_height}, and at most "
                    f"{MAX_FILE_PIXELS} pixels are read; cut it into pieces"
                )
        return SquareSettings._fitted(self, height, width)


def read_square(entries: Entries, *, crops: bool, default: int = _SIZE) -> tuple[int | None, int]:
    """Return the shorter side of resized images, None if they are stretched, and the side of the square."""
    size = entries.values.get("size")
    given = size if isinstance(size, dict) else {"shortest_edge": size} if crops else {}
    if not crops or "height" in given or "width" in given:
        side = entries.square("size", default)
        if entries.flag("do_center_crop", crops) and entries.square("crop_size", default) != side:
            raise ModelLoadError(f"crop_size in {entries.source} is not that of size ({side}); {FIX}")
        return None, side
    if unknown := given.keys() - {"shortest_edge"}:
        raise ModelLoadError(f"size.{min(unknown)} in {entries.source} is not known; Pagewick knows shortest_edge only")
    entries.demand_one_of("do_center_crop", (True,))
    shortest_edge, cut = entries.counted(given.get("shortest_edge"), "size", _SIZE), entries.square("crop_size", _SIZE)
    if shortest_edge < cut:
        raise ModelLoadError(
            f"size in {entries.source} is {shortest_edge}, and crop_size {cut}; Pagewick fills no image up; {FIX}"
        )
    return shortest_edge, cut
