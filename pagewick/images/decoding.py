"""Turns image files, which come from strangers, into pictures of the size that a model reads.

Nothing else here needs numpy and Pillow, so that a server that gets no images does not import them.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import ExifTags, Image
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.images.headers import Format, Header, check_num_pixels, measured
from pagewick.images.settings import ImageSettings, View

# Rows of an image that are laid on white at once.
_STRIP_ROWS = 256
# Not Image.open: it tries every format that some library has registered, and takes photos of cameras that hold a
# preview, too, for several pictures.
_READERS: dict[Format, Callable[[io.BytesIO], ImageFile]] = {
    Format.PNG: PngImageFile,
    Format.JPEG: JpegImageFile,
    Format.WEBP: WebPImageFile,
    Format.GIF: GifImageFile,
    Format.BMP: BmpImageFile,
}
# The number of an orientation (Exif 3.0, section 4.6.5.1.6) -> the operation that turns such an image upright.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_EXCHANGING = (5, 6, 7, 8)
# One of these stands before the notes of a camera in PNG (two kinds), JPEG and WebP files, and before notes in XML.
_NOTES = (b"eXIf", b"Raw profile type", b"Exif", b"EXIF", b"xmp", b"XMP", b"http://ns.adobe.com/")


class Picture(NamedTuple):
    """An image, or a tile of one, as a model reads it.

    pixels: uint8 [height, width, 3], red, green and blue, resized, not normalized. num_tokens: its placeholders, with
    the tokens between its rows. edges, has_end: as in ImageInput (pagewick/engine/messages.py).
    """

    pixels: npt.NDArray[np.uint8]
    num_tokens: int
    edges: tuple[int, int] | None = None
    has_end: bool = False


def prepare(data: bytes, settings: ImageSettings) -> list[Picture]:
    """Decode a file, and return the pictures that a model gets of the image.

    The image is turned upright and becomes red, green and blue; what is transparent becomes white.
    Raises InvalidRequestError for a damaged, truncated, animated, too large or too narrow image.
    """
    header = measured(data)
    settings.resized(header.height, header.width)
    with _refusing_damage(f"its {header.format.value} file"):
        return pictures_of(_decoded(data, header), settings)


def pictures_of(image: Image.Image, settings: ImageSettings) -> list[Picture]:
    """Do the same for an image of Pillow's, which may be a file that Pillow has not read yet."""
    check_num_pixels(image.height, image.width)
    settings.resized(image.height, image.width)
    with _refusing_damage("it"):
        image = _upright(image)
        views = settings.views(image.height, image.width)
        seen = _seen(_rgb(image), views, Image.Resampling(settings.resample))
    return [
        Picture(pixels, settings.tokens_in(view), view.edges, view.has_end)
        for pixels, view in zip(seen, views, strict=True)
    ]


def _seen(image: Image.Image, views: Sequence[View], resample: Image.Resampling) -> list[npt.NDArray[np.uint8]]:
    """Return the pixels of each view. Views that begin with the same sizes share the resized images."""
    resized: dict[tuple[tuple[int, int], ...], Image.Image] = {(): _squared(image, views[0].around)}
    for view in views:
        for number, (height, width) in enumerate(view.sizes):
            if view.sizes[: number + 1] not in resized:
                before = resized[view.sizes[:number]]
                resized[view.sizes[: number + 1]] = before.resize((width, height), resample)
    cut = []
    for view in views:
        top, left, height, width = view.box
        # Cut before it becomes an array: a part of an array keeps all of it in memory.
        part = resized[view.sizes].crop((left, top, left + width, top + height))
        if view.above is not None:
            part = _with_above(part, image.resize(view.above[::-1], resample))
        cut.append(np.asarray(part))
    return cut


def _with_above(part: Image.Image, above: Image.Image) -> Image.Image:
    """Return an image with another one, which is not wider, above it at the left."""
    both = Image.new("RGB", (part.width, above.height + part.height))
    both.paste(above, (0, 0))
    both.paste(part, (0, above.height))
    return both


def _squared(image: Image.Image, colour: tuple[int, int, int] | None) -> Image.Image:
    """Return an image in the middle of a square of a colour; the image itself if that is None."""
    side = max(image.size)
    if colour is None or image.size == (side, side):
        return image
    square = Image.new("RGB", (side, side), colour)
    square.paste(image, ((side - image.width) // 2, (side - image.height) // 2))
    return square


def is_turned(content: bytes | Image.Image) -> bool:
    """Return whether the orientation of an image exchanges its height and width; False for one that cannot be read.

    Decodes PNG files that have notes of a camera, which may stand behind the pixels, and nothing else.
    """
    if isinstance(content, bytes) and not any(name in content for name in _NOTES):
        return False
    try:
        if isinstance(content, bytes):
            content = _READERS[measured(content).format](io.BytesIO(content))
        return content.getexif().get(ExifTags.Base.Orientation, 1) in _EXCHANGING
    # As in `_upright`, and a damaged file is refused when it is decoded.
    except Exception:
        return False


@contextmanager
def _refusing_damage(what: str) -> Iterator[None]:
    """Raise InvalidRequestError for all exceptions."""
    try:
        yield
    except InvalidRequestError:
        raise
    # Pillow raises almost anything for a damaged file: OSError, SyntaxError, ValueError, struct.error and others.
    except Exception as error:
        reason = " ".join((str(error) or type(error).__name__).split())[:120]
        raise InvalidRequestError(f"{what} cannot be read ({reason}); send the whole file, undamaged") from error


def _decoded(data: bytes, header: Header) -> Image.Image:
    """Return the whole image. Raises InvalidRequestError, and any exception of Pillow's."""
    image = _READERS[header.format](io.BytesIO(data))
    # A file may contradict itself, and Pillow finds another size than the one that was checked.
    if image.size != (header.width, header.height):
        raise InvalidRequestError(f"its {header.format.value} file names several sizes; save it anew")
    if getattr(image, "is_animated", False):
        raise UnsupportedError(f"its {header.format.value} file is animated; send one frame of it")
    image.load()
    if image.size != (header.width, header.height):
        raise InvalidRequestError(f"its {header.format.value} file names several sizes; save it anew")
    return image


def _upright(image: Image.Image) -> Image.Image:
    """Return an image turned as its EXIF orientation says; the same one if that says nothing."""
    try:
        turn = _UPRIGHT.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    # A camera's notes may be damaged in an image that is not.
    except Exception:
        turn = None
    return image if turn is None else image.transpose(turn)


def _rgb(image: Image.Image) -> Image.Image:
    """Return an image in red, green and blue, laid on white if it has transparent parts."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    whole = Image.new("RGB", image.size)
    # In strips, which need little memory beside the image itself.
    for top in range(0, image.height, _STRIP_ROWS):
        box = (0, top, image.width, min(top + _STRIP_ROWS, image.height))
        strip = image.crop(box).convert("RGBA")
        white = Image.new("RGBA", strip.size, (255, 255, 255, 255))
        whole.paste(Image.alpha_composite(white, strip).convert("RGB"), box)
    return whole
