"""Connections on real sockets: every limit, and everything that is not quite HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace

import httpx
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from pagewick.server.errors import ApiError
from pagewick.server.guard import connections
from pagewick.server.guard.body import read_body
from pagewick.server.guard.connections import FAREWELL_S, MAX_PIPELINED, Phase
from pagewick.server.guard.http_rules import MAX_HEADERS, MAX_TARGET_BYTES, check_head
from pagewick.server.settings import ServerSettings
from tests.server.raw_http import RawServer, read_all, read_answer, until

SHORT_S = 0.2
# The event loop stands still for this long at /block, longer than the time that a client has for its headers there.
BLOCKED_S, PATIENCE_S = 1.5, 1.0
# Its limits are far above those that the tests reach.
PATIENT = ServerSettings(served_model_name=("m",), max_header_size=8192, max_body_size=2**20)
HASTY = ServerSettings(
    served_model_name=("m",),
    header_timeout=SHORT_S,
    body_timeout=SHORT_S,
    write_timeout=SHORT_S,
    keep_alive_timeout=SHORT_S,
    max_body_size=2**20,
)
GET = b"GET /echo HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"
CLOSE = b"Connection: close\r\n\r\n"


class App:
    """Echoes requests. /big sends as many bytes as the query says, and /early reads nothing.

    /block keeps the event loop for a while, and /wait ends with its client.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        self.num_started = 0
        self.num_ended = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.num_started += 1
        try:
            response = await self._answer(Request(scope, receive))
            await response(scope, receive, send)
        finally:
            self.num_ended += 1

    async def _answer(self, request: Request) -> Response:
        match request.scope["path"]:
            case "/big":
                return Response(bytes(int(request.url.query)))
            case "/early":
                return JSONResponse("early", 401)
            case "/early-close":
                return JSONResponse("early", 413, {"connection": "close"})
            case "/block":
                time.sleep(BLOCKED_S)
                return Response()
            case "/wait":
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                return Response()
            case "/endless":
                return Endless()
        try:
            body = await read_body(request, self._settings)
        except ApiError as error:
            return JSONResponse(error.body, error.status, error.headers)
        headers = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in request.scope["headers"]]
        path = request.scope["raw_path"].decode() + "?" + request.scope["query_string"].decode()
        return JSONResponse({"path": path, "headers": headers, "body": body.decode("latin-1")})


class Endless(Response):
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def wait_until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass

        gone = asyncio.create_task(wait_until_gone())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not gone.done():
            await send({"type": "http.response.body", "body": bytes(2**14), "more_body": True})
            await asyncio.sleep(0)


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def server(request: pytest.FixtureRequest) -> Iterator[RawServer]:
    with RawServer(App(PATIENT), PATIENT, is_uvloop=request.param == "uvloop") as running:
        yield running


@pytest.fixture(scope="module", params=["uvloop", "asyncio"])
def hasty(request: pytest.FixtureRequest) -> Iterator[RawServer]:
    with RawServer(App(HASTY), HASTY, is_uvloop=request.param == "uvloop") as running:
        yield running


def app_of(server: RawServer) -> App:
    assert isinstance(server.app, App)
    return server.app


def test_an_ordinary_request(server: RawServer) -> None:
    answer = server.talk(POST + b"Content-Length: 5\r\n" + CLOSE + b"hello")
    assert (answer.status, answer.headers["connection"], answer.rest) == (200, "close", b"")
    assert json.loads(answer.body)["body"] == "hello"
    assert "server" not in answer.headers


def test_a_connection_serves_a_thousand_requests(server: RawServer) -> None:
    url = "http://{}:{}".format(*server.address)
    until(lambda: server.num_connections == 0)
    with httpx.Client(limits=httpx.Limits(max_connections=1)) as client:
        for number in range(1000):
            content = b"x" * (number % 7)
            response = client.post(f"{url}/echo?{number}", content=content)
            assert response.json()["path"] == f"/echo?{number}"
            assert response.json()["body"] == content.decode()
        assert server.num_connections == 1


