"""Images in prompts: their names in the prefix cache, and which of them a sequence still needs. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from pagewick.engine.messages import EngineRequest, ImageInput

_KEY_BYTES = 16


def with_image_keys(request: EngineRequest, num_leading: int = 0) -> EngineRequest:
    """Return a request with an extra key for each of its images.

    num_leading: the number of tokens ahead of an image that see it as its own tokens do.
    The keys and values of placeholder tokens depend on the pixels, and in some models those of later tokens on the
    image's height and width; those of its first tokens, on the grid of its slices.
    """
    if not request.images:
        return request
    keys = [(image.start - num_leading, image.end, _key(image)) for image in request.images]
    return msgspec.structs.replace(request, extra_keys=[*request.extra_keys, *keys])


def num_image_bytes(request: EngineRequest) -> int:
    """Return the memory that a request's images take while it is not finished."""
    return sum(len(image.pixels) for image in request.images)


def _key(image: ImageInput) -> bytes:
    sizes = b"".join(size.to_bytes(4, "little") for size in (image.height, image.width))
    edges = b"" if image.edges is None else repr(image.edges).encode()
    end = b"end" if image.has_end else b""
    return blake2b(sizes + image.pixels + image.layout + edges + end, digest_size=_KEY_BYTES, person=b"image").digest()


def without_computed(images: Sequence[ImageInput], num_computed: int) -> list[ImageInput]:
    """Return images without the pixels of those whose tokens have all been computed."""
    return [msgspec.structs.replace(image, pixels=b"") if image.end <= num_computed else image for image in images]
