"""How large a request may be, checked before anything is done with it."""

from __future__ import annotations

import asyncio
import re

from starlette.requests import Request

from pagewick.errors import InvalidRequestError
from pagewick.server.errors import ApiError

MAX_BODY_BYTES = 10 * 2**20
BODY_TIMEOUT_S = 30.0  # without a further byte
MAX_JSON_DEPTH = 64
MAX_JSON_PARTS = 250_000
MAX_MESSAGES = 2048
MAX_SEQUENCES = 1024  # prompts times choices of one request
MAX_STOP_CHARS = 1024

# A string (its brackets do not count) or one bracket.
_JSON_PART = re.compile(rb'"(?:[^"\\]|\\.)*+"?|[\[\]{}]', re.DOTALL)


async def read_body(request: Request) -> bytes:
    """The body. Raises ApiError: 413 as soon as it is too large, 408 if it stalls, 415 if it is compressed.

    The content type is not looked at: the body is JSON whatever it says.
    """
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(415, f"content-encoding {encoding[:32]!r} is not supported; send the body uncompressed")
    chunks: list[bytes] = []
    num_bytes = 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(BODY_TIMEOUT_S):
                chunk = await anext(stream, None)
        except TimeoutError:
            raise ApiError(408, f"no byte of the body came for {BODY_TIMEOUT_S:g} seconds") from None
        if chunk is None:
            return b"".join(chunks)
        num_bytes += len(chunk)
        if num_bytes > MAX_BODY_BYTES:
            message = f"the body is larger than {MAX_BODY_BYTES // 2**20} MiB"
            # What is left of the body is not read, so that the connection cannot be used again.
            raise ApiError(413, message, code="request_too_large", headers={"connection": "close"})
        chunks.append(chunk)


def check_nesting(body: bytes) -> None:
    """Raises InvalidRequestError for JSON so deep or of so many parts that reading it would be the attack."""
    if body.count(b"[") + body.count(b"{") <= MAX_JSON_DEPTH:
        return
    depth = 0
    for num_parts, match in enumerate(_JSON_PART.finditer(body)):
        if num_parts >= MAX_JSON_PARTS:
            raise InvalidRequestError(f"the JSON has more than {MAX_JSON_PARTS} strings and brackets")
        part = match[0]
        if part in b"[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                raise InvalidRequestError(f"the JSON is nested deeper than {MAX_JSON_DEPTH} levels")
        elif part in b"]}":
            depth -= 1


def check_count(param: str, count: int, limit: int) -> None:
    """Raises InvalidRequestError unless 1 <= count <= limit."""
    if not 1 <= count <= limit:
        raise InvalidRequestError(f"{param} must have 1 to {limit} entries; got {count}", param=param)


def check_stop(stop: list[str]) -> None:
    """Raises InvalidRequestError for a stop string that is too long; SamplingParams checks the rest."""
    if any(len(text) > MAX_STOP_CHARS for text in stop):
        raise InvalidRequestError(f"a stop string must have at most {MAX_STOP_CHARS} characters", param="stop")
