"""Answers in JSON, and the header that names what a request said in vain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.responses import Response

from pagewick.log import get_logger
from pagewick.server.api.decoding import MAX_NAMED, harmless_name

_logger = get_logger(__name__)
_encoder = msgspec.json.Encoder()


def json_answer(content: Any, ignored: Sequence[str] = ()) -> Response:
    """ignored: names of fields that had no effect."""
    return Response(_encoder.encode(content), media_type="application/json", headers=headers_naming(ignored))


def headers_naming(ignored: Sequence[str]) -> dict[str, str]:
    """The names are a user's words: only harmless characters pass."""
    if not ignored:
        return {}
    names = ", ".join(map(harmless_name, ignored[:MAX_NAMED]))
    _logger.info("ignored request fields: %s", names)
    return {"x-pagewick-ignored": names}
