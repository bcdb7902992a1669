"""ImageSettings: how a model wants its images, from its preprocessor_config.json or processor_config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import msgspec

from pagewick.errors import ConfigError, InvalidRequestError, ModelLoadError

# The most images of a request.
MAX_IMAGES = 64
# The longer side may be at most this many times the shorter one, as in Qwen's published processors.
MAX_ASPECT_RATIO = 200
_MAX_FILE_BYTES = 2**20
# Names of the processor of Qwen2-VL and of all later models; the suffix only says how it is implemented.
_PROCESSORS = tuple(
    f"{family}ImageProcessor{suffix}"
    for family in ("Qwen2VL", "Qwen2_5_VL", "Qwen3VL")
    for suffix in ("", "Fast", "Pil")
)
_PIXTRAL_PROCESSORS = tuple(f"PixtralImageProcessor{suffix}" for suffix in ("", "Fast", "Pil"))
# Pillow's number of the bicubic filter, which files hold.
_BICUBIC = 3
# Values of entries that a file leaves out: those of Qwen2-VL's processor in transformers.
_MEAN = (0.48145466, 0.4578275, 0.40821073)
_STD = (0.26862954, 0.26130258, 0.27577711)
_MIN_PIXELS, _MAX_PIXELS = 56 * 56, 28 * 28 * 1280
_FIX = "download the model again"


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """How an image becomes patches. The resampling is bicubic.

    patch_size: side of a patch in pixels. merge_size: the encoder makes one token of a square with this number of
    patches per side. temporal_patch_size: number of frames of a patch; an image is repeated so often. min_pixels,
    max_pixels: limits for the number of pixels of the resized image. mean, std: of red, green and blue, after the
    multiplication of 8-bit values with rescale_factor.
    longest_edge: the image is scaled down to sides of at most this, which are then rounded up (Pixtral); None: the
    limits for pixels alone decide (Qwen). row_end: the text of the token behind each row of an image's tokens but the
    last one, which image_end follows; both are empty if the rows follow each other.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float
    longest_edge: int | None = None
    row_end: str = ""
    image_end: str = ""

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read the settings in a model directory. Raises ModelLoadError if they are missing or cannot be honoured.

        As in transformers, image_processor in processor_config.json comes before preprocessor_config.json.
        """
        whole = _read(directory / "processor_config.json")
        entries: Any = None if whole is None else whole.get("image_processor")
        source = f"image_processor in {directory / 'processor_config.json'}"
        if entries is None:
            entries = _read(directory / "preprocessor_config.json")
            source = str(directory / "preprocessor_config.json")
        if entries is None:
            message = (
                f"{directory} has no preprocessor_config.json, which says how the model reads images; download it too"
            )
            raise ModelLoadError(message)
        if not isinstance(entries, dict):
            raise ModelLoadError(f"{source} is not an object; {_FIX}")
        found = _Entries(entries, source)
        found.demand_one_of("image_processor_type", (*_PROCESSORS, *_PIXTRAL_PROCESSORS))
        if entries.get("image_processor_type") in _PIXTRAL_PROCESSORS:
            processor = _Entries(whole or {}, str(directory / "processor_config.json"))
            config = _Entries(_read(directory / "config.json") or {}, str(directory / "config.json"))
            return cls._of_pixtral(found, processor, config)
        return cls._of(found)

    @staticmethod
    def are_in(directory: Path) -> bool:
        """Return whether a model directory has settings."""
        whole = _read(directory / "processor_config.json") or {}
        return "image_processor" in whole or (directory / "preprocessor_config.json").is_file()

    @classmethod
    def of_entries(cls, entries: Mapping[str, Any], source: str) -> Self:
        """Read the entries of a preprocessor_config.json; `source` names it in errors. Raises as `read` does."""
        found = _Entries(entries, source)
        found.demand_one_of("image_processor_type", _PROCESSORS)
        return cls._of(found)

    @classmethod
    def _of(cls, entries: _Entries) -> Self:
        entries.demand_usual_steps()
        min_pixels, max_pixels = entries.limits()
        return cls(
            patch_size=entries.count("patch_size", 14),
            merge_size=entries.count("merge_size", 2),
            temporal_patch_size=entries.count("temporal_patch_size", 2),
            min_pixels=min_pixels,
            max_pixels=max_pixels,
            mean=entries.channels("image_mean", _MEAN),
            std=entries.channels("image_std", _STD, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
        )

    @classmethod
    def _of_pixtral(cls, entries: _Entries, processor: _Entries, config: _Entries) -> Self:
        """processor: the other entries of processor_config.json, which come first, as in transformers."""
        entries.demand_usual_steps()
        entries.demand_one_of("do_center_crop", (False,))
        patch_size = processor.count("patch_size", entries.square("patch_size", 16))
        merge_size = processor.count("spatial_merge_size", config.count("spatial_merge_size", 1))
        longest_edge, side = entries.longest_edge(1024), patch_size * merge_size
        return cls(
            patch_size=patch_size,
            merge_size=merge_size,
            temporal_patch_size=1,
            min_pixels=1,
            max_pixels=(-(-longest_edge // side) * side) ** 2,
            mean=entries.channels("image_mean", _MEAN),
            std=entries.channels("image_std", _STD, is_divisor=True),
            rescale_factor=entries.factor("rescale_factor", 1 / 255),
            longest_edge=longest_edge,
            row_end=processor.token("image_break_token", "[IMG_BREAK]"),
            image_end=processor.token("image_end_token", "[IMG_END]"),
        )

    @property
    def token_side(self) -> int:
        """The side in pixels of the square that becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def row_break(self) -> int:
        """The number of tokens behind each row of an image's tokens."""
        return 1 if self.row_end else 0

    def limited(self, max_pixels: int) -> Self:
        """Return settings with a max_pixels that is not higher than this. Raises ConfigError if no token would fit."""
        if max_pixels < self.token_side**2:
            least = self.token_side**2
            raise ConfigError(f"--max-image-pixels must be at least {least}, the pixels of a token; got {max_pixels}")
        limit = min(self.max_pixels, max_pixels)
        return replace(self, max_pixels=limit, min_pixels=min(self.min_pixels, limit))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the resized image, multiples of token_side.

        With a longest_edge, sides that are longer are scaled by one factor, and both are rounded up (Pixtral's
        processor). Without one, the sides are rounded; if there are too few pixels, they are scaled by one factor and
        then rounded up ("smart resize" of Qwen2-VL's processor). If there are too many pixels, they are scaled by one
        factor and then rounded down. Raises InvalidRequestError for an image that is too narrow.
        """
        long, short = max(height, width), min(height, width)
        if long > MAX_ASPECT_RATIO * short:
            message = (
                f"its longer side may be at most {MAX_ASPECT_RATIO} times its shorter side; it has {width} x {height} "
                "pixels. Cut it into pieces"
            )
            raise InvalidRequestError(message)
        side = self.token_side
        if self.longest_edge is not None:
            new_height, new_width = self._within_edge(height, width, self.longest_edge)
        else:
            # round() rounds halves to even numbers, as the published processors do.
            new_height, new_width = (round(length / side) * side for length in (height, width))
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new_height, new_width = (max(side, math.floor(length / shrink / side) * side) for length in (height, width))
        elif new_height * new_width < self.min_pixels:
            growth = math.sqrt(self.min_pixels / (height * width))
            new_height, new_width = (math.ceil(length * growth / side) * side for length in (height, width))
        return new_height, new_width

    def _within_edge(self, height: int, width: int, edge: int) -> tuple[int, int]:
        side, ratio = self.token_side, max(height / edge, width / edge)
        if ratio > 1:
            height, width = (max(1, math.floor(length / ratio)) for length in (height, width))
        return -(-height // side) * side, -(-width // side) * side

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image whose file has this size, with those between its rows.

        Raises InvalidRequestError as `resized`.
        """
        return self.tokens_of(*self.resized(height, width))

    def tokens_of(self, height: int, width: int) -> int:
        """Return the number of tokens of a resized image, with those between its rows."""
        return height // self.token_side * (width // self.token_side + self.row_break)

    @property
    def max_tokens(self) -> int:
        """The number of tokens of the largest image, with those between its rows."""
        num_rows = math.isqrt(self.max_pixels) // self.token_side
        return self.max_pixels // self.token_side**2 + num_rows * self.row_break


@dataclass(frozen=True, slots=True)
class _Entries:
    """The entries of a file, with errors that name it. An entry that is null counts as missing."""

    values: Mapping[str, Any]
    source: str

    def demand_one_of(self, name: str, allowed: tuple[Any, ...]) -> None:
        """Refuse a value that would change the result."""
        if (value := self.values.get(name)) is not None and value not in allowed:
            known = ", ".join(map(repr, allowed))
            raise ModelLoadError(f"{name} in {self.source} is {str(value)[:80]!r}; Pagewick knows {known} only")

    def demand_usual_steps(self) -> None:
        self.demand_one_of("resample", (_BICUBIC,))
        for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
            self.demand_one_of(name, (True,))

    def square(self, name: str, default: int) -> int:
        """Return a number that may be written as height and width."""
        value = self.values.get(name)
        if not isinstance(value, dict):
            return self._counted(value, name, default)
        height, width = (self._counted(value.get(side), f"{name}.{side}", default) for side in ("height", "width"))
        if height != width:
            raise ModelLoadError(f"{name} in {self.source} is {height} x {width}; Pagewick knows squares only")
        return height

    def longest_edge(self, default: int) -> int:
        """Return size.longest_edge. Raises ModelLoadError for a size that gives other lengths."""
        size = self.values.get("size")
        if size is None:
            return default
        if not isinstance(size, dict) or size.get("longest_edge") is None:
            raise ModelLoadError(f"size in {self.source} has no longest_edge, which Pagewick needs; {_FIX}")
        return self._counted(size["longest_edge"], "size.longest_edge", default)

    def token(self, name: str, default: str) -> str:
        """Return the text of a token, which may be written as an object with its content."""
        value = self.values.get(name)
        text = value.get("content") if isinstance(value, dict) else default if value is None else value
        if not isinstance(text, str) or not text:
            raise ModelLoadError(f"{name} in {self.source} must be the text of a token; {_FIX}")
        return text

    def count(self, name: str, default: int) -> int:
        return self._counted(self.values.get(name), name, default)

    def limits(self) -> tuple[int, int]:
        """Return min_pixels and max_pixels.

        Older files have these entries, newer ones size.shortest_edge and size.longest_edge, and some have both; the
        older names then count, as in transformers.
        """
        size = self.values.get("size")
        given = size if isinstance(size, dict) else {}
        found = []
        for name, newer, default in (
            ("min_pixels", "shortest_edge", _MIN_PIXELS),
            ("max_pixels", "longest_edge", _MAX_PIXELS),
        ):
            places = ((self.values, name, name), (given, newer, f"size.{newer}"), (given, name, f"size.{name}"))
            present = [(values[key], shown) for values, key, shown in places if values.get(key) is not None]
            found.append(self._counted(*present[0], default) if present else default)
        if found[0] > found[1]:
            raise ModelLoadError(f"{self.source} demands at least {found[0]} and at most {found[1]} pixels; {_FIX}")
        return found[0], found[1]

    def factor(self, name: str, default: float) -> float:
        value = self.values.get(name)
        return default if value is None else self._number(value, name)

    def channels(
        self, name: str, default: tuple[float, float, float], *, is_divisor: bool = False
    ) -> tuple[float, float, float]:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, list) or len(value) != 3:
            raise ModelLoadError(f"{name} in {self.source} must be three numbers; {_FIX}")
        red, green, blue = (self._number(one, name) for one in value)
        if is_divisor and not (red and green and blue):
            raise ModelLoadError(f"{name} in {self.source} must not be 0; {_FIX}")
        return red, green, blue

    def _counted(self, value: Any, name: str, default: int) -> int:
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
            raise ModelLoadError(
                f"{name} in {self.source} must be a whole number from 1; got {str(value)[:80]!r}; {_FIX}"
            )
        return value

    def _number(self, value: Any, name: str) -> float:
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            raise ModelLoadError(f"{name} in {self.source} must be a number; got {str(value)[:80]!r}; {_FIX}")
        return float(value)


def _read(path: Path) -> dict[str, Any] | None:
    """Return the object in a JSON file; None if there is no such file. Raises ModelLoadError."""
    if not path.is_file():
        return None
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_FILE_BYTES + 1)
        if len(raw) > _MAX_FILE_BYTES:
            raise ModelLoadError(f"{path} is larger than {_MAX_FILE_BYTES} bytes; {_FIX}")
        value = msgspec.json.decode(raw)
    except (OSError, msgspec.DecodeError, RecursionError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}; {_FIX}") from None
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is not an object; {_FIX}")
    return value
