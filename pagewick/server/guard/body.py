"""A request's body: read as far as it may be long, and decompressed no further than that."""

from __future__ import annotations

import asyncio
import importlib
import zlib
from collections.abc import Callable
from typing import Any

from starlette.requests import Request

from pagewick.server.errors import ApiError
from pagewick.server.settings import ServerSettings

# A zstd frame may ask its reader for more; RFC 8878 has 8 MiB as what everybody should grant.
ZSTD_WINDOW_BYTES = 8 * 2**20
ACCEPTED = "gzip, deflate, zstd"

# Takes the compressed body and a limit; gives what it stands for. Raises ApiError if that is longer.
_Decompress = Callable[[bytes, int], bytes]


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """The body, decompressed.

    Raises ApiError: 413 as soon as it is longer than settings.max_body_size, compressed or not; 408 if no further byte
    comes for settings.body_timeout seconds; 415 for a content-encoding other than gzip, deflate and zstd, or several;
    400 if what came is not what the encoding says; ClientDisconnect. The content type is not looked at: the body is
    JSON whatever it says.
    """
    decompress = _decompressor(request)
    limit = settings.max_body_size
    # A client that says so beforehand, and perhaps waits for 100 Continue, need not send it.
    if int(request.headers.get("content-length", 0)) > limit:
        raise _too_large(limit)
    raw = await _read_raw(request, limit, settings.body_timeout)
    if decompress is None or not raw:
        return raw
    return decompress(raw, limit)


async def _read_raw(request: Request, limit: int, timeout_s: float) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    stream = request.stream()
    while True:
        try:
            async with asyncio.timeout(timeout_s):
                chunk = await anext(stream, None)
        except TimeoutError:
            message = f"no byte of the body came for {timeout_s:g} seconds"
            raise ApiError(408, message, code="request_timeout", headers={"connection": "close"}) from None
        if chunk is None:
            return b"".join(chunks)
        num_bytes += len(chunk)
        if num_bytes > limit:
            raise _too_large(limit)
        chunks.append(chunk)


def _too_large(limit: int) -> ApiError:
    size = f"{limit / 2**20:g} MiB" if limit >= 2**20 else f"{limit} bytes"
    message = f"the body is larger than {size}; the server's --max-body-size sets the limit"
    # What is left of the body is not read, so that the connection cannot be used again.
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})


def _decompressor(request: Request) -> _Decompress | None:
    lines = request.headers.getlist("content-encoding")
    encodings = [name.strip().lower() for line in lines for name in line.split(",") if name.strip()]
    match encodings:
        case [] | ["identity"]:
            return None
        case ["gzip" | "x-gzip"]:
            return _gunzip
        case ["deflate"]:
            return _inflate
        case ["zstd"]:
            return _zstd_decompressor()
    shown = ", ".join(encodings)[:64]
    raise _unsupported(f"content-encoding {shown!r} is not supported; send one of {ACCEPTED}, or the plain body")


def _unsupported(message: str) -> ApiError:
    headers = {"accept-encoding": ACCEPTED}
    return ApiError(415, message, code="unsupported_content_encoding", headers=headers)


def _gunzip(raw: bytes, limit: int) -> bytes:
    return _zlib_decompress("gzip", 16 + zlib.MAX_WBITS, raw, limit)


def _inflate(raw: bytes, limit: int) -> bytes:
    return _zlib_decompress("deflate", zlib.MAX_WBITS, raw, limit)


def _zlib_decompress(encoding: str, window_bits: int, raw: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj(window_bits)
    try:
        body = stream.decompress(raw, limit + 1)
    except zlib.error:
        raise _not_as_said(encoding) from None
    if len(body) > limit:
        raise _too_large(limit)
    # Bytes behind the end are refused, too: whoever sent them meant them to be read.
    if not stream.eof or stream.unused_data:
        raise _not_as_said(encoding)
    return body


def _not_as_said(encoding: str) -> ApiError:
    message = f"the body is not one whole {encoding} stream, which its content-encoding says"
    return ApiError(400, message, code="invalid_content_encoding")


def _zstd_decompressor() -> _Decompress:
    try:
        # Optional, and imported only where a client needs it.
        zstandard: Any = importlib.import_module("zstandard")
    except ImportError:
        message = "zstd needs the zstandard package on the server (pip install 'pagewick[zstd]'); send gzip instead"
        raise _unsupported(message) from None

    def decompress(raw: bytes, limit: int) -> bytes:
        made = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
        try:
            # Only a reader can be stopped at a length, and only a decompressobj knows whether the frame is whole.
            if len(made.stream_reader(raw).read(limit + 1)) > limit:
                raise _too_large(limit)
            stream = made.decompressobj()
            body: bytes = stream.decompress(raw)
        except zstandard.ZstdError:
            raise _not_as_said("zstd") from None
        if not stream.eof or stream.unused_data:
            raise _not_as_said("zstd")
        return body

    return decompress
