"""The forms in which a caller may give an image: a data: address, a file, or an image of another library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard

from pagewick.errors import InvalidRequestError
from pagewick.images.addresses import MAX_IMAGE_BYTES, bytes_of, check_num_bytes
from pagewick.images.headers import check_num_pixels, measured
from pagewick.images.settings import ImageSettings

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL import Image

    from pagewick.images.decoding import Picture

# A str is a data: address and never a path: requests over HTTP consist of them.
ImageSource: TypeAlias = "str | bytes | os.PathLike[str] | Image.Image | npt.NDArray[np.uint8]"


class LoadedImage(NamedTuple):
    """An image in memory, not decoded yet. height, width: in pixels, perhaps exchanged by an orientation."""

    content: bytes | Image.Image
    height: int
    width: int

    def upright(self) -> tuple[int, int]:
        """Return the height and width after the image is turned as its orientation says."""
        from pagewick.images.decoding import is_turned

        return (self.width, self.height) if is_turned(self.content) else (self.height, self.width)

    def pictures(self, settings: ImageSettings) -> list[Picture]:
        """Decode it, and return what the model gets of it. Raises InvalidRequestError as `prepare` does."""
        from pagewick.images.decoding import pictures_of, prepare

        if isinstance(self.content, bytes):
            return prepare(self.content, settings)
        return pictures_of(self.content, settings)


def is_source(value: object) -> TypeGuard[ImageSource]:
    if isinstance(value, str | bytes | os.PathLike):
        return True
    if value is None or isinstance(value, int | float | list | dict):
        return False
    # Not before: what has come over HTTP needs neither library to be checked.
    import numpy as np
    from PIL import Image

    return isinstance(value, Image.Image | np.ndarray)


def load(source: ImageSource) -> LoadedImage:
    """Return the image that a caller has given.

    An array is uint8 [height, width, 3], in red, green and blue. Raises InvalidRequestError for an image that cannot be
    read or is too large, and UnsupportedError for an address that is not a data: address.
    """
    if isinstance(source, str):
        source = bytes_of(source)
    elif isinstance(source, os.PathLike):
        source = _read(Path(source))
    if isinstance(source, bytes):
        header = measured(source)
        return LoadedImage(source, header.height, header.width)
    image = _image_of(source)
    check_num_pixels(image.height, image.width)
    return LoadedImage(image, image.height, image.width)


def _image_of(source: Image.Image | npt.NDArray[Any]) -> Image.Image:
    import numpy as np
    from PIL import Image

    if isinstance(source, Image.Image):
        return source
    if source.dtype != np.uint8 or source.ndim != 3 or source.shape[2] != 3 or not source.size:
        message = f"an array must be uint8 [height, width, 3]; it is {source.dtype} {list(source.shape)}"
        raise InvalidRequestError(message)
    return Image.fromarray(source)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_IMAGE_BYTES + 1)
    except OSError as error:
        raise InvalidRequestError(f"its file cannot be read: {error}") from None
    check_num_bytes(len(data))
    return data
