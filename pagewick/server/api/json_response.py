"""Responses in JSON, and the header that names fields without effect."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from pagewick.log import get_logger
from pagewick.server.api.decoding import MAX_NAMED, harmless_name

_logger = get_logger(__name__)
_encoder = msgspec.json.Encoder()


def json_response(content: Any, ignored: Sequence[str] = ()) -> Response:
    """ignored: names of fields that had no effect."""
    return Response(_encoder.encode(content), media_type="application/json", headers=headers_naming(ignored))


async def encoded(make: Callable[[], msgspec.Struct], *, is_large: bool) -> msgspec.Raw:
    """Make one part of a response and encode it as JSON. Other requests run before it, and beside it if it is large."""
    part = await asyncio.to_thread(make) if is_large else make()
    await asyncio.sleep(0)
    return msgspec.Raw(_encoder.encode(part))


def headers_naming(ignored: Sequence[str]) -> dict[str, str]:
    """Return the header that names ignored fields. Clients chose the names, so only harmless characters pass."""
    if not ignored:
        return {}
    names = ", ".join(map(harmless_name, ignored[:MAX_NAMED]))
    _logger.info("ignored request fields: %s", names)
    return {"x-pagewick-ignored": names}
