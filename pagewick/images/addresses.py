"""Reads images that stand in a request as data: addresses (RFC 2397)."""

from __future__ import annotations

import base64
import binascii
import re

from pagewick.errors import InvalidRequestError, UnsupportedError

# The limit of a file, before it is written in base64.
MAX_IMAGE_BYTES = 32 * 2**20
_FORM = "data:image/png;base64,..."
_HEAD_CHARS = 256
_SPACES = re.compile(r"\s+")


def is_data(url: str) -> bool:
    """Whether this is a data: address."""
    return url[:5].lower() == "data:"


def bytes_of(url: str) -> bytes:
    """Return the file in a data: address with base64. The media type does not matter: the file says what it is.

    Raises UnsupportedError for other addresses, which Pagewick does not fetch: a server that fetches what it is told to
    reaches into its own network. Raises InvalidRequestError for wrong base64, and for a file that is too large.
    """
    if not is_data(url):
        shown = url[:40] + ("..." if len(url) > 40 else "")
        raise UnsupportedError(f"images are not fetched from addresses such as {shown!r}; send the file as {_FORM}")
    head, comma, _ = url[:_HEAD_CHARS].partition(",")
    if not comma or not head.lower().rstrip().endswith(";base64"):
        raise InvalidRequestError(f"a data: address must contain the file in base64; write {_FORM}")
    encoded = url[len(head) + 1 :]
    if len(encoded) // 4 * 3 > MAX_IMAGE_BYTES + 3:
        raise InvalidRequestError(_too_large())
    try:
        data = base64.b64decode(encoded, validate=True)
    except (ValueError, binascii.Error):
        data = _tolerant(encoded)
    check_num_bytes(len(data))
    return data


def check_num_bytes(num_bytes: int) -> None:
    """Raises InvalidRequestError for a file that is empty or too large."""
    if num_bytes > MAX_IMAGE_BYTES:
        raise InvalidRequestError(_too_large())
    if not num_bytes:
        raise InvalidRequestError("its file is empty; send the whole file")


def _too_large() -> str:
    return f"its file is larger than {MAX_IMAGE_BYTES // 2**20} MiB; make it smaller"


def _tolerant(encoded: str) -> bytes:
    """Decode base64 with line breaks, without padding, or with the letters that are safe in addresses (RFC 4648)."""
    text = _SPACES.sub("", encoded).rstrip("=").translate({ord("-"): "+", ord("_"): "/"})
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (ValueError, binascii.Error):
        message = f"a data: address contains wrong base64; write {_FORM}, with the file's bytes in base64"
        raise InvalidRequestError(message) from None
