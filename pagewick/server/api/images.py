"""Images in the messages of a request: what a part may say, and where it may stand.

The HTTP APIs check the form here, and turn their own parts into OpenAI's image_url; pagewick/text decodes the pictures.
A picture comes in the request itself, as a data: address. Other addresses are refused: a server that fetches what it is
told reaches into its own network, and a path would name a file of the server's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pagewick.errors import InvalidRequestError, UnsupportedError
from pagewick.images.headers import Format
from pagewick.server.api.messages import ChatMessage

READS_TEXT_ONLY = "this model reads text only"
# Media types in the words of the APIs.
IMAGE_TYPES = tuple(one.media_type for one in Format)
# Chat templates write images of these roles only.
IMAGE_ROLES = ("user", "tool")
_PARTS = ("text", "refusal", "image_url")
_FORM = '{"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}'


def image_part(url: str) -> dict[str, Any]:
    """Return the part of a message that shows an image."""
    return {"type": "image_url", "image_url": {"url": url}}


def data_url(media_type: str, data: str) -> str:
    """Return the address of an image. data: its file in base64."""
    return f"data:{media_type};base64,{data}"


def checked_url(url: Any, where: str) -> str:
    """Return the address of an image. Raises InvalidRequestError unless it holds the image itself."""
    if not isinstance(url, str):
        raise InvalidRequestError(f"{where} must be a data: address: data:image/png;base64,...", param=where)
    scheme = url.lstrip()[:8].lower()
    if scheme.startswith("data:"):
        return url
    message = f"{where} must be a data: address, which holds the image itself: data:image/png;base64,..."
    if scheme.startswith(("http:", "https:")):
        message = f"{where} is an address of the web, from which this server fetches nothing; send the image itself, "
        message += "in base64, as a data: address: data:image/png;base64,..."
    raise InvalidRequestError(message, param=where)


def is_without_effect(detail: Any, where: str) -> bool:
    """Whether this value of `detail` asks for something: the size of an image alone decides about its tokens.

    Raises InvalidRequestError unless it is a word.
    """
    if not isinstance(detail, str | None):
        raise InvalidRequestError(f"{where} must be auto, low or high", param=where)
    return detail not in (None, "auto")


def check_parts(messages: Sequence[ChatMessage], *, reads_images: bool) -> list[str]:
    """Check the parts of messages that are no texts. Returns the names of fields that have no effect.

    Parts without a type are left to the chat template's own checks. Raises UnsupportedError for other types than text
    and images, and for images if the model reads none; InvalidRequestError for images of another form or place.
    """
    ignored: dict[str, None] = {}
    for place, message in enumerate(messages):
        if not isinstance(message.content, list):
            continue
        for number, part in enumerate(message.content):
            kind = part.get("type")
            if kind in ("text", "refusal") or not isinstance(kind, str):
                continue
            content = f"messages[{place}].content"
            if kind not in _PARTS or not reads_images:
                raise UnsupportedError(_unknown_part(kind, reads_images=reads_images), param=content)
            if message.role not in IMAGE_ROLES:
                text = f"{content}[{number}]: only messages of the roles user and tool may have images"
                raise InvalidRequestError(text, param=f"{content}[{number}]")
            if _has_detail(part, f"{content}[{number}].image_url"):
                ignored["messages[].content[].image_url.detail"] = None
    return list(ignored)


def _unknown_part(kind: str, *, reads_images: bool) -> str:
    reads = "this model reads text and images" if reads_images else READS_TEXT_ONLY
    return f"{reads}; a content part has type {kind[:64]!r}"


def _has_detail(part: Mapping[str, Any], where: str) -> bool:
    """Check the form of an image_url part. Returns whether it has a detail without effect."""
    image = part.get("image_url")
    if not isinstance(image, Mapping):
        raise InvalidRequestError(f"{where} must be an object with a url: {_FORM}", param=where)
    checked_url(image.get("url"), f"{where}.url")
    return is_without_effect(image.get("detail"), f"{where}.detail")
