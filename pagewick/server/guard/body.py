"""Reading a request's body, with a limit on its size before and after decompression."""

from __future__ import annotations

import asyncio
import importlib
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

from starlette.requests import Request

from pagewick.server.errors import ApiError
from pagewick.server.settings import ServerSettings

# A zstd frame may ask its reader for more memory; RFC 8878 recommends to grant 8 MiB.
ZSTD_WINDOW_BYTES = 8 * 2**20
ACCEPTED = "gzip, deflate, zstd"

# Decompresses a body. Raises ApiError if the result is longer than a limit.
_Decompress = Callable[[bytes, int], bytes]


async def read_body(request: Request, settings: ServerSettings) -> bytes:
    """Return the body, decompressed. The content type does not matter: the body is JSON, whatever it says.

    Raises ApiError: 413 as soon as the body is longer than settings.max_body_size, compressed or not; 408 if no further
    byte comes for settings.body_timeout seconds; 415 for several content-encodings or one other than gzip, deflate and
    zstd; 400 for a body that does not have this encoding. Raises ClientDisconnect.
    """
    decompress = _decompressor(request)
    limit = settings.max_body_size
    # A client that announces too long a body, and perhaps waits for 100 Continue, need not send it.
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
    # The rest of the body stays unread, so the connection cannot be used again.
    return ApiError(413, message, code="request_too_large", headers={"connection": "close"})


def _decompressor(request: Request) -> _Decompress | None:
    lines = request.headers.getlist("content-encoding")
    encodings = [name.strip().lower() for line in lines for name in line.split(",") if name.strip()]
    match encodings:
        case [] | ["identity"]:
            return None
        case ["gzip" | "x-gzip"]:
            return partial(_zlib_decompress, "gzip", 16 + zlib.MAX_WBITS)
        case ["deflate"]:
            return partial(_zlib_decompress, "deflate", zlib.MAX_WBITS)
        case ["zstd"]:
            return _zstd_decompressor()
    shown = ", ".join(encodings)[:64]
    raise _unsupported(f"content-encoding {shown!r} is not supported; send one of {ACCEPTED}, or the plain body")


def _unsupported(message: str) -> ApiError:
    headers = {"accept-encoding": ACCEPTED}
    return ApiError(415, message, code="unsupported_content_encoding", headers=headers)


def _zlib_decompress(encoding: str, window_bits: int, raw: bytes, limit: int) -> bytes:
    stream = zlib.decompressobj(window_bits)
    try:
        body = stream.decompress(raw, limit + 1)
    except zlib.error:
        raise _wrong_encoding(encoding) from None
    if len(body) > limit:
        raise _too_large(limit)
    # Bytes behind the end are refused, too: their sender meant them to be read.
    if not stream.eof or stream.unused_data:
        raise _wrong_encoding(encoding)
    return body


def _wrong_encoding(encoding: str) -> ApiError:
    message = f"the body is not one whole {encoding} stream, although its content-encoding says so"
    return ApiError(400, message, code="invalid_content_encoding")


def _zstd_decompressor() -> _Decompress:
    try:
        # The package is optional, and imported only if a client needs it.
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
            raise _wrong_encoding("zstd") from None
        if not stream.eof or stream.unused_data:
            raise _wrong_encoding("zstd")
        return body

    return decompress
