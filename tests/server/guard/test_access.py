"""Access control: every kind of request for every path, with every key, host and origin."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagewick.errors import ConfigError
from pagewick.server.guard.access import Access, ResponseHeaders, check_exposure, is_loopback
from pagewick.server.guard.api_keys import ApiKeys
from pagewick.server.settings import ServerSettings
from tests.server.raw_http import RawServer

KEY = "correct-horse-battery"
OTHER = "another-key-of-ours"
LOCAL = [("host", "localhost:8000")]
Header = tuple[str, str]


async def let_in(scope: Scope, receive: Receive, send: Send) -> None:
    """Responds with 200 and the id of the key to every request that reaches it."""
    await JSONResponse({"key": scope["pagewick.key"]}, headers={"vary": "accept"})(scope, receive, send)


def guarded(app: ASGIApp = let_in, **fields: Any) -> ASGIApp:
    settings = ServerSettings(served_model_name=("m",), **fields)
    return ResponseHeaders(Access(app, settings, ApiKeys(settings, {})), settings)


class Asked:
    """A response: status, headers (the last of each name), JSON; has_read_body: whether the request's body was read."""

    def __init__(self, app: ASGIApp, method: str, path: str, headers: list[Header], **changes: Any) -> None:
        self.messages: list[Message] = []
        self.has_read_body = False
        raw = [(name.encode(), value.encode("latin-1")) for name, value in headers]
        scope = {
            "type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b"",
            "root_path": "", "scheme": "http", "http_version": "1.1", "headers": raw, "server": ("127.0.0.1", 8000),
            **changes,
        }  # fmt: skip
        asyncio.run(app(scope, self._receive, self._send))  # type: ignore[arg-type]
        start = self.messages[0]
        self.status = start["status"]
        self.headers = {name.decode(): value.decode("latin-1") for name, value in start["headers"]}
        self.header_lines = [name.decode() for name, _ in start["headers"]]
        body = b"".join(message.get("body", b"") for message in self.messages[1:])
        self.json = json.loads(body) if body else None

    @property
    def code(self) -> str:
        error = self.json["error"]
        assert sorted(error) == ["code", "message", "param", "type"] and error["type"] == "invalid_request_error"
        return str(error["code"])

    async def _receive(self) -> Message:
        self.has_read_body = True
        return {"type": "http.request", "body": b"", "more_body": False}

    async def _send(self, message: Message) -> None:
        self.messages.append(message)


def ask(app: ASGIApp, path: str = "/v1/models", *headers: Header, method: str = "GET", **changes: Any) -> Asked:
    return Asked(app, method, path, [*LOCAL, *headers], **changes)


def bearer(key: str) -> Header:
    return ("authorization", f"Bearer {key}")


PATHS = [
    "/v1/models", "/v1/chat/completions", "/metrics", "/tokenize", "/v1/", "/nothing", "/openapi.json",
    # Beside what is public, but not it.
    "/health/", "//health", "/health//live", "/health/..", "/health/../v1/models", "/v1/../health", "/./health",
    "/Health", "/health;x", "/health%2flive", "/health\x00", "/health?", "/health/other", "/page", "/page/",
    "/page/../../access.py", "/page//index.html", "/page/nothing.js", "/favicon.ico/", "//", "/%2e", "",
]  # fmt: skip
METHODS = ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "TRACE", "get", "HEALTH"]


@pytest.mark.parametrize("path", PATHS)
def test_without_a_key_nothing_else_is_public(path: str) -> None:
    app = guarded(api_key=(KEY,))
    for method in METHODS:
        answer = ask(app, path, method=method)
        assert (answer.status, answer.code) == (401, "invalid_api_key"), method
        assert answer.headers["www-authenticate"] == "Bearer"
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert not answer.has_read_body
        assert ask(app, path, bearer(KEY), method=method).status == 200


