"""Bodies: whole, in pieces, compressed, too long, truncated, and with a wrong encoding."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
import tracemalloc
import zlib
from collections.abc import Iterable
from types import ModuleType

import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.types import Message

from pagewick.server.errors import ApiError
from pagewick.server.guard import body as body_module
from pagewick.server.guard.body import read_body
from pagewick.server.settings import ServerSettings

LIMIT = 100_003
SETTINGS = ServerSettings(served_model_name=("m",), max_body_size=LIMIT, body_timeout=0.05)
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
@pytest.mark.parametrize("encoding", ["", "identity", "gzip", "GZIP", "x-gzip", " deflate "])
def test_bodies_arrive_as_they_were_sent(encoding: str, size: int) -> None:
    name = encoding.strip().lower()
    raw = {"gzip": gzip.compress, "x-gzip": gzip.compress, "deflate": zlib.compress}.get(name, bytes)(TEXT)
    pieces = [raw[start : start + size] for start in range(0, len(raw), size)]
    assert read(pieces, encoded(encoding)) == TEXT
    assert read(pieces, encoded(encoding), ("content-type", "application/x-www-form-urlencoded")) == TEXT


def test_no_body_is_an_empty_one() -> None:
    for headers in ([], [encoded("gzip")], [("content-length", "0")]):
        assert read([], *headers) == b""


def test_the_limit_is_exact() -> None:
    assert len(read([bytes(LIMIT)])) == LIMIT
    assert len(read([gzip.compress(bytes(LIMIT))], encoded("gzip"))) == LIMIT
    for pieces, headers in [
        ([bytes(LIMIT), b"x"], []),
        ([gzip.compress(bytes(LIMIT + 1))], [encoded("gzip")]),
        ([zlib.compress(bytes(LIMIT + 1))], [encoded("deflate")]),
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


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_bomb_takes_no_more_memory_than_the_limit(encoding: str) -> None:
    zeros = zlib.compressobj(1, zlib.DEFLATED, 31 if encoding == "gzip" else 15)
    raw = b"".join(zeros.compress(bytes(2**20)) for _ in range(20)) + zeros.flush()
    assert len(raw) < LIMIT
    tracemalloc.start()
    try:
        refused(413, [raw], encoded(encoding))
        assert tracemalloc.get_traced_memory()[1] < 10 * LIMIT
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["gzip", "deflate"])
def test_a_body_with_another_encoding_than_announced_is_refused(encoding: str) -> None:
    raw = (gzip.compress if encoding == "gzip" else zlib.compress)(TEXT)
    broken = raw[:-3] + bytes([raw[-3] ^ 1]) + raw[-2:]
    for data in (TEXT, raw[:-1], raw[:20], raw[:5], raw + b"x", raw + raw, broken, b"\0"):
        error = refused(400, [data], encoded(encoding))
        assert encoding in str(error)
    other = (zlib.compress if encoding == "gzip" else gzip.compress)(TEXT)
    refused(400, [other], encoded(encoding))


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


class Frame:
    """A stand-in for zstandard: the frame of n zero bytes is n in decimal digits and a dot."""

    class ZstdError(Exception):
        pass

    def __init__(self, *, max_window_size: int) -> None:
        assert max_window_size <= 8 * 2**20
        self.eof = False
        self.unused_data = b""

    def decompressobj(self) -> Frame:
        return self

    def stream_reader(self, raw: bytes) -> Frame:
        self._raw = raw
        return self

    def read(self, size: int) -> bytes:
        return bytes(min(size, len(self._decompress(self._raw)[0])))

    def decompress(self, raw: bytes) -> bytes:
        body, self.eof, self.unused_data = self._decompress(raw)
        assert len(body) <= LIMIT, "what was not bounded beforehand"
        return body

    def _decompress(self, raw: bytes) -> tuple[bytes, bool, bytes]:
        number, dot, rest = raw.partition(b".")
        if not number.isdigit():
            raise self.ZstdError
        return bytes(int(number)), bool(dot), rest


@pytest.fixture(params=["stand-in", "zstandard"])
def zstd(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType | None:
    """Return None for the stand-in, or the real package, which is optional."""
    if request.param == "zstandard":
        module: ModuleType = pytest.importorskip("zstandard", reason="needs zstandard: pip install 'pagewick[zstd]'")
        return module
    stand_in = ModuleType("zstandard")
    stand_in.ZstdDecompressor = Frame  # type: ignore[attr-defined]
    stand_in.ZstdError = Frame.ZstdError  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "zstandard", stand_in)
    return None


def test_zstd(zstd: ModuleType | None) -> None:
    def frame(size: int) -> bytes:
        return b"%d." % size if zstd is None else zstd.compress(bytes(size))

    assert read([frame(5000)], encoded("zstd")) == bytes(5000)
    assert len(read([frame(LIMIT)], encoded("zstd"))) == LIMIT
    refused(413, [frame(LIMIT + 1)], encoded("zstd"))
    refused(413, [frame(10**8)], encoded("zstd"))
    for data in (b"plain", frame(5000)[:-1], frame(5000) + b"x", frame(5000) * 2):
        assert "zstd" in str(refused(400, [data], encoded("zstd")))


def test_zstd_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    error = refused(415, [b"x"], encoded("zstd"))
    assert "pagewick[zstd]" in str(error) and "gzip" in str(error)
    assert body_module.ACCEPTED in error.headers["accept-encoding"]