@pytest.mark.parametrize("size", [1, 3, 17])
def test_a_request_in_pieces(server: RawServer, size: int) -> None:
    data = POST + b"Transfer-Encoding: chunked\r\n" + CLOSE + b"3\r\nabc\r\nb;x=y\r\ndefghijklmn\r\n0\r\n\r\n"
    with server.connect() as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(data), size):
            connection.sendall(data[start : start + size])
        assert json.loads(read_answer(connection).body)["body"] == "abcdefghijklmn"


CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    "data",
    [
        # Two lengths, and lengths that are none.
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n0\r\n\r\n",
        POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc",
        POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc",
        POST + b"Content-Length: 3, 3\r\n\r\nabc",
        POST + b"Content-Length: +3\r\n\r\nabc",
        POST + b"Content-Length: 0x3\r\n\r\nabc",
        POST + b"Content-Length: -1\r\n\r\nabc",
        POST + b"Content-Length:\r\n\r\nabc",
        POST + b"Content-Length: 99999999999999999999\r\n\r\nabc",
        # Codings that a server before us might read otherwise.
        POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
        POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
        b"POST /echo HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        # Chunks.
        CHUNKED + b"zz\r\nabc\r\n0\r\n\r\n",
        CHUNKED + b"0x3\r\nabc\r\n0\r\n\r\n",
        CHUNKED + b"-3\r\nabc\r\n0\r\n\r\n",
        CHUNKED + b"3\r\nabcd\r\n0\r\n\r\n",
        CHUNKED + b"3\nabc\r\n0\r\n\r\n",
        CHUNKED + b"3 \r\nabc\r\n0\r\n\r\n",
        CHUNKED + b"fffffffffffffffff\r\nabc\r\n0\r\n\r\n",
        CHUNKED + b"3;a\nb\r\nabc\r\n0\r\n\r\n",
        CHUNKED + b"3\r\nabc\r\n0\r\nContent-Length: 5\r\n\r\n",
        # Lines.
        GET + b"X: a\r\n b\r\n\r\n",
        GET + b"X: a\r\n\tb\r\n\r\n",
        b"GET /echo HTTP/1.1\nHost: localhost\n\n",
        GET + b"X: a\nY: b\r\n\r\n",
        GET + b"X: a\rY: b\r\n\r\n",
        GET + b"\n",
        GET + b"X : a\r\n\r\n",
        GET + b": a\r\n\r\n",
        GET + b"X\r\n\r\n",
        GET + b"X: a\0b\r\n\r\n",
        GET + b"X: a\x01b\r\n\r\n",
        b"GET /echo HTTP/1.1\r\n Host: localhost\r\n\r\n",
        # Request lines.
        b"\0\0\0\0\0\0\0\0",
        b"hello\r\n\r\n",
        b"get /echo HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET\t/echo\tHTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /echo echo HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET \\echo HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET echo HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET ?x HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /echo#part HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /echo HTTP/1.2\r\nHost: localhost\r\n\r\n",
        b"GET /echo HTTP/11\r\nHost: localhost\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://evil/echo HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://localhost@evil/echo HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET http://localhost/echo HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n",
        b"GET ftp://localhost/echo HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"CONNECT localhost:443 HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_invalid_requests_are_refused(server: RawServer, data: bytes) -> None:
    answer = server.talk(data)
    assert (answer.status, answer.headers["connection"], answer.rest) == (400, "close", b"")
    assert answer.error["type"] == "invalid_request_error"
    assert server.talk(GET + CLOSE).status == 200


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", 501, "transfer_encoding_not_supported"),
        (
            POST + b"Transfer-Encoding: identity\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            501,
            "transfer_encoding_not_supported",
        ),
        (POST + b"Transfer-Encoding: xchunked\r\n\r\n", 501, "transfer_encoding_not_supported"),
        (b"GET /echo\r\n\r\n", 505, "http_version_not_supported"),
        (b"GET /echo HTTP/0.9\r\n\r\n", 505, "http_version_not_supported"),
        (b"GET /echo HTTP/2.0\r\nHost: localhost\r\n\r\n", 505, "http_version_not_supported"),
        (GET + b"Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", 400, "websocket_not_supported"),
        (GET + b"Connection: upgrade\r\nUpgrade: h2c, WebSocket\r\n\r\n", 400, "websocket_not_supported"),
        (b"GET /" + b"a" * MAX_TARGET_BYTES + b" HTTP/1.1\r\n", 414, "uri_too_long"),
        (b"GET /" + b"a" * 10**6, 414, "uri_too_long"),
        (GET + b"A: b\r\n" * MAX_HEADERS + b"\r\n", 431, "request_headers_too_large"),
        (GET + b"A: b\r\n" * 10_000 + b"\r\n", 431, "request_headers_too_large"),
        (GET + b"A: " + b"b" * 8192 + b"\r\n\r\n", 431, "request_headers_too_large"),
        (GET + b"A: " + b"b" * 10**7 + b"\r\n\r\n", 431, "request_headers_too_large"),
        (GET + b"A" * 10**7, 431, "request_headers_too_large"),
        (b"\r\n" * 5000, 431, "request_headers_too_large"),
        # Parts of a chunked body that are not data.
        (CHUNKED + b"3;" + b"x" * 10**6, 431, "request_headers_too_large"),
        (CHUNKED + b"0\r\nA: " + b"b" * 10**6, 431, "request_headers_too_large"),
        (CHUNKED + b"0\r\n" + b"A: b\r\n" * 200 + b"\r\n", 431, "request_headers_too_large"),
    ],
)
def test_requests_above_a_limit_are_refused(server: RawServer, data: bytes, status: int, code: str) -> None:
    answer = server.talk(data)
    assert (answer.status, answer.error["code"], answer.rest) == (status, code, b"")