def test_public_paths_need_no_key() -> None:
    app = guarded(api_key=(KEY,))
    pages = ("/", "/favicon.ico", "/page/main.js", "/page/style.css", "/docs", "/page/docs/docs.js")
    for path in ("/health", "/health/live", "/health/ready", *pages):
        for method in METHODS:
            assert ask(app, path, method=method).status == (200 if method in ("GET", "HEAD") else 401), (path, method)
        assert ask(app, path, bearer("wrong-key-wrong")).status == 200
        # The same path to the router, but escaped on its way here.
        escaped = path.replace("e", "%65").encode()
        assert ask(app, path, raw_path=escaped).status == (200 if escaped == path.encode() else 401)
    of_chat, of_docs = ("/", "/page/main.js"), ("/docs", "/page/docs/docs.js")
    for ui, docs in ((True, True), (True, False), (False, True), (False, False)):
        app = guarded(api_key=(KEY,), ui=ui, docs=docs)
        assert {ask(app, path).status for path in of_chat} == {200 if ui else 401}
        assert {ask(app, path).status for path in of_docs} == {200 if docs else 401}
        assert {ask(app, path).status for path in ("/favicon.ico", "/page/theme.js")} == {200 if ui or docs else 401}
        assert ask(app, "/health").status == 200


GOOD = [
    [bearer(KEY)],
    [("authorization", f"bearer {KEY}")],
    [("authorization", f"BEARER   {KEY}  ")],
    [("x-api-key", KEY)],
    [("x-api-key", KEY), bearer(KEY)],
    [bearer(OTHER)],
]
BAD = [
    [],
    [bearer("wrong-key-wrong")],
    [bearer(KEY + "x")],
    [bearer(KEY[:-1])],
    [bearer("")],
    [("authorization", "Bearer")],
    [("authorization", "")],
    [("authorization", KEY)],
    [("authorization", f"Basic {KEY}")],
    [("authorization", f"Bearer{KEY}")],
    [("authorization", f"Bearer {KEY}, Bearer {KEY}")],
    [("authorization", f"Bearer {KEY} x")],
    [("authorization", f"Token Bearer {KEY}")],
    [bearer("schlüssel-schlüssel")],
    [("x-api-key", "")],
    [("x-api-key", f"Bearer {KEY}")],
    [bearer(KEY), bearer(KEY)],
    [("x-api-key", KEY), ("x-api-key", KEY)],
    [bearer(KEY), bearer("wrong-key-wrong")],
    [bearer(KEY), ("x-api-key", "wrong-key-wrong")],
    [bearer("wrong-key-wrong"), ("x-api-key", KEY)],
    [bearer(KEY), ("x-api-key", OTHER)],
    [("authorization", f"Basic {KEY}"), ("x-api-key", KEY)],
    [("api-key", KEY)],
    [("cookie", f"api_key={KEY}")],
    [("x-forwarded-authorization", f"Bearer {KEY}")],
    # Headers that make other servers trust a proxy, or take the request for another one.
    [("x-forwarded-for", "127.0.0.1"), ("x-forwarded-host", "localhost")],
    [("x-http-method-override", "GET"), ("x-original-url", "/health"), ("x-rewrite-url", "/health")],
]


@pytest.mark.parametrize("headers", GOOD, ids=str)
def test_requests_with_a_key_are_let_in(headers: list[Header]) -> None:
    app = guarded(api_key=(KEY, OTHER))
    for path, method in itertools.product(PATHS, METHODS):
        assert ask(app, path, *headers, method=method).status == 200


@pytest.mark.parametrize("headers", BAD, ids=str)
def test_requests_without_a_key_are_refused(headers: list[Header]) -> None:
    app = guarded(api_key=(KEY, OTHER))
    for path, method in itertools.product(["/v1/models", "/metrics", "//health", ""], METHODS):
        answer = ask(app, path, *headers, method=method)
        assert (answer.status, answer.code) == (401, "invalid_api_key")
        assert KEY not in str(answer.json) and "wrong-key" not in str(answer.json)
    assert ask(app, "/v1/models", *headers, query_string=f"api_key={KEY}&key={KEY}".encode()).status == 401


def test_the_id_of_the_key_is_passed_on() -> None:
    app = guarded(api_key=(KEY, OTHER))
    ids = [ask(app, "/v1/models", bearer(key)).json["key"] for key in (KEY, OTHER, KEY)]
    assert ids[0] == ids[2] != ids[1] and KEY not in str(ids)
    assert ask(app, "/health").json["key"] == ""
    assert ask(guarded(), "/v1/models").json["key"] == ""
    assert ask(guarded(), "/v1/models", bearer(KEY)).json["key"] == ""


def test_websockets_are_closed_and_the_lifespan_passes() -> None:
    sent: list[Message] = []
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError

    for kind in ("websocket", "lifespan"):
        asyncio.run(guarded(app)({"type": kind}, receive, send))  # type: ignore[arg-type]
    assert [message["type"] for message in sent] == ["websocket.close"] and seen == ["lifespan"]


