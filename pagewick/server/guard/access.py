"""Access control: by the host that is asked for, the web page that asks, and the API key.

Decisions are made on the request as it came, never on a URL put together again, and anything not allowed is refused.
ResponseHeaders goes around everything, errors included; Access comes before every route.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Iterator

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewick.errors import ConfigError
from pagewick.server.errors import ApiError
from pagewick.server.guard.api_keys import ApiKeys
from pagewick.server.page_routes import page_paths
from pagewick.server.settings import ServerSettings

# Paths that need no key, beside the pages. /metrics needs one: it tells how the server is used, and Prometheus can send
# a key. /openapi.json needs one, too: it tells strangers the version; the page /docs, which shows it, asks for the key.
PUBLIC_PATHS = frozenset({"/health", "/health/live", "/health/ready"})

_READING = frozenset({"GET", "HEAD"})
_HARMLESS = _READING | {"OPTIONS"}
_DEFAULT_PORTS = {"http": 80, "https": 443}
_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#@]+)")
_HEADER_NAMES = re.compile(rb"[\w-]+(?: *, *[\w-]+)*")
_BEARER = re.compile(rb"bearer +(\S+) *", re.IGNORECASE)

_Authority = tuple[str, int | None]


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    name = host.strip("[]").rstrip(".").lower()
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return name == "localhost"


def check_exposure(settings: ServerSettings, keys: ApiKeys) -> None:
    """Raises ConfigError for a server that anybody in the network could use."""
    if not (is_loopback(settings.host) or keys or settings.insecure):
        raise ConfigError(
            f"--host {settings.host} lets others reach the server, and it has no key. Give it one (--api-key-file or "
            "PAGEWICK_API_KEY), listen on 127.0.0.1 behind a proxy that authenticates clients, or set --insecure"
        )


def open_paths(settings: ServerSettings) -> frozenset[str]:
    """Return the paths that need no key, for GET and HEAD."""
    return PUBLIC_PATHS | page_paths(settings)


class Access:
    """Lets a request through, with its key's id as scope["pagewick.key"] ("" if there are no keys), or refuses it."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, keys: ApiKeys) -> None:
        """Raises ConfigError for invalid hosts and origins."""
        self._app = app
        self._keys = keys
        self._hosts = Hosts(settings)
        self._origins = Origins(settings)
        self._public = open_paths(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        try:
            response = self._check(scope)
        except ApiError as error:
            response = error.response(scope)
        await (response or self._app)(scope, receive, send)

    def _check(self, scope: Scope) -> Response | None:
        """Return the response to a preflight; None for a request that may pass. Raises ApiError for any other."""
        host = self._hosts.check(scope)
        origin = _single(scope, b"origin")
        if origin is not None and not self._origins.allows(origin) and not _is_same_origin(origin, host):
            if scope["method"] not in _HARMLESS or _is_preflight(scope):
                raise _origin_refused(origin)
        elif origin is not None and _is_preflight(scope):
            return _preflight_response(scope)
        scope["pagewick.key"] = self._key_id(scope) if self._keys else ""
        return None

    def _key_id(self, scope: Scope) -> str:
        if self._is_public(scope):
            return ""
        credentials = list(_credentials(scope))
        if not credentials:
            raise _no_key(
                "Incorrect API key provided: there is none; send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'"
            )
        # With two different keys, a proxy in between might have checked the other one.
        if any(not hmac.compare_digest(credentials[0], other) for other in credentials[1:]):
            raise _no_key("Incorrect API key provided: there are two different ones; send one")
        key_id = self._keys.check(credentials[0])
        if key_id is None:
            # LiteLLM tells this error from other bad requests by these words, which are OpenAI's.
            raise _no_key("Incorrect API key provided")
        return key_id

    def _is_public(self, scope: Scope) -> bool:
        path: str = scope["path"]
        # A path with escapes is not public, so that the router sees exactly what is compared here.
        is_plain = scope.get("raw_path") in (None, path.encode())
        return scope["method"] in _READING and path in self._public and is_plain


class ResponseHeaders:
    """Adds headers for browsers to every response: which pages may read it, and that its type must not be sniffed."""

    def __init__(self, app: ASGIApp, settings: ServerSettings) -> None:
        self._app = app
        self._origins = Origins(settings)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        added = [(b"x-content-type-options", b"nosniff"), *self._origins.headers(scope)]
        names = {name for name, _ in added}

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = [
                    pair for pair in message.get("headers", ()) if pair[0].lower() not in names or pair[0] == b"vary"
                ]
                message = {**message, "headers": [*kept, *added]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


class Hosts:
    """The names under which the server answers.

    On loopback these are the loopback's own and --allowed-hosts, because a web page whose name was made to point here
    ("DNS rebinding") asks under its own name. On other addresses it is any name, unless --allowed-hosts lists some.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._allowed = frozenset(
            _authority_of("--allowed-hosts", name) for name in settings.allowed_hosts if name != "*"
        )
        self._is_any = "*" in settings.allowed_hosts or not (settings.allowed_hosts or is_loopback(settings.host))

    def check(self, scope: Scope) -> _Authority | None:
        """Return the requested name and port; None if HTTP/1.0 leaves them open. Raises ApiError if not allowed."""
        lines = _values(scope, b"host")
        if not lines and scope.get("http_version") == "1.0":
            return None  # Probes of load balancers do that; no browser does.
        authority = _parse_authority(lines[0]) if len(lines) == 1 else None
        if authority is None:
            raise ApiError(400, "there must be one Host header, with a name or address", code="invalid_host")
        name, port = authority
        if self._is_any or authority in self._allowed or (name, None) in self._allowed or is_loopback(name):
            return authority
        # Probes ask for the address itself, which is never the name of a web page.
        if scope.get("server") and _is_same_address(name.strip("[]"), scope["server"][0]):
            return authority
        shown = name if port is None else f"{name}:{port}"
        message = f"requests for the host {shown} are not answered; --allowed-hosts {name} would allow them"
        raise ApiError(403, message, code="host_not_allowed")


def _is_same_address(one: str, other: str) -> bool:
    """Return whether two texts are the same IP address. A socket for IPv6 shows 10.0.0.8 as ::ffff:10.0.0.8."""
    try:
        return _plain_address(one) == _plain_address(other)
    except ValueError:
        return False


def _plain_address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(text)
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address


class Origins:
    """The web pages, by origin, that may use the API from a browser, beside the server's own."""

    def __init__(self, settings: ServerSettings) -> None:
        for origin in settings.allowed_origins:
            if origin != "*" and _parse_origin(origin) is None:
                raise ConfigError(
                    f"--allowed-origins must be like https://example.com or http://localhost:3000, or *; got {origin!r}"
                )
        self._is_any = "*" in settings.allowed_origins
        self._allowed = frozenset(_parse_origin(origin) for origin in settings.allowed_origins if origin != "*")

    def allows(self, origin: str) -> bool:
        parsed = _parse_origin(origin)
        # Pages without an origin, such as files and sandboxes, send "null"; it says nothing about who they are.
        return parsed is not None and (self._is_any or parsed in self._allowed)

    def headers(self, scope: Scope) -> Iterator[tuple[bytes, bytes]]:
        """Yield the headers that let an allowed page read a response; without credentials, as there are no cookies."""
        if self._allowed and not self._is_any:
            yield b"vary", b"origin"
        origins = _values(scope, b"origin")
        if len(origins) == 1 and self.allows(origins[0]):
            yield b"access-control-allow-origin", b"*" if self._is_any else origins[0].encode("latin-1")
            yield b"access-control-expose-headers", b"x-request-id, x-pagewick-ignored, retry-after"


def _is_preflight(scope: Scope) -> bool:
    return scope["method"] == "OPTIONS" and bool(_values(scope, b"access-control-request-method"))


def _preflight_response(scope: Scope) -> Response:
    headers = {"access-control-allow-methods": "GET, HEAD, POST, DELETE", "access-control-max-age": "600"}
    asked = b", ".join(value for name, value in scope["headers"] if name == b"access-control-request-headers")
    if _HEADER_NAMES.fullmatch(asked):
        headers["access-control-allow-headers"] = asked.decode("ascii")
    return Response(status_code=204, headers={**headers, "vary": "access-control-request-headers"})


def _origin_refused(origin: str) -> ApiError:
    shown = re.sub(r"[^!-~]", "?", origin)[:128]
    message = f"web pages of {shown} may not use this server; --allowed-origins {shown} would allow them"
    return ApiError(403, message, code="origin_not_allowed")


def _is_same_origin(origin: str, host: _Authority | None) -> bool:
    """Return whether a page of the server itself asks. The scheme may differ, since a proxy in front may speak TLS."""
    parsed = _parse_origin(origin)
    if parsed is None or host is None or parsed[0] not in _DEFAULT_PORTS:
        return False
    scheme, name, port = parsed
    return (name, port) == (host[0], host[1] or _DEFAULT_PORTS[scheme])


def _credentials(scope: Scope) -> Iterator[bytes]:
    """Yield the keys in a request's headers. Raises ApiError for a header that is there twice or has another form."""
    for name in (b"authorization", b"x-api-key"):
        values = [value for key, value in scope["headers"] if key == name]
        if len(values) > 1:
            raise _no_key(f"the header {name.decode()} is there {len(values)} times; send it once")
        for value in values:
            if name == b"x-api-key":
                yield value
            elif match := _BEARER.fullmatch(value):
                yield match[1]
            else:
                raise _no_key("the Authorization header must be 'Bearer KEY'")


def _no_key(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for key, value in scope["headers"] if key == name]


def _single(scope: Scope, name: bytes) -> str | None:
    """Return a header's value. Several are joined into one, which equals nothing that it is compared with."""
    values = _values(scope, name)
    return ", ".join(values) if values else None


def _parse_authority(text: str) -> _Authority | None:
    match = _AUTHORITY.fullmatch(text.lower())
    if match is None or (match[2] and int(match[2]) > 65535):
        return None
    return match[1].rstrip(".") or ".", int(match[2]) if match[2] else None


def _authority_of(flag: str, text: str) -> _Authority:
    authority = _parse_authority(text)
    if authority is None:
        raise ConfigError(f"{flag} must be a host name like example.com or example.com:8443, or *; got {text!r}")
    return authority


def _parse_origin(text: str) -> tuple[str, str, int | None] | None:
    """Return scheme, name and port, which may be the scheme's default; None if the text is not an origin."""
    match = _ORIGIN.fullmatch(text.lower())
    authority = _parse_authority(match[2]) if match else None
    if match is None or authority is None:
        return None
    return match[1], authority[0], authority[1] or _DEFAULT_PORTS.get(match[1])
