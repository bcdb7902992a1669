"""Images in prompts: their names in the prefix cache, which of them a sequence still needs, and how many tokens they
have at most. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import msgspec

from pagewick.config import EngineConfig
from pagewick.engine.messages import EngineRequest, ImageInput
from pagewick.errors import ConfigError
from pagewick.models.config import AttentionConfig, ModelConfig

_KEY_BYTES = 16


def with_image_keys(request: EngineRequest) -> EngineRequest:
    """Return a request with an extra key for each of its images.

    The keys and values of placeholder tokens depend on the pixels, and in some models those of later tokens on the
    image's height and width.
    """
    if not request.images:
        return request
    keys = [(image.start, image.end, _key(image)) for image in request.images]
    return msgspec.structs.replace(request, extra_keys=[*request.extra_keys, *keys])


def num_image_bytes(request: EngineRequest) -> int:
    """Return the memory that a request's images take while it is not finished."""
    return sum(len(image.pixels) for image in request.images)


def sees_images_whole(config: ModelConfig) -> bool:
    """Return whether a layer lets the tokens of an image see each other, so that a step must compute all of them."""
    kinds = (layer.attention for layer in config.layers)
    return any(isinstance(attention, AttentionConfig) and attention.sees_images_whole for attention in kinds)


def max_image_tokens(config: EngineConfig, model: ModelConfig) -> int:
    """Return the tokens of the largest image, if a step must compute all of an image; 0: it may compute a part.

    config: has the pixels of the largest image, if the model reads any. Raises ConfigError if a step is too small.
    """
    if model.vision is None or config.max_image_pixels is None or not sees_images_whole(model):
        return 0
    most = config.max_image_pixels // model.vision.side**2
    if most > config.max_num_batched_tokens:
        raise ConfigError(
            f"--max-num-batched-tokens {config.max_num_batched_tokens} is too small: this model needs all tokens of an "
            f"image in one step, and the largest image has {most}\n"
            f"  give at least {most}, or --language-model-only if no request has images"
        )
    return most


def _key(image: ImageInput) -> bytes:
    sizes = b"".join(size.to_bytes(4, "little") for size in (image.height, image.width))
    return blake2b(sizes + image.pixels, digest_size=_KEY_BYTES, person=b"image").digest()


def without_computed(images: Sequence[ImageInput], num_computed: int) -> list[ImageInput]:
    """Return images without the pixels of those whose tokens have all been computed."""
    return [msgspec.structs.replace(image, pixels=b"") if image.end <= num_computed else image for image in images]