# Hosts

LOOPBACK_HOSTS = [
    "localhost",
    "LOCALHOST:1",
    "localhost.",
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.1.2.3:5",
    "[::1]",
    "[::1]:80",
]
FOREIGN_HOSTS = [
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evil-localhost",
    "192.168.1.5", "0.0.0.0:8000", "[::]", "[fe80::1]", "2130706433", "127.1", "0x7f000001", "1", "xn--lcalhost-54a",
]  # fmt: skip
BROKEN_HOSTS = [
    "", " ", "localhost:", "localhost:x", "localhost:99999", "localhost, localhost", "localhost/health", "a@localhost",
    "http://localhost", "::1", "[::1", "localhost#", "local host", "lücalhost", "localhost:80:80", "[localhost]",
]  # fmt: skip


def hosted(app: ASGIApp, *values: str, **changes: Any) -> Asked:
    return Asked(app, "GET", "/v1/models", [("host", value) for value in values], **changes)


@pytest.mark.parametrize("bound", ["127.0.0.1", "localhost", "::1", "127.0.0.5"])
def test_on_loopback_only_its_own_names_are_allowed(bound: str) -> None:
    app = guarded(host=bound)
    assert [hosted(app, host).status for host in LOOPBACK_HOSTS] == [200] * len(LOOPBACK_HOSTS)
    for host in FOREIGN_HOSTS:
        answer = hosted(app, host)
        assert (answer.status, answer.code) == (403, "host_not_allowed"), host
        assert f"--allowed-hosts {host.partition(':')[0]}" in answer.json["error"]["message"] or "[" in host
    for host in BROKEN_HOSTS:
        answer = hosted(app, host)
        assert (answer.status, answer.code) == (400, "invalid_host"), host


def test_there_is_one_host() -> None:
    for app in (guarded(), guarded(host="0.0.0.0", insecure=True), guarded(allowed_hosts=("*",))):
        assert [hosted(app).status, hosted(app, "localhost", "localhost").status] == [400, 400]
        assert hosted(app, http_version="1.0").status == 200
        assert hosted(app, "localhost", "evil.example", http_version="1.0").status == 400


def test_further_hosts() -> None:
    app = guarded(allowed_hosts=("Example.COM", "other.example:8443", "10.0.0.7"))
    allowed = ["example.com", "EXAMPLE.com:99", "example.com.", "other.example:8443", "10.0.0.7:8000", *LOOPBACK_HOSTS]
    assert [hosted(app, host).status for host in allowed] == [200] * len(allowed)
    for host in ("other.example", "other.example:8000", "sub.example.com", "example.com.evil", *FOREIGN_HOSTS):
        assert hosted(app, host).status == 403
    everyone = guarded(allowed_hosts=("*",))
    assert [hosted(everyone, host).status for host in FOREIGN_HOSTS] == [200] * len(FOREIGN_HOSTS)
    for wrong in ("https://example.com", "*.example.com", "example.com/", ""):
        with pytest.raises(ConfigError, match="--allowed-hosts"):
            guarded(allowed_hosts=(wrong,))


def test_elsewhere_hosts_are_looked_at_only_if_some_are_named() -> None:
    assert hosted(guarded(host="0.0.0.0", insecure=True), "evil.example").status == 200
    app = guarded(host="0.0.0.0", insecure=True, allowed_hosts=("good.example",))
    # The last one is how a probe asks: for the address that it connects to.
    hosts = {"good.example": 200, "evil.example": 403, "10.0.0.9:8000": 403, "10.0.0.8:8000": 200}
    for host, status in hosts.items():
        assert hosted(app, host, server=("10.0.0.8", 8000)).status == status


def test_a_probe_may_write_the_address_in_another_way() -> None:
    """A socket for IPv6 has ::ffff:10.0.0.8 for a client that connects to 10.0.0.8."""
    app = guarded(host="::", insecure=True, allowed_hosts=("good.example",))
    for address, host, status in [
        ("::ffff:10.0.0.8", "10.0.0.8:8000", 200),
        ("::ffff:10.0.0.8", "[::ffff:10.0.0.8]:8000", 200),
        ("::ffff:10.0.0.8", "[::FFFF:a00:8]", 200),
        ("10.0.0.8", "[::ffff:10.0.0.8]", 200),
        ("2001:db8::8", "[2001:DB8:0::8]:8000", 200),
        ("::ffff:10.0.0.8", "10.0.0.9", 403),
        ("::ffff:10.0.0.8", "[::10.0.0.8]", 403),
        ("::ffff:10.0.0.8", "evil.example", 403),
        ("/run/pagewick.sock", "evil.example", 403),
    ]:
        assert hosted(app, host, server=(address, 8000)).status == status, (address, host)


