"""ImageSettings: how a model wants its images. A family of models is a class, in a module of its own."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

from pagewick.errors import ConfigError, InvalidRequestError

# The most images of a request.
MAX_IMAGES = 64
# The most pictures of a request: its images, and the tiles of those that are cut.
MAX_PICTURES = 4096
# The longer side may be at most this many times the shorter one, as in Qwen's published processors.
MAX_ASPECT_RATIO = 200


class Placeholder(NamedTuple):
    """A token that chat templates write for an image, and the text that the model reads in its place.

    written: by templates, a token. before, after: the texts around the tokens of the image, which replace it together
    with these; each is empty, or consists of one token, perhaps with white space around it.
    """

    written: str
    before: str
    after: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that a tokenizer must know beside that of images."""
        return tuple(filter(None, (self.written, self.before.strip(), self.after.strip())))

    def around(self, token: str) -> str:
        """Return the text that replaces what templates write. token: that of the image's tokens."""
        return f"{self.before}{token}{self.after}"


class Box(NamedTuple):
    """A part of an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class View(NamedTuple):
    """A picture that a model gets of an image: all of it, or a tile.

    sizes: the heights and widths to which the image is resized, one after the other. box: the part that is cut out of
    the last of these. before, after: the texts ahead of the tokens of the picture, and behind them. edges,
    has_end: as in ImageInput (pagewick/engine/messages.py). around: the colour with which the image is filled up to a
    square at first, at both sides; None: it is not. above: the height and width of a smaller picture of the whole
    image, at the left of the part and above it, with black beside it; None: there is none.
    """

    sizes: tuple[tuple[int, int], ...]
    box: Box
    before: str = ""
    after: str = ""
    edges: tuple[int, int] | None = None
    has_end: bool = False
    around: tuple[int, int, int] | None = None
    above: tuple[int, int] | None = None

    @property
    def num_pixels(self) -> int:
        """The number of pixels of the picture."""
        above = 0 if self.above is None else self.above[0]
        return (above + self.box.height) * self.box.width

    @classmethod
    def whole(cls, *sizes: tuple[int, int], before: str = "", after: str = "") -> Self:
        """Return a view of all of the image."""
        return cls(sizes, Box(0, 0, *sizes[-1]), before, after)


@dataclass(frozen=True, slots=True)
class ImageSettings(ABC):
    """How an image becomes patches.

    patch_size: side of a patch in pixels. merge_size: the encoder makes one token of a square with this number of
    patches per side. temporal_patch_size: number of frames of a patch; an image is repeated so often. min_pixels,
    max_pixels: limits for the number of pixels of the resized image, if it is not cut into tiles. mean, std: of red,
    green and blue, after the multiplication of 8-bit values with rescale_factor.
    row_end: the text of the token behind each row of an image's tokens but the last one; empty if the rows follow each
    other. image_end: the text behind all tokens of an image; one token, if there is a row_end. resample: Pillow's
    number of the filter that resizes. placeholder: None if templates write the token of images itself.
    """

    patch_size: int
    merge_size: int
    temporal_patch_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float
    row_end: str = ""
    image_end: str = ""
    resample: int = 3
    placeholder: Placeholder | None = None

    @property
    def token_side(self) -> int:
        """The side in pixels of the square that becomes one token."""
        return self.patch_size * self.merge_size

    @property
    def row_break(self) -> int:
        """The number of tokens behind each row of an image's tokens."""
        return 1 if self.row_end else 0

    @property
    def depends_on_turning(self) -> bool:
        """Whether an image may have other tokens than the same one that is turned by 90 degrees."""
        return bool(self.row_end)

    @property
    def marks(self) -> tuple[str, ...]:
        """The tokens of the texts around pictures that a tokenizer must know."""
        return ()

    @property
    def only_place(self) -> int | None:
        """The position of the only image of a prompt; None: any number of images may have any places."""
        return None

    def for_images(self, number: int) -> Self:
        """Return the settings for a request with this number of images."""
        return self

    def before_image(self, number: int) -> str:
        """Return the text ahead of the image with this number in its request, from 1."""
        return ""

    @property
    def largest_picture(self) -> int:
        """The number of pixels of the largest picture."""
        return self.max_pixels

    @property
    def tile_tokens(self) -> int:
        """The number of tokens of a tile; 0 if no image is cut into tiles."""
        return 0

    @property
    def has_fixed_tokens(self) -> bool:
        """Whether all images have the same number of tokens."""
        return False

    def limited(self, max_pixels: int) -> Self:
        """Return settings with a max_pixels that is not higher than this. Raises ConfigError if no token would fit."""
        if max_pixels < self.token_side**2:
            least = self.token_side**2
            raise ConfigError(f"--max-image-pixels must be at least {least}, the pixels of a token; got {max_pixels}")
        limit = min(self.max_pixels, max_pixels)
        return replace(self, max_pixels=limit, min_pixels=min(self.min_pixels, limit))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the height and width of the resized image, multiples of token_side (LightOnOCR: of resize_step).

        Raises InvalidRequestError for an image that is too narrow.
        """
        long, short = max(height, width), min(height, width)
        if long > MAX_ASPECT_RATIO * short:
            message = (
                f"its longer side may be at most {MAX_ASPECT_RATIO} times its shorter side; it has {width} x {height} "
                "pixels. Cut it into pieces"
            )
            raise InvalidRequestError(message)
        return self._fitted(height, width)

    def views(self, height: int, width: int) -> tuple[View, ...]:
        """Return the pictures that the model gets of an image, in their order. Raises InvalidRequestError as `resized`.

        The sides of each are multiples, too.
        """
        return (View.whole(self.resized(height, width)),)

    @abstractmethod
    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        """Return what `resized` does, for an image that is not too narrow."""

    def _within_limits(self, size: tuple[int, int], height: int, width: int) -> tuple[int, int]:
        """Return a size for an image of height x width pixels, or another one within the limits for pixels.

        If there are too few pixels, the sides of the image are scaled by one factor and then rounded up; if there are
        too many, they are scaled by one factor and then rounded down.
        """
        side, (new_height, new_width) = self.token_side, size
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new_height, new_width = (max(side, math.floor(length / shrink / side) * side) for length in (height, width))
        elif new_height * new_width < self.min_pixels:
            growth = math.sqrt(self.min_pixels / (height * width))
            new_height, new_width = (math.ceil(length * growth / side) * side for length in (height, width))
        return new_height, new_width

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image whose file has this size, with those between rows of a picture.

        Raises InvalidRequestError as `resized`.
        """
        return sum(map(self.tokens_in, self.views(height, width)))

    def tokens_in(self, view: View) -> int:
        """Return the number of tokens of a picture, with those between and behind its rows."""
        return self.tokens_of(view.box.height, view.box.width)

    def tokens_of(self, height: int, width: int) -> int:
        """Return the number of tokens of a picture, with those between its rows."""
        return height // self.token_side * (width // self.token_side + self.row_break)

    def most_tokens(self, count: Callable[[str], int]) -> int:
        """Return the number of tokens of the largest image, with those around and between its pictures.

        count: returns the number of tokens of a text that stands around pictures.
        """
        return self.max_tokens

    @property
    def max_tokens(self) -> int:
        """The number of tokens of the largest picture of a whole image, with those between its rows."""
        num_rows = math.isqrt(self.max_pixels) // self.token_side
        return self.max_pixels // self.token_side**2 + num_rows * self.row_break


@dataclass(frozen=True, slots=True)
class SquareSettings(ImageSettings):
    """Every image becomes a square of the same size, which has max_pixels."""

    @property
    def has_fixed_tokens(self) -> bool:
        return True

    def limited(self, max_pixels: int) -> Self:
        """Return the same settings. Raises ConfigError for a limit below the pixels that every image has."""
        if max_pixels < self.max_pixels:
            side = math.isqrt(self.max_pixels)
            raise ConfigError(
                f"--max-image-pixels must be at least {self.max_pixels}, because the model reads every image as "
                f"{side} x {side} pixels; got {max_pixels}"
            )
        return self

    def _fitted(self, height: int, width: int) -> tuple[int, int]:
        side = math.isqrt(self.max_pixels)
        return side, side