def test_requests_just_below_a_limit_are_served(server: RawServer) -> None:
    assert server.talk(GET + b"A: b\r\n" * (MAX_HEADERS - 2) + CLOSE).status == 200
    assert server.talk(GET + b"A: " + b"b" * 8000 + b"\r\n" + CLOSE).status == 200
    target = b"/" + b"a" * (MAX_TARGET_BYTES - 1)
    assert server.talk(b"GET " + target[:8000] + b" HTTP/1.1\r\nHost: a\r\n" + CLOSE).status == 200
    assert check_head(target, "1.1", []) == target


def test_tls_on_the_plain_port(server: RawServer) -> None:
    hello = bytes.fromhex("16030100f8010000f40303") + bytes(200)
    assert "http://" in server.talk(hello).error["message"]


def test_a_url_as_target_stands_for_its_path(server: RawServer) -> None:
    for target, path in [
        (b"http://localhost/echo?a=b", "/echo?a=b"),
        (b"HTTP://localhost", "/?"),
        (b"/echo", "/echo?"),
    ]:
        answer = server.talk(b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n" + CLOSE)
        assert json.loads(answer.body)["path"] == path
    for path in (b"//evil/x", b"/v1/../metrics", b"/v1/%2e%2e/x", b"/a;b", b"/a%2fb"):
        answer = server.talk(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n" + CLOSE)
        assert json.loads(answer.body)["path"] == path.decode() + "?"


def test_trailers_are_no_headers(server: RawServer) -> None:
    answer = server.talk(
        POST
        + b"Transfer-Encoding: chunked\r\n"
        + CLOSE
        + b"1\r\nx\r\n0\r\nAuthorization: Bearer stolen\r\nHost: evil\r\n\r\n"
    )
    headers = json.loads(answer.body)["headers"]
    assert [name for name, _ in headers] == ["host", "transfer-encoding", "connection"]


@pytest.mark.parametrize("is_split", [False, True])
def test_an_offer_of_http_2_is_ignored(server: RawServer, is_split: bool) -> None:
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    pieces = [POST + offer + b"Content-Length: 5\r\n\r\n", b"hello", GET + offer + b"\r\n", GET + CLOSE]
    with server.connect() as connection:
        for piece in pieces if is_split else [b"".join(pieces)]:
            connection.sendall(piece)
            time.sleep(0.01)
        data = read_all(connection)
    assert data.count(b"HTTP/1.1 200 OK") == 3
    assert b'"body":"hello"' in data and data.count(b'"body":""') == 2


def test_pipelined_requests_are_answered_in_order(server: RawServer) -> None:
    requests = [b"GET /echo?%d HTTP/1.1\r\nHost: a\r\n\r\n" % number for number in range(MAX_PIPELINED)]
    with server.connect() as connection:
        connection.sendall(b"".join(requests[:-1]) + GET + CLOSE)
        data = read_all(connection)
    places = [data.index(b'"/echo?%d"' % number) for number in range(MAX_PIPELINED - 1)]
    assert places == sorted(places) and data.count(b"HTTP/1.1 200 OK") == MAX_PIPELINED


def test_too_many_pipelined_requests_end_the_connection(server: RawServer) -> None:
    until(lambda: server.num_connections == 0)
    with server.connect() as connection:
        connection.sendall(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n" * 5000)
        assert read_all(connection) == b""
    until(lambda: server.num_connections == 0 and app_of(server).num_started == app_of(server).num_ended)


def test_a_running_request_learns_that_its_client_left(server: RawServer) -> None:
    app = app_of(server)
    num_before = app.num_started
    with server.connect() as connection:
        connection.sendall(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n" + GET + b"\r\n")
        until(lambda: app.num_started == num_before + 1)
    until(lambda: app.num_ended == num_before + 1)


def test_a_bad_body_ends_the_request_that_waits_for_it(server: RawServer) -> None:
    app = app_of(server)
    with server.connect() as connection:
        connection.sendall(CHUNKED + b"3\r\nabc\r\n")
        time.sleep(0.05)
        connection.sendall(b"x\r\n")
        answer = read_answer(connection)
    assert (answer.status, answer.error["code"], answer.rest) == (400, "invalid_http", b"")
    until(lambda: app.num_started == app.num_ended)


def test_garbage_behind_a_running_request_does_not_disturb_its_response(server: RawServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        assert connection.recv(100).startswith(b"HTTP/1.1 200")
        connection.sendall(b"\0garbage")
        assert b"invalid_http" not in read_all(connection)
    until(lambda: app_of(server).num_started == app_of(server).num_ended)


@pytest.mark.parametrize(
    "behind", [b"\0garbage", GET + b"A: " + b"b" * 8192 + b"\r\n\r\n", b"\r\n" * 5000], ids=["garbage", "head", "lines"]
)
def test_no_error_takes_the_place_of_a_response_that_is_not_there_yet(server: RawServer, behind: bytes) -> None:
    app = app_of(server)
    num_before = app.num_started
    with server.connect() as connection:
        connection.sendall(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        until(lambda: app.num_started == num_before + 1)
        connection.sendall(behind)
        assert read_all(connection) == b""
    until(lambda: app.num_started == app.num_ended)


def test_a_client_with_an_early_response_may_finish_its_body_and_go_on(server: RawServer) -> None:
    with server.connect() as connection:
        connection.sendall(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 500000\r\n\r\n")
        time.sleep(0.05)
        connection.sendall(bytes(500_000) + GET + CLOSE)
        data = read_all(connection)
    assert data.startswith(b"HTTP/1.1 401") and b"HTTP/1.1 200 OK" in data


def test_a_client_with_an_early_response_cannot_send_forever(server: RawServer) -> None:
    with server.connect() as connection, pytest.raises(OSError):
        connection.sendall(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000000\r\n\r\n")
        for _ in range(1000):
            connection.sendall(bytes(2**20))


def test_a_refused_client_can_read_why_although_it_sends_more(server: RawServer) -> None:
    for path in (b"/early-close", b"/echo"):
        with server.connect() as connection:
            connection.sendall(b"POST " + path + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 5000000\r\n\r\n")
            connection.sendall(bytes(5_000_000))
            answer = read_answer(connection)
        assert (answer.status, answer.headers["connection"]) == (413, "close")


def test_a_client_that_expects_100_continue_gets_it_or_a_response(server: RawServer) -> None:
    expect = b"Expect: 100-continue\r\n"
    with server.connect() as connection:
        connection.sendall(POST + expect + b"Content-Length: 5\r\n" + CLOSE)
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(b"hello")
        assert json.loads(read_answer(connection).body)["body"] == "hello"
    assert server.talk(POST + expect + b"Content-Length: 5000000\r\n\r\n").status == 413
    assert server.talk(b"POST /early HTTP/1.1\r\nHost: a\r\n" + expect + b"Content-Length: 5\r\n\r\n").status == 401


def test_a_silent_connection_is_closed_without_a_word(hasty: RawServer) -> None:
    with hasty.connect() as connection:
        assert read_all(connection) == b""


def test_a_connection_that_has_served_is_closed_without_a_word(hasty: RawServer) -> None:
    with hasty.connect() as connection:
        connection.sendall(GET + b"\r\n")
        data = read_all(connection)
    assert data.count(b"HTTP/1.1") == 1 and data.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("data", [b"G", b"\r\n", GET, GET + b"A: b", GET + b"\r\nG", GET + b"\r\n" + GET])
def test_headers_that_do_not_end_get_a_408(hasty: RawServer, data: bytes) -> None:
    with hasty.connect() as connection:
        connection.sendall(data)
        received = read_all(connection)
    assert b"HTTP/1.1 408 Request Timeout" in received and b'"request_timeout"' in received
    assert received.count(b"HTTP/1.1") == 1 + (b"\r\n\r\n" in data)


def test_headers_that_drip_get_a_408(hasty: RawServer) -> None:
    with hasty.connect() as connection:
        connection.sendall(GET)
        start = time.monotonic()
        while time.monotonic() < start + 2 * SHORT_S:
            connection.sendall(b"A")
            time.sleep(SHORT_S / 20)
        assert read_answer(connection).status == 408


@pytest.mark.parametrize("is_uvloop", [False, True])
def test_time_in_which_the_server_stands_still_is_not_the_clients(is_uvloop: bool) -> None:
    settings = replace(HASTY, header_timeout=PATIENCE_S)
    with RawServer(App(settings), settings, is_uvloop=is_uvloop) as running, running.connect() as connection:
        until(lambda: running.num_connections == 1)
        assert running.talk(b"GET /block HTTP/1.1\r\nHost: localhost\r\n" + CLOSE).status == 200
        connection.sendall(GET + CLOSE)
        assert read_answer(connection).status == 200
        with running.connect() as silent:
            assert read_all(silent) == b""


def test_a_body_that_stalls_gets_a_408(hasty: RawServer) -> None:
    for start in (POST + b"Content-Length: 5\r\n\r\nabc", CHUNKED + b"3\r\nab"):
        answer = hasty.talk(start)
        assert (answer.status, json.loads(answer.body)["error"]["code"]) == (408, "request_timeout")


def test_the_rest_of_a_body_that_stalls_ends_the_connection(hasty: RawServer) -> None:
    answer = hasty.talk(b"POST /early HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nabc")
    assert (answer.status, answer.rest) == (401, b"")


def test_a_response_may_take_its_time(hasty: RawServer) -> None:
    app = app_of(hasty)
    until(lambda: app.num_started == app.num_ended)
    with hasty.connect() as connection:
        connection.sendall(b"GET /wait HTTP/1.1\r\nHost: a\r\n\r\n")
        until(lambda: app.num_started == app.num_ended + 1)
        time.sleep(3 * SHORT_S)
        assert (app.num_started, hasty.num_connections) == (app.num_ended + 1, 1)
    until(lambda: app.num_started == app.num_ended)


@pytest.mark.parametrize("request_line", [b"/endless HTTP/1.1", b"/big?30000000 HTTP/1.1", b"/big?30000000 HTTP/1.0"])
def test_a_client_that_reads_nothing_is_cut(hasty: RawServer, request_line: bytes) -> None:
    app = app_of(hasty)
    num_before = app.num_started
    with hasty.connect(receive_buffer=4096) as connection:
        connection.sendall(b"GET " + request_line + b"\r\nHost: a\r\n\r\n")
        until(lambda: app.num_started == num_before + 1)
        until(lambda: hasty.num_connections == 0 and app.num_started == app.num_ended)
        assert len(read_all(connection)) < 1_000_000


@pytest.mark.parametrize("is_uvloop", [True, False])
def test_a_silent_reader_is_cut_without_socket_options(is_uvloop: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "set_socket_options", lambda *_: None)
    app = App(HASTY)
    with RawServer(app, HASTY, is_uvloop=is_uvloop) as server, server.connect(receive_buffer=4096) as connection:
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        until(lambda: app.num_started == 1)
        until(lambda: server.num_connections == 0 and app.num_ended == 1)


def test_the_system_notices_clients_that_vanished(server: RawServer) -> None:
    until(lambda: server.num_connections == 0)
    with server.connect():
        until(lambda: server.num_connections == 1)
        options = server.connections[0]._transport.get_extra_info("socket")
        assert options.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 60_000
        assert options.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == 2**16


def test_a_write_timeout_may_be_as_long_as_one_likes() -> None:
    patient = replace(PATIENT, write_timeout=1e9)
    with RawServer(App(patient), patient) as server, server.connect() as connection:
        connection.sendall(GET + CLOSE)
        assert read_answer(connection).status == 200


def test_a_slow_reader_gets_everything(hasty: RawServer) -> None:
    with hasty.connect(receive_buffer=2**16) as connection:
        connection.sendall(b"GET /big?3000000 HTTP/1.1\r\nHost: a\r\n\r\n")
        received = 0
        while piece := connection.recv(2**16):
            received += len(piece)
            time.sleep(SHORT_S / 20)
    assert received > 3_000_000


@pytest.mark.parametrize("is_uvloop", [True, False])
def test_a_slow_reader_costs_little_memory(is_uvloop: bool) -> None:
    with (
        RawServer(App(PATIENT), PATIENT, is_uvloop=is_uvloop) as server,
        server.connect(receive_buffer=4096) as connection,
    ):
        connection.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        until(lambda: any(one._is_write_paused for one in server.connections))
        assert server.connections[0]._transport.get_write_buffer_size() < 2**18


def test_more_connections_than_there_may_be() -> None:
    settings = ServerSettings(served_model_name=("m",), max_connections=3)
    with RawServer(App(settings), settings) as server, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(server.connect())
        until(lambda: server.num_connections == 3)
        answer = server.talk()
        assert (answer.status, answer.error["code"], answer.error["type"]) == (
            503, "too_many_connections", "service_unavailable_error",
        )  # fmt: skip
        assert answer.headers["retry-after"] == "1"
        # A client that sends its request first gets this response, too.
        assert server.talk(GET + b"\r\n").status == 503
        stack.close()
        until(lambda: server.num_connections == 0)
        assert server.talk(GET + CLOSE).status == 200


NUM_HALF_OPEN = 300  # each has two ends in this process, which may have 1024 files


def open_halfway(server: RawServer, stack: ExitStack) -> list[socket.socket]:
    connections = [stack.enter_context(server.connect()) for _ in range(NUM_HALF_OPEN)]
    for connection in connections:
        connection.sendall(GET + b"A:")
    return connections


def test_half_open_connections_have_no_tasks() -> None:
    with RawServer(App(PATIENT), PATIENT) as server, ExitStack() as stack:
        open_halfway(server, stack)
        until(lambda: server.num_connections == NUM_HALF_OPEN)
        assert not server.http.server_state.tasks
        assert server.talk(GET + CLOSE).status == 200


def test_half_open_connections_end() -> None:
    settings = ServerSettings(served_model_name=("m",), header_timeout=0.5)
    with RawServer(App(settings), settings) as server, ExitStack() as stack:
        assert {read_answer(connection).status for connection in open_halfway(server, stack)} == {408}
        until(lambda: server.num_connections == 0)


def test_shutdown_does_not_wait_for_refused_clients() -> None:
    assert FAREWELL_S > 1
    with RawServer(App(PATIENT), PATIENT) as server, server.connect() as connection:
        connection.sendall(b"\0")
        until(lambda: any(one._phase is Phase.FAREWELL for one in server.connections))
        server.http.config.timeout_graceful_shutdown = None
        server.leave()
        until(lambda: server.num_connections == 0)
