"""Bodies: whole, in pieces, compressed, too long, truncated, and with a wrong encoding."""

from __future__ import annotations

import asyncio
import gzip
import json
import tracemalloc
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
import zstandard
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from pagewick.server.errors import ApiError
from pagewick.server.guard.body import read_body
from pagewick.server.settings import ServerSettings

LIMIT = 100_003
SETTINGS = ServerSettings(served_model_name=("m",), max_body_size=LIMIT, body_timeout=0.05)
COMPRESS = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}
TEXT = json.dumps({"messages": [{"role": "user", "content": "Grüße, " * 999}]}).encode()


def read(pieces: Iterable[bytes], *headers: tuple[str, str], is_whole: bool = True) -> bytes:
    """Read a body that comes in pieces. If it is not whole, nothing follows the last piece."""
    messages: list[Message] = [{"type": "http.request", "body": piece, "more_body": True} for piece in pieces]

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        if not is_whole:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": b"", "more_body": False}

    raw = [(name.encode(), value.encode()) for name, value in headers]
    return asyncio.run(read_body(Request({"type": "http", "headers": raw}, receive), SETTINGS))


def encoded(encoding: str) -> tuple[str, str]:
    return ("content-encoding", encoding)


def refused(status: int, pieces: Iterable[bytes], *headers: tuple[str, str], is_whole: bool = True) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read(pieces, *headers, is_whole=is_whole)
    assert caught.value.status == status, caught.value
    assert caught.value.body["error"]["code"]
    return caught.value


@pytest.mark.parametrize("size", [7, 63, 4099, len(TEXT)])
@pytest.mark.parametrize("encoding", ["", "identity", "gzip", "GZIP", "x-gzip", " deflate ", "zstd"])
def test_bodies_arrive_as_they_were_sent(encoding: str, size: int) -> None:
    name = encoding.strip().lower()
    raw = COMPRESS.get(name, bytes)(TEXT)
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert read(pieces, encoded(encoding)) == TEXT
    assert read(pieces, encoded(encoding), ("content-type", "application/x-www-form-urlencoded")) == TEXT


def test_no_body_is_an_empty_one() -> None:
    for headers in ([], [encoded("gzip")], [("content-length", "0")]):
        assert read([], *headers) == b""


def test_the_limit_is_exact() -> None:
    assert len(read([bytes(LIMIT)])) == LIMIT
    assert len(read([gzip.compress(bytes(LIMIT))], encoded("gzip"))) == LIMIT
    assert len(read([zstandard.compress(bytes(LIMIT))], encoded("zstd"))) == LIMIT
    for pieces, headers in [
        ([bytes(LIMIT), b"x"], []),
        ([gzip.compress(bytes(LIMIT + 1))], [encoded("gzip")]),
        ([zlib.compress(bytes(LIMIT + 1))], [encoded("deflate")]),
        ([zstandard.compress(bytes(LIMIT + 1))], [encoded("zstd")]),
    ]:
        error = refused(413, pieces, *headers)
        assert error.headers["connection"] == "close"
        assert "--max-body-size" in str(error) and f"{LIMIT} bytes" in str(error)


def test_a_body_announced_as_too_long_is_not_read() -> None:
    def never() -> Message:
        raise AssertionError

    request = Request({"type": "http", "headers": [(b"content-length", str(LIMIT + 1).encode())]}, never)  # type: ignore[arg-type]
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_body(request, SETTINGS))
    assert caught.value.status == 413


def test_an_endless_body_is_cut_off() -> None:
    num_taken = 0

    async def receive() -> Message:
        nonlocal num_taken
        num_taken += 1
        return {"type": "http.request", "body": bytes(1000), "more_body": True}

    for headers in ([], [(b"content-encoding", b"gzip")]):
        num_taken = 0
        with pytest.raises(ApiError) as caught:
            asyncio.run(read_body(Request({"type": "http", "headers": headers}, receive), SETTINGS))
        assert (caught.value.status, num_taken) == (413, LIMIT // 1000 + 1)


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_a_bomb_takes_no_more_memory_than_the_limit(encoding: str) -> None:
    if encoding == "zstd":
        zeros: Any = zstandard.ZstdCompressor().compressobj()
    else:
        zeros = zlib.compressobj(1, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    raw = b"".join(zeros.compress(bytes(2**20)) for _ in range(20)) + zeros.flush()
    assert len(raw) < LIMIT
    tracemalloc.start()
    try:
        refused(413, [raw], encoded(encoding))
        assert tracemalloc.get_traced_memory()[1] < 10 * LIMIT
    finally:
        tracemalloc.stop()


def test_a_body_that_drips_takes_no_more_memory_than_the_limit() -> None:
    num_sent = 0

    async def receive() -> Message:
        nonlocal num_sent
        num_sent += 1
        await asyncio.sleep(0)  # else the loop keeps the timer of every piece
        body = num_sent.to_bytes(2, "big")  # bytes of length 1 would be shared objects
        return {"type": "http.request", "body": body, "more_body": num_sent < LIMIT // 2}

    tracemalloc.start()
    try:
        patient = replace(SETTINGS, body_timeout=60)
        body = asyncio.run(read_body(Request({"type": "http", "headers": []}, receive), patient))
        assert len(body) == LIMIT - 1
        assert tracemalloc.get_traced_memory()[1] < 10 * LIMIT
    finally:
        tracemalloc.stop()


def test_a_zstd_frame_that_wants_too_much_memory_is_refused() -> None:
    for window_log, status in ((23, None), (24, 400)):
        parameters = zstandard.ZstdCompressionParameters(window_log=window_log, write_content_size=False)
        frame = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
        raw = frame.compress(TEXT) + frame.flush()
        if status is None:
            assert read([raw], encoded("zstd")) == TEXT
        else:
            refused(status, [raw], encoded("zstd"))


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "zstd"])
def test_a_body_with_another_encoding_than_announced_is_refused(encoding: str) -> None:
    raw = COMPRESS[encoding](TEXT)
    broken = raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:]
    for data in (TEXT, raw[:-1], raw[:20], raw[:5], raw + b"x", raw + raw, broken, b"\0"):
        error = refused(400, [data], encoded(encoding))
        assert encoding in str(error)
    for other in {"gzip", "deflate", "zstd"} - {encoding}:
        refused(400, [COMPRESS[other](TEXT)], encoded(encoding))


@pytest.mark.parametrize(
    "encodings", [["br"], ["gzip, gzip"], ["gzip", "gzip"], ["identity, gzip"], ["compress"], ["x" * 999]]
)
def test_other_encodings_are_refused(encodings: list[str]) -> None:
    error = refused(415, [gzip.compress(gzip.compress(TEXT))], *map(encoded, encodings))
    assert error.headers["accept-encoding"] == "gzip, deflate, zstd"
    assert len(str(error)) < 200


def test_a_body_that_stalls() -> None:
    for pieces in ([], [b"x"], [gzip.compress(TEXT)[:20]] * 2):
        error = refused(408, pieces, encoded("gzip" if len(pieces) > 1 else ""), is_whole=False)
        assert error.headers["connection"] == "close" and "0.05 seconds" in str(error)


def test_a_client_that_leaves() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    with pytest.raises(ClientDisconnect):
        asyncio.run(read_body(Request({"type": "http", "headers": []}, receive), SETTINGS))
