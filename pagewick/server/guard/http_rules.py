"""Rules for requests beyond those that llhttp enforces itself, and the responses to requests that break them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from http import HTTPStatus

import msgspec

from pagewick.server.errors import ApiError

MAX_HEADERS = 100
MAX_TARGET_BYTES = 8192

Headers = Sequence[tuple[bytes, bytes]]

_TARGET = re.compile(rb"[!-~]+")
_ABSOLUTE_TARGET = re.compile(rb"http://([^/?#@]+)(?=[/?]|$)", re.IGNORECASE)


def check_head(target: bytes, version: str, headers: Headers) -> bytes:
    """Return the target as a path with its query.

    Names in headers are lower-case. Raises ApiError for a request that two servers in a row could read in two ways.
    """
    if version not in ("1.0", "1.1"):
        raise ApiError(505, "this server speaks HTTP/1.1", code="http_version_not_supported")
    codings = [value.strip().lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        raise ApiError(400, "HTTP/1.0 has no transfer-encoding", code="invalid_http")
    if codings and codings != [b"chunked"]:
        raise ApiError(501, "the only transfer-encoding is chunked", code="transfer_encoding_not_supported")
    if not _TARGET.fullmatch(target):
        raise ApiError(400, "the request's target has characters that are not ASCII", code="invalid_http")
    if b"#" in target:
        raise ApiError(400, "the request's target has a fragment, which is for the client only", code="invalid_http")
    return target if target.startswith(b"/") else _path_of_absolute(target, headers)


def check_upgrade(method: bytes, headers: Headers) -> None:
    """Raises ApiError unless a request that asks for another protocol can be answered as if it did not."""
    if method == b"CONNECT":
        raise ApiError(400, "this server is no proxy", code="connect_not_supported")
    if any(b"websocket" in value.lower() for name, value in headers if name == b"upgrade"):
        message = 'there are no WebSockets here; "stream": true sends tokens as server-sent events'
        raise ApiError(400, message, code="websocket_not_supported")


def too_long_target() -> ApiError:
    return ApiError(414, f"the request's path is longer than {MAX_TARGET_BYTES} bytes", code="uri_too_long")


def too_many_headers() -> ApiError:
    return ApiError(431, f"the request has more than {MAX_HEADERS} headers", code="request_headers_too_large")


def too_large_head(limit: int) -> ApiError:
    message = f"the request's headers are larger than {limit} bytes (--max-header-size)"
    return ApiError(431, message, code="request_headers_too_large")


def too_many_connections(limit: int) -> ApiError:
    message = f"all {limit} connections are in use; try again in a moment"
    headers = {"retry-after": "1"}
    return ApiError(503, message, type="service_unavailable_error", code="too_many_connections", headers=headers)


def not_http(data: bytes, error: Exception) -> ApiError:
    """Return the error for bytes that the parser refused."""
    if data.startswith(b"\x16\x03"):
        message = "this port speaks plain HTTP: use http:// in place of https://, or put a proxy for TLS in front"
    else:
        message = f"this is not HTTP/1.1: {str(error)[:100]}"
    return ApiError(400, message, code="invalid_http")


def response_bytes(error: ApiError, *headers: tuple[bytes, bytes]) -> bytes:
    """Return a whole response, with further headers, after which the connection is closed."""
    body = msgspec.json.encode(error.body)
    own = {
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-content-type-options": "nosniff",
        "x-request-id": uuid.uuid4().hex,
        **error.headers,
    }
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n".encode()]
    lines += [b"%s: %s\r\n" % pair for pair in headers]
    lines += [f"{name}: {value}\r\n".encode("latin-1") for name, value in own.items()]
    return b"".join([*lines, b"\r\n", body])


def _path_of_absolute(target: bytes, headers: Headers) -> bytes:
    """Return the path of a URL. Clients send URLs to proxies; the host in it must be that of the Host header."""
    match = _ABSOLUTE_TARGET.match(target)
    hosts = [value for name, value in headers if name == b"host"]
    if match is None or hosts != [match[1]]:
        message = "the request's target must be a path, or a URL with the Host header's host"
        raise ApiError(400, message, code="invalid_http")
    path = target[match.end() :]
    return path if path.startswith(b"/") else b"/" + path