def test_the_key_does_not_replace_the_host() -> None:
    app = guarded(api_key=(KEY,))
    assert Asked(app, "GET", "/v1/models", [("host", "evil.example"), bearer(KEY)]).status == 403
    assert Asked(app, "GET", "/health", [("host", "evil.example")]).status == 403


# Origins

PAGE = "https://page.example"
FOREIGN_ORIGINS = [
    "https://evil.example", "http://page.example", "https://page.example:8443", "https://page.example.evil", "null", "",
    "https://sub.page.example", "https://page.example/", "https://page.example, https://page.example", "file://",
    "chrome-extension://localhost:8000", "http://localhost:9000", "http://localhost", "http://a@localhost:8000",
]  # fmt: skip


@pytest.mark.parametrize("origin", FOREIGN_ORIGINS)
def test_pages_of_others_change_nothing_and_read_nothing(origin: str) -> None:
    for app in (guarded(), guarded(allowed_origins=(PAGE,)), guarded(api_key=(KEY,))):
        headers = [("origin", origin), bearer(KEY)]
        for method in ("POST", "PUT", "DELETE", "PATCH", "post"):
            answer = ask(app, "/v1/chat/completions", *headers, method=method)
            assert (answer.status, answer.code) == (403, "origin_not_allowed"), method
            assert not answer.has_read_body
            assert not any(name.startswith("access-control") for name in answer.headers)
        preflight = ask(app, "/v1/models", *headers, ("access-control-request-method", "POST"), method="OPTIONS")
        assert (preflight.status, preflight.code) == (403, "origin_not_allowed")
        readable = ask(app, "/v1/models", *headers)
        assert readable.status == 200 and "access-control-allow-origin" not in readable.headers


@pytest.mark.parametrize(
    ("origin", "host"),
    [
        ("http://localhost:8000", "localhost:8000"),
        ("http://LOCALHOST:8000", "localhost:8000"),
        ("http://127.0.0.1", "127.0.0.1:80"),
        ("http://127.0.0.1:80", "127.0.0.1"),
        # Behind a proxy that speaks TLS.
        ("https://localhost", "localhost"),
        ("http://[::1]:8000", "[::1]:8000"),
    ],
)
def test_the_page_of_the_server_itself_may_everything(origin: str, host: str) -> None:
    answer = Asked(guarded(), "POST", "/v1/chat/completions", [("host", host), ("origin", origin)])
    assert answer.status == 200
    assert "access-control-allow-origin" not in answer.headers and answer.headers["vary"] == "accept"


def test_two_origins_are_none() -> None:
    app = guarded(allowed_origins=(PAGE,))
    assert ask(app, "/v1/models", ("origin", PAGE), ("origin", PAGE), method="POST").status == 403
    assert ask(guarded(allowed_origins=("*",)), "/", ("origin", PAGE), ("origin", PAGE), method="POST").status == 403


@pytest.mark.parametrize("fields", [{}, {"api_key": (KEY,)}], ids=["open", "keys"])
def test_an_allowed_page(fields: dict[str, Any]) -> None:
    app = guarded(allowed_origins=("https://Page.example:443", "http://localhost:3000"), **fields)
    for method in ("GET", "POST"):
        answer = ask(app, "/v1/models", ("origin", PAGE), bearer(KEY), method=method)
        assert answer.status == 200
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert "access-control-allow-credentials" not in answer.headers
        assert {"x-request-id", "x-pagewick-ignored"} <= {
            name.strip() for name in answer.headers["access-control-expose-headers"].split(",")
        }
        assert answer.header_lines.count("vary") == 2
    # Errors can be read, too, and caches do not give an answer to one page to another.
    assert ask(app, "/v1/models", ("origin", "http://localhost:3000"), bearer("wrong")).headers[
        "access-control-allow-origin"
    ] == "http://localhost:3000"  # fmt: skip
    assert ask(app, "/v1/models", bearer(KEY)).headers["vary"] == "origin"


