"""Images for tests: noise, which no resampling leaves as it is, in files of any format."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
from PIL import Image

from pagewick.images import decoding
from pagewick.images.decoding import Picture
from pagewick.images.settings import ImageSettings


def noise(height: int, width: int, *, seed: int = 1) -> Image.Image:
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def address_of(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def prepare(data: bytes, settings: ImageSettings) -> Picture:
    """Return the only picture that a model gets of an image."""
    (picture,) = decoding.prepare(data, settings)
    return picture
