"""RequestReader: turns the bytes of a client into valid HTTP/1.1 requests."""

from __future__ import annotations

from typing import Any, NoReturn, Protocol

import httptools

from pagewick.server.errors import ApiError
from pagewick.server.guard.http_rules import (
    MAX_HEADERS,
    MAX_TARGET_BYTES,
    check_head,
    check_upgrade,
    not_http,
    too_large_head,
    too_long_target,
    too_many_headers,
)


class RequestSink(Protocol):
    """Receives requests in pieces. Its methods may raise ApiError, which `RequestReader.feed` raises in turn."""

    def on_head(self, head: bytes) -> None:
        """A request begins, whose request line and headers these are."""

    def on_body(self, data: bytes) -> None:
        """More of the body comes, framed as the headers say."""

    def on_request_end(self) -> None:
        """The request is complete."""


class RequestReader:
    """Parses strictly (RFC 9112, as llhttp does without leniencies) and writes each valid request anew.

    The new request has no trailers, no offer of another protocol, and a path as its target. max_header_size: bytes.
    """

    def __init__(self, sink: RequestSink, max_header_size: int) -> None:
        self._sink = sink
        self._max_header_size = max_header_size
        self.is_in_head = False
        self.is_in_body = False
        self.headers: list[tuple[bytes, bytes]] = []
        self._target = b""
        self._num_headers = 0
        self._num_header_bytes = 0
        self._num_idle_bytes = 0  # since headers were complete, or since the last byte of a body
        self._is_chunked = False
        self._is_upgrade_ignored = False
        self._error: ApiError | None = None
        self._renew_parser()

    @property
    def has_partial_head(self) -> bool:
        return self.is_in_head or (self._num_idle_bytes > 0 and not self.is_in_body)

    def feed(self, data: bytes) -> None:
        """Parse what was received. Raises ApiError for bytes that are not a valid request, and as the sink does."""
        self._num_idle_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError as error:
            raise self._error or not_http(data, error) from None
        if self._num_idle_bytes > self._max_header_size:
            raise too_large_head(self._max_header_size)

    def _parse(self, data: bytes) -> None:
        while data:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                # RFC 9110 lets a server ignore such an offer, and Java's client makes one with every request. llhttp
                # would take the body for HTTP/2, so a new parser gets the request once more, without the offer.
                self._is_upgrade_ignored = False
                data = self._head(self._target) + data[upgrade.args[0] :]
                self._renew_parser()

    def _renew_parser(self) -> None:
        self._parser: Any = httptools.HttpRequestParser(self)
        # A client may send more after its last request, which nothing looks at.
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _head(self, target: bytes) -> bytes:
        """Return the request line and headers, without an offer of another protocol."""
        version = self._parser.get_http_version().encode("ascii")
        lines = [b"%s %s HTTP/%s" % (self._parser.get_method(), target, version)]
        lines += [b"%s: %s" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _stop(self, error: ApiError) -> NoReturn:
        """Raise an error through the parser, which wraps whatever its callbacks raise."""
        self._error = error
        raise error

    # Callbacks of the parser

    def on_message_begin(self) -> None:
        self.is_in_head = True
        self._target, self.headers = b"", []
        self._num_headers = self._num_header_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._target += url
        if len(self._target) > MAX_TARGET_BYTES:
            self._stop(too_long_target())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_headers += 1
        self._num_header_bytes += len(name) + len(value) + len(": \r\n")
        if self._num_headers > MAX_HEADERS:
            self._stop(too_many_headers())
        if self._num_header_bytes + len(self._target) > self._max_header_size:
            self._stop(too_large_head(self._max_header_size))
        # Trailers after a body are dropped: they were not there when the request was let in.
        if self.is_in_head:
            self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._num_idle_bytes = 0
        try:
            if self._parser.should_upgrade():
                check_upgrade(self._parser.get_method(), self.headers)
                self._is_upgrade_ignored = True
                return
            target = check_head(self._target, self._parser.get_http_version(), self.headers)
            self.is_in_head, self.is_in_body = False, True
            self._is_chunked = any(name == b"transfer-encoding" for name, _ in self.headers)
            self._sink.on_head(self._head(target))
        except ApiError as error:
            self._stop(error)

    def on_body(self, body: bytes) -> None:
        self._num_idle_bytes = 0
        try:
            self._sink.on_body(b"%x\r\n%b\r\n" % (len(body), body) if self._is_chunked else body)
        except ApiError as error:
            self._stop(error)

    def on_message_complete(self) -> None:
        if self._is_upgrade_ignored:
            return
        self._num_idle_bytes = 0
        self.is_in_body = False
        if self._is_chunked:
            self._sink.on_body(b"0\r\n\r\n")
        self._sink.on_request_end()