@pytest.mark.parametrize("fields", [{}, {"api_key": (KEY,)}], ids=["open", "keys"])
def test_preflights_need_no_key(fields: dict[str, Any]) -> None:
    app = guarded(allowed_origins=(PAGE,), **fields)
    wanted = [("origin", PAGE), ("access-control-request-method", "POST")]
    for path in ("/v1/chat/completions", "/nothing", "/health"):
        names = ("access-control-request-headers", "authorization, content-type,x-stainless-os")
        answer = ask(app, path, *wanted, names, method="OPTIONS")
        assert (answer.status, answer.json) == (204, None)
        assert answer.headers["access-control-allow-origin"] == PAGE
        assert answer.headers["access-control-allow-headers"] == names[1]
        assert "POST" in answer.headers["access-control-allow-methods"]
    strange = ask(app, "/", *wanted, ("access-control-request-headers", "a\r\nset-cookie: x"), method="OPTIONS")
    assert strange.status == 204 and "access-control-allow-headers" not in strange.headers
    # OPTIONS that is no preflight is a request like others.
    assert ask(app, "/v1/models", ("origin", PAGE), method="OPTIONS").status == (401 if fields else 200)


def test_any_page() -> None:
    app = guarded(allowed_origins=("*",))
    answer = ask(app, "/v1/models", ("origin", "https://any-page.example"), method="POST")
    assert (answer.status, answer.headers["access-control-allow-origin"]) == (200, "*")
    assert "access-control-allow-credentials" not in answer.headers
    assert ask(app, "/v1/models", ("origin", "null"), method="POST").status == 403


@pytest.mark.parametrize(
    "origin", ["page.example", "https://page.example/", "https://*.example", "null", "", "https://"]
)
def test_wrong_origins_are_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="--allowed-origins"):
        guarded(allowed_origins=(origin,))


# The start


def test_is_loopback() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "localhost", "LOCALHOST", "::1", "[::1]"]))
    assert not any(map(is_loopback, ["0.0.0.0", "::", "", "192.168.0.1", "127.0.0.1.evil", "localhost.evil", "::2"]))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "server.example", ""])
def test_a_server_for_others_needs_a_key(host: str) -> None:
    def check(**fields: Any) -> None:
        settings = ServerSettings(served_model_name=("m",), host=host, **fields)
        check_exposure(settings, ApiKeys(settings, {}))

    with pytest.raises(ConfigError) as caught:
        check()
    assert all(word in str(caught.value) for word in ("--api-key-file", "127.0.0.1", "--insecure"))
    check(insecure=True)
    check(api_key=(KEY,))
    settings = ServerSettings(served_model_name=("m",))
    check_exposure(settings, ApiKeys(settings, {}))


# On the wire


def test_a_real_server_agrees() -> None:
    async def secret(request: Request) -> JSONResponse:
        return JSONResponse("secret")

    routes = [Route(path, secret, methods=["GET", "POST"]) for path in ("/health", "/v1/models", "/metrics")]
    settings = ServerSettings(served_model_name=("m",), api_key=(KEY,))
    app = guarded(Starlette(routes=routes), api_key=(KEY,))
    with RawServer(app, settings) as server:
        for target in ("/v1/models", "/metrics", "//metrics", "/health/../metrics", "/%6detrics", "/metrics?x=/health",
                       "/v1/models/", "/metrics;/health", "http://localhost/metrics", "/health%2f..%2fmetrics",
                       "/%68ealth", "/health/%2e%2e/metrics", "/health%3f"):  # fmt: skip
            for more in ("", "Authorization: Bearer wrong-key-wrong\r\n", "X-Original-URL: /health\r\n"):
                request = f"GET {target} HTTP/1.1\r\nHost: localhost\r\n{more}Connection: close\r\n\r\n"
                answer = server.talk(request.encode())
                assert answer.status == 401 and b"secret" not in answer.body, target
                assert "server" not in answer.headers
        # A Host header that reads like a path once it is part of a URL.
        for host in ("localhost/health?", "localhost/health#", "localhost:8000/health", "health", "localhost\\health"):
            request = f"GET /metrics HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
            answer = server.talk(request.encode())
            assert answer.status in (400, 403) and b"secret" not in answer.body
        request = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {KEY}\r\nConnection: close\r\n\r\n"
        assert server.talk(request.encode()).body == b'"secret"'
