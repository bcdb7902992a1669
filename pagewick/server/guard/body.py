"""Reading a request's body, with a limit on its size before and after decompression."""

from __future__ import annotations

import asyncio
import codecs
import sys
import zlib
from typing import Any

from starlette.requests import Request

from pagewick.server.errors import ApiError
from pagewick.server.settings import ServerSettings

# A zstd frame may ask its reader for more memory; RFC 8878 recommends to grant 8 MiB.
ZSTD_WINDOW_BITS = 23
ACCEPTED = "gzip, deflate, zstd"


async def read_body(request: Request, settings: ServerSettings, *, reads_images: bool = False) -> bytes:
    """Return the body, decompressed. The content type does not matter: the body is JSON, whatever it says. A
    byte order mark before it, which programs of Windows write, is left out (RFC 8259, section 8.1).

    Raises ApiError: 413 as soon as the body is longer than settings.body_limit, compressed or not; 408 if no further
    byte comes for settings.body_timeout seconds; 415 for several content-encodings or one other than gzip, deflate and
    zstd; 400 for a body that does not have this encoding. Raises ClientDisconnect.
    """
    encoding = _encoding_of(request)
    limit = settings.body_limit(reads_images=reads_images)
    # A client that announces too long a body, and perhaps waits for 100 Continue, need not send it.
    if int(request.headers.get("content-length", 0)) > limit:
        raise _too_large(limit)
    raw = await _read_raw(request, limit, settings.body_timeout)
    plain = _decompressed(encoding, raw, limit) if encoding and raw else raw
    return plain.removeprefix(codecs.BOM_UTF8)


async def _read_raw(request: Request, limit: int, timeout_s: float) -> bytes:
    # Not a list of the chunks: an object for each byte of a client that sends them one by one takes much more memory.
    body = bytearray()
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                chunk = await anext(stream, None)
        except TimeoutError:
            message = f"no byte of the body came for {timeout_s:g} seconds"
            raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
        if chunk is None:
            return bytes(body)
        if len(body) + len(chunk) > limit:
            raise _too_large(limit)
        body += chunk


def _too_large(limit: int) -> ApiError:
    size = f"{limit / 2**20:g} MiB" if limit >= 2**20 else f"{limit} bytes"
    message = f"the body is larger than {size}; the server's --max-body-size sets the limit"
    # The rest of the body stays unread, so the connection cannot be used again.
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})


def _encoding_of(request: Request) -> str | None:
    """Return the encoding of the body; None for a plain one. Raises ApiError (415)."""
    lines = request.headers.getlist("content-encoding")
    encodings = [name.strip().lower() for line in lines for name in line.split(",") if name.strip()]
    match encodings:
        case [] | ["identity"]:
            return None
        case ["gzip" | "x-gzip"]:
            return "gzip"
        case ["deflate" | "zstd" as encoding]:
            return encoding
    shown = ", ".join(encodings)[:64]
    message = f"content-encoding {shown!r} is not supported; send one of {ACCEPTED}, or the plain body"
    raise ApiError(415, message, code="unsupported_content_encoding", headers={"accept-encoding": ACCEPTED})


def _decompressed(encoding: str, raw: bytes, limit: int) -> bytes:
    stream, stream_error = _new_stream(encoding)
    wrong = f"the body is not one whole {encoding} stream, although its content-encoding says so"
    try:
        body: bytes = stream.decompress(raw, limit + 1)
    except stream_error:
        raise ApiError(400, wrong, code="invalid_content_encoding") from None
    if len(body) > limit:
        raise _too_large(limit)
    # Bytes after the end are refused, too: their sender meant them to be read.
    if not stream.eof or stream.unused_data:
        raise ApiError(400, wrong, code="invalid_content_encoding")
    return body


def _new_stream(encoding: str) -> tuple[Any, type[Exception]]:
    """Return a decompressor of one stream, and the exception that it raises for bytes that are not such a stream."""
    if encoding != "zstd":
        return zlib.decompressobj(zlib.MAX_WBITS + (16 if encoding == "gzip" else 0)), zlib.error
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    options: dict[int, int] = {zstd.DecompressionParameter.window_log_max: ZSTD_WINDOW_BITS}
    return zstd.ZstdDecompressor(options=options), zstd.ZstdError
